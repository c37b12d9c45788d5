"""Geometry and constraints of the strategies of paged attention.

Those of tiles and matrix are here; lanes and matrix_lanes have modules of their own.
"""

from __future__ import annotations

from tuner.device_info import MatrixLayout
from tuner.kernels import attention_lanes as lanes
from tuner.kernels import attention_matrix_lanes as matrix_lanes
from tuner.kernels import limits
from tuner.kernels.attention_chunks import CHUNK_BYTES, chunks, vectors
from tuner.kernels.base import Candidate, Constraint
from tuner.kernels.matrix_decode import SHAPES
from tuner.kernels.matrix_units import by_matrix, exchange_reason, layout_of, sharing_masks

MAX_LANE_WORDS = 224
"""32-bit words of queries, sums and chunks one lane may hold: GPUs give it 128 to 256."""
MIN_TILE_ROWS = 16
MATRIX_STRATEGIES = ("matrix", "matrix_lanes")

__all__ = [
    "CONSTRAINTS",
    "GRANULE_NEEDS",
    "MATRIX_STRATEGIES",
    "SHAPES",
    "constants",
    "granule",
    "row_tiles",
]


def granule(c: Candidate) -> int:
    """Tokens one workgroup takes a step."""
    if c["strategy"] == "lanes":
        return lanes.granule(c)
    if c["strategy"] == "matrix_lanes":
        return matrix_lanes.granule(c)
    return int(c["tile_tokens"])


def row_tiles(c: Candidate) -> int:
    """Workgroups that share the rows of one KV head."""
    return int(-(-c.problem.rows // c["tile_rows"]))


def constants(c: Candidate) -> dict[str, object]:
    """What the template of the attend pass needs beside the parameters."""
    if c["strategy"] == "lanes":
        return lanes.constants(c)
    if c["strategy"] == "matrix_lanes":
        return matrix_lanes.constants(c)
    if c["strategy"] == "tiles":
        own = -(-chunks(c) // c["lanes_per_row"])
        return {
            "own_rows": _own_rows(c),
            "own_chunks": own,
            "uneven": own * c["lanes_per_row"] != chunks(c),
        }
    layout = layout_of(c.values, c.device)
    assert layout is not None, "asked of an illegal candidate"
    rows = tuple(dict.fromkeys(layout.c.element_row))
    places = zip(layout.c.element_row, layout.c.element_column, strict=True)
    return {
        "m": layout.shape.m,
        "n": layout.shape.n,
        "k": layout.shape.k,
        "lane_row": layout.c.lane_row,
        "lane_column": layout.c.lane_column,
        "rows_held": rows,
        "elements": tuple((e, rows.index(r), column) for e, (r, column) in enumerate(places)),
        "row_masks": sharing_masks(layout.c.lane_row),
        "loads": -(-2 * c["tile_tokens"] * chunks(c) // _threads(c)),
        "staged_chunks": _staged_chunks(c, layout),
    }


def _threads(c: Candidate) -> int:
    return int(c["subgroups"] * c["subgroup_size"])


def _own_rows(c: Candidate) -> int:
    """Rows of one thread of the strategy tiles."""
    return int(c["tile_rows"] * c["lanes_per_row"] // _threads(c))


def _staged_chunks(c: Candidate, layout: MatrixLayout) -> int:
    vectors_staged = max(2 * c["tile_tokens"], c["tile_rows"])
    outputs = c["subgroups"] * layout.shape.m * layout.shape.n // 4
    return int(max(vectors_staged * (chunks(c) + 1), outputs))


def _shared_bytes(c: Candidate) -> int:
    rows, tokens = c["tile_rows"], c["tile_tokens"]
    if c["strategy"] == "lanes":
        return lanes.shared_bytes(c)
    if c["strategy"] == "tiles":
        query = rows * (c.problem.head_size // 4 + 1) * 16
        staged = c["kv_buffers"] * tokens * (chunks(c) + 1) * CHUNK_BYTES
        return int(query + staged + rows * (tokens + 1) * 4)
    if c["strategy"] == "matrix_lanes":
        return matrix_lanes.shared_bytes(c)
    layout = layout_of(c.values, c.device)
    staged = 0 if layout is None else _staged_chunks(c, layout) * CHUNK_BYTES
    weights = 2 * rows * (tokens + 8) if c["exchange"] == "shared" else 0
    return int(staged + weights + 8 * rows)


def _check_tile(c: Candidate) -> str | None:
    if c["strategy"] != "tiles":
        return None
    columns, threads = c["lanes_per_row"], _threads(c)
    if c["tile_rows"] < MIN_TILE_ROWS:
        return f"strategy tiles takes at least {MIN_TILE_ROWS} rows, tile_rows is {c['tile_rows']}"
    if columns > c["subgroup_size"]:
        return f"{columns} lanes per row are more than the subgroup's {c['subgroup_size']}"
    if c["tile_tokens"] % columns:
        return f"{columns} lanes cannot share tiles of {c['tile_tokens']} tokens evenly"
    if c["tile_rows"] * columns % threads or not _own_rows(c):
        return f"{c['tile_rows']} rows times {columns} lanes are no multiple of {threads} threads"
    return None


def _check_tile_registers(c: Candidate) -> str | None:
    if c["strategy"] != "tiles":
        return None
    own, tokens = _own_rows(c), c["tile_tokens"] // c["lanes_per_row"]
    dims = 4 * vectors(c)
    words = own * (dims * -(-chunks(c) // c["lanes_per_row"]) + tokens) + tokens * dims
    if words > MAX_LANE_WORDS:
        return (
            f"a thread would hold {words} words of sums, scores and keys, the limit is "
            f"{MAX_LANE_WORDS}: use more lanes_per_row or fewer tile_rows"
        )
    return None


def _check_matrix_features(c: Candidate) -> str | None:
    strategy = c["strategy"]
    if strategy not in MATRIX_STRATEGIES:
        return None
    device = c.device
    if c.problem.element != "f16":
        return (
            f"{strategy} multiplies 16-bit floats as they are stored, not {c.problem.element}: "
            "rounding or overflow would change the answer"
        )
    if not (device.cooperative_matrix and device.float16 and device.vulkan_memory_model):
        return f"{strategy} needs KHR cooperative matrices, 16-bit floats and Vulkan's memory model"
    if by_matrix(c.values) and not (device.storage_16bit and device.shared_memory_views):
        return "matrix needs 16-bit storage and an explicit layout of shared memory"
    return None


def _check_matrix(c: Candidate) -> str | None:
    if not by_matrix(c.values):
        return None
    layout = layout_of(c.values, c.device)
    if layout is None:
        return f"no probed layout of shape {c['matrix_shape']} with 16-bit floats"
    shape = layout.shape
    if len(layout.c.lane_row) != c["subgroup_size"]:
        return f"layouts were probed for subgroups of {len(layout.c.lane_row)} lanes"
    if (len(set(layout.c.lane_row)) << len(sharing_masks(layout.c.lane_row))) != c["subgroup_size"]:
        return "the lanes that hold one row's scores do not differ in whole bits"
    if c["tile_rows"] != c["subgroups"] * shape.m:
        return f"{c['subgroups']} subgroups of {shape.m} rows make no tile of {c['tile_rows']}"
    for what, size in (("head size", c.problem.head_size), ("tile_tokens", c["tile_tokens"])):
        if size % shape.n or size % shape.k:
            return f"{what} {size} does not cut into matrices of {shape.n} and {shape.k}"
    if shape.n % 8:
        return f"{shape.n} columns of a matrix are no whole chunks"
    return None


def _check_exchange(c: Candidate) -> str | None:
    if not by_matrix(c.values) or c["exchange"] != "convert":
        return None
    layout, reason = layout_of(c.values, c.device), exchange_reason(c)
    if reason is None and layout is not None and layout.shape.n != layout.shape.k:
        return f"exchange=convert needs a square operand, {c['matrix_shape']} has none"
    return reason


def _check_matrix_registers(c: Candidate) -> str | None:
    layout = layout_of(c.values, c.device) if by_matrix(c.values) else None
    if layout is None:
        return None
    size, held = c.problem.head_size, len(layout.c.element_row)
    words = held * (size + c["tile_tokens"]) // layout.shape.n
    words += len(layout.a.element_row) * size // (2 * layout.shape.k)
    words += 4 * -(-2 * c["tile_tokens"] * chunks(c) // _threads(c)) * c["prefetch"]
    if words > MAX_LANE_WORDS:
        return (
            f"a lane would hold {words} words of sums, scores, queries and chunks, the limit is "
            f"{MAX_LANE_WORDS}: use fewer tile_tokens or no prefetch"
        )
    return None


def _check_shared_memory(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        return None
    return limits.shared_memory_reason(c.device, _shared_bytes(c))


_THREADS = ("strategy", "subgroup_size", "subgroups")
_TILE = (*_THREADS, "tile_rows", "tile_tokens")
GRANULE_NEEDS = (*_THREADS, "tile_rows", "lanes_per_token", "tokens_unrolled", "tile_tokens")
"""The parameters that `granule` and `row_tiles` depend on."""

CONSTRAINTS = (
    Constraint(needs=("strategy",), check=_check_matrix_features),
    *lanes.CONSTRAINTS,
    Constraint(needs=(*_TILE, "lanes_per_row"), check=_check_tile),
    Constraint(needs=(*_TILE, "lanes_per_row"), check=_check_tile_registers),
    Constraint(needs=(*_TILE, "matrix_shape"), check=_check_matrix),
    Constraint(needs=("strategy", "matrix_shape", "exchange"), check=_check_exchange),
    Constraint(needs=(*_TILE, "matrix_shape", "prefetch"), check=_check_matrix_registers),
    *matrix_lanes.CONSTRAINTS,
    Constraint(
        needs=(*GRANULE_NEEDS, "matrix_shape", "kv_buffers", "exchange"),
        check=_check_shared_memory,
    ),
)
