"""How decode over the int8 cache is launched: how work is cut, workgroups, passes, scratch."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.kernels import decode_switches as switches
from tuner.kernels import lane_decode as lanes
from tuner.kernels import matrix_decode as matrix
from tuner.kernels.base import (
    Candidate,
    DispatchRule,
    Pass,
    PushField,
    ValidationCase,
    Values,
    push_values,
)
from tuner.kernels.decode_scalars import SHARED_FIELDS, SHARED_PUSH
from tuner.kernels.matrix_units import by_matrix
from tuner.kernels.splits import (
    CUT,
    DEALT,
    FEW_SHARES,
    MANY_PARTS,
    MAX_SPLITS,
    UNCUT,
    SplitPlan,
    dealt_rule,
    split_plan,
    split_rule,
    workgroups_dealt,
)
from tuner.kernels.subgroups import required_size
from tuner.problems import PagedDecodeProblem

BASELINE_THREADS = 128
PUSH_FIELDS = (*SHARED_FIELDS, PushField(name="num_sequences", type="uint"))
SWITCHED_PUSH_FIELDS = (*PUSH_FIELDS, *switches.PUSH_FIELDS)


def align_of(c: Candidate) -> int:
    """Tokens at a multiple of which a walk over a window begins: what is before the window there is
    of a block that the window reaches into."""
    if by_matrix(c.values):
        return matrix.tile_rows(c)
    return lanes.alignment(c) if lanes.by_lanes(c.values) else 1


def split_of(c: Candidate) -> SplitPlan:
    """How a strategy that cuts contexts does so; the others do not."""
    problem: PagedDecodeProblem = c.problem
    if not lanes.by_lanes(c.values):
        return SplitPlan(1, max(1, problem.context))
    walked = problem.context
    if problem.window:
        walked = min(walked, problem.window + align_of(c) - 1)
    return split_plan(
        c["split"],
        context=walked,
        workgroups=problem.sequences * problem.kv_heads,
        compute_units=c.device.compute_units,
        granule=lanes.granule(c),
    )


def workgroups_sharing(c: Candidate) -> int:
    """Workgroups among which the strategy matrix deals out the work."""
    problem: PagedDecodeProblem = c.problem
    return workgroups_dealt(
        c["split"],
        tokens=int(problem.visible_tokens().sum()) * problem.kv_heads,
        pairs=problem.sequences * problem.kv_heads,
        compute_units=c.device.compute_units,
    )


def workgroup_counts(c: Candidate) -> dict[str, tuple[int, int, int]]:
    """The workgroup counts of each pass."""
    problem: PagedDecodeProblem = c.problem
    per_head = (problem.query_heads, problem.sequences, 1)
    if c["strategy"] == "baseline":
        return {"baseline": per_head}
    if by_matrix(c.values):
        return {"attend": (workgroups_sharing(c), 1, 1)}
    plan = split_of(c)
    attend = {"attend": (plan.parts, problem.kv_heads, problem.sequences)}
    return attend | ({"combine": per_head} if plan.combined else {})


def passes(c: Candidate, scalars: Mapping[str, int | float]) -> tuple[Pass, ...]:
    """The launches of a candidate; see `Family.passes`."""
    problem: PagedDecodeProblem = c.problem
    plan, groups = split_of(c), workgroup_counts(c)
    fields = SWITCHED_PUSH_FIELDS if problem.switched else PUSH_FIELDS
    push = push_values(fields, scalars)
    push |= {"num_splits": plan.parts, "tokens_per_split": plan.tokens}
    shape = {
        "head_size": problem.head_size,
        "block_size": problem.block_size,
        "group": problem.group,
        "planar": c["layout"] == "planar",
        "row_words": matrix.row_words(c),
        "window": bool(problem.window),
        "align": align_of(c),
        "softcap": bool(problem.softcap),
        "alibi": bool(problem.alibi),
        "sinks": bool(problem.sinks),
    }
    constants: dict[str, Mapping[str, object]] = {
        "baseline": {"threads": BASELINE_THREADS},
        "combine": {"slices": c["combine_slices"]},
    }
    if by_matrix(c.values):
        push |= {"num_splits": groups["attend"][0], "tokens_per_split": 0}
        constants["attend"] = matrix.constants(c)
    elif lanes.by_lanes(c.values):
        constants["attend"] = {**lanes.constants(c), "splits": plan.combined}
    return tuple(
        Pass(
            name=name,
            constants={**shape, **constants[name]},
            push=push,
            groups=count,
            subgroup_size=required_size(c) if name == "attend" else None,
        )
        for name, count in groups.items()
    )


def dispatch_rule(c: Candidate) -> DispatchRule:
    """How an engine launches a candidate on other lengths; see `Family.dispatch`."""
    per_head = ("query_heads", "sequences", "1")
    push = SHARED_PUSH | {"num_sequences": "sequences"}
    if c["strategy"] == "baseline":
        return DispatchRule(
            policy="none",
            terms=(("num_splits", "1"), ("tokens_per_split", "max(1, context)")),
            groups={"baseline": per_head},
            push=push,
            scratch={"partials": "16", "counters": "4"},
            text="one workgroup per query head and sequence walks the whole context",
        )
    units = c.device.compute_units
    facts = {} if units is None else {"compute_units": units}
    return _dealt(c, facts, push) if by_matrix(c.values) else _cut(c, facts, push)


def _dealt(c: Candidate, facts: Mapping[str, int], push: Mapping[str, str]) -> DispatchRule:
    """The rule of kernels whose workgroups share all tokens of the batch."""
    problem: PagedDecodeProblem = c.problem
    pairs = "sequences * kv_heads"
    shared = dealt_rule(c["split"], tokens="kv_heads * visible_sum", pairs=pairs)
    row = f"{problem.group} * {problem.head_size + 4}"
    return DispatchRule(
        policy=str(c["split"]),
        facts=facts,
        terms=(("num_splits", shared), ("tokens_per_split", "0")),
        groups={"attend": ("num_splits", "1", "1")},
        push=push,
        scratch={"partials": f"4 * ({pairs} + num_splits) * {row}", "counters": f"4 * {pairs}"},
        text=DEALT,
    )


def _cut(c: Candidate, facts: Mapping[str, int], push: Mapping[str, str]) -> DispatchRule:
    """The rule of kernels whose workgroups take a part of a context each."""
    problem: PagedDecodeProblem = c.problem
    combined = split_of(c).combined
    policy = str(c["split"]) if combined else "none"
    walked = f"min(context, window + {align_of(c) - 1})" if problem.window else "context"
    rows = f"4 * sequences * query_heads * num_splits * {problem.head_size + 2}"
    counts = {"attend": ("num_splits", "kv_heads", "sequences")}
    return DispatchRule(
        policy=policy,
        facts={"granule_tokens": lanes.granule(c), **facts},
        terms=(
            ("walked", walked),
            *split_rule(policy, context="walked", workgroups="sequences * kv_heads"),
        ),
        groups=counts | {"combine": ("query_heads", "sequences", "1")} if combined else counts,
        push=push,
        scratch={"partials": f"max(16, {rows})" if combined else "16", "counters": "4"},
        at_most={"num_splits": MAX_SPLITS},
        text=CUT if combined else UNCUT,
    )


def validated_as(c: Candidate, case: ValidationCase) -> Values:
    """The same kernels on contexts of up to a thousand tokens.

    Kernels of several splits are cut as often as may be. Those that are dealt the work have few
    workgroups on most cases, so that each goes through several rounds and sequences, and many on
    the case of a single sequence, so that several parts are joined.
    """
    if by_matrix(c.values):
        return {**c.values, "split": MANY_PARTS if case.name == "single" else FEW_SHARES}
    if lanes.by_lanes(c.values) and split_of(c).combined:
        return {**c.values, "split": MANY_PARTS}
    return {**c.values, "split": "none", "combine_slices": 1}


def scratch_bytes(c: Candidate) -> dict[str, int]:
    """Bytes of partial results and counters; see `Family.scratch_bytes`."""
    problem: PagedDecodeProblem = c.problem
    plan = split_of(c)
    if by_matrix(c.values):
        pairs = problem.sequences * problem.kv_heads
        rows = (pairs + workgroups_sharing(c)) * problem.group
        return {"partials": 4 * rows * (problem.head_size + 4), "counters": 4 * pairs}
    rows = problem.sequences * problem.query_heads * plan.parts if plan.combined else 0
    return {"partials": max(16, 4 * rows * (problem.head_size + 2)), "counters": 4}
