"""The parameters of paged attention, and the variants that a search begins with."""

from __future__ import annotations

import dataclasses

from tuner.kernels import attention_strategies as strategies
from tuner.kernels import subgroups
from tuner.kernels.base import Parameter, Values
from tuner.kernels.matrix_units import EXCHANGE

POLICIES = (
    "none",
    *(f"count:{parts}" for parts in (2, 4, 8, 16, 32)),
    *(f"tokens:{tokens}" for tokens in (512, 1024, 2048, 4096)),
    *(f"device:{workgroups}" for workgroups in (1, 2, 4, 8)),
)
"""Rows make workgroups, too, so that fewer ways to cut the keys do than in decode."""


def _by_lanes(values: Values) -> bool:
    return values["strategy"] == "lanes"


def by_matrices(values: Values) -> bool:
    """Whether the strategy multiplies on matrix units."""
    return values["strategy"] in strategies.MATRIX_STRATEGIES


def _by_tiles(values: Values) -> bool:
    return values["strategy"] == "tiles"


PARAMETERS = (
    Parameter(
        name="strategy",
        values=("baseline", "lanes", "tiles", "matrix", "matrix_lanes"),
        help="baseline: one thread per query row, two passes over K. lanes: for few rows, KV goes "
        "straight to registers. tiles: KV tiles in shared memory, for many rows. matrix, "
        "matrix_lanes: tiles and lanes with cooperative matrices",
    ),
    subgroups.SIZE,
    subgroups.per_workgroup(1, 2, 4, 8, 16),
    Parameter(
        name="tile_rows",
        values=(1, 2, 4, 8, 16, 32, 64, 128),
        help="rows (query tokens times query heads of a KV head) of one workgroup",
        used=subgroups.tuned,
    ),
    Parameter(
        name="lanes_per_token",
        values=(1, 2, 4, 8, 16, 32),
        help="lanes that share the dimensions of one token",
        used=_by_lanes,
    ),
    Parameter(
        name="tokens_unrolled",
        values=(1, 2, 4, 8),
        help="tokens each group of lanes loads before it computes",
        used=_by_lanes,
    ),
    Parameter(
        name="tile_tokens",
        values=(8, 16, 32, 64),
        help="tokens of a tile staged by the whole workgroup; for matrix_lanes, of each subgroup's",
        used=lambda values: values["strategy"] in ("tiles", *strategies.MATRIX_STRATEGIES),
    ),
    Parameter(
        name="lanes_per_row",
        values=(4, 8, 16),
        help="lanes that share the scores and sums of a row",
        used=_by_tiles,
    ),
    Parameter(
        name="kv_buffers",
        values=(1, 2),
        help="2: keys and values are staged together, 1: one after the other in the same place",
        used=_by_tiles,
    ),
    Parameter(
        name="matrix_shape",
        values=strategies.SHAPES,
        help="cooperative-matrix shape: rows x tokens x terms; tokens x rows x terms for "
        "matrix_lanes",
        used=by_matrices,
    ),
    dataclasses.replace(EXCHANGE, used=by_matrices),
    Parameter(
        name="prefetch",
        values=(0, 1),
        help="1: the loads of the next tile are issued before the present one is computed, or, by "
        "strategies that load straight to registers, as soon as these are free",
        used=lambda values: _by_lanes(values) or by_matrices(values),
    ),
    Parameter(
        name="split",
        values=POLICIES,
        help="how the keys are cut: none, count:N parts, parts of tokens:N, or device:N "
        "workgroups per compute unit",
        used=subgroups.tuned,
    ),
    Parameter(
        name="combine_slices",
        values=(1, 2, 4),
        help="parts into which the combine pass deals out the splits of a row",
        used=lambda values: subgroups.tuned(values) and values["split"] != "none",
    ),
)


MATRIX_STARTS: tuple[Values, ...] = tuple(
    {
        "strategy": "matrix",
        "subgroup_size": size,
        "matrix_shape": shape,
        "subgroups": subgroups,
        "tile_rows": subgroups * int(shape.split("x")[0]),
        "tile_tokens": tokens,
        "prefetch": prefetch,
        "split": split,
    }
    for size, shape in ((32, "16x8x16"), (32, "16x16x16"), (64, "16x16x16"), (8, "8x8x8"))
    for subgroups, tokens, prefetch, split in (
        (4, 32, 1, "none"),
        (8, 32, 1, "none"),
        (4, 64, 0, "none"),
        (4, 32, 1, "device:2"),
        (1, 16, 1, "device:8"),
    )
)
MATRIX_LANE_STARTS: tuple[Values, ...] = tuple(
    {
        "strategy": "matrix_lanes",
        "subgroup_size": size,
        "matrix_shape": shape,
        "subgroups": subgroups,
        "tile_rows": rows,
        "tile_tokens": 8 if size == 8 else 16,
        "exchange": exchange,
        "prefetch": prefetch,
        "split": split,
        "combine_slices": 4,
    }
    for subgroups, exchange, prefetch, split in (
        (16, "shared", 0, "device:1"),
        (4, "convert", 1, "device:4"),
        (4, "shared", 0, "device:4"),
        (8, "shared", 1, "device:2"),
    )
    for size, shape, rows in (
        (32, "16x8x16", 8),
        (32, "16x8x16", 16),
        (64, "16x16x16", 16),
        (32, "16x16x16", 16),
        (8, "8x8x8", 8),
    )
)
LANE_STARTS: tuple[Values, ...] = tuple(
    {
        "strategy": "lanes",
        "subgroup_size": size,
        "subgroups": subgroups,
        "tile_rows": rows,
        "lanes_per_token": lanes,
        "tokens_unrolled": tokens,
        "prefetch": prefetch,
        "split": split,
        "combine_slices": 4,
    }
    for subgroups, prefetch, split in ((4, 1, "device:4"), (4, 0, "device:4"), (16, 0, "device:1"))
    for size in (32, 64, 16, 8)
    for rows, lanes, tokens in ((4, min(16, size), 4), (4, 8, 2), (8, min(16, size), 2), (1, 8, 4))
)
TILE_STARTS: tuple[Values, ...] = tuple(
    {
        "strategy": "tiles",
        "subgroup_size": size,
        "subgroups": 128 // size,
        "tile_rows": 32,
        "tile_tokens": 32,
        "lanes_per_row": columns,
        "kv_buffers": 1,
        "split": split,
    }
    for size, columns in ((32, 16), (64, 16), (16, 16), (8, 8))
    for split in ("none", "device:2")
)
STARTS = (*MATRIX_LANE_STARTS, *MATRIX_STARTS, *TILE_STARTS, *LANE_STARTS)
PORTABLE: tuple[Values, ...] = (
    *(
        {
            "strategy": "lanes",
            "subgroup_size": size,
            "subgroups": 128 // max(size, 32),
            "tile_rows": rows,
            "lanes_per_token": 8,
            "tokens_unrolled": tokens,
            "split": split,
            "combine_slices": 4,
        }
        for size in (32, 16, 64, 8)
        for rows, tokens, split in (
            (4, 2, "tokens:1024"),
            (4, 1, "count:16"),
            (1, 2, "tokens:1024"),
        )
    ),
    *(
        {
            "strategy": "tiles",
            "subgroup_size": size,
            "subgroups": 128 // size,
            "tile_rows": rows,
            "tile_tokens": 8,
            "lanes_per_row": 8,
            "kv_buffers": 1,
            "split": "none",
        }
        for size in (32, 16, 64, 8)
        for rows in (16, 8)
    ),
)
"""Variants for any device; see `Family.portable`."""
