"""Paged attention with log-sum-exp: any number of query tokens a sequence, pools [NB, BS, Hkv, D].

Semantics are those of the second system. The query heads of a KV head and the query tokens are one
list of rows that share keys, so that decode steps and prefills differ in the number of rows only.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.kernels import attention_strategies as strategies
from tuner.kernels import limits, subgroups
from tuner.kernels.attention_chunks import INPUTS, WHOLE_CHUNKS, chunks, constants
from tuner.kernels.attention_operands import (
    make_operands,
    q_offset_rule,
    scalars,
    timing_bytes,
    validation_cases,
)
from tuner.kernels.attention_parameters import PARAMETERS, PORTABLE, STARTS, by_matrices
from tuner.kernels.base import (
    ArithmeticClass,
    Binding,
    Candidate,
    Constraint,
    DispatchRule,
    Family,
    Pass,
    PushField,
    ValidationCase,
    Values,
    push_values,
)
from tuner.kernels.splits import (
    CUT,
    MANY_PARTS,
    MAX_SPLITS,
    UNCUT,
    SplitPlan,
    combine_reason,
    split_plan,
    split_reason,
    split_rule,
)
from tuner.oracle.paged_attention import forward_reference, sampled_forward_reference
from tuner.problems import PagedAttentionProblem

BASELINE_THREADS = 256


def _plan(c: Candidate) -> SplitPlan:
    problem: PagedAttentionProblem = c.problem
    return split_plan(
        c["split"],
        context=problem.context,
        workgroups=problem.batch * problem.kv_heads * strategies.row_tiles(c),
        compute_units=c.device.compute_units,
        granule=strategies.granule(c),
    )


def _workgroups(c: Candidate) -> int:
    """Workgroups in x: of the whole baseline, else of one KV head of one sequence."""
    problem: PagedAttentionProblem = c.problem
    if c["strategy"] == "baseline":
        rows = problem.batch * problem.query_heads * problem.query_tokens
        return -(-rows // BASELINE_THREADS)
    return strategies.row_tiles(c) * _plan(c).parts


def _check_groups(c: Candidate) -> str | None:
    problem: PagedAttentionProblem = c.problem
    counts = (_workgroups(c), problem.kv_heads, problem.batch)
    if c["strategy"] == "baseline":
        counts = (_workgroups(c), 1, 1)
    return limits.groups_reason(c.device, counts)


def _check_batch(c: Candidate) -> str | None:
    return limits.groups_reason(c.device, (1, c.problem.kv_heads, c.problem.batch))


def _check_baseline(c: Candidate) -> str | None:
    return _check_groups(c) if c["strategy"] == "baseline" else None


def _check_split(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        return None
    reason = split_reason(c["split"], _plan(c).parts, c.device.compute_units)
    return reason or _check_groups(c)


def _check_combine(c: Candidate) -> str | None:
    if c["split"] == "none":
        return None
    problem: PagedAttentionProblem = c.problem
    counts = (problem.query_tokens, problem.query_heads, problem.batch)
    return limits.groups_reason(c.device, counts) or combine_reason(
        c.device,
        columns=chunks(c),
        slices=c["combine_slices"],
        dimensions=problem.head_size,
    )


CONSTRAINTS = (
    WHOLE_CHUNKS,
    subgroups.operations("basic", "shuffle", "vote"),
    subgroups.SIZE_RULE,
    subgroups.WORKGROUP_RULE,
    Constraint(needs=(), check=_check_batch),
    Constraint(needs=("strategy",), check=_check_baseline),
    *strategies.CONSTRAINTS,
    Constraint(needs=(*strategies.GRANULE_NEEDS, "split"), check=_check_split),
    Constraint(needs=("split", "combine_slices"), check=_check_combine),
)

BINDINGS = (
    *INPUTS,
    Binding(name="partials", buffer="partials", element="float", role="scratch"),
    Binding(name="attention", buffer="out", element="uvec4", role="output"),
    Binding(name="log_sums", buffer="lse", element="float", role="output"),
)

PUSH_FIELDS = (
    PushField(name="batch", type="uint"),
    PushField(name="query_heads", type="uint"),
    PushField(name="kv_heads", type="uint"),
    PushField(name="query_tokens", type="uint"),
    PushField(name="context", type="uint"),
    PushField(name="max_blocks", type="uint"),
    PushField(name="q_offset", type="int"),
    PushField(name="num_splits", type="uint"),
    PushField(name="tokens_per_split", type="uint"),
    PushField(name="workgroups", type="uint"),
    PushField(name="softmax_scale", type="float"),
)


def _arithmetic(values: Values) -> ArithmeticClass:
    return "f16_matrix" if by_matrices(values) else "f32"


def _passes(c: Candidate, given: Mapping[str, int | float]) -> tuple[Pass, ...]:
    problem: PagedAttentionProblem = c.problem
    baseline = c["strategy"] == "baseline"
    plan = SplitPlan(1, max(1, problem.context)) if baseline else _plan(c)
    push = push_values(PUSH_FIELDS, given)
    push |= {
        "num_splits": plan.parts,
        "tokens_per_split": plan.tokens,
        "workgroups": _workgroups(c),
    }
    shape = constants(problem) | {"chunks": chunks(c), "splits": plan.combined}
    if baseline:
        return (
            Pass(
                name="baseline",
                constants=shape | {"threads": BASELINE_THREADS},
                push=push,
                groups=(_workgroups(c), 1, 1),
                subgroup_size=None,
            ),
        )
    attend = Pass(
        name="attend",
        constants=shape | strategies.constants(c),
        push=push,
        groups=(_workgroups(c), problem.kv_heads, problem.batch),
        subgroup_size=subgroups.required_size(c),
    )
    if not plan.combined:
        return (attend,)
    combine = Pass(
        name="combine",
        constants=shape | {"slices": c["combine_slices"]},
        push=push,
        groups=(problem.query_tokens, problem.query_heads, problem.batch),
        subgroup_size=None,
    )
    return (attend, combine)


def _dispatch(c: Candidate) -> DispatchRule:
    push = {
        **{name: name for name in ("batch", "query_tokens", "context", "num_splits", "workgroups")},
        "max_blocks": "max(1, ceil_div(context, block_size))",
        "q_offset": q_offset_rule(c.problem),
        "tokens_per_split": "tokens_per_split",
    }
    if c["strategy"] == "baseline":
        rows = "batch * query_heads * query_tokens"
        return DispatchRule(
            policy="none",
            terms=(
                ("num_splits", "1"),
                ("tokens_per_split", "max(1, context)"),
                ("workgroups", f"ceil_div({rows}, {BASELINE_THREADS})"),
            ),
            groups={"baseline": ("workgroups", "1", "1")},
            push=push,
            scratch={"partials": "4"},
            text="one thread per query row",
        )
    combined, units = _plan(c).combined, c.device.compute_units
    policy = str(c["split"]) if combined else "none"
    partials = f"query_heads * query_tokens * num_splits * {c.problem.head_size + 2}"
    return DispatchRule(
        policy=policy,
        facts={"granule_tokens": strategies.granule(c)}
        | ({} if units is None else {"compute_units": units}),
        terms=(
            ("row_tiles", f"ceil_div(query_tokens * {c.problem.group}, {c['tile_rows']})"),
            *split_rule(policy, context="context", workgroups="batch * kv_heads * row_tiles"),
            ("workgroups", "row_tiles * num_splits"),
        ),
        groups={"attend": ("workgroups", "kv_heads", "batch")}
        | ({"combine": ("query_tokens", "query_heads", "batch")} if combined else {}),
        push=push,
        scratch={"partials": f"4 * batch * {partials}" if combined else "4"},
        at_most={"num_splits": MAX_SPLITS},
        text="row_tiles tiles of query rows for each KV head; " + (CUT if combined else UNCUT),
    )


def _validated_as(c: Candidate, _case: ValidationCase) -> Values:
    """The same kernels on contexts of up to some hundred tokens, cut as often as may be."""
    if c["strategy"] == "baseline":
        return c.values
    if _plan(c).combined:
        return {**c.values, "split": MANY_PARTS}
    return {**c.values, "split": "none", "combine_slices": 1}


def _scratch_bytes(c: Candidate) -> dict[str, int]:
    problem: PagedAttentionProblem = c.problem
    if c["strategy"] == "baseline" or not _plan(c).combined:
        return {"partials": 4}
    rows = problem.batch * problem.query_heads * problem.query_tokens * _plan(c).parts
    return {"partials": 4 * rows * (problem.head_size + 2)}


def bytes_moved(problem: PagedAttentionProblem) -> int:
    """Keys and values that some row sees once per sequence, queries, outputs, sums, tables."""
    seen = problem.keys_seen(problem.query_tokens - 1)
    cache = 2 * problem.batch * seen * problem.kv_heads * problem.head_size
    rows = problem.batch * problem.query_heads * problem.query_tokens
    vectors = 2 * rows * problem.head_size
    table = problem.batch * -(-seen // problem.block_size)
    return (cache + vectors) * problem.element_bytes + 4 * rows + 4 * table


PAGED_ATTENTION = Family(
    name="paged_attention",
    summary="attention with log-sum-exp over a paged f32, f16 or bf16 KV cache, from decode to "
    "prefill",
    template="paged_attention.comp.jinja",
    problem_type=PagedAttentionProblem,
    parameters=PARAMETERS,
    constraints=CONSTRAINTS,
    bindings=BINDINGS,
    push_fields=PUSH_FIELDS,
    baseline={"strategy": "baseline"},
    starts=STARTS,
    portable=PORTABLE,
    arithmetic=_arithmetic,
    passes=_passes,
    scratch_bytes=_scratch_bytes,
    operands=make_operands,
    reference=forward_reference,
    sampled_reference=sampled_forward_reference,
    validation_cases=validation_cases,
    bytes_moved=bytes_moved,
    operand_bytes=timing_bytes,
    scalars=scalars,
    dispatch=_dispatch,
    validated_as=_validated_as,
)
