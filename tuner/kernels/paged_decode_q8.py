"""Paged decode attention over the int8 token-major cache: one query token for each sequence.

Layout, rounding and semantics are those of the first system (an int8 paged-attention decode): a
token's vector of one KV head is D/4 words of four signed codes and one word with a float32 scale.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.kernels.base import (
    ArithmeticClass,
    Binding,
    Candidate,
    Constraint,
    Family,
    Parameter,
    Pass,
    PushField,
    Values,
)
from tuner.kernels.decode_operands import make_operands, validation_cases
from tuner.kernels.splits import POLICIES, SplitPlan, split_plan
from tuner.oracle import decode_reference, sampled_decode_reference
from tuner.problems import PagedDecodeProblem

MAX_LANE_WORDS = 224
"""32-bit words of query, accumulators and codes one lane may hold: GPUs give it 128 to 256."""
MAX_UNROLLED_WORDS = 128
"""Words times heads in one unrolled step: beyond it compile times grow to many seconds."""
MAX_SPLITS = 1024
BASELINE_THREADS = 128
BASELINE_MAX_HEAD_SIZE = 256


def _split_t(values: Values) -> bool:
    return values["strategy"] != "baseline"


def _staged(values: Values) -> bool:
    return _split_t(values) and values["staging"] == "shared"


PARAMETERS = (
    Parameter(
        name="strategy",
        values=("baseline", "scalar_f32", "packed_f16", "int_dot"),
        help="baseline: one workgroup per query head, two passes over K; the others split the "
        "context and read KV once per KV head, computing in f32, packed f16, or with the integer "
        "dot product for QK",
    ),
    Parameter(
        name="subgroup_size",
        values=(8, 16, 32, 64),
        help="lanes of a subgroup that the kernel is built for",
        used=_split_t,
    ),
    Parameter(
        name="subgroups", values=(1, 2, 4, 8, 16), help="subgroups per workgroup", used=_split_t
    ),
    Parameter(
        name="lanes_per_token",
        values=(1, 2, 4, 8, 16, 32, 64),
        help="lanes that share the dimensions of one token",
        used=_split_t,
    ),
    Parameter(
        name="tokens_unrolled",
        values=(1, 2, 4, 8),
        help="tokens each group of lanes loads before it computes",
        used=_split_t,
    ),
    Parameter(
        name="staging",
        values=("registers", "shared"),
        help="where codes wait: straight to registers, or a tile of tokens in shared memory",
        used=_split_t,
    ),
    Parameter(
        name="tile_tokens",
        values=(16, 32, 64, 128),
        help="tokens of a staged tile",
        used=_staged,
    ),
    Parameter(
        name="load_words",
        values=(1, 4),
        help="words of one global load into the staged tile (4: blocks as 16-byte vectors)",
        used=_staged,
    ),
    Parameter(
        name="head_slices",
        values=(1, 2, 4, 8),
        help="parts into which the query group is dealt out over the subgroups of a workgroup",
        used=_staged,
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


def _heads_per_slice(c: Candidate) -> int:
    return -(-c.problem.group // int(c["head_slices"]))


def _token_groups(c: Candidate) -> int:
    """Groups of lanes that each take tokens of their own."""
    slices = c["subgroups"] // c["head_slices"]
    return int(slices * (c["subgroup_size"] // c["lanes_per_token"]))


def _granule(c: Candidate) -> int:
    """Tokens one workgroup takes a step."""
    if c["staging"] == "shared":
        return int(c["tile_tokens"])
    return _token_groups(c) * int(c["tokens_unrolled"])


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


def _row_words(head_size: int) -> int:
    return head_size // 4 + 1


def _shared_words(c: Candidate) -> int:
    """Words of the one shared array: the staged tile, later reused by the final merge."""
    head_size = c.problem.head_size
    tile = 2 * c["tile_tokens"] * _row_words(head_size) if c["staging"] == "shared" else 0
    merged = c["subgroups"] * _heads_per_slice(c) * (head_size + 2) if _merges(c) else 0
    return int(max(tile, merged))


def _merges(c: Candidate) -> bool:
    return bool(c["subgroups"] > c["head_slices"])


def _check_head_size(c: Candidate) -> str | None:
    if c.problem.head_size % 4:
        return f"head size {c.problem.head_size} is no multiple of 4, the codes of one word"
    if c["strategy"] == "baseline" and c.problem.head_size > BASELINE_MAX_HEAD_SIZE:
        return (
            f"the baseline's shared arrays hold a head size of {BASELINE_MAX_HEAD_SIZE}, "
            f"the problem has {c.problem.head_size}"
        )
    return None


def _check_features(c: Candidate) -> str | None:
    device = c.device
    if c["strategy"] == "baseline":
        return None
    missing = {"basic", "shuffle"} - set(device.subgroup_operations)
    if missing:
        return f"the device has no subgroup operations of kind {', '.join(sorted(missing))}"
    if c["strategy"] == "packed_f16" and not device.float16:
        return "packed_f16 needs 16-bit float arithmetic (shaderFloat16)"
    if c["strategy"] == "int_dot" and not device.integer_dot_product:
        return "int_dot needs shaderIntegerDotProduct"
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


def _check_lanes(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        return None
    lanes, words = c["lanes_per_token"], c.problem.head_size // 4
    if lanes > c["subgroup_size"]:
        return f"{lanes} lanes per token are more than the subgroup's {c['subgroup_size']}"
    if words % lanes:
        return f"{lanes} lanes cannot share the {words} words of a token evenly"
    return None


def _check_workgroup(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        return None
    threads, limit = c["subgroups"] * c["subgroup_size"], c.device.max_workgroup_invocations
    limit = min(limit, c.device.max_workgroup_size[0])
    if threads > limit:
        return f"{threads} threads a workgroup, the device allows {limit}"
    return None


def _check_head_slices(c: Candidate) -> str | None:
    if c["head_slices"] > min(c["subgroups"], c.problem.group):
        return (
            f"{c['head_slices']} head slices need as many subgroups (here {c['subgroups']}) and "
            f"query heads per KV head (here {c.problem.group})"
        )
    return None


def _check_registers(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        return None
    dims = c.problem.head_size // c["lanes_per_token"]
    query_share = {"scalar_f32": 1.0, "packed_f16": 0.5, "int_dot": c["query_terms"] / 4}
    values = _heads_per_slice(c) * dims * (1 + query_share[c["strategy"]])
    codes = c["tokens_unrolled"] * dims / 2
    if values + codes > MAX_LANE_WORDS:
        return (
            f"a lane would hold {values + codes:.0f} words of query, accumulator and codes, the "
            f"limit is {MAX_LANE_WORDS}: use more lanes_per_token or head_slices"
        )
    unrolled = _heads_per_slice(c) * dims // 4 * c["tokens_unrolled"]
    if unrolled > MAX_UNROLLED_WORDS:
        return (
            f"one step would unroll {unrolled} words times heads, the limit is "
            f"{MAX_UNROLLED_WORDS}: use more lanes_per_token or fewer tokens_unrolled"
        )
    return None


def _check_tile(c: Candidate) -> str | None:
    if c["staging"] != "shared":
        return None
    step = _token_groups(c) * c["tokens_unrolled"]
    if c["tile_tokens"] % step:
        return f"a tile of {c['tile_tokens']} tokens is no multiple of the {step} of one step"
    return None


def _check_load_words(c: Candidate) -> str | None:
    if c["load_words"] == 1:
        return None
    block, words = c.problem.block_size, _row_words(c.problem.head_size)
    if block * words % 4:
        return f"a block of {block} x {words} words is no multiple of 16 bytes"
    if c["tile_tokens"] % block:
        return f"a tile of {c['tile_tokens']} tokens is no multiple of the block of {block}"
    return None


def _check_shared_memory(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        return None
    needed, limit = 4 * _shared_words(c), c.device.max_shared_memory_bytes
    if needed > limit:
        return f"needs {needed} bytes of shared memory, the device has {limit}"
    return None


def _check_split(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        return None
    policy = c["split"]
    if policy.startswith("device:") and c.device.compute_units is None:
        return f"{policy} needs the number of compute units, which this driver does not tell"
    count = _plan(c).count
    if count > MAX_SPLITS:
        return f"{policy} makes {count} splits, the limit is {MAX_SPLITS}"
    return None


def _check_groups(c: Candidate) -> str | None:
    groups, limit = c.problem.sequences, c.device.max_workgroup_count[2]
    if groups > limit:
        return f"{groups} sequences, the device allows {limit} workgroups in z"
    return None


def _check_combine(c: Candidate) -> str | None:
    if c["split"] == "none":
        return None
    threads, limit = c.problem.head_size // 4 * c["combine_slices"], c.device
    if threads > limit.max_workgroup_invocations:
        return f"{threads} threads to combine, the device allows {limit.max_workgroup_invocations}"
    return None


CONSTRAINTS = (
    Constraint(needs=("strategy",), check=_check_head_size),
    Constraint(needs=("strategy",), check=_check_features),
    Constraint(needs=("strategy",), check=_check_groups),
    Constraint(needs=("strategy", "subgroup_size"), check=_check_subgroup_size),
    Constraint(needs=("strategy", "subgroup_size", "subgroups"), check=_check_workgroup),
    Constraint(needs=("strategy", "subgroup_size", "lanes_per_token"), check=_check_lanes),
    Constraint(needs=("strategy", "subgroups", "head_slices"), check=_check_head_slices),
    Constraint(
        needs=(
            "strategy",
            "lanes_per_token",
            "tokens_unrolled",
            "head_slices",
            "query_terms",
        ),
        check=_check_registers,
    ),
    Constraint(
        needs=(
            "staging",
            "subgroup_size",
            "subgroups",
            "lanes_per_token",
            "tokens_unrolled",
            "tile_tokens",
            "head_slices",
        ),
        check=_check_tile,
    ),
    Constraint(needs=("load_words", "tile_tokens"), check=_check_load_words),
    Constraint(
        needs=("strategy", "staging", "subgroups", "tile_tokens", "head_slices"),
        check=_check_shared_memory,
    ),
    Constraint(
        needs=(
            "strategy",
            "staging",
            "subgroup_size",
            "subgroups",
            "lanes_per_token",
            "tokens_unrolled",
            "tile_tokens",
            "head_slices",
            "split",
        ),
        check=_check_split,
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
    if values["strategy"] == "int_dot":
        return "int8_one_term" if values["query_terms"] == 1 else "int8_two_terms"
    return "f32"


def _passes(c: Candidate, scalars: Mapping[str, int | float]) -> tuple[Pass, ...]:
    problem: PagedDecodeProblem = c.problem
    plan = _plan(c)
    push = {field.name: scalars[field.name] for field in PUSH_FIELDS if field.name in scalars}
    push |= {"num_splits": plan.count, "tokens_per_split": plan.tokens}
    shape = {
        "head_size": problem.head_size,
        "block_size": problem.block_size,
        "group": problem.group,
        "splits": plan.count > 1,
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
        constants=shape
        | {
            "heads_per_slice": _heads_per_slice(c),
            "token_groups": _token_groups(c),
            "granule": _granule(c),
            "shared_words": _shared_words(c),
            "merges": _merges(c),
        },
        push=push,
        groups=(plan.count, problem.kv_heads, problem.sequences),
        subgroup_size=c["subgroup_size"] if c.device.subgroup_size_control else None,
    )
    if plan.count == 1:
        return (attend,)
    combine = Pass(
        name="combine",
        constants=shape | {"slices": c["combine_slices"]},
        push=push,
        groups=(problem.query_heads, problem.sequences, 1),
        subgroup_size=None,
    )
    return (attend, combine)


def _scratch_bytes(c: Candidate) -> dict[str, int]:
    plan, problem = _plan(c), c.problem
    if plan.count == 1:
        return {"partials": 4}
    rows = problem.sequences * problem.query_heads * plan.count
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
    starts=tuple(
        _start(
            strategy=strategy,
            subgroup_size=size,
            subgroups=4,
            lanes_per_token=lanes,
            tokens_unrolled=4,
            split="device:4",
            combine_slices=2,
        )
        for strategy in ("packed_f16", "scalar_f32")
        for size, lanes in ((32, 8), (64, 8), (16, 8), (8, 8), (8, 4))
    ),
    arithmetic=_arithmetic,
    passes=_passes,
    scratch_bytes=_scratch_bytes,
    operands=make_operands,
    reference=decode_reference,
    sampled_reference=sampled_decode_reference,
    validation_cases=validation_cases,
    bytes_moved=_bytes_moved,
)
