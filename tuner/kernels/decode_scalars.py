"""What the host passes to every paged decode kernel beside the buffers."""

from __future__ import annotations

from tuner.kernels.base import PushField
from tuner.kernels.decode_values import softmax_scale
from tuner.problems import PagedDecodeProblem

SHARED_FIELDS = (
    PushField(name="num_heads", type="uint"),
    PushField(name="num_kv_heads", type="uint"),
    PushField(name="max_blocks", type="uint"),
    PushField(name="q_stride", type="uint"),
    PushField(name="max_context_len", type="uint"),
    PushField(name="num_splits", type="uint"),
    PushField(name="tokens_per_split", type="uint"),
    PushField(name="softmax_scale", type="float"),
)
"""Push constants that all these kernels begin with; how a launch is cut is added for each."""


def shared_scalars(problem: PagedDecodeProblem) -> dict[str, int | float]:
    """Those of `SHARED_FIELDS` that a problem has for timing, its rows not padded."""
    return {
        "q_stride": problem.query_heads * problem.head_size,
        "max_blocks": problem.blocks_per_sequence,
        "max_context_len": problem.context,
        "softmax_scale": softmax_scale(problem.head_size),
        "num_kv_heads": problem.kv_heads,
        "num_heads": problem.query_heads,
    }


SHARED_PUSH = {
    "max_blocks": "max(1, ceil_div(context, block_size))",
    "q_stride": "query_heads * head_size",
    "max_context_len": "context",
    "num_splits": "num_splits",
    "tokens_per_split": "tokens_per_split",
}
"""Those of `SHARED_FIELDS` that the sizes of a batch change, for dispatch rules."""
