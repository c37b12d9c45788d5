"""Paged decode attention over the int8 token-major cache: one query token for each sequence.

Layout, rounding and semantics are those of the first system (an int8 paged-attention decode): a
token's vector of one KV head is D/4 words of four signed codes and one word with a float32 scale.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.kernels import lane_decode as lanes
from tuner.kernels import matrix_decode as matrix
from tuner.kernels.base import (
    ArithmeticClass,
    Binding,
    Candidate,
    Constraint,
    DispatchRule,
    Family,
    Parameter,
    Pass,
    PushField,
    Values,
)
from tuner.kernels.decode_operands import make_operands, timing_scalars, validation_cases
from tuner.kernels.splits import MANY_PARTS, POLICIES, SplitPlan, split_plan
from tuner.oracle import decode_reference, sampled_decode_reference
from tuner.problems import PagedDecodeProblem

MAX_SPLITS = 1024
BASELINE_THREADS = 128
BASELINE_MAX_HEAD_SIZE = 256


def _split_t(values: Values) -> bool:
    return values["strategy"] != "baseline"


PARAMETERS = (
    Parameter(
        name="strategy",
        values=("baseline", *lanes.STRATEGIES, "matrix"),
        help="baseline: one workgroup per query head, two passes over K. The others split the "
        "context and read KV once per KV head; they compute in f32, in packed f16, with the "
        "integer dot product for QK, or with cooperative matrices",
    ),
    Parameter(
        name="subgroup_size",
        values=(8, 16, 32, 64),
        help="lanes of a subgroup that the kernel is built for",
        used=_split_t,
    ),
    Parameter(
        name="subgroups", values=(1, 2, 4, 8, 12, 16), help="subgroups per workgroup", used=_split_t
    ),
    Parameter(
        name="staging",
        values=("registers", "shared"),
        help="where codes wait: straight to registers, or tiles of tokens in shared memory",
        used=_split_t,
    ),
    Parameter(
        name="matrix_shape",
        values=matrix.SHAPES,
        help="cooperative-matrix shape: tokens x query heads x terms",
        used=matrix.by_matrix,
    ),
    Parameter(
        name="key_operand",
        values=("float16", "int8"),
        help="keys widened to 16 bits, or as they are with the query in two int8 terms",
        used=matrix.by_matrix,
    ),
    Parameter(
        name="tiles_unrolled",
        values=(1, 2, 4),
        help="matrices of tokens each subgroup loads before it computes",
        used=matrix.by_matrix,
    ),
    Parameter(
        name="prefetch",
        values=(0, 1),
        help="1: the loads of the next tiles are issued before the present ones are computed",
        used=matrix.staged,
    ),
    Parameter(
        name="exchange",
        values=("shared", "convert"),
        help="how weights pass from accumulator to operand: through shared memory, or by the "
        "conversion of NV cooperative matrix 2",
        used=matrix.by_matrix,
    ),
    Parameter(
        name="rescale",
        values=("lagging", "exact"),
        help="whether sums are rescaled with each new maximum, or only once it has moved far",
        used=matrix.by_matrix,
    ),
    Parameter(
        name="lanes_per_token",
        values=(1, 2, 4, 8, 16, 32, 64),
        help="lanes that share the dimensions of one token",
        used=lanes.by_lanes,
    ),
    Parameter(
        name="tokens_unrolled",
        values=(1, 2, 4, 8),
        help="tokens each group of lanes loads before it computes",
        used=lanes.by_lanes,
    ),
    Parameter(
        name="tile_tokens",
        values=(16, 32, 64, 128),
        help="tokens of a tile staged by the whole workgroup",
        used=lanes.staged,
    ),
    Parameter(
        name="load_words",
        values=(1, 4),
        help="words of one global load into the staged tile (4: blocks as 16-byte vectors)",
        used=lanes.staged,
    ),
    Parameter(
        name="head_slices",
        values=(1, 2, 4, 8),
        help="parts into which the query group is dealt out over the subgroups of a workgroup",
        used=lanes.staged,
    ),
    Parameter(
        name="query_terms",
        values=(1, 2),
        help="int8 terms of a query value for the integer dot product",
        used=lambda values: values["strategy"] == "int_dot",
    ),
    Parameter(
        name="split",
        values=POLICIES,
        help="how the context is cut: none, count:N parts, parts of tokens:N, or device:N "
        "workgroups per compute unit",
        used=_split_t,
    ),
    Parameter(
        name="combine_slices",
        values=(1, 2, 4, 8),
        help="parts into which the combine pass deals out the splits of a query head",
        used=lambda values: _split_t(values) and values["split"] != "none",
    ),
)


def _granule(c: Candidate) -> int:
    """Tokens one workgroup takes a step."""
    return matrix.granule(c) if matrix.by_matrix(c.values) else lanes.granule(c)


def _plan(c: Candidate) -> SplitPlan:
    problem: PagedDecodeProblem = c.problem
    if c["strategy"] == "baseline":
        return SplitPlan(1, max(1, problem.context))
    return split_plan(
        c["split"],
        context=problem.context,
        workgroups=problem.sequences * problem.kv_heads,
        compute_units=c.device.compute_units,
        granule=_granule(c),
    )


def _check_switches(c: Candidate) -> str | None:
    if c.problem.switched:
        return (
            f"this family has no {', '.join(c.problem.switched)}: use paged_decode_f32 or "
            "paged_decode_f16"
        )
    return None


def _check_head_size(c: Candidate) -> str | None:
    if c.problem.head_size % 4:
        return f"head size {c.problem.head_size} is no multiple of 4, the codes of one word"
    if c["strategy"] == "baseline" and c.problem.head_size > BASELINE_MAX_HEAD_SIZE:
        return (
            f"the baseline's shared arrays hold a head size of {BASELINE_MAX_HEAD_SIZE}, "
            f"the problem has {c.problem.head_size}"
        )
    return None


def _check_subgroups(c: Candidate) -> str | None:
    missing = {"basic", "shuffle"} - set(c.device.subgroup_operations)
    if c["strategy"] != "baseline" and missing:
        return f"the device has no subgroup operations of kind {', '.join(sorted(missing))}"
    return None


def _check_groups(c: Candidate) -> str | None:
    groups, limit = c.problem.sequences, c.device.max_workgroup_count[2]
    if groups > limit:
        return f"{groups} sequences, the device allows {limit} workgroups in z"
    return None


def _check_subgroup_size(c: Candidate) -> str | None:
    size, device = c["subgroup_size"], c.device
    if c["strategy"] == "baseline" or size == device.subgroup_size:
        return None
    if not device.subgroup_size_control:
        return f"the device's subgroups have {device.subgroup_size} lanes and no size control"
    if not device.min_subgroup_size <= size <= device.max_subgroup_size:
        return (
            f"subgroup size {size} is outside the device's {device.min_subgroup_size} to "
            f"{device.max_subgroup_size}"
        )
    return None


def _check_workgroup(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        return None
    threads, limit = c["subgroups"] * c["subgroup_size"], c.device.max_workgroup_invocations
    limit = min(limit, c.device.max_workgroup_size[0])
    if threads > limit:
        return f"{threads} threads a workgroup, the device allows {limit}"
    return None


def _check_split(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        return None
    policy = c["split"]
    if policy.startswith("device:") and c.device.compute_units is None:
        return f"{policy} needs the number of compute units, which this driver does not tell"
    parts = _plan(c).parts
    if parts > MAX_SPLITS:
        return f"{policy} makes {parts} splits, the limit is {MAX_SPLITS}"
    return None


def _check_combine(c: Candidate) -> str | None:
    if c["split"] == "none":
        return None
    threads, limit = c.problem.head_size // 4 * c["combine_slices"], c.device
    if threads > limit.max_workgroup_invocations:
        return f"{threads} threads to combine, the device allows {limit.max_workgroup_invocations}"
    return None


CONSTRAINTS = (
    Constraint(needs=(), check=_check_switches),
    Constraint(needs=("strategy",), check=_check_head_size),
    Constraint(needs=("strategy",), check=_check_subgroups),
    Constraint(needs=("strategy",), check=_check_groups),
    Constraint(needs=("strategy", "subgroup_size"), check=_check_subgroup_size),
    Constraint(needs=("strategy", "subgroup_size", "subgroups"), check=_check_workgroup),
    *lanes.CONSTRAINTS,
    *matrix.CONSTRAINTS,
    Constraint(
        needs=(*lanes.GRANULE_NEEDS, "matrix_shape", "tiles_unrolled", "split"), check=_check_split
    ),
    Constraint(needs=("split", "combine_slices"), check=_check_combine),
)

BINDINGS = (
    Binding(name="query", buffer="query", element="float", role="input"),
    Binding(name="key_words", buffer="key_cache", element="uint", role="input"),
    Binding(name="value_words", buffer="value_cache", element="uint", role="input"),
    Binding(name="block_table", buffer="block_table", element="uint", role="input"),
    Binding(name="context_lens", buffer="context_lens", element="uint", role="input"),
    Binding(name="partials", buffer="partials", element="float", role="scratch"),
    Binding(name="attention", buffer="out", element="float", role="output"),
    Binding(name="key_quads", buffer="key_cache", element="uvec4", role="input"),
    Binding(name="value_quads", buffer="value_cache", element="uvec4", role="input"),
)

PUSH_FIELDS = (
    PushField(name="num_heads", type="uint"),
    PushField(name="num_kv_heads", type="uint"),
    PushField(name="max_blocks", type="uint"),
    PushField(name="q_stride", type="uint"),
    PushField(name="max_context_len", type="uint"),
    PushField(name="num_splits", type="uint"),
    PushField(name="tokens_per_split", type="uint"),
    PushField(name="softmax_scale", type="float"),
)


def _arithmetic(values: Values) -> ArithmeticClass:
    if values["strategy"] == "packed_f16":
        return "f16"
    if values["strategy"] == "matrix":
        return "f16_matrix" if values["key_operand"] == "float16" else "int8_matrix"
    if values["strategy"] == "int_dot":
        return "int8_one_term" if values["query_terms"] == 1 else "int8_two_terms"
    return "f32"


def _passes(c: Candidate, scalars: Mapping[str, int | float]) -> tuple[Pass, ...]:
    problem: PagedDecodeProblem = c.problem
    plan = _plan(c)
    push = {field.name: scalars[field.name] for field in PUSH_FIELDS if field.name in scalars}
    push |= {"num_splits": plan.parts, "tokens_per_split": plan.tokens}
    shape = {
        "head_size": problem.head_size,
        "block_size": problem.block_size,
        "group": problem.group,
        "splits": plan.combined,
    }
    if c["strategy"] == "baseline":
        groups = (problem.query_heads, problem.sequences, 1)
        return (
            Pass(
                name="baseline",
                constants=shape | {"threads": BASELINE_THREADS},
                push=push,
                groups=groups,
                subgroup_size=None,
            ),
        )
    attend = Pass(
        name="attend",
        constants=shape | (matrix if matrix.by_matrix(c.values) else lanes).constants(c),
        push=push,
        groups=(plan.parts, problem.kv_heads, problem.sequences),
        subgroup_size=c["subgroup_size"] if c.device.subgroup_size_control else None,
    )
    if not plan.combined:
        return (attend,)
    combine = Pass(
        name="combine",
        constants=shape | {"slices": c["combine_slices"]},
        push=push,
        groups=(problem.query_heads, problem.sequences, 1),
        subgroup_size=None,
    )
    return (attend, combine)


def _dispatch(c: Candidate) -> DispatchRule:
    per_head = ("query_heads", "sequences", "1")
    if c["strategy"] == "baseline":
        return DispatchRule(
            policy="none",
            facts={},
            groups={"baseline": per_head},
            text="one workgroup per query head and sequence walks the whole context",
        )
    units = c.device.compute_units
    facts = {"granule_tokens": _granule(c)} | ({} if units is None else {"compute_units": units})
    return DispatchRule(
        policy=str(c["split"]),
        facts=facts,
        groups={"attend": ("num_splits", "kv_heads", "sequences"), "combine": per_head},
        text="wanted = 1 for none, N for count:N, ceil(context / N) for tokens:N, "
        "floor(N * compute_units / (sequences * kv_heads)) for device:N, at least 1, where context "
        "is the longest of the batch; tokens_per_split = ceil(context / wanted), rounded up to a "
        "multiple of granule_tokens; num_splits = ceil(context / tokens_per_split); the buffer "
        "partials needs 4 * sequences * query_heads * num_splits * (head_size + 2) bytes; these "
        "kernels are built for "
        + ("any number of splits" if _plan(c).combined else "one split, without a combine pass"),
    )


def _validated_as(c: Candidate) -> Values:
    """The same kernels on contexts of up to a thousand tokens, cut as often as may be."""
    if c["strategy"] == "baseline":
        return c.values
    if _plan(c).combined:
        return {**c.values, "split": MANY_PARTS}
    return {**c.values, "split": "none", "combine_slices": 1}


def _scratch_bytes(c: Candidate) -> dict[str, int]:
    plan, problem = _plan(c), c.problem
    if not plan.combined:
        return {"partials": 4}
    rows = problem.sequences * problem.query_heads * plan.parts
    return {"partials": 4 * rows * (problem.head_size + 2)}


def _bytes_moved(problem: PagedDecodeProblem) -> int:
    """Codes and scales of every token once per KV head for K and V, queries, outputs, tables."""
    lens = problem.context_lens()
    tokens = int(lens.sum(dtype="int64"))
    cache = 2 * tokens * problem.kv_heads * (problem.head_size + 4)
    vectors = 2 * problem.sequences * problem.query_heads * problem.head_size * 4
    blocks = int((-(-lens.astype("int64") // problem.block_size)).sum())
    return cache + vectors + 4 * blocks + 4 * problem.sequences


def _start(**values: int | str) -> Values:
    neutral = {parameter.name: parameter.values[0] for parameter in PARAMETERS}
    return neutral | values


STARTS = tuple(
    _start(
        strategy="matrix",
        subgroup_size=size,
        matrix_shape=shape,
        subgroups=subgroups,
        staging="shared",
        prefetch=prefetch,
        exchange=exchange,
        tiles_unrolled=1,
        split=split,
        combine_slices=8,
    )
    for size, shape in ((32, "16x8x16"), (32, "16x16x16"), (64, "16x16x16"), (8, "8x8x8"))
    for exchange in ("convert", "shared")
    for subgroups, prefetch, split in ((12, 1, "device:1"), (8, 0, "device:2"), (4, 0, "device:4"))
) + tuple(
    _start(
        strategy=strategy,
        subgroup_size=size,
        subgroups=4,
        lanes_per_token=shared,
        tokens_unrolled=4,
        split="device:4",
        combine_slices=2,
    )
    for strategy in ("packed_f16", "scalar_f32")
    for size, shared in ((32, 8), (64, 8), (16, 8), (8, 8), (8, 4))
)

PAGED_DECODE_Q8 = Family(
    name="paged_decode_q8",
    summary="decode attention over a paged int8 KV cache (token-major words, one scale a vector)",
    template="paged_decode_q8.comp.jinja",
    problem_type=PagedDecodeProblem,
    parameters=PARAMETERS,
    constraints=CONSTRAINTS,
    bindings=BINDINGS,
    push_fields=PUSH_FIELDS,
    baseline=_start(strategy="baseline"),
    starts=STARTS,
    arithmetic=_arithmetic,
    passes=_passes,
    scratch_bytes=_scratch_bytes,
    operands=make_operands,
    reference=decode_reference,
    sampled_reference=sampled_decode_reference,
    validation_cases=validation_cases,
    bytes_moved=_bytes_moved,
    scalars=timing_scalars,
    dispatch=_dispatch,
    validated_as=_validated_as,
)
