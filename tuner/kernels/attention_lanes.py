"""Paged attention for few rows: geometry and constraints of the strategy lanes.

Groups of lanes share the dimensions of a token, so that a lane has a part of every score (token
times row). Lanes exchange halves of these until each has the whole of its own, and no others.
"""

from __future__ import annotations

from tuner.kernels.attention_chunks import chunks, vectors
from tuner.kernels.base import Candidate, Constraint, Values

MAX_ROWS = 16
MAX_LANE_WORDS = 224
"""32-bit words of sums, scores and chunks one lane may hold: GPUs give it 128 to 256."""
MAX_UNROLLED, MAX_UNROLLED_ON_CPU = 512, 64
"""Vectors of four dimensions times rows in one unrolled step: beyond it compile times grow."""


def by_lanes(values: Values) -> bool:
    """Whether the strategy is this module's."""
    return values["strategy"] == "lanes"


def granule(c: Candidate) -> int:
    """Tokens that a workgroup takes a step."""
    return int(_token_groups(c) * c["tokens_unrolled"])


def constants(c: Candidate) -> dict[str, object]:
    """What the template of the attend pass needs beside the parameters."""
    scores, lanes = _scores(c), int(c["lanes_per_token"])
    return {
        "own_scores": max(1, scores // lanes),
        "replicas": max(1, lanes // scores),
        "exchanges": exchanges(scores, lanes),
    }


def exchanges(scores: int, lanes: int) -> tuple[tuple[int, int], ...]:
    """The steps by which `lanes` lanes sum their parts of `scores` scores (both powers of two).

    Each is (mask, kept): lanes whose numbers differ by `mask` exchange halves, and are left with
    `kept` scores; where that is 0, both had the same single score and still have it.
    """
    steps, mask = [], lanes // 2
    while mask:
        scores //= 2
        steps.append((mask, scores))
        mask //= 2
    return tuple(steps)


def shared_bytes(c: Candidate) -> int:
    """Bytes of the shared arrays: queries, weights, what is merged."""
    rows, size = int(c["tile_rows"]), int(c.problem.head_size)
    merge = c["subgroups"] * rows * (4 * size + 8)
    return int(4 * rows * size + 4 * _token_groups(c) * _scores(c) + merge)


def _token_groups(c: Candidate) -> int:
    return int(c["subgroups"] * max(1, c["subgroup_size"] // c["lanes_per_token"]))


def _scores(c: Candidate) -> int:
    return int(c["tile_rows"] * c["tokens_unrolled"])


def _check_lanes(c: Candidate) -> str | None:
    if not by_lanes(c.values):
        return None
    lanes, rows = c["lanes_per_token"], c["tile_rows"]
    if rows > MAX_ROWS:
        return f"strategy lanes takes up to {MAX_ROWS} rows, tile_rows is {rows}"
    if lanes > c["subgroup_size"]:
        return f"{lanes} lanes per token are more than the subgroup's {c['subgroup_size']}"
    if chunks(c) % lanes:
        return f"{lanes} lanes cannot share the {chunks(c)} chunks of a token evenly"
    return None


def _check_registers(c: Candidate) -> str | None:
    if not by_lanes(c.values):
        return None
    own, rows, unroll = -(-chunks(c) // c["lanes_per_token"]), c["tile_rows"], c["tokens_unrolled"]
    dims = 4 * vectors(c) * own
    words = rows * (dims + unroll) + unroll * (8 * own + 4 * vectors(c))
    if words > MAX_LANE_WORDS:
        return (
            f"a lane would hold {words} words of sums, scores and chunks, the limit is "
            f"{MAX_LANE_WORDS}: use more lanes_per_token or fewer tile_rows"
        )
    unrolled = rows * unroll * dims // 4
    limit = MAX_UNROLLED_ON_CPU if c.device.is_cpu else MAX_UNROLLED
    if unrolled > limit:
        return (
            f"one step would unroll {unrolled} vectors times rows, the limit is {limit}: use "
            "more lanes_per_token or fewer tokens_unrolled"
        )
    return None


CONSTRAINTS = (
    Constraint(
        needs=("strategy", "subgroup_size", "tile_rows", "lanes_per_token"), check=_check_lanes
    ),
    Constraint(
        needs=("strategy", "tile_rows", "lanes_per_token", "tokens_unrolled"),
        check=_check_registers,
    ),
)
