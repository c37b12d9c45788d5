"""Decode over the planar q8 cache by groups of lanes: parameters, geometry and constraints.

Both families of partial results have these, and the decode chain takes its pass from them. A
workgroup takes one part of the tokens of one KV head of one row, for the whole query group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tuner.kernels import limits
from tuner.kernels.base import (
    ArithmeticClass,
    Candidate,
    Constraint,
    Parameter,
    Pass,
    PushField,
    Values,
)
from tuner.kernels.lane_decode import MAX_LANE_WORDS, MAX_UNROLLED_WORDS, lanes_reason
from tuner.kernels.q8_operands import max_parts

CHUNK = 32
"""Tokens that are dealt out to the parts in turn."""
UPSTREAM_LANES = 32
UPSTREAM_PARTS = 256
UPSTREAM_CHUNKS = 3
MAX_PARTS = 1024
MAX_PACKED_WORDS = 64
"""Words times heads in one unrolled step of packed arithmetic, which takes compilers longest."""
MAX_LOGITS = 64
"""Logits of one unrolled step that a lane may hold: query heads times tokens."""

SLICES = (1, 2, 3, 4, 6, 12)
POLICIES = (
    "upstream",
    "count:1",
    "count:2",
    "count:3",
    "count:4",
    "count:8",
    "count:16",
    "count:32",
    "count:64",
    "count:128",
    "device:1",
    "device:2",
    "device:4",
    "device:8",
)


def tuned(values: Values) -> bool:
    """Whether the strategy is any but the baseline."""
    return values["strategy"] != "baseline"


def staged(values: Values) -> bool:
    """Whether tiles of tokens wait in shared memory."""
    return tuned(values) and values["staging"] == "shared"


PARAMETERS = (
    Parameter(
        name="strategy",
        values=("baseline", "scalar_f32", "packed_f16", "int_dot"),
        help="baseline: one group of lanes per query head, which loads KV for itself, token by "
        "token. The others share KV in a workgroup and compute in f32, in packed f16, or with the "
        "integer dot product for QK",
    ),
    Parameter(
        name="subgroup_size",
        values=(8, 16, 32, 64),
        help="lanes of a subgroup that the kernel is built for",
        used=tuned,
    ),
    Parameter(
        name="subgroups", values=(1, 2, 4, 6, 8, 12), help="subgroups per workgroup", used=tuned
    ),
    Parameter(
        name="head_slices",
        values=SLICES,
        help="parts into which the query group is dealt out over the subgroups of a workgroup",
        used=tuned,
    ),
    Parameter(
        name="lanes_per_token",
        values=(4, 8, 16, 32),
        help="lanes that share the dimensions of one token",
        used=tuned,
    ),
    Parameter(
        name="tokens_unrolled",
        values=(1, 2, 4, 8),
        help="tokens each group of lanes loads before it computes",
        used=tuned,
    ),
    Parameter(
        name="staging",
        values=("registers", "shared"),
        help="where codes wait: straight to registers, or tiles of tokens in shared memory",
        used=tuned,
    ),
    Parameter(
        name="tile_tokens",
        values=(16, 32, 64),
        help="tokens of a tile in shared memory",
        used=staged,
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
        help="into how many parts the chunks of 32 tokens are dealt out: upstream's one part for "
        "three chunks, count:N, or device:N workgroups per compute unit",
        used=tuned,
    ),
)

PUSH_FIELDS = (
    PushField(name="num_heads", type="uint"),
    PushField(name="num_kv_heads", type="uint"),
    PushField(name="scale_word", type="uint"),
    PushField(name="visible_stride", type="uint"),
    PushField(name="max_parts", type="uint"),
    PushField(name="num_parts", type="uint"),
    PushField(name="base2_scale", type="float"),
)


def arithmetic(values: Values) -> ArithmeticClass:
    """How a variant rounds."""
    if values["strategy"] == "packed_f16":
        return "f16"
    if values["strategy"] == "int_dot":
        return "int8_one_term" if values["query_terms"] == 1 else "int8_two_terms"
    return "f32"


def parts(c: Candidate) -> int:
    """Into how many parts the tokens of the longest row are dealt out."""
    chunks = -(-c.problem.seen // CHUNK)
    kind, _, argument = (c["split"] if tuned(c.values) else "upstream").partition(":")
    if kind == "upstream":
        wanted = min(-(-chunks // UPSTREAM_CHUNKS), UPSTREAM_PARTS)
    elif kind == "count":
        wanted = int(argument)
    else:
        workgroups = c.problem.kv_heads * c.problem.rows
        wanted = int(argument) * (c.device.compute_units or 1) // workgroups
    return int(max(1, min(wanted, chunks, max_parts(c.problem.tokens))))


def subgroup_size(c: Candidate) -> int:
    """Lanes of a subgroup; the baseline wants 32, and takes what the device has otherwise."""
    if tuned(c.values):
        return int(c["subgroup_size"])
    device = c.device
    allowed = device.min_subgroup_size <= UPSTREAM_LANES <= device.max_subgroup_size
    return UPSTREAM_LANES if device.subgroup_size_control and allowed else device.subgroup_size


def geometry(c: Candidate) -> dict[str, int | str]:
    """The parameters as the template reads them; the baseline's follow from the problem."""
    if tuned(c.values):
        lanes = int(c["lanes_per_token"])
        return {
            **{name: c[name] for name in ("subgroups", "head_slices", "staging", "tile_tokens")},
            **{name: c[name] for name in ("tokens_unrolled", "query_terms")},
            "lanes_per_token": lanes,
            "load_words": load_words(c.problem.head_size, lanes),
        }
    lanes = min(UPSTREAM_LANES, subgroup_size(c))
    while c.problem.head_size // 4 % lanes:
        lanes //= 2
    return {
        "subgroups": c.problem.group,
        "head_slices": c.problem.group,
        "lanes_per_token": lanes,
        "tokens_unrolled": 1,
        "staging": "registers",
        "tile_tokens": 0,
        "query_terms": 1,
        "load_words": 1,
    }


def load_words(head_size: int, lanes: int) -> int:
    """Words of one load: as many of 4 as a lane has of a token, where heads are so aligned."""
    words = head_size // 4 // max(1, lanes)
    return next(n for n in (4, 2, 1) if words % n == 0 and head_size % (4 * n) == 0)


def heads_per_slice(c: Candidate) -> int:
    """Query heads of one slice of the query group."""
    return 1 if not tuned(c.values) else int(-(-c.problem.group // c["head_slices"]))


def token_groups(c: Candidate) -> int:
    """Groups of lanes that each take tokens of their own."""
    if not tuned(c.values):
        return subgroup_size(c) // int(geometry(c)["lanes_per_token"])
    # At least 1: of an illegal variant every constraint is asked, those that divide by this too.
    slices = max(1, c["subgroups"] // c["head_slices"])
    return int(slices * max(1, c["subgroup_size"] // c["lanes_per_token"]))


def merges(c: Candidate) -> bool:
    """Whether several subgroups walk different tokens of the same heads."""
    return tuned(c.values) and bool(c["subgroups"] > c["head_slices"])


def pool_quads(c: Candidate) -> int:
    """Elements of 16 bytes of the one large shared array: the tile of codes, or the merge."""
    words = c.problem.head_size // 4
    tile = 2 * c["tile_tokens"] * words // 4 if staged(c.values) else 0
    merged = c["subgroups"] * heads_per_slice(c) * words if merges(c) else 0
    return int(max(tile, merged))


def head_scales(c: Candidate) -> int:
    """Scales that the codes of one head lie under, at most."""
    size = c.problem.head_size
    return int(size // CHUNK if size % CHUNK == 0 else -(-size // CHUNK) + 1)


def constants(c: Candidate) -> dict[str, object]:
    """What the template needs beside the strategy."""
    shape = geometry(c)
    groups = token_groups(c)
    granule = shape["tile_tokens"] if staged(c.values) else groups * int(shape["tokens_unrolled"])
    return {
        **shape,
        "strategy": c["strategy"],
        "subgroup_size": subgroup_size(c),
        "head_size": c.problem.head_size,
        "kv_heads": c.problem.kv_heads,
        "group": c.problem.group,
        "heads_per_slice": heads_per_slice(c),
        "token_groups": groups,
        "granule": granule,
        "merges": merges(c),
        "pool_quads": pool_quads(c),
        "head_scales": head_scales(c),
    }


def attend_pass(
    c: Candidate, push: Mapping[str, int | float], *, selected: bool | Literal["by row"]
) -> Pass:
    """The one pass of partial results; `push` has all fields but `num_parts`."""
    count = parts(c)
    return Pass(
        name="attend",
        constants=constants(c) | {"selected": selected},
        push={**push, "num_parts": count},
        groups=(count, c.problem.kv_heads, c.problem.rows),
        subgroup_size=subgroup_size(c) if c.device.subgroup_size_control else None,
    )


def _check_head_size(c: Candidate) -> str | None:
    if c.problem.head_size % 4:
        return f"head size {c.problem.head_size} is no multiple of 4, the codes of one word"
    return None


def _check_device(c: Candidate) -> str | None:
    missing = {"basic", "shuffle"} - set(c.device.subgroup_operations)
    if missing:
        return f"the device has no subgroup operations of kind {', '.join(sorted(missing))}"
    groups, limit = c.problem.rows, c.device.max_workgroup_count[2]
    if groups > limit:
        return f"{groups} rows, the device allows {limit} workgroups in z"
    if c["strategy"] == "packed_f16" and not c.device.float16:
        return "packed_f16 needs 16-bit float arithmetic (shaderFloat16)"
    if c["strategy"] == "int_dot" and not c.device.integer_dot_product:
        return "int_dot needs shaderIntegerDotProduct"
    return None


def _check_subgroup_size(c: Candidate) -> str | None:
    return limits.subgroup_size_reason(c.device, subgroup_size(c))


def _check_workgroup(c: Candidate) -> str | None:
    count = c["subgroups"] if tuned(c.values) else c.problem.group
    return limits.threads_reason(c.device, count * subgroup_size(c))


def _check_head_slices(c: Candidate) -> str | None:
    if not tuned(c.values):
        return None
    if c["head_slices"] > c.problem.group:
        return f"{c['head_slices']} head slices of {c.problem.group} query heads per KV head"
    if c["subgroups"] % c["head_slices"]:
        return f"{c['subgroups']} subgroups are not dealt out evenly to {c['head_slices']} slices"
    if (c["head_slices"] - 1) * heads_per_slice(c) >= c.problem.group:
        return (
            f"{c['head_slices']} head slices of {heads_per_slice(c)} query heads leave one without "
            f"any of the group's {c.problem.group}"
        )
    return None


def _check_lanes(c: Candidate) -> str | None:
    return lanes_reason(c) if tuned(c.values) else None


def _check_registers(c: Candidate) -> str | None:
    if not tuned(c.values):
        return None
    dims = c.problem.head_size // c["lanes_per_token"]
    heads, tokens = heads_per_slice(c), c["tokens_unrolled"]
    query_share = {"scalar_f32": 1.0, "packed_f16": 0.5, "int_dot": c["query_terms"] / 4}
    words = heads * dims * (1 + query_share[c["strategy"]]) + tokens * dims / 2
    if words > MAX_LANE_WORDS:
        return (
            f"a lane would hold {words:.0f} words of query, accumulator and codes, the limit is "
            f"{MAX_LANE_WORDS}: use more lanes_per_token or head_slices"
        )
    unrolled = heads * dims // 4 * tokens
    limit = MAX_PACKED_WORDS if c["strategy"] == "packed_f16" else MAX_UNROLLED_WORDS
    if unrolled > limit or heads * tokens > MAX_LOGITS:
        return (
            f"one step would unroll {unrolled} words times heads (limit {limit}) and "
            f"{heads * tokens} logits (limit {MAX_LOGITS}): use fewer tokens_unrolled"
        )
    return None


def _check_tile(c: Candidate) -> str | None:
    if not staged(c.values):
        return None
    step = token_groups(c) * c["tokens_unrolled"]
    if c["tile_tokens"] % step:
        return f"a tile of {c['tile_tokens']} tokens is no multiple of the {step} of one step"
    if load_words(c.problem.head_size, c["lanes_per_token"]) != 4:
        return "a tile in shared memory takes 16-byte loads: use fewer lanes_per_token"
    return None


def _check_shared_memory(c: Candidate) -> str | None:
    if not tuned(c.values):
        return None
    scales = 8 * c["tile_tokens"] * head_scales(c) if staged(c.values) else 0
    statistics = 8 * c["subgroups"] * heads_per_slice(c) if merges(c) else 0
    needed, limit = 16 * pool_quads(c) + scales + statistics, c.device.max_shared_memory_bytes
    if needed > limit:
        return f"needs {needed} bytes of shared memory, the device has {limit}"
    return None


def _check_split(c: Candidate) -> str | None:
    policy = c["split"] if tuned(c.values) else "upstream"
    if policy.startswith("device:") and c.device.compute_units is None:
        return f"{policy} needs the number of compute units, which this driver does not tell"
    if parts(c) > MAX_PARTS:
        return f"{policy} makes {parts(c)} parts, the limit is {MAX_PARTS}"
    return None


_SLICES = ("strategy", "subgroups", "head_slices")
_STEP = (*_SLICES, "subgroup_size", "lanes_per_token", "tokens_unrolled")
CONSTRAINTS = (
    Constraint(needs=("strategy",), check=_check_head_size),
    Constraint(needs=("strategy",), check=_check_device),
    Constraint(needs=("strategy", "subgroup_size"), check=_check_subgroup_size),
    Constraint(needs=("strategy", "subgroup_size", "subgroups"), check=_check_workgroup),
    Constraint(needs=_SLICES, check=_check_head_slices),
    Constraint(needs=("strategy", "subgroup_size", "lanes_per_token"), check=_check_lanes),
    Constraint(
        needs=("strategy", "lanes_per_token", "tokens_unrolled", "head_slices", "query_terms"),
        check=_check_registers,
    ),
    Constraint(needs=(*_STEP, "staging", "tile_tokens"), check=_check_tile),
    Constraint(needs=(*_SLICES, "staging", "tile_tokens"), check=_check_shared_memory),
    Constraint(needs=("strategy", "split"), check=_check_split),
)
