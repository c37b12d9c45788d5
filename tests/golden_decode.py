"""Golden decodes as operands of the int8 paged decode family."""

from __future__ import annotations

import numpy as np

from tests.golden_vectors import Golden
from tuner.kernels.base import Operands
from tuner.problems import PagedDecodeProblem


def decode_operands(golden: Golden, **caches: np.ndarray) -> Operands:
    """The operands of a golden decode; `caches` replace those of the file."""
    inputs, attributes = golden.inputs, golden.attributes
    heads = int(attributes["num_heads"])
    shape = (len(inputs["context_lens"]), heads, int(attributes["head_size"]))
    return Operands(
        inputs={
            "query": inputs["q"],
            "key_cache": caches.get("key_cache", inputs["key_cache"]),
            "value_cache": caches.get("value_cache", inputs["value_cache"]),
            "block_table": inputs["block_tables"],
            "context_lens": inputs["context_lens"],
        },
        outputs={"out": (shape, np.dtype(np.float32))},
        scalars={
            "q_stride": attributes["q_stride"],
            "max_blocks": attributes["max_num_blocks_per_seq"],
            "max_context_len": attributes["max_context_len"],
            "softmax_scale": attributes["scale"],
            "num_kv_heads": attributes["num_kv_heads"],
            "num_heads": heads,
            "num_sequences": shape[0],
        },
    )


def decode_problem(golden: Golden) -> PagedDecodeProblem:
    """The problem that an engine would choose a kernel for, knowing no single length."""
    attributes = golden.attributes
    return PagedDecodeProblem(
        query_heads=int(attributes["num_heads"]),
        kv_heads=int(attributes["num_kv_heads"]),
        head_size=int(attributes["head_size"]),
        block_size=int(attributes["block_size"]),
        sequences=len(golden.inputs["context_lens"]),
        context=int(attributes["max_context_len"]),
    )
