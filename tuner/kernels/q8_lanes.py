"""Decode over the planar q8 cache by groups of lanes: parameters, geometry and constraints.

A group of lanes shares the words of a token, and takes tokens of its own. The baseline, too, is a
choice of this geometry.
"""

from __future__ import annotations

from tuner.kernels import limits
from tuner.kernels.base import Candidate, Constraint, Parameter, Values
from tuner.kernels.lane_decode import (
    MAX_LANE_WORDS,
    MAX_UNROLLED_WORDS,
    STRATEGIES,
    lanes_reason,
)
from tuner.kernels.q8_parts import UPSTREAM_LANES, heads_per_slice, subgroup_size
from tuner.kernels.subgroups import tuned
from tuner.problems import GROUP_CODES

MAX_PACKED_WORDS = 64
"""Words times heads in one unrolled step of packed arithmetic, which takes compilers longest."""
MAX_LOGITS = 64
"""Logits of one unrolled step that a lane may hold: query heads times tokens."""


def by_lanes(values: Values) -> bool:
    """Whether the strategy is one of this module's, and not the baseline."""
    return values["strategy"] in STRATEGIES


def staged(values: Values) -> bool:
    """Whether tiles of tokens wait in shared memory."""
    return by_lanes(values) and values["staging"] == "shared"


PARAMETERS = (
    Parameter(
        name="lanes_per_token",
        values=(4, 8, 16, 32),
        help="lanes that share the dimensions of one token",
        used=by_lanes,
    ),
    Parameter(
        name="tokens_unrolled",
        values=(1, 2, 4, 8),
        help="tokens each group of lanes loads before it computes",
        used=by_lanes,
    ),
    Parameter(
        name="staging",
        values=("registers", "shared"),
        help="where codes wait: straight to registers, or tiles of tokens in shared memory",
        used=by_lanes,
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
)


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
    return int(size // GROUP_CODES if size % GROUP_CODES == 0 else -(-size // GROUP_CODES) + 1)


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


def _check_features(c: Candidate) -> str | None:
    if reason := limits.operations_reason(c.device, ("basic", "shuffle")):
        return reason
    if c["strategy"] == "packed_f16" and not c.device.float16:
        return "packed_f16 needs 16-bit float arithmetic (shaderFloat16)"
    if c["strategy"] == "int_dot" and not c.device.integer_dot_product:
        return "int_dot needs shaderIntegerDotProduct"
    return None


def _check_lanes(c: Candidate) -> str | None:
    return lanes_reason(c) if by_lanes(c.values) else None


def _check_registers(c: Candidate) -> str | None:
    if not by_lanes(c.values):
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
    if not by_lanes(c.values):
        return None
    scales = 8 * c["tile_tokens"] * head_scales(c) if staged(c.values) else 0
    statistics = 8 * c["subgroups"] * heads_per_slice(c) if merges(c) else 0
    return limits.shared_memory_reason(c.device, 16 * pool_quads(c) + scales + statistics)


_SLICES = ("strategy", "subgroups", "head_slices")
_STEP = (*_SLICES, "subgroup_size", "lanes_per_token", "tokens_unrolled")
CONSTRAINTS = (
    Constraint(needs=("strategy",), check=_check_features),
    Constraint(needs=("strategy", "subgroup_size", "lanes_per_token"), check=_check_lanes),
    Constraint(
        needs=("strategy", "lanes_per_token", "tokens_unrolled", "head_slices", "query_terms"),
        check=_check_registers,
    ),
    Constraint(needs=(*_STEP, "staging", "tile_tokens"), check=_check_tile),
    Constraint(needs=(*_SLICES, "staging", "tile_tokens"), check=_check_shared_memory),
)
