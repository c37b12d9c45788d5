"""What the families of the block-sparse indexer share: buffers, scalars, constants, constraints.

Buffers (nb rows, I index heads, E index dimensions, R tokens a block, NBmax blocks of room):

* `index_projection` float32 [nb, (I+1)*E]: I query heads, then one key;
* `index_keys` float16 bits [max_t, E]: raw keys, one a token; as words two elements each;
* `block_keys` float16 bits [NBmax, E]: pooled, normalised, turned keys, one a block;
* `index_query` float32 [nb, I, E]: normalised, turned queries;
* `scores` float32 [nb, NBmax]: valid below the row's number of complete blocks;
* `visible` uint32 [nb, budget + R], `visible_count` uint32 [nb], `block_mask` uint32
  [nb, ceil(NBmax / 32)]: what a selective row attends to;
* `rope_rows` float32 [nb, rotary/2, 2], `rope_blocks` float32 [ceil(nb / R), rotary/2, 2]: cosine
  and sine for each row's position and for the first position of each block that may complete; the
  host computes them in float64, since a shader's cos and sin are no good for large angles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tuner.kernels import limits
from tuner.kernels.base import (
    Binding,
    Candidate,
    Constraint,
    DispatchRule,
    PushField,
    push_values,
)
from tuner.problems import IndexerStepProblem

BINDINGS: Mapping[str, Binding] = {
    binding.name: binding
    for binding in (
        Binding(name="projection", buffer="index_projection", element="float", role="input"),
        Binding(name="projection_quads", buffer="index_projection", element="vec4", role="input"),
        Binding(name="index_key_words", buffer="index_keys", element="uint", role="state"),
        Binding(name="index_key_quads", buffer="index_keys", element="uvec4", role="state"),
        Binding(name="block_key_words", buffer="block_keys", element="uint", role="state"),
        Binding(name="block_key_quads", buffer="block_keys", element="uvec4", role="input"),
        Binding(name="index_query", buffer="index_query", element="float", role="output"),
        Binding(name="index_query_quads", buffer="index_query", element="vec4", role="input"),
        Binding(
            name="index_query_weight", buffer="index_query_weight", element="float", role="input"
        ),
        Binding(name="index_key_weight", buffer="index_key_weight", element="float", role="input"),
        Binding(name="rope_rows", buffer="rope_rows", element="vec2", role="input"),
        Binding(name="rope_blocks", buffer="rope_blocks", element="vec2", role="input"),
        Binding(name="scores", buffer="scores", element="float", role="output"),
        Binding(name="score_bits", buffer="scores", element="uint", role="input"),
        Binding(name="visible", buffer="visible", element="uint", role="output"),
        Binding(name="visible_count", buffer="visible_count", element="uint", role="output"),
        Binding(name="block_mask", buffer="block_mask", element="uint", role="output"),
        Binding(name="row_counters", buffer="row_counters", element="uint", role="counter"),
        Binding(name="candidates", buffer="candidates", element="uint", role="scratch"),
        Binding(name="group_maxima", buffer="group_maxima", element="uint", role="scratch"),
    )
}
"""Every view of every buffer by its name in GLSL, in the role it has where a step is by itself."""


def as_input(name: str) -> Binding:
    """The binding of that name where the buffer is only read."""
    return replace(BINDINGS[name], role="input")


def _check_keys(c: Candidate) -> str | None:
    nbytes = 2 * c.problem.max_tokens * c.problem.index_dim
    return limits.buffer_reason(c.device, "index_keys", nbytes)


KEYS_RULE = Constraint(needs=(), check=_check_keys)
"""The raw keys of a whole cache must fit into one buffer."""

PUSH_FIELDS = (
    PushField(name="rows", type="uint"),
    PushField(name="base_pos", type="uint"),
    PushField(name="max_blocks", type="uint"),
)
"""What a launch tells every kernel of the indexer."""


def scalars(problem: IndexerStepProblem) -> dict[str, int | float]:
    """What the host passes beside the buffers, and what the oracle needs to know."""
    return {
        "rows": problem.rows,
        "base_pos": problem.base_pos,
        "max_blocks": problem.max_blocks,
        "max_tokens": problem.max_tokens,
        "index_heads": problem.index_heads,
        "index_dim": problem.index_dim,
        "ratio": problem.ratio,
        "kept_blocks": problem.kept_blocks,
        "rotary": problem.rotary,
        "theta": problem.theta,
        "eps": problem.eps,
        "one_plus": problem.one_plus,
    }


def push(known: Mapping[str, int | float]) -> dict[str, int | float]:
    """Values of `PUSH_FIELDS`, as far as `known` has them."""
    return push_values(PUSH_FIELDS, known)


TERMS = (
    ("base_pos", "context - rows"),
    ("max_tokens", "max(capacity, context)"),
    ("max_blocks", "floor_div(max_tokens, ratio) + 1"),
)
"""What follows from a step's sizes, in expressions. An engine knows `max_tokens`, its cache's."""
PUSH = {field.name: field.name for field in PUSH_FIELDS}


def rule(
    groups: Mapping[str, tuple[str, str, str]],
    text: str,
    *,
    scratch: Mapping[str, str] | None = None,
    policy: str = "none",
) -> DispatchRule:
    """The dispatch rule of a kernel of the indexer, given its workgroup counts."""
    return DispatchRule(
        policy=policy, terms=TERMS, groups=groups, push=PUSH, scratch=scratch or {}, text=text
    )


def constants(problem: IndexerStepProblem) -> dict[str, object]:
    """What is compiled into every kernel of the indexer: see `indexer/geometry.glsl.jinja`."""
    return {
        "index_heads": problem.index_heads,
        "index_dim": problem.index_dim,
        "ratio": problem.ratio,
        "kept_blocks": problem.kept_blocks,
        "rotary": problem.rotary,
        "eps": problem.eps,
        "one_plus": problem.one_plus,
    }
