"""Paged decode attention over caches of floats: one query token for each sequence.

Two families, one for each type of cache, share everything here. The layout is that of the first
system's float caches: keys in packets of 16 bytes, so that those of a block's tokens lie side by
side for every few dimensions, and values by dimension, so that those of its tokens do.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from tuner.kernels import float_lanes as lanes
from tuner.kernels import float_matrix as matrix
from tuner.kernels import limits
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
    Value,
    Values,
)
from tuner.kernels.float_operands import (
    F16,
    F32,
    CacheFormat,
    float_validation_cases,
    make_operands,
    timing_scalars,
)
from tuner.kernels.matrix_units import by_matrix
from tuner.kernels.splits import MANY_PARTS, POLICIES, SplitPlan, split_plan
from tuner.oracle.float_decode import float_decode_reference, sampled_float_decode_reference
from tuner.problems import PagedDecodeProblem

MAX_SPLITS = 1024
BASELINE_THREADS = 128
MAX_HEAD_SIZE = 512
SPLITS = tuple(policy for policy in POLICIES if not policy.startswith("fit:"))
"""The policies that say into how many parts a context is cut."""


def _split_t(values: Values) -> bool:
    return values["strategy"] != "baseline"


def _parameters(strategies: tuple[Value, ...]) -> tuple[Parameter, ...]:
    return (
        Parameter(
            name="strategy",
            values=strategies,
            help="baseline: one workgroup per query head, two passes over K. The others split the "
            "context and read KV once per KV head; they compute in f32, in packed f16, or with "
            "cooperative matrices",
        ),
        Parameter(
            name="subgroup_size",
            values=(8, 16, 32, 64),
            help="lanes of a subgroup that the kernel is built for",
            used=_split_t,
        ),
        Parameter(
            name="subgroups",
            values=(1, 2, 4, 8, 12, 16),
            help="subgroups per workgroup",
            used=_split_t,
        ),
        Parameter(
            name="head_slices",
            values=(1, 2, 4, 8),
            help="parts into which the query group is dealt out over the subgroups of a workgroup",
            used=lanes.by_lanes,
        ),
        Parameter(
            name="token_lanes",
            values=(4, 8, 16, 32, 64),
            help="lanes side by side over the tokens of a tile's keys; the others share them",
            used=lanes.by_lanes,
        ),
        Parameter(
            name="tokens_unrolled",
            values=(1, 2, 4),
            help="tokens of a tile that each lane takes",
            used=lanes.by_lanes,
        ),
        Parameter(
            name="value_lanes",
            values=(1, 2, 4, 8),
            help="lanes that share the tokens of one dimension of a tile's values",
            used=lanes.by_lanes,
        ),
        *(matrix.PARAMETERS if "matrix" in strategies else ()),
        Parameter(
            name="prefetch",
            values=(0, 1),
            help="0: values are loaded once keys are used; 1: the next tile's keys and values are "
            "loaded as soon as these are used",
            used=lambda values: lanes.by_lanes(values) or matrix.fed_by_lanes(values),
        ),
        Parameter(
            name="split",
            values=SPLITS,
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


def _tile(c: Candidate) -> int:
    """Tokens of which a walk over the context begins at a multiple."""
    if by_matrix(c.values):
        return matrix.tile(c)
    return lanes.tile(c) if _split_t(c.values) else 1


def _granule(c: Candidate) -> int:
    """Tokens one workgroup takes a step."""
    return _tile(c) * lanes.walkers(c)


def _plan(c: Candidate) -> SplitPlan:
    problem: PagedDecodeProblem = c.problem
    if not _split_t(c.values):
        return SplitPlan(1, max(1, problem.context))
    walked = problem.context
    if problem.window:
        walked = min(walked, problem.window + _tile(c) - 1)
    return split_plan(
        c["split"],
        context=walked,
        workgroups=problem.sequences * problem.kv_heads,
        compute_units=c.device.compute_units,
        granule=_granule(c),
    )


def _check_groups(c: Candidate) -> str | None:
    groups, limit = c.problem.sequences, c.device.max_workgroup_count[2]
    if groups > limit:
        return f"{groups} sequences, the device allows {limit} workgroups in z"
    return None


def _check_subgroup_size(c: Candidate) -> str | None:
    if not _split_t(c.values):
        return None
    return limits.subgroup_size_reason(c.device, c["subgroup_size"])


def _check_workgroup(c: Candidate) -> str | None:
    if not _split_t(c.values):
        return None
    return limits.threads_reason(c.device, c["subgroups"] * c["subgroup_size"])


def _check_split(c: Candidate) -> str | None:
    if not _split_t(c.values):
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
    if c.problem.value_size % 4:
        return f"values of {c.problem.value_size} elements do not combine in vectors of 4"
    threads, limit = c.problem.value_size // 4 * c["combine_slices"], c.device
    if threads > limit.max_workgroup_invocations:
        return f"{threads} threads to combine, the device allows {limit.max_workgroup_invocations}"
    return None


def _check_head_size(c: Candidate, cache: CacheFormat) -> str | None:
    if c.problem.head_size % cache.packet:
        return (
            f"head size {c.problem.head_size} is no multiple of {cache.packet}, the elements that "
            "lie side by side in the cache"
        )
    for name, size in (("head", c.problem.head_size), ("value", c.problem.value_size)):
        if size > MAX_HEAD_SIZE:
            return f"{name} size {size} is more than the {MAX_HEAD_SIZE} that are supported"
    return None


def _check_whole_words(c: Candidate, cache: CacheFormat) -> str | None:
    if c.problem.value_size * c.problem.block_size * cache.dtype.itemsize % 4:
        return (
            f"{c.problem.value_size} x {c.problem.block_size} values of a block do not fill whole "
            "32-bit words"
        )
    return None


def _constraints(cache: CacheFormat, *, matrices: bool) -> tuple[Constraint, ...]:
    granule = (
        *("strategy", "subgroups", "head_slices", "token_lanes", "tokens_unrolled"),
        *(("matrix_shape", "value_width") if matrices else ()),
    )
    return (
        Constraint(needs=(), check=partial(_check_head_size, cache=cache)),
        Constraint(needs=(), check=partial(_check_whole_words, cache=cache)),
        Constraint(needs=(), check=_check_groups),
        Constraint(needs=("strategy", "subgroup_size"), check=_check_subgroup_size),
        Constraint(needs=("strategy", "subgroup_size", "subgroups"), check=_check_workgroup),
        *lanes.constraints(cache),
        *(matrix.CONSTRAINTS if matrices else ()),
        Constraint(needs=(*granule, "split"), check=_check_split),
        Constraint(needs=("split", "combine_slices"), check=_check_combine),
    )


def _bindings(cache: CacheFormat) -> tuple[Binding, ...]:
    vector, pair, element = {
        "f32": ("vec4", "vec2", "float"),
        "f16": ("uvec4", "uvec2", "uint"),
    }[cache.name]
    return (
        Binding(name="query", buffer="query", element="float", role="input"),
        Binding(name="key_vectors", buffer="key_cache", element=vector, role="input"),
        Binding(name="value_vectors", buffer="value_cache", element=vector, role="input"),
        Binding(name="block_table", buffer="block_table", element="uint", role="input"),
        Binding(name="context_lens", buffer="context_lens", element="uint", role="input"),
        Binding(name="sinks", buffer="sinks", element="float", role="input"),
        Binding(name="slopes", buffer="slopes", element="float", role="input"),
        Binding(name="partials", buffer="partials", element="float", role="scratch"),
        Binding(name="attention", buffer="out", element="float", role="output"),
        Binding(name="key_elements", buffer="key_cache", element=element, role="input"),
        Binding(name="value_elements", buffer="value_cache", element=element, role="input"),
        Binding(name="value_pairs", buffer="value_cache", element=pair, role="input"),
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
    PushField(name="window", type="uint"),
    PushField(name="softcap", type="float"),
)


def _arithmetic(values: Values) -> ArithmeticClass:
    classes: dict[Value, ArithmeticClass] = {"packed_f16": "f16", "matrix": "f16_matrix"}
    return classes.get(values["strategy"], "f32")


def _passes(
    c: Candidate, scalars: Mapping[str, int | float], cache: CacheFormat
) -> tuple[Pass, ...]:
    problem: PagedDecodeProblem = c.problem
    plan = _plan(c)
    push = {field.name: scalars[field.name] for field in PUSH_FIELDS if field.name in scalars}
    push |= {"num_splits": plan.parts, "tokens_per_split": plan.tokens}
    shape: dict[str, object] = {
        "cache": cache.name,
        "packet": int(scalars.get("packet", cache.packet)),
        "head_size": problem.head_size,
        "value_size": problem.value_size,
        "block_size": problem.block_size,
        "group": problem.group,
        "tile": _tile(c),
        "splits": plan.combined,
        "window": bool(problem.window),
        "softcap": bool(problem.softcap),
        "alibi": bool(problem.alibi),
        "sinks": bool(problem.sinks),
    }
    per_head = (problem.query_heads, problem.sequences, 1)
    if not _split_t(c.values):
        threads = {"threads": BASELINE_THREADS}
        return (_pass("baseline", shape | threads, push, per_head),)
    attend = Pass(
        name="attend",
        constants=shape
        | (matrix.constants(c) if by_matrix(c.values) else lanes.constants(c, cache)),
        push=push,
        groups=(plan.parts, problem.kv_heads, problem.sequences),
        subgroup_size=c["subgroup_size"] if c.device.subgroup_size_control else None,
    )
    if not plan.combined:
        return (attend,)
    return (attend, _pass("combine", shape | {"slices": c["combine_slices"]}, push, per_head))


def _pass(
    name: str,
    constants: Mapping[str, object],
    push: Mapping[str, int | float],
    groups: tuple[int, int, int],
) -> Pass:
    """A pass that any subgroup size serves."""
    return Pass(name=name, constants=constants, push=push, groups=groups, subgroup_size=None)


def _dispatch(c: Candidate) -> DispatchRule:
    per_head = ("query_heads", "sequences", "1")
    if not _split_t(c.values):
        return DispatchRule(
            policy="none",
            facts={},
            groups={"baseline": per_head},
            text="one workgroup per query head and sequence walks the whole context",
        )
    units = c.device.compute_units
    facts = {"granule_tokens": _granule(c), "tile_tokens": _tile(c)}
    return DispatchRule(
        policy=str(c["split"]),
        facts=facts | ({} if units is None else {"compute_units": units}),
        groups={"attend": ("num_splits", "kv_heads", "sequences"), "combine": per_head},
        text="walked = context, the longest of the batch, or with a window at most window + "
        "tile_tokens - 1; wanted = 1 for none, N for count:N, ceil(walked / N) for tokens:N, "
        "floor(N * compute_units / (sequences * kv_heads)) for device:N, at least 1; "
        "tokens_per_split = ceil(walked / wanted), rounded up to a multiple of granule_tokens; "
        "num_splits = ceil(walked / tokens_per_split); the buffer partials needs "
        "4 * sequences * query_heads * num_splits * (value_head_size + 2) bytes; these kernels are "
        "built for "
        + ("any number of splits" if _plan(c).combined else "one split, without a combine pass"),
    )


def _validated_as(c: Candidate, _case: ValidationCase) -> Values:
    """The same kernels on contexts of up to a thousand tokens, cut as often as may be."""
    if not _split_t(c.values):
        return c.values
    if _plan(c).combined:
        return {**c.values, "split": MANY_PARTS}
    return {**c.values, "split": "none", "combine_slices": 1}


def _scratch_bytes(c: Candidate) -> dict[str, int]:
    plan, problem = _plan(c), c.problem
    if not plan.combined:
        return {"partials": 4}
    rows = problem.sequences * problem.query_heads * plan.parts
    return {"partials": 4 * rows * (problem.value_size + 2)}


def _bytes_moved(problem: PagedDecodeProblem, cache: CacheFormat) -> int:
    """Every token seen once per KV head for K and V; queries, outputs, tables, lengths."""
    tokens = int(problem.visible_tokens().sum())
    sizes = problem.head_size + problem.value_size
    kv = tokens * problem.kv_heads * sizes * cache.dtype.itemsize
    vectors = problem.sequences * problem.query_heads * sizes * 4
    blocks = int((-(-problem.visible_tokens() // problem.block_size)).sum())
    return kv + vectors + 4 * blocks + 4 * problem.sequences


def _family(
    cache: CacheFormat, strategies: tuple[Value, ...], starts: tuple[Values, ...]
) -> Family:
    return Family(
        name=f"paged_decode_{cache.name}",
        summary=f"decode attention over a paged {cache.name} KV cache (keys in packets of 16 "
        "bytes, values by dimension), with window, soft cap, ALiBi and sinks",
        template="paged_decode_floats.comp.jinja",
        problem_type=PagedDecodeProblem,
        parameters=_parameters(strategies),
        constraints=_constraints(cache, matrices="matrix" in strategies),
        bindings=_bindings(cache),
        push_fields=PUSH_FIELDS,
        baseline={"strategy": "baseline"},
        starts=starts,
        arithmetic=_arithmetic,
        passes=partial(_passes, cache=cache),
        scratch_bytes=_scratch_bytes,
        operands=partial(make_operands, cache=cache),
        reference=float_decode_reference,
        sampled_reference=sampled_float_decode_reference,
        validation_cases=float_validation_cases,
        bytes_moved=partial(_bytes_moved, cache=cache),
        scalars=partial(timing_scalars, cache=cache),
        dispatch=_dispatch,
        validated_as=_validated_as,
    )


PAGED_DECODE_F32 = _family(F32, ("baseline", "scalar_f32"), lanes.starts(F32))
PAGED_DECODE_F16 = _family(
    F16,
    ("baseline", "scalar_f32", "packed_f16", "matrix"),
    (*matrix.STARTS, *lanes.starts(F16)),
)
