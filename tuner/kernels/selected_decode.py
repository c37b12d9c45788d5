"""Block-sparse decode over the paged int8 cache: each sequence sees the blocks that a list names.

The selection is the third system's (complete blocks of `ratio` tokens, ascending, and the tokens
behind the last), the cache the first's. Kernels are those of dense decode by lanes, whose tokens
are the visible ones: one look-up more for each run of tokens that stay together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tuner.kernels import lane_decode as lanes
from tuner.kernels import paged_decode_q8 as dense
from tuner.kernels import teams
from tuner.kernels.base import (
    Binding,
    Candidate,
    Constraint,
    DispatchRule,
    Family,
    Parameter,
    Pass,
    PushField,
    ValidationCase,
    Values,
)
from tuner.kernels.selected_operands import (
    make_selected_operands,
    selected_cases,
    selected_scalars,
)
from tuner.kernels.splits import MANY_PARTS, SplitPlan, split_plan
from tuner.oracle.selected_decode import sampled_selected_reference, selected_reference
from tuner.problems import PagedDecodeProblem, PagedSelectedProblem

SPLITS = (
    "none",
    *(f"count:{parts}" for parts in (2, 4, 8, 16, 32)),
    *(f"device:{share}" for share in (1, 2, 4, 8)),
)
"""Fewer than of dense decode: what is seen are some thousand tokens, however long the context."""
_DENSE = {parameter.name: parameter for parameter in dense.PARAMETERS}

PARAMETERS = (
    Parameter(
        name="strategy",
        values=("baseline", *lanes.STRATEGIES),
        help="baseline: one workgroup per query head, two passes over K. The others split what is "
        "seen and read KV once per KV head; they compute in f32, in packed f16, or with the "
        "integer dot product for QK",
    ),
    _DENSE["subgroup_size"],
    replace(_DENSE["subgroups"], values=(1, 2, 4, 8)),
    _DENSE["staging"],
    _DENSE["lanes_per_token"],
    _DENSE["tokens_unrolled"],
    replace(_DENSE["tile_tokens"], values=(16, 32, 64)),
    _DENSE["load_words"],
    _DENSE["head_slices"],
    _DENSE["query_terms"],
    replace(_DENSE["split"], values=SPLITS),
    _DENSE["combine_slices"],
)


def _as_dense(c: Candidate) -> Candidate:
    """The candidate for the dense step over as many tokens as are seen, in blocks of those that
    stay together."""
    problem: PagedSelectedProblem = c.problem
    step = PagedDecodeProblem(
        sequences=problem.sequences,
        context=problem.seen,
        query_heads=problem.query_heads,
        kv_heads=problem.kv_heads,
        head_size=problem.head_size,
        block_size=problem.run,
    )
    return Candidate(c.values, step, c.device)


def _plan(c: Candidate) -> SplitPlan:
    problem: PagedSelectedProblem = c.problem
    if c["strategy"] == "baseline":
        return SplitPlan(1, max(1, problem.seen))
    return split_plan(
        c["split"],
        context=problem.seen,
        workgroups=problem.sequences * problem.kv_heads,
        compute_units=c.device.compute_units,
        granule=lanes.granule(c),
    )


def _check_head_size(c: Candidate) -> str | None:
    size = c.problem.head_size
    if size % 4:
        return f"head size {size} is no multiple of 4, the codes of one word"
    if c["strategy"] == "baseline" and size > dense.BASELINE_MAX_HEAD_SIZE:
        return (
            f"the baseline's shared arrays hold a head size of {dense.BASELINE_MAX_HEAD_SIZE}, "
            f"the problem has {size}"
        )
    return None


def _check_groups(c: Candidate) -> str | None:
    for name, count, axis in (
        ("query heads", c.problem.query_heads, 0),
        ("sequences", c.problem.sequences, 1),
        ("sequences", c.problem.sequences, 2),
    ):
        limit = c.device.max_workgroup_count[axis]
        if count > limit:
            return f"{count} {name}, the device allows {limit} workgroups in {'xyz'[axis]}"
    return None


def _check_split(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        return None
    if c["split"].startswith("device:") and c.device.compute_units is None:
        return f"{c['split']} needs the number of compute units, which this driver does not tell"
    parts = _plan(c).parts
    if parts > dense.MAX_SPLITS:
        return f"{c['split']} makes {parts} splits, the limit is {dense.MAX_SPLITS}"
    return None


def _check_combine(c: Candidate) -> str | None:
    if c["split"] == "none":
        return None
    threads, limit = c.problem.head_size // 4 * c["combine_slices"], c.device
    if threads > limit.max_workgroup_invocations:
        return f"{threads} threads to combine, the device allows {limit.max_workgroup_invocations}"
    return None


def _on_dense(constraint: Constraint) -> Constraint:
    return replace(constraint, check=lambda c: constraint.check(_as_dense(c)))


CONSTRAINTS = (
    Constraint(needs=("strategy",), check=_check_head_size),
    Constraint(needs=(), check=_check_groups),
    *teams.SUBGROUP_CONSTRAINTS,
    *map(_on_dense, lanes.CONSTRAINTS),
    Constraint(needs=(*lanes.GRANULE_NEEDS, "split"), check=_check_split),
    Constraint(needs=("split", "combine_slices"), check=_check_combine),
)

BINDINGS = (
    Binding(name="query", buffer="query", element="float", role="input"),
    Binding(name="key_words", buffer="key_cache", element="uint", role="input"),
    Binding(name="value_words", buffer="value_cache", element="uint", role="input"),
    Binding(name="block_table", buffer="block_table", element="uint", role="input"),
    Binding(name="sequence_lens", buffer="sequence_lens", element="uint", role="input"),
    Binding(name="selection", buffer="selection", element="uint", role="input"),
    # The parts that are shared with dense decode walk so many tokens.
    Binding(name="context_lens", buffer="visible_lens", element="uint", role="input"),
    Binding(name="partials", buffer="partials", element="float", role="scratch"),
    Binding(name="attention", buffer="out", element="float", role="output"),
    Binding(name="key_quads", buffer="key_cache", element="uvec4", role="input"),
    Binding(name="value_quads", buffer="value_cache", element="uvec4", role="input"),
)

PUSH_FIELDS = (
    PushField(name="num_heads", type="uint"),
    PushField(name="num_kv_heads", type="uint"),
    PushField(name="max_blocks", type="uint"),
    PushField(name="max_selected", type="uint"),
    PushField(name="q_stride", type="uint"),
    PushField(name="max_context_len", type="uint"),
    PushField(name="num_splits", type="uint"),
    PushField(name="tokens_per_split", type="uint"),
    PushField(name="softmax_scale", type="float"),
)


def _passes(c: Candidate, scalars: Mapping[str, int | float]) -> tuple[Pass, ...]:
    problem: PagedSelectedProblem = c.problem
    plan = _plan(c)
    push = {f.name: scalars[f.name] for f in PUSH_FIELDS if f.name in scalars}
    push |= {"num_splits": plan.parts, "tokens_per_split": plan.tokens}
    shape = {
        "head_size": problem.head_size,
        "page_size": problem.block_size,
        "block_size": problem.run,
        "ratio": problem.ratio,
        "group": problem.group,
        "splits": plan.combined,
    }

    def per_head(name: str, **more: int) -> Pass:
        groups = (problem.query_heads, problem.sequences, 1)
        return Pass(
            name=name, constants={**shape, **more}, push=push, groups=groups, subgroup_size=None
        )

    if c["strategy"] == "baseline":
        return (per_head("baseline", threads=dense.BASELINE_THREADS),)
    attend = Pass(
        name="attend",
        constants={**shape, **lanes.constants(_as_dense(c))},
        push=push,
        groups=(plan.parts, problem.kv_heads, problem.sequences),
        subgroup_size=teams.required_size(c),
    )
    return (attend, per_head("combine", slices=c["combine_slices"])) if plan.combined else (attend,)


def _dispatch(c: Candidate) -> DispatchRule:
    per_head = ("query_heads", "sequences", "1")
    if c["strategy"] == "baseline":
        return DispatchRule(
            policy="none",
            facts={},
            groups={"baseline": per_head},
            text="one workgroup per query head and sequence walks all that is seen",
        )
    units = c.device.compute_units
    facts = {"granule_tokens": lanes.granule(c)} | (
        {} if units is None else {"compute_units": units}
    )
    return DispatchRule(
        policy=str(c["split"]),
        facts=facts,
        groups={"attend": ("num_splits", "kv_heads", "sequences"), "combine": per_head},
        text="as paged_decode_q8, where context is seen = min(context, min(selected, context / "
        "ratio) * ratio + ratio - 1) with context the longest of the batch: wanted = 1 for none, N "
        "for count:N, ceil(seen / N) for tokens:N, floor(N * compute_units / (sequences * "
        "kv_heads)) for device:N, at least 1; tokens_per_split = ceil(seen / wanted), rounded up "
        "to a multiple of granule_tokens; num_splits = ceil(seen / tokens_per_split); the buffer "
        "partials needs 4 * sequences * query_heads * num_splits * (head_size + 2) bytes; these "
        "kernels are built for "
        + ("any number of splits" if _plan(c).combined else "one split, without a combine pass"),
    )


def _validated_as(c: Candidate, _case: ValidationCase) -> Values:
    """The same kernels on a thousand visible tokens, cut as often as may be."""
    if c["strategy"] == "baseline":
        return c.values
    if _plan(c).combined:
        return {**c.values, "split": MANY_PARTS}
    return {**c.values, "split": "none", "combine_slices": 1}


def _scratch_bytes(c: Candidate) -> dict[str, int]:
    plan, problem = _plan(c), c.problem
    rows = problem.sequences * problem.query_heads * plan.parts if plan.combined else 0
    return {"partials": max(4, 4 * rows * (problem.head_size + 2))}


def _bytes_moved(problem: PagedSelectedProblem) -> int:
    """Codes and scales of what is seen once per KV head for K and V, queries, outputs, lists, the
    fewest table entries, lengths."""
    visible = problem.visible_lens()
    cache = 2 * int(visible.sum()) * problem.kv_heads * (problem.head_size + 4)
    vectors = 2 * problem.sequences * problem.query_heads * problem.head_size * 4
    pages = int((-(-visible // problem.block_size)).sum())
    return cache + vectors + 4 * (int(problem.listed().sum()) + pages + 2 * problem.sequences)


def _start(**values: int | str) -> Values:
    return {parameter.name: parameter.values[0] for parameter in PARAMETERS} | values


PAGED_SELECTED_Q8 = Family(
    name="paged_selected_q8",
    summary="block-sparse decode attention over a paged int8 KV cache: lists of selected blocks",
    template="paged_selected_q8.comp.jinja",
    problem_type=PagedSelectedProblem,
    parameters=PARAMETERS,
    constraints=CONSTRAINTS,
    bindings=BINDINGS,
    push_fields=PUSH_FIELDS,
    baseline=_start(strategy="baseline"),
    starts=tuple(
        _start(
            strategy=strategy,
            subgroup_size=size,
            subgroups=subgroups,
            lanes_per_token=shared,
            tokens_unrolled=4,
            split=split,
            combine_slices=2,
        )
        for strategy in ("packed_f16", "int_dot", "scalar_f32")
        for size, shared in ((32, 8), (64, 8), (16, 8), (8, 8), (32, 16))
        for subgroups, split in ((4, "device:4"), (2, "device:2"))
    ),
    arithmetic=dense.PAGED_DECODE_Q8.arithmetic,
    passes=_passes,
    scratch_bytes=_scratch_bytes,
    operands=make_selected_operands,
    reference=selected_reference,
    sampled_reference=sampled_selected_reference,
    validation_cases=selected_cases,
    bytes_moved=_bytes_moved,
    scalars=selected_scalars,
    dispatch=_dispatch,
    validated_as=_validated_as,
)
