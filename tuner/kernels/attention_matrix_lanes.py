"""Paged attention on matrix units for few rows: geometry and constraints of strategy matrix_lanes.

Every subgroup of a workgroup walks tiles of keys of its own, for all the workgroup's rows (query
tokens times query heads of a KV head), so that a decode step reads each key once for the whole
group. Keys and values go straight from memory to the registers that hold the operands, 16 bytes at
a time. Both products are transposed, so that a lane's accumulators belong to few rows:

    scores [tokens, rows] = keys x query          sums [dims, rows] = values x weights

A dot product may run over its terms in any order, so what a lane loads of its keys serves as its
terms whatever their dimensions, and the query is permuted to match; so are the rows of the sums.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tuner.device_info import MatrixLayout
from tuner.kernels.attention_chunks import chunks
from tuner.kernels.base import Candidate, Constraint, Values
from tuner.kernels.fragments import Axis, operand_axes
from tuner.kernels.matrix_units import (
    exchange_reason,
    layout_of,
    layout_reason,
    score_elements,
    sharing_masks,
)

CHUNK_HALVES = 8
"""16-bit floats of one load."""
PADDING = 8
"""Added to each row of queries and weights in shared memory: rows start in different banks."""
MAX_ROW_TILES = 4
MERGED_ROWS = 2
"""Rows that subgroups merge at a time: more would need more shared memory."""
MAX_LANE_WORDS = 224
"""32-bit words of sums, scores, keys and values one lane may hold: GPUs give it 128 to 256."""
MAX_PRODUCTS_ON_CPU = 32
"""Products of matrices in a step: a software driver takes a third of a second to compile each."""


def by_matrix_lanes(values: Values) -> bool:
    """Whether the strategy is this module's."""
    return values["strategy"] == "matrix_lanes"


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePlan:
    """What each lane loads, for one layout and head size. `elements[j][p]` of an operand A is the
    p-th term of the lane's j-th row.

    Of a key, the lanes of class c of `terms` load chunks c, c + (classes), …: dimension d is
    term `query_places[d]`, counted over all steps. Of a value, the lanes of class c of `rows` do:
    row r of the sums, counted over all matrices, is dimension `output_dims[r]`.
    """

    elements: tuple[tuple[int, ...], ...]
    rows: Axis
    terms: Axis
    key_slots: int
    value_slots: int
    query_places: tuple[int, ...]
    output_dims: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def lane_plan(layout: MatrixLayout, head_size: int) -> LanePlan | str:
    """The plan for a layout and a head size (a multiple of 8), or the reason why there is none."""
    axes, shape = operand_axes(layout.a), layout.shape
    if isinstance(axes, str):
        return axes
    rows, terms, elements = axes
    held = head_size // CHUNK_HALVES
    for what, axis in (("keys", terms), ("values", rows)):
        if held % len(axis.bases):
            return f"{len(axis.bases)} lanes cannot share the {held} chunks of {what} evenly"
    if head_size % shape.m or head_size % shape.k:
        return f"head size {head_size} does not cut into matrices of {shape.m} and {shape.k}"
    query_dims = _dims(terms, head_size)
    return LanePlan(
        elements=elements,
        rows=rows,
        terms=terms,
        key_slots=held // len(terms.bases),
        value_slots=held // len(rows.bases),
        query_places=tuple(query_dims.index(dim) for dim in range(head_size)),
        output_dims=_dims(rows, head_size),
    )


def _dims(axis: Axis, head_size: int) -> tuple[int, ...]:
    """The dimension of each index along `axis`, matrix after matrix."""
    dims, size = [], len(axis.table)
    for matrix in range(head_size // size):
        for index in range(size):
            number, position = axis.table[index]
            slot, half = divmod(matrix * len(axis.offsets) + position, CHUNK_HALVES)
            dims.append(CHUNK_HALVES * (number + len(axis.bases) * slot) + half)
    return tuple(dims)


def granule(c: Candidate) -> int:
    """Tokens that the subgroups of a workgroup take a step."""
    return int(c["subgroups"] * c["tile_tokens"])


def constants(c: Candidate) -> dict[str, object]:
    """What the template of the attend pass needs beside the parameters."""
    layout = layout_of(c.values, c.device)
    assert layout is not None, "asked of an illegal candidate"
    plan, shape = lane_plan(layout, c.problem.head_size), layout.shape
    elements = score_elements(layout.c)
    return {
        "plan": plan,
        "layout": layout,
        "row_tiles": _row_tiles(c, layout),
        "score_tiles": c["tile_tokens"] // shape.m,
        "value_steps": c["tile_tokens"] // shape.k,
        "key_steps": c.problem.head_size // shape.k,
        "output_tiles": c.problem.head_size // shape.m,
        "score_rows": elements.rows,
        "score_columns": elements.columns,
        "score_elements": elements.places,
        "column_masks": sharing_masks(layout.c.lane_column),
        "padding": PADDING,
        "merged_rows": MERGED_ROWS,
    }


def shared_bytes(c: Candidate) -> int:
    """Bytes of the shared arrays: queries, weights, what is merged."""
    rows, size = int(c["tile_rows"]), int(c.problem.head_size)
    query = 2 * rows * (size + PADDING)
    weights = 2 * c["subgroups"] * rows * (c["tile_tokens"] + PADDING)
    merge = 4 * (c["subgroups"] * MERGED_ROWS * (size + 2) + 2 * MERGED_ROWS)
    return int(query + merge + (weights if c["exchange"] == "shared" else 0))


def _row_tiles(c: Candidate, layout: MatrixLayout) -> int:
    return int(c["tile_rows"] // layout.shape.n)


def _layout(c: Candidate) -> MatrixLayout | None:
    """The layout a candidate of this strategy asks for, if it fits its subgroups."""
    if not by_matrix_lanes(c.values) or layout_reason(c) is not None:
        return None
    return layout_of(c.values, c.device)


def _check_layout(c: Candidate) -> str | None:
    if not by_matrix_lanes(c.values):
        return None
    reason, layout = layout_reason(c), _layout(c)
    if layout is None:
        return reason
    plan = lane_plan(layout, c.problem.head_size)
    return plan if isinstance(plan, str) else None


def _check_tile(c: Candidate) -> str | None:
    layout = _layout(c)
    if layout is None:
        return None
    shape, rows, tokens = layout.shape, c["tile_rows"], c["tile_tokens"]
    if rows % shape.n:
        return f"{rows} rows do not fill matrices of {shape.n}"
    if rows > MAX_ROW_TILES * shape.n:
        return f"{rows} rows need more than {MAX_ROW_TILES} matrices of {shape.n}: use matrix"
    if tokens % shape.m or tokens % shape.k:
        return f"{tokens} tokens do not cut into matrices of {shape.m} and {shape.k}"
    return None


def _check_exchange(c: Candidate) -> str | None:
    layout = _layout(c)
    if layout is None or c["exchange"] != "convert":
        return None
    if layout.shape.m != layout.shape.k:
        return (
            f"accumulators of {layout.shape.m} rows do not convert to operands of "
            f"{layout.shape.k} terms"
        )
    return exchange_reason(c)


def _check_registers(c: Candidate) -> str | None:
    layout = _layout(c)
    if layout is None:
        return None
    shape, size, tokens = layout.shape, c.problem.head_size, c["tile_tokens"]
    row_tiles, lanes = _row_tiles(c, layout), len(layout.a.lane_row)
    if c.device.is_cpu:
        products = row_tiles * 2 * size * tokens // (shape.m * shape.k)
        if products > MAX_PRODUCTS_ON_CPU:
            return (
                f"a step of {products} products of matrices takes a software driver too long to "
                f"compile, the limit is {MAX_PRODUCTS_ON_CPU}: use fewer tile_tokens or tile_rows"
            )
        return None
    held = row_tiles * len(layout.c.element_row) * (size + tokens) // shape.m
    held += 2 * chunks(c) * tokens * 4 // lanes
    if held > MAX_LANE_WORDS:
        return (
            f"a lane would hold {held} words of sums, scores, keys and values, the limit is "
            f"{MAX_LANE_WORDS}: use fewer tile_tokens or tile_rows"
        )
    return None


_SHAPE = ("strategy", "subgroup_size", "matrix_shape")
_TILE = (*_SHAPE, "tile_rows", "tile_tokens")
CONSTRAINTS = (
    Constraint(needs=_SHAPE, check=_check_layout),
    Constraint(needs=_TILE, check=_check_tile),
    Constraint(needs=(*_SHAPE, "exchange"), check=_check_exchange),
    Constraint(needs=_TILE, check=_check_registers),
)
