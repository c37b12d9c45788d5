"""Decode by groups of lanes: each group takes tokens of its own, its lanes share a token's words.

Geometry and constraints of the strategies scalar_f32, packed_f16 and int_dot.
"""

from __future__ import annotations

from tuner.kernels import limits
from tuner.kernels.base import Candidate, Constraint, Values
from tuner.kernels.subgroups import head_slices_reason

STRATEGIES = ("scalar_f32", "packed_f16", "int_dot")
MAX_LANE_WORDS = 224
"""32-bit words of query, accumulators and codes one lane may hold: GPUs give it 128 to 256."""
MAX_UNROLLED_WORDS = 128
"""Words times heads in one unrolled step: beyond it compile times grow to many seconds."""


def by_lanes(values: Values) -> bool:
    """Whether the strategy is one of this module's."""
    return values["strategy"] in STRATEGIES


def staged(values: Values) -> bool:
    """Whether tiles of tokens wait in shared memory."""
    return by_lanes(values) and values["staging"] == "shared"


def row_words(head_size: int) -> int:
    """Words of one cached vector: codes, then the scale."""
    return head_size // 4 + 1


def heads_per_slice(c: Candidate) -> int:
    """Query heads of one slice of the query group."""
    return int(-(-c.problem.group // c["head_slices"]))


def token_groups(c: Candidate) -> int:
    """Groups of lanes that each take tokens of their own."""
    # At least 1: of an illegal variant every constraint is asked, those that divide by this too.
    slices = max(1, c["subgroups"] // c["head_slices"])
    return int(slices * max(1, c["subgroup_size"] // c["lanes_per_token"]))


def granule(c: Candidate) -> int:
    """Tokens one workgroup takes a step."""
    if c["staging"] == "shared":
        return int(c["tile_tokens"])
    return token_groups(c) * int(c["tokens_unrolled"])


def alignment(c: Candidate) -> int:
    """Tokens at a multiple of which a walk over a window begins."""
    block, unrolled = int(c.problem.block_size), int(c["tokens_unrolled"])
    if c["staging"] == "shared":
        return block
    return unrolled if block % unrolled == 0 else 1


def merges(c: Candidate) -> bool:
    """Whether several subgroups walk different tokens of the same heads."""
    return bool(c["subgroups"] > c["head_slices"])


def shared_words(c: Candidate) -> int:
    """Words of the one shared array: the staged tile, later reused by the final merge."""
    head_size = c.problem.head_size
    tile = 2 * c["tile_tokens"] * row_words(head_size) if c["staging"] == "shared" else 0
    merged = c["subgroups"] * heads_per_slice(c) * (head_size + 2) if merges(c) else 0
    return int(max(tile, merged))


def constants(c: Candidate) -> dict[str, object]:
    """What the template of the attend pass needs beside the parameters."""
    return {
        "heads_per_slice": heads_per_slice(c),
        "token_groups": token_groups(c),
        "granule": granule(c),
        "shared_words": shared_words(c),
        "merges": merges(c),
    }


def _check_features(c: Candidate) -> str | None:
    if c["strategy"] == "packed_f16" and not c.device.float16:
        return "packed_f16 needs 16-bit float arithmetic (shaderFloat16)"
    if c["strategy"] == "int_dot" and not c.device.integer_dot_product:
        return "int_dot needs shaderIntegerDotProduct"
    return None


def _check_lanes(c: Candidate) -> str | None:
    return lanes_reason(c) if by_lanes(c.values) else None


def lanes_reason(c: Candidate) -> str | None:
    """Why the lanes of a token cannot share its words; None if they can."""
    lanes, words = c["lanes_per_token"], c.problem.head_size // 4
    if lanes > c["subgroup_size"]:
        return f"{lanes} lanes per token are more than the subgroup's {c['subgroup_size']}"
    if words % lanes:
        return f"{lanes} lanes cannot share the {words} words of a token evenly"
    return None


def _check_head_slices(c: Candidate) -> str | None:
    return head_slices_reason(c["head_slices"], c["subgroups"], c.problem.group)


def _check_registers(c: Candidate) -> str | None:
    if not by_lanes(c.values):
        return None
    dims = c.problem.head_size // c["lanes_per_token"]
    query_share = {"scalar_f32": 1.0, "packed_f16": 0.5, "int_dot": c["query_terms"] / 4}
    values = heads_per_slice(c) * dims * (1 + query_share[c["strategy"]])
    codes = c["tokens_unrolled"] * dims / 2
    if values + codes > MAX_LANE_WORDS:
        return (
            f"a lane would hold {values + codes:.0f} words of query, accumulator and codes, the "
            f"limit is {MAX_LANE_WORDS}: use more lanes_per_token or head_slices"
        )
    unrolled = heads_per_slice(c) * dims // 4 * c["tokens_unrolled"]
    if unrolled > MAX_UNROLLED_WORDS:
        return (
            f"one step would unroll {unrolled} words times heads, the limit is "
            f"{MAX_UNROLLED_WORDS}: use more lanes_per_token or fewer tokens_unrolled"
        )
    return None


def _check_tile(c: Candidate) -> str | None:
    if not staged(c.values):
        return None
    step = token_groups(c) * c["tokens_unrolled"]
    if c["tile_tokens"] % step:
        return f"a tile of {c['tile_tokens']} tokens is no multiple of the {step} of one step"
    return None


def _check_load_words(c: Candidate) -> str | None:
    if c["load_words"] == 1:
        return None
    block, words = c.problem.block_size, row_words(c.problem.head_size)
    if block * words % 4:
        return f"a block of {block} x {words} words is no multiple of 16 bytes"
    if c["tile_tokens"] % block:
        return f"a tile of {c['tile_tokens']} tokens is no multiple of the block of {block}"
    return None


def _check_shared_memory(c: Candidate) -> str | None:
    if not by_lanes(c.values):
        return None
    return limits.shared_memory_reason(c.device, 4 * shared_words(c))


PORTABLE: tuple[Values, ...] = tuple(
    {
        "strategy": strategy,
        "subgroup_size": size,
        "subgroups": subgroups,
        "lanes_per_token": lanes,
        "tokens_unrolled": 2,
        "split": split,
        "combine_slices": 2,
    }
    for strategy, subgroups, split in (
        ("packed_f16", 2, "tokens:1024"),
        ("scalar_f32", 2, "tokens:1024"),
        ("int_dot", 2, "tokens:1024"),
        ("packed_f16", 1, "count:16"),
    )
    for size, lanes in ((32, 8), (32, 16), (32, 32), (16, 8), (16, 16), (64, 8), (64, 16), (8, 8))
)
"""Variants for any device; see `Family.portable`."""
PORTABLE_STAGED: tuple[Values, ...] = tuple(
    {
        "strategy": strategy,
        "subgroup_size": size,
        "subgroups": slices,
        "staging": "shared",
        "lanes_per_token": min(size, 16),
        "tokens_unrolled": 2,
        "tile_tokens": 16,
        "load_words": words,
        "head_slices": slices,
        "split": "count:16",
        "combine_slices": 2,
    }
    for size, slices in ((32, 4), (32, 8), (16, 4), (16, 8), (64, 2), (64, 8), (8, 4), (8, 8))
    for words in (4, 1)
    for strategy in ("packed_f16", "scalar_f32", "int_dot")
)
"""The same for large query groups, dealt out to the subgroups of a workgroup."""

GRANULE_NEEDS = (
    "strategy",
    "staging",
    "subgroup_size",
    "subgroups",
    "lanes_per_token",
    "tokens_unrolled",
    "tile_tokens",
    "head_slices",
)
"""The parameters that `granule` depends on."""

CONSTRAINTS = (
    Constraint(needs=("strategy",), check=_check_features),
    Constraint(needs=("strategy", "subgroup_size", "lanes_per_token"), check=_check_lanes),
    Constraint(needs=("subgroups", "head_slices"), check=_check_head_slices),
    Constraint(
        needs=("strategy", "lanes_per_token", "tokens_unrolled", "head_slices", "query_terms"),
        check=_check_registers,
    ),
    Constraint(needs=GRANULE_NEEDS, check=_check_tile),
    Constraint(needs=("load_words", "tile_tokens"), check=_check_load_words),
    Constraint(
        needs=("strategy", "staging", "subgroups", "tile_tokens", "head_slices"),
        check=_check_shared_memory,
    ),
)
