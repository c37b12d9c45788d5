"""Block-sparse decode over the paged int8 cache: each sequence sees the blocks that a list names.

The selection is the third system's (complete blocks of `ratio` tokens, ascending, and the tokens
behind the last), the cache the first's. Kernels, parameters and constraints are those of dense
decode: what a sequence sees is a context of its own, whose tokens stay together in runs as blocks
do there, so that only the way from a token to its row in the cache differs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from tuner.expressions import renamed
from tuner.kernels import lane_decode
from tuner.kernels.base import (
    Binding,
    Candidate,
    Constraint,
    DispatchRule,
    Family,
    Pass,
    PushField,
    ValidationCase,
    Values,
)
from tuner.kernels.paged_decode_q8 import PAGED_DECODE_Q8 as DENSE
from tuner.kernels.selected_operands import (
    make_selected_operands,
    selected_bytes,
    selected_cases,
    selected_scalars,
)
from tuner.kernels.splits import FEW_SHARES
from tuner.oracle.selected_decode import sampled_selected_reference, selected_reference
from tuner.problems import PagedDecodeProblem, PagedSelectedProblem

SPLITS = (
    "none",
    *(f"count:{parts}" for parts in (2, 4, 8, 16, 32)),
    FEW_SHARES,
    *(f"{kind}:{share}" for kind in ("device", "fit") for share in (1, 2, 4)),
)
"""Fewer than of dense decode: what is seen are some thousand tokens, however long the context."""

PARAMETERS = tuple(
    replace(parameter, values=SPLITS) if parameter.name == "split" else parameter
    for parameter in DENSE.parameters
)


@functools.lru_cache(maxsize=64)
def _seen_step(problem: PagedSelectedProblem) -> PagedDecodeProblem:
    """The dense step over what is seen, in blocks of the tokens that stay together."""
    visible = problem.visible_lens().tolist()
    return PagedDecodeProblem(
        sequences=problem.sequences,
        context=problem.seen,
        query_heads=problem.query_heads,
        kv_heads=problem.kv_heads,
        head_size=problem.head_size,
        block_size=problem.run,
        lengths="equal" if len(set(visible)) == 1 else "list:" + ",".join(map(str, visible)),
    )


def _as_dense(c: Candidate) -> Candidate:
    return replace(c, problem=_seen_step(c.problem))


def _on_seen(constraint: Constraint) -> Constraint:
    return replace(constraint, check=lambda c: constraint.check(_as_dense(c)))


SEEN = Binding(name="context_lens", buffer="visible_lens", element="uint", role="input")
"""Templates that are shared with dense decode walk so many tokens."""

BINDINGS = (
    *(SEEN if binding.name == SEEN.name else binding for binding in DENSE.bindings),
    Binding(name="sequence_lens", buffer="sequence_lens", element="uint", role="input"),
    Binding(name="selection", buffer="selection", element="uint", role="input"),
)
PUSH_FIELDS = (*DENSE.push_fields, PushField(name="max_selected", type="uint"))


def _passes(c: Candidate, scalars: Mapping[str, int | float]) -> tuple[Pass, ...]:
    problem: PagedSelectedProblem = c.problem
    more = {"page_size": problem.block_size, "ratio": problem.ratio}
    push = {name: scalars[name] for name in ("max_selected",) if name in scalars}
    return tuple(
        replace(each, constants={**each.constants, **more}, push={**each.push, **push})
        for each in DENSE.passes(_as_dense(c), scalars)
    )


def _dispatch(c: Candidate) -> DispatchRule:
    assert DENSE.dispatch is not None
    rule = DENSE.dispatch(_as_dense(c))
    own = {
        "max_blocks": rule.push["max_blocks"],
        "max_context_len": "visible",
        "max_selected": "selected",
    }
    return replace(
        rule,
        terms=tuple((name, renamed(text, {"context": "visible"})) for name, text in rule.terms),
        push={**rule.push, **own},
        text="as of dense decode, the context of each sequence being what it sees (visible_lens): "
        + rule.text,
    )


def _validated_as(c: Candidate, case: ValidationCase) -> Values:
    return DENSE.validation_values(_as_dense(c), case)


def _bytes_moved(problem: PagedSelectedProblem) -> int:
    """Codes and scales of what is seen once per KV head for K and V, queries, outputs, lists, the
    fewest table entries, lengths."""
    visible = problem.visible_lens()
    cache = 2 * int(visible.sum()) * problem.kv_heads * (problem.head_size + 4)
    vectors = 2 * problem.sequences * problem.query_heads * problem.head_size * 4
    pages = int((-(-visible // problem.block_size)).sum())
    return cache + vectors + 4 * (int(problem.listed().sum()) + pages + 2 * problem.sequences)


STARTS = tuple(
    {
        "strategy": strategy,
        "subgroup_size": size,
        "subgroups": subgroups,
        "staging": "shared",
        "lanes_per_token": shared,
        "tokens_unrolled": 4,
        "tile_tokens": 32,
        "load_words": 4,
        "head_slices": slices,
        "split": split,
        "combine_slices": 2,
    }
    for strategy in ("packed_f16", "int_dot")
    for size, shared in ((32, 16), (64, 16), (16, 16), (8, 8))
    for subgroups, slices, split in ((4, 4, "device:4"), (8, 4, "device:2"), (8, 8, "device:2"))
)
"""Short index blocks rule out matrix units: large query groups are dealt out to subgroups."""

PAGED_SELECTED_Q8 = Family(
    name="paged_selected_q8",
    summary="block-sparse decode attention over a paged int8 KV cache: lists of selected blocks",
    template="paged_selected_q8.comp.jinja",
    problem_type=PagedSelectedProblem,
    parameters=PARAMETERS,
    constraints=tuple(map(_on_seen, DENSE.constraints)),
    bindings=BINDINGS,
    push_fields=PUSH_FIELDS,
    baseline=DENSE.baseline,
    starts=(*DENSE.starts, *STARTS),
    portable=lane_decode.PORTABLE_STAGED,
    arithmetic=DENSE.arithmetic,
    passes=_passes,
    scratch_bytes=lambda c: DENSE.scratch_bytes(_as_dense(c)),
    operands=make_selected_operands,
    reference=selected_reference,
    sampled_reference=sampled_selected_reference,
    validation_cases=selected_cases,
    bytes_moved=_bytes_moved,
    operand_bytes=selected_bytes,
    scalars=selected_scalars,
    dispatch=_dispatch,
    validated_as=_validated_as,
)
