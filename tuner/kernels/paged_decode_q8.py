"""Paged decode attention over the int8 token-major cache: one query token for each sequence.

Layout, rounding and semantics are those of the first system (an int8 paged-attention decode): a
token's vector of one KV head is D/4 words of four signed codes and one word with a float32 scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

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
    ValidationCase,
    Values,
)
from tuner.kernels.decode_operands import make_operands, timing_scalars, validation_cases
from tuner.kernels.splits import (
    FEW_SHARES,
    MANY_PARTS,
    POLICIES,
    SplitPlan,
    split_plan,
    workgroups_dealt,
)
from tuner.oracle import decode_reference, sampled_decode_reference
from tuner.problems import PagedDecodeProblem

MAX_SPLITS = 1024
BASELINE_THREADS = 128
BASELINE_MAX_HEAD_SIZE = 256


def _split_t(values: Values) -> bool:
    return values["strategy"] != "baseline"


LAYOUTS = {
    "token_major": "token-major words, one scale behind each vector",
    "planar": "of each block and KV head first all codes, then the scales: 16-byte aligned rows",
}
"""Cache layouts, each a family of its own: the first system's, and what an engine would gain with
the scales apart."""
PARAMETERS = (
    Parameter(
        name="layout",
        values=tuple(LAYOUTS),
        help="how the cache is laid out; each family has one layout",
    ),
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
        values=("none", "keys", "all"),
        help="loads of the next tiles that are issued before the present ones are computed",
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
        help="how the work is cut: none (a workgroup for each sequence and KV head), count:N times "
        "as many, parts of tokens:N, or device:N workgroups per compute unit",
        used=_split_t,
    ),
    Parameter(
        name="combine_slices",
        values=(1, 2, 4, 8),
        help="parts into which the combine pass deals out the splits of a query head",
        used=lambda values: lanes.by_lanes(values) and values["split"] != "none",
    ),
)


def _plan(c: Candidate) -> SplitPlan:
    """How a strategy that cuts contexts does so; the others do not."""
    problem: PagedDecodeProblem = c.problem
    if not lanes.by_lanes(c.values):
        return SplitPlan(1, max(1, problem.context))
    return split_plan(
        c["split"],
        context=problem.context,
        workgroups=problem.sequences * problem.kv_heads,
        compute_units=c.device.compute_units,
        granule=lanes.granule(c),
    )


def _dealt(c: Candidate) -> int:
    """Workgroups among which the strategy matrix deals out the work."""
    problem: PagedDecodeProblem = c.problem
    return workgroups_dealt(
        c["split"],
        tokens=int(problem.context_lens().sum(dtype="int64")) * problem.kv_heads,
        pairs=problem.sequences * problem.kv_heads,
        compute_units=c.device.compute_units,
    )


def _groups(c: Candidate) -> dict[str, tuple[int, int, int]]:
    """The workgroup counts of each pass."""
    problem: PagedDecodeProblem = c.problem
    per_head = (problem.query_heads, problem.sequences, 1)
    if c["strategy"] == "baseline":
        return {"baseline": per_head}
    if matrix.by_matrix(c.values):
        return {"attend": (_dealt(c), 1, 1)}
    plan = _plan(c)
    attend = {"attend": (plan.parts, problem.kv_heads, problem.sequences)}
    return attend | ({"combine": per_head} if plan.combined else {})


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
        return _check_groups(c)
    policy = c["split"]
    if policy.startswith("fit:") and lanes.by_lanes(c.values):
        return f"{policy} is for kernels that deal out the work, {c['strategy']} cuts contexts"
    if policy.startswith(("device:", "fit:")) and c.device.compute_units is None:
        return f"{policy} needs the number of compute units, which this driver does not tell"
    pairs = c.problem.sequences * c.problem.kv_heads
    parts = -(-_dealt(c) // pairs) if matrix.by_matrix(c.values) else _plan(c).parts
    if parts > MAX_SPLITS:
        return f"{policy} makes {parts} splits, the limit is {MAX_SPLITS}"
    return _check_groups(c)


def _check_groups(c: Candidate) -> str | None:
    for name, groups in _groups(c).items():
        for axis, count, limit in zip("xyz", groups, c.device.max_workgroup_count, strict=True):
            if count > limit:
                return f"{count} workgroups in {axis} ({name}), the device allows {limit}"
    return None


def _check_combine(c: Candidate) -> str | None:
    if not lanes.by_lanes(c.values) or c["split"] == "none":
        return None
    columns, slices, device = c.problem.head_size // 4, c["combine_slices"], c.device
    limit = min(device.max_workgroup_invocations, device.max_workgroup_size[0])
    if columns * slices > limit:
        return f"{columns * slices} threads to combine, the device allows {limit}"
    if slices > device.max_workgroup_size[1]:
        return f"{slices} slices to combine, the device allows {device.max_workgroup_size[1]}"
    needed = (16 * columns + 8) * slices if slices > 1 else 0
    if needed > device.max_shared_memory_bytes:
        return (
            f"needs {needed} bytes of shared memory to combine, the device has "
            f"{device.max_shared_memory_bytes}"
        )
    return None


def _check_staged(c: Candidate) -> str | None:
    if c["layout"] == "planar" and lanes.staged(c.values):
        return "tiles with their scales apart are staged by the strategy matrix alone"
    return None


CONSTRAINTS = (
    Constraint(needs=("layout", "strategy", "staging"), check=_check_staged),
    Constraint(needs=(), check=_check_switches),
    Constraint(needs=("strategy",), check=_check_head_size),
    Constraint(needs=("strategy",), check=_check_subgroups),
    Constraint(needs=("strategy", "subgroup_size"), check=_check_subgroup_size),
    Constraint(needs=("strategy", "subgroup_size", "subgroups"), check=_check_workgroup),
    *lanes.CONSTRAINTS,
    *matrix.CONSTRAINTS,
    Constraint(
        needs=(*lanes.GRANULE_NEEDS, "matrix_shape", "tiles_unrolled", "split"), check=_check_split
    ),
    Constraint(needs=("strategy", "split", "combine_slices"), check=_check_combine),
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
    Binding(name="partial_quads", buffer="partials", element="vec4", role="scratch"),
    Binding(name="counters", buffer="counters", element="uint", role="counter"),
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
    PushField(name="num_sequences", type="uint"),
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
    plan, groups = _plan(c), _groups(c)
    push = {field.name: scalars[field.name] for field in PUSH_FIELDS if field.name in scalars}
    push |= {"num_splits": plan.parts, "tokens_per_split": plan.tokens}
    shape = {
        "head_size": problem.head_size,
        "block_size": problem.block_size,
        "group": problem.group,
        "planar": c["layout"] == "planar",
        "row_words": matrix.row_words(c),
    }
    constants: dict[str, Mapping[str, object]] = {
        "baseline": {"threads": BASELINE_THREADS},
        "combine": {"slices": c["combine_slices"]},
    }
    if matrix.by_matrix(c.values):
        push |= {"num_splits": groups["attend"][0], "tokens_per_split": 0}
        constants["attend"] = matrix.constants(c)
    elif lanes.by_lanes(c.values):
        constants["attend"] = {**lanes.constants(c), "splits": plan.combined}
    sized = c["subgroup_size"] if c.device.subgroup_size_control else None
    return tuple(
        Pass(
            name=name,
            constants={**shape, **constants[name]},
            push=push,
            groups=count,
            subgroup_size=sized if name == "attend" else None,
        )
        for name, count in groups.items()
    )


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
    facts = {} if units is None else {"compute_units": units}
    if matrix.by_matrix(c.values):
        return DispatchRule(
            policy=str(c["split"]),
            facts=facts,
            groups={"attend": ("num_splits", "1", "1")},
            text="any number of workgroups is right, they deal out all tokens evenly; num_splits "
            "is that number: with pairs = sequences * kv_heads it is pairs for none, N * pairs for "
            "count:N, N * compute_units for device:N, ceil(kv_heads * sum of context_lens / N) for "
            "tokens:N; for fit:N, with most = N * compute_units, it is pairs * floor(most / pairs) "
            "if pairs <= most, else ceil(pairs / ceil(pairs / most)); the buffer partials needs "
            "4 * (pairs + num_splits) * (query_heads / kv_heads) * (head_size + 4) bytes, counters "
            "4 * pairs bytes that are zero before the first launch (every launch leaves them so)",
        )
    return DispatchRule(
        policy=str(c["split"]),
        facts={"granule_tokens": lanes.granule(c)} | facts,
        groups={"attend": ("num_splits", "kv_heads", "sequences"), "combine": per_head},
        text="wanted = 1 for none, N for count:N, ceil(context / N) for tokens:N, "
        "floor(N * compute_units / (sequences * kv_heads)) for device:N, at least 1, where context "
        "is the longest of the batch; tokens_per_split = ceil(context / wanted), rounded up to a "
        "multiple of granule_tokens; num_splits = ceil(context / tokens_per_split); the buffer "
        "partials needs 4 * sequences * query_heads * num_splits * (head_size + 2) bytes; these "
        "kernels are built for "
        + ("any number of splits" if _plan(c).combined else "one split, without a combine pass"),
    )


def _validated_as(c: Candidate, case: ValidationCase) -> Values:
    """The same kernels on contexts of up to a thousand tokens.

    Kernels of several splits are cut as often as may be. Those that are dealt the work have few
    workgroups on most cases, so that each goes through several rounds and sequences, and many on
    the case of a single sequence, so that several parts are joined.
    """
    if matrix.by_matrix(c.values):
        return {**c.values, "split": MANY_PARTS if case.name == "single" else FEW_SHARES}
    if lanes.by_lanes(c.values) and _plan(c).combined:
        return {**c.values, "split": MANY_PARTS}
    return {**c.values, "split": "none", "combine_slices": 1}


def _scratch_bytes(c: Candidate) -> dict[str, int]:
    problem: PagedDecodeProblem = c.problem
    plan = _plan(c)
    if matrix.by_matrix(c.values):
        pairs = problem.sequences * problem.kv_heads
        rows = (pairs + _dealt(c)) * problem.group
        return {"partials": 4 * rows * (problem.head_size + 4), "counters": 4 * pairs}
    rows = problem.sequences * problem.query_heads * plan.parts if plan.combined else 0
    return {"partials": max(16, 4 * rows * (problem.head_size + 2)), "counters": 4}


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
        prefetch="all",
        exchange=exchange,
        tiles_unrolled=1,
        rescale=rescale,
        split=split,
    )
    for size, shape in ((32, "16x8x16"), (32, "16x16x16"), (64, "16x16x16"), (8, "8x8x8"))
    for exchange in ("convert", "shared")
    for subgroups, rescale, split in (
        (16, "exact", "fit:1"),
        (12, "lagging", "fit:1"),
        (4, "exact", "fit:4"),
        (4, "exact", "device:4"),
    )
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


def _family(name: str, layout: str) -> Family:
    """The declaration of a layout: the same kernels on rows that lie otherwise."""

    def laid_out(values: Values) -> Values:
        return {**values, "layout": layout}

    return Family(
        name=name,
        summary=f"decode attention over a paged int8 KV cache ({LAYOUTS[layout]})",
        template="paged_decode_q8.comp.jinja",
        problem_type=PagedDecodeProblem,
        parameters=tuple(
            replace(each, values=(layout,)) if each.name == "layout" else each
            for each in PARAMETERS
        ),
        constraints=CONSTRAINTS,
        bindings=BINDINGS,
        push_fields=PUSH_FIELDS,
        baseline=laid_out(_start(strategy="baseline")),
        starts=tuple(map(laid_out, STARTS)),
        arithmetic=_arithmetic,
        passes=_passes,
        scratch_bytes=_scratch_bytes,
        operands=partial(make_operands, layout=layout),
        reference=decode_reference,
        sampled_reference=sampled_decode_reference,
        validation_cases=validation_cases,
        bytes_moved=_bytes_moved,
        scalars=timing_scalars,
        dispatch=_dispatch,
        validated_as=_validated_as,
    )


PAGED_DECODE_Q8 = _family("paged_decode_q8", "token_major")
PAGED_DECODE_Q8_PLANAR = _family("paged_decode_q8_planar", "planar")
