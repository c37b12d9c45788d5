"""How decode over caches of floats is launched: how contexts are cut, passes, scratch."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.kernels import decode_switches as switches
from tuner.kernels import float_lanes as lanes
from tuner.kernels import float_matrix as matrix
from tuner.kernels.base import (
    Candidate,
    DispatchRule,
    Pass,
    ValidationCase,
    Values,
    push_values,
)
from tuner.kernels.decode_scalars import SHARED_FIELDS, SHARED_PUSH
from tuner.kernels.float_operands import CacheFormat
from tuner.kernels.matrix_units import by_matrix
from tuner.kernels.splits import (
    CUT,
    MANY_PARTS,
    MAX_SPLITS,
    UNCUT,
    SplitPlan,
    split_plan,
    split_rule,
)
from tuner.kernels.subgroups import required_size, tuned
from tuner.problems import PagedDecodeProblem

BASELINE_THREADS = 128
PUSH_FIELDS = (*SHARED_FIELDS, *switches.PUSH_FIELDS)


def tile(c: Candidate) -> int:
    """Tokens of which a walk over the context begins at a multiple."""
    if by_matrix(c.values):
        return matrix.tile(c)
    return lanes.tile(c) if tuned(c.values) else 1


def granule(c: Candidate) -> int:
    """Tokens one workgroup takes a step."""
    return tile(c) * lanes.walkers(c)


def plan_of(c: Candidate) -> SplitPlan:
    """How the tokens that are walked over are cut; with a window no more than it can touch."""
    problem: PagedDecodeProblem = c.problem
    if not tuned(c.values):
        return SplitPlan(1, max(1, problem.context))
    walked = problem.context
    if problem.window:
        walked = min(walked, problem.window + tile(c) - 1)
    return split_plan(
        c["split"],
        context=walked,
        workgroups=problem.sequences * problem.kv_heads,
        compute_units=c.device.compute_units,
        granule=granule(c),
    )


def workgroup_counts(c: Candidate) -> dict[str, tuple[int, int, int]]:
    """The workgroup counts of each pass."""
    problem: PagedDecodeProblem = c.problem
    per_head = (problem.query_heads, problem.sequences, 1)
    if not tuned(c.values):
        return {"baseline": per_head}
    plan = plan_of(c)
    attend = {"attend": (plan.parts, problem.kv_heads, problem.sequences)}
    return attend | ({"combine": per_head} if plan.combined else {})


def passes(
    c: Candidate, scalars: Mapping[str, int | float], cache: CacheFormat
) -> tuple[Pass, ...]:
    """The launches of a candidate; see `Family.passes`."""
    problem: PagedDecodeProblem = c.problem
    plan = plan_of(c)
    push = push_values(PUSH_FIELDS, scalars)
    push |= {"num_splits": plan.parts, "tokens_per_split": plan.tokens}
    shape: dict[str, object] = {
        "cache": cache.name,
        "packet": int(scalars.get("packet", cache.packet)),
        "head_size": problem.head_size,
        "value_size": problem.value_size,
        "block_size": problem.block_size,
        "group": problem.group,
        "tile": tile(c),
        "splits": plan.combined,
        "window": bool(problem.window),
        "softcap": bool(problem.softcap),
        "alibi": bool(problem.alibi),
        "sinks": bool(problem.sinks),
    }
    constants: dict[str, Mapping[str, object]] = {
        "baseline": {"threads": BASELINE_THREADS},
        "combine": {"slices": c["combine_slices"]},
    }
    if tuned(c.values):
        constants["attend"] = (
            matrix.constants(c) if by_matrix(c.values) else lanes.constants(c, cache)
        )
    return tuple(
        Pass(
            name=name,
            constants={**shape, **constants[name]},
            push=push,
            groups=groups,
            subgroup_size=required_size(c) if name == "attend" else None,
        )
        for name, groups in workgroup_counts(c).items()
    )


def dispatch_rule(c: Candidate) -> DispatchRule:
    """How an engine launches a candidate on other lengths; see `Family.dispatch`."""
    per_head = ("query_heads", "sequences", "1")
    if not tuned(c.values):
        return DispatchRule(
            policy="none",
            terms=(("num_splits", "1"), ("tokens_per_split", "max(1, context)")),
            groups={"baseline": per_head},
            push=SHARED_PUSH,
            scratch={"partials": "4"},
            text="one workgroup per query head and sequence walks the whole context",
        )
    combined = plan_of(c).combined
    policy = str(c["split"]) if combined else "none"
    units = c.device.compute_units
    window = f"min(context, window + {tile(c) - 1})" if c.problem.window else "context"
    rows = "sequences * query_heads * num_splits"
    return DispatchRule(
        policy=policy,
        facts={"granule_tokens": granule(c)} | ({} if units is None else {"compute_units": units}),
        terms=(
            ("walked", window),
            *split_rule(policy, context="walked", workgroups="sequences * kv_heads"),
        ),
        groups={"attend": ("num_splits", "kv_heads", "sequences")}
        | ({"combine": per_head} if combined else {}),
        push=SHARED_PUSH,
        scratch={"partials": f"4 * {rows} * {c.problem.value_size + 2}" if combined else "4"},
        at_most={"num_splits": MAX_SPLITS},
        text=CUT if combined else UNCUT,
    )


def validated_as(c: Candidate, _case: ValidationCase) -> Values:
    """The same kernels on contexts of up to a thousand tokens, cut as often as may be."""
    if not tuned(c.values):
        return c.values
    if plan_of(c).combined:
        return {**c.values, "split": MANY_PARTS}
    return {**c.values, "split": "none", "combine_slices": 1}


def scratch_bytes(c: Candidate) -> dict[str, int]:
    """Bytes of partial results; see `Family.scratch_bytes`."""
    plan, problem = plan_of(c), c.problem
    if not plan.combined:
        return {"partials": 4}
    rows = problem.sequences * problem.query_heads * plan.parts
    return {"partials": 4 * rows * (problem.value_size + 2)}
