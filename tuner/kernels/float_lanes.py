"""Decode over caches of floats by lanes that take 16 bytes at a time: keys and values differently.

Geometry and constraints of the strategies scalar_f32 and packed_f16. A subgroup walks tiles of
tokens. Of the keys a lane takes one token after another, since those of neighbouring tokens lie
side by side; of the values it takes the tokens of one dimension, since these do.
"""

from __future__ import annotations

from functools import partial

from tuner.kernels import limits
from tuner.kernels.base import Candidate, Constraint, Parameter, Values
from tuner.kernels.float_operands import CacheFormat
from tuner.kernels.subgroups import head_slices_reason

STRATEGIES = ("scalar_f32", "packed_f16")
MAX_LANE_WORDS = 224
"""32-bit words of sums, keys and values one lane may hold: GPUs give it 128 to 256."""
MAX_UNROLLED, MAX_UNROLLED_ON_CPU = 1024, 256
"""Products in one unrolled step: beyond it compile times grow to many seconds."""
MAX_SHORT_SUM = 32
"""Products that packed_f16 adds up in 16 bits."""
MERGED_HEADS = 2
"""Query heads of a slice that subgroups merge at a time: more need more shared memory."""
LAG = 8
"""How far, in powers of two, the reference of the softmax may lag behind the maximum."""


GEOMETRIES = {
    "f32": (
        (32, 8, 1, 2),
        (32, 16, 1, 4),
        (32, 4, 1, 1),
        (64, 16, 1, 4),
        (64, 8, 1, 2),
        (16, 8, 1, 2),
        (16, 4, 1, 1),
        (8, 8, 1, 1),
        (8, 4, 1, 1),
    ),
    "f16": (
        (32, 16, 1, 2),
        (32, 8, 1, 1),
        (32, 4, 2, 1),
        (64, 16, 1, 2),
        (64, 32, 1, 4),
        (16, 8, 1, 1),
        (16, 4, 2, 1),
        (8, 8, 1, 1),
    ),
}
"""Subgroup size, lanes over tokens, tokens of each, lanes over the values of a row: so that a block
of 16 tokens is read in order, and for large heads with fewer words in each lane."""


def starts(cache: CacheFormat) -> tuple[Values, ...]:
    """Variants to try first, coarsest arithmetic first; what they do not say is neutral."""
    strategies = STRATEGIES if cache.name == "f16" else STRATEGIES[:1]
    return tuple(
        {
            "strategy": strategy,
            "subgroup_size": size,
            "subgroups": max(4, slices),
            "head_slices": slices,
            "token_lanes": token_lanes,
            "tokens_unrolled": unrolled,
            "value_lanes": value_lanes,
            "prefetch": 1,
            "split": "device:4",
            "combine_slices": 4,
        }
        for strategy in reversed(strategies)
        for size, token_lanes, unrolled, value_lanes in GEOMETRIES[cache.name]
        for slices in (1, 2, 4, 8)
    )


def portable(cache: CacheFormat) -> tuple[Values, ...]:
    """Variants for any device; see `Family.portable`."""
    found: list[Values] = []
    for start in starts(cache):
        size, slices = int(start["subgroup_size"]), int(start["head_slices"])
        subgroups = {1: 1, 2: 2, 4: min(4, 128 // size)}.get(slices)
        if subgroups is not None:
            fewer = {"subgroups": subgroups, "head_slices": min(slices, subgroups)}
            split = "tokens:1024" if slices > 1 else "count:16"
            found.append({**start, **fewer, "split": split, "combine_slices": 2})
    return tuple(found)


def by_lanes(values: Values) -> bool:
    """Whether the strategy is one of this module's."""
    return values["strategy"] in STRATEGIES


PARAMETERS = (
    Parameter(
        name="head_slices",
        values=(1, 2, 4, 8),
        help="parts into which the query group is dealt out over the subgroups of a workgroup",
        used=by_lanes,
    ),
    Parameter(
        name="token_lanes",
        values=(4, 8, 16, 32, 64),
        help="lanes side by side over the tokens of a tile's keys; the others share them",
        used=by_lanes,
    ),
    Parameter(
        name="tokens_unrolled",
        values=(1, 2, 4),
        help="tokens of a tile that each lane takes",
        used=by_lanes,
    ),
    Parameter(
        name="value_lanes",
        values=(1, 2, 4, 8),
        help="lanes that share the tokens of one dimension of a tile's values",
        used=by_lanes,
    ),
)


def tile(c: Candidate) -> int:
    """Tokens of one step of a subgroup."""
    return int(c["token_lanes"] * c["tokens_unrolled"])


def walkers(c: Candidate) -> int:
    """Subgroups of a workgroup that each walk tiles of their own."""
    return max(1, int(c["subgroups"] // c["head_slices"]))


def heads_per_slice(c: Candidate) -> int:
    """Query heads of one slice of the query group."""
    return int(-(-c.problem.group // c["head_slices"]))


def _key_loads(c: Candidate, cache: CacheFormat) -> int:
    """Loads for one token of a lane."""
    shares = max(1, c["subgroup_size"] // c["token_lanes"])
    return int(c.problem.head_size // cache.packet // shares)


def _lane_dims(c: Candidate) -> int:
    """Dimensions of values whose rows a lane reads."""
    return int(c.problem.value_size // max(1, c["subgroup_size"] // c["value_lanes"]))


def _value_loads(c: Candidate, cache: CacheFormat) -> int:
    """Loads from one row of a lane."""
    return int(tile(c) // cache.packet // c["value_lanes"])


def _merged_heads(c: Candidate) -> int:
    return min(MERGED_HEADS, heads_per_slice(c))


def constants(c: Candidate, cache: CacheFormat) -> dict[str, object]:
    """What the template of the attend pass needs beside the parameters."""
    return {
        "heads_per_slice": heads_per_slice(c),
        "key_loads": _key_loads(c, cache),
        "lane_dims": _lane_dims(c),
        "value_loads": _value_loads(c, cache),
        "merged_heads": _merged_heads(c),
        # Weights of 16 bits stay relative to the maximum itself: their sums must stay in range.
        "lag": 0 if c["strategy"] == "packed_f16" else LAG,
    }


def _check_features(c: Candidate) -> str | None:
    if c["strategy"] == "packed_f16" and not c.device.float16:
        return "packed_f16 needs 16-bit float arithmetic (shaderFloat16)"
    if not by_lanes(c.values):
        return None
    return limits.operations_reason(c.device, ("basic", "shuffle", "vote"))


def _check_packets(c: Candidate, cache: CacheFormat) -> str | None:
    if by_lanes(c.values) and c.problem.block_size % cache.packet:
        return (
            f"blocks of {c.problem.block_size} tokens do not hold whole loads of "
            f"{cache.packet} values: the baseline takes any"
        )
    return None


def _check_keys(c: Candidate, cache: CacheFormat) -> str | None:
    if not by_lanes(c.values):
        return None
    lanes, size = c["token_lanes"], c["subgroup_size"]
    if lanes > size:
        return f"{lanes} token lanes are more than the subgroup's {size}"
    packets, shares = c.problem.head_size // cache.packet, size // lanes
    if packets % shares:
        return f"{shares} lanes cannot share the {packets} loads of a key evenly"
    return None


def _check_tile(c: Candidate) -> str | None:
    tokens, block = tile(c), c.problem.block_size
    if by_lanes(c.values) and tokens % block and block % tokens:
        return f"tiles of {tokens} tokens and blocks of {block} do not divide each other"
    return None


def _check_values(c: Candidate, cache: CacheFormat) -> str | None:
    if not by_lanes(c.values):
        return None
    lanes, size = c["value_lanes"], c["subgroup_size"]
    if lanes > size or tile(c) % (cache.packet * lanes):
        return (
            f"{lanes} lanes cannot share {tile(c)} tokens of a dimension in loads of {cache.packet}"
        )
    if c.problem.value_size % (size // lanes):
        return (
            f"{size // lanes} rows side by side do not divide the {c.problem.value_size} "
            "elements of a value"
        )
    if c["strategy"] == "packed_f16" and _value_loads(c, cache) * cache.packet > MAX_SHORT_SUM:
        return (
            f"packed_f16 would add up {_value_loads(c, cache) * cache.packet} products in 16 "
            f"bits, the limit is {MAX_SHORT_SUM}: use more value_lanes"
        )
    return None


def _check_registers(c: Candidate, cache: CacheFormat) -> str | None:
    if not by_lanes(c.values):
        return None
    heads, dims, unroll = heads_per_slice(c), _lane_dims(c), int(c["tokens_unrolled"])
    keys, values = unroll * _key_loads(c, cache), dims * _value_loads(c, cache)
    held = heads * (dims + unroll + 2) + 4 * (keys + values)
    if c["strategy"] == "packed_f16":
        held += -(-heads // 2) * dims
    # A software driver has no registers to run out of, but compiles the more slowly.
    if held > MAX_LANE_WORDS and not c.device.is_cpu:
        return (
            f"a lane would hold {held} words of sums, keys and values, the limit is "
            f"{MAX_LANE_WORDS}: use more head_slices or fewer tokens_unrolled"
        )
    products = heads * cache.packet * max(keys, values)
    limit = MAX_UNROLLED_ON_CPU if c.device.is_cpu else MAX_UNROLLED
    if products > limit:
        return (
            f"one step would unroll {products} products, the limit is {limit}: use more "
            "head_slices or fewer tokens_unrolled"
        )
    return None


def _check_shared_memory(c: Candidate) -> str | None:
    if not by_lanes(c.values):
        return None
    return limits.shared_memory_reason(c.device, shared_bytes(c))


def _check_head_slices(c: Candidate) -> str | None:
    if not by_lanes(c.values):
        return None
    return head_slices_reason(c["head_slices"], c["subgroups"], c.problem.group)


def shared_bytes(c: Candidate) -> int:
    """Bytes of the shared arrays: the query, the weights of a tile, the merge."""
    packed = c["strategy"] == "packed_f16"
    heads = heads_per_slice(c)
    query = c.problem.group * (2 * c.problem.head_size + 4 if packed else 4 * c.problem.head_size)
    slots = -(-heads // 2) if packed else heads
    width = 4 if slots > 2 else slots
    weights = c["subgroups"] * tile(c) * 4 * (-(-slots // width) * width)
    merge = c["subgroups"] * _merged_heads(c) * (c.problem.value_size + 2) * 4
    return int(query + weights + merge)


def constraints(cache: CacheFormat) -> tuple[Constraint, ...]:
    """What a variant over a cache of this format must obey."""
    keys = ("strategy", "subgroup_size", "token_lanes")
    values = (*keys, "tokens_unrolled", "value_lanes")
    return (
        Constraint(needs=("strategy",), check=_check_features),
        Constraint(needs=("strategy",), check=partial(_check_packets, cache=cache)),
        Constraint(needs=("strategy", "subgroups", "head_slices"), check=_check_head_slices),
        Constraint(needs=keys, check=partial(_check_keys, cache=cache)),
        Constraint(needs=("strategy", "token_lanes", "tokens_unrolled"), check=_check_tile),
        Constraint(needs=values, check=partial(_check_values, cache=cache)),
        Constraint(needs=(*values, "head_slices"), check=partial(_check_registers, cache=cache)),
        Constraint(needs=(*values, "head_slices", "subgroups"), check=_check_shared_memory),
    )
