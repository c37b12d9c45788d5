"""Split-T partial attention over the planar q8 cache, dense or over lists of tokens.

The attention pass of the third system: rows of one decode step share a cache of int8 codes with
float16 scales of 32; chunks of 32 tokens are dealt out to parts in turn, and each part leaves its
maximum (base 2), its sum of weights and its unnormalised output for `gated_combine`. All rows go in
one dispatch, each with its own place in the buffer of partials.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tuner.kernels import q8_lanes, q8_matrix, q8_operands, q8_parts
from tuner.kernels.base import (
    ArithmeticClass,
    Binding,
    Candidate,
    DispatchRule,
    Family,
    Pass,
    ValidationCase,
    Values,
    push_values,
)
from tuner.kernels.matrix_units import by_matrix
from tuner.kernels.q8_operands import make_operands, scalars_of, timing_bytes, validation_cases
from tuner.kernels.subgroups import tuned
from tuner.oracle.q8_decode import partials_reference, sampled_partials_reference
from tuner.planar import SCALE_OFFSET
from tuner.problems import Q8DecodeProblem, Q8SelectedProblem

BINDINGS = (
    Binding(name="query_gate", buffer="query_gate", element="float", role="input"),
    Binding(name="key_code_words", buffer="key_cache", element="uint", role="input"),
    Binding(name="key_code_pairs", buffer="key_cache", element="uvec2", role="input"),
    Binding(name="key_code_quads", buffer="key_cache", element="uvec4", role="input"),
    Binding(name="value_code_words", buffer="value_cache", element="uint", role="input"),
    Binding(name="value_code_pairs", buffer="value_cache", element="uvec2", role="input"),
    Binding(name="value_code_quads", buffer="value_cache", element="uvec4", role="input"),
    Binding(name="row_tokens", buffer="row_tokens", element="uint", role="input"),
    Binding(name="partials", buffer="partials", element="vec2", role="output"),
)
VALIDATED_SPLIT = "count:3"
VISIBLE = Binding(name="visible", buffer="visible", element="uint", role="input")
PARAMETERS = (
    *q8_parts.PARAMETERS,
    *q8_lanes.PARAMETERS,
    *q8_matrix.PARAMETERS,
    q8_parts.SPLIT,
)


def arithmetic(values: Values) -> ArithmeticClass:
    """How a variant rounds."""
    if values["strategy"] == "packed_f16":
        return "f16"
    if by_matrix(values):
        return "f16_matrix_scaled"
    if values["strategy"] == "int_dot":
        return "int8_one_term" if values["query_terms"] == 1 else "int8_two_terms"
    return "f32"


def attend_pass(
    c: Candidate, push: Mapping[str, int | float], *, selected: bool | Literal["by row"]
) -> Pass:
    """The one pass of partial results; `push` has all fields but `num_parts`."""
    count, size = q8_parts.parts(c), q8_parts.subgroup_size(c)
    of_strategy = q8_matrix if by_matrix(c.values) else q8_lanes
    return Pass(
        name="attend",
        constants=of_strategy.constants(c) | {"selected": selected},
        push={**push, "num_parts": count},
        groups=(count, c.problem.kv_heads, c.problem.rows),
        subgroup_size=size if c.device.subgroup_size_control else None,
    )


def _passes(c: Candidate, scalars: Mapping[str, int | float]) -> tuple[Pass, ...]:
    push = push_values(q8_parts.PUSH_FIELDS, scalars)
    selected = isinstance(c.problem, Q8SelectedProblem)
    return (attend_pass(c, push, selected=selected),)


def _bytes_moved(problem: Q8DecodeProblem) -> int:
    """Codes and scales of every token that some row sees once for K and V, queries, lists, and
    one result for each row and head.

    Rows see nearly the same tokens where they are dense; lists may differ altogether.
    """
    selected = isinstance(problem, Q8SelectedProblem)
    rows = problem.row_tokens().astype("int64")
    tokens = min(int(rows.sum()), problem.tokens) if selected else int(rows.max())
    cache = 2 * tokens * (problem.cache_row + problem.cache_row // 16)
    heads = problem.rows * problem.query_heads
    return (
        cache + 4 * heads * (2 * problem.head_size + 2) + (4 * int(rows.sum()) if selected else 0)
    )


def _validated_as(c: Candidate, _case: ValidationCase) -> Values:
    """The same kernel, with a few parts of several chunks each."""
    return {**c.values, "split": VALIDATED_SPLIT} if tuned(c.values) else c.values


def _dispatch(c: Candidate) -> DispatchRule:
    selected = isinstance(c.problem, Q8SelectedProblem)
    policy, facts, num_parts = q8_parts.parts_rule(c, "visible" if selected else "tokens")
    return DispatchRule(
        policy=policy,
        facts=facts,
        terms=(
            ("max_tokens", "tokens"),
            ("max_parts", q8_operands.MAX_PARTS),
            ("num_parts", num_parts),
        ),
        groups={"attend": ("num_parts", "kv_heads", "rows")},
        push={
            "scale_word": f"floor_div({SCALE_OFFSET}, 4)",
            "visible_stride": "visible" if selected else "tokens",
            "max_parts": "max_parts",
            "num_parts": "num_parts",
        },
        text="tokens is how many the longest row sees"
        + (" of those cached, visible how many its list names" if selected else "")
        + "; part p takes chunks of chunk_tokens tokens: p, p + num_parts and so on",
    )


_FEW_TOKENS: tuple[Values, ...] = tuple(
    {
        "strategy": strategy,
        "subgroup_size": 32,
        "subgroups": subgroups,
        "head_slices": slices,
        "lanes_per_token": 16,
        "tokens_unrolled": 8,
        "split": "device:1",
    }
    for strategy, subgroups, slices in (("packed_f16", 12, 6), ("int_dot", 8, 4))
)
"""To begin with where a workgroup has no more than a chunk, as with most lists."""
STARTS: tuple[Values, ...] = (
    *_FEW_TOKENS,
    *q8_matrix.STARTS,
    *(
        {
            "strategy": strategy,
            "subgroup_size": size,
            "subgroups": subgroups,
            "head_slices": slices,
            "lanes_per_token": shared,
            "tokens_unrolled": unrolled,
            "split": split,
        }
        for size, shared in ((32, 16), (64, 16), (16, 16), (8, 8))
        for strategy, unrolled in (("packed_f16", 4), ("int_dot", 4), ("scalar_f32", 2))
        for subgroups, slices in ((4, 4), (8, 4), (4, 2), (4, 1))
        for split in ("device:4", "count:64")
    ),
)
PORTABLE: tuple[Values, ...] = tuple(
    {
        "strategy": strategy,
        "subgroup_size": size,
        "subgroups": subgroups,
        "head_slices": min(slices, subgroups),
        "lanes_per_token": 16 if size > 8 else 8,
        "tokens_unrolled": 2,
        "split": split,
    }
    for size, subgroups in ((32, 4), (16, 4), (64, 2), (8, 4))
    for strategy in ("packed_f16", "scalar_f32", "int_dot")
    for slices, split in ((4, "count:32"), (1, "upstream"))
)


def _family(name: str, summary: str, problem_type: type[Q8DecodeProblem]) -> Family:
    selected = issubclass(problem_type, Q8SelectedProblem)
    return Family(
        name=name,
        summary=summary,
        template="attn_partials_q8.comp.jinja",
        problem_type=problem_type,
        parameters=PARAMETERS,
        constraints=(*q8_parts.CONSTRAINTS, *q8_lanes.CONSTRAINTS, *q8_matrix.CONSTRAINTS),
        bindings=(*BINDINGS, VISIBLE) if selected else BINDINGS,
        push_fields=q8_parts.PUSH_FIELDS,
        baseline={"strategy": "baseline"},
        starts=STARTS,
        portable=PORTABLE,
        arithmetic=arithmetic,
        passes=_passes,
        operands=make_operands,
        reference=partials_reference,
        sampled_reference=sampled_partials_reference,
        validation_cases=validation_cases,
        bytes_moved=_bytes_moved,
        operand_bytes=timing_bytes,
        scalars=scalars_of,
        dispatch=_dispatch,
        validated_as=_validated_as,
    )


ATTN_PARTIALS_Q8 = _family(
    "attn_partials_q8",
    "split-T partial attention over the planar q8 cache (codes, and f16 scales of 32)",
    Q8DecodeProblem,
)
ATTN_PARTIALS_SELECTED_Q8 = _family(
    "attn_partials_selected_q8",
    "the same over lists of visible tokens",
    Q8SelectedProblem,
)
