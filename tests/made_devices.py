"""Devices that exist only on paper, with all that a strategy of decode may ask for.

The layouts of 16-bit matrices are those found by probing: how one vendor's units and how Mesa's CPU
driver deal the elements of a matrix out to lanes. The 8-bit one continues the first's pattern.
"""

from __future__ import annotations

from typing import Any

from tests.toy_family import toy_device
from tuner.device_info import DeviceInfo, Fragment, MatrixLayout, MatrixShape


def _shape(m: int, n: int, k: int, operand: str = "float16") -> MatrixShape:
    sums = "float32" if operand == "float16" else "int32"
    return MatrixShape(m=m, n=n, k=k, a_type=operand, b_type=operand, c_type=sums, result_type=sums)


def _fragment(row: list[int], column: list[int], elements: list[tuple[int, int]]) -> Fragment:
    """A fragment from the first element of each lane and the offsets (row, column) of all."""
    return Fragment(
        lane_row=tuple(row),
        lane_column=tuple(column),
        element_row=tuple(r for r, _ in elements),
        element_column=tuple(c for _, c in elements),
    )


_GROUP = [lane // 4 for lane in range(32)]
_PAIR = [2 * (lane % 4) for lane in range(32)]
_FOUR = [4 * (lane % 4) for lane in range(32)]

LANES_32 = MatrixLayout(
    shape=_shape(16, 8, 16),
    a=_fragment(_GROUP, _PAIR, [(r, c + i) for r in (0, 8) for c in (0, 8) for i in range(2)]),
    b=_fragment(_PAIR, _GROUP, [(r + i, 0) for r in (0, 8) for i in range(2)]),
    c=_fragment(_GROUP, _PAIR, [(r, i) for r in (0, 8) for i in range(2)]),
)
"""16x8x16 over 32 lanes; lane 4 g + t starts at row g (of A and C) and column 2 t."""
LANES_32_WIDE = MatrixLayout(
    shape=_shape(16, 16, 16),
    a=LANES_32.a,
    b=_fragment(_PAIR, _GROUP, [(r + i, c) for c in (0, 8) for r in (0, 8) for i in range(2)]),
    c=LANES_32.a,
)
"""The same with twice as many columns, 16x16x16."""
LANES_32_INT8 = MatrixLayout(
    shape=_shape(16, 8, 32, "int8"),
    a=_fragment(_GROUP, _FOUR, [(r, c + i) for r in (0, 8) for c in (0, 16) for i in range(4)]),
    b=_fragment(_FOUR, _GROUP, [(r + i, 0) for r in (0, 16) for i in range(4)]),
    c=LANES_32.c,
)
"""The same with twice as many terms of 8 bits."""

_LANE, _NONE = list(range(8)), [0] * 8

LANES_8 = MatrixLayout(
    shape=_shape(8, 8, 8),
    a=_fragment(_NONE, _LANE, [(i, 0) for i in range(8)]),
    b=_fragment(_LANE, _NONE, [(0, i) for i in range(8)]),
    c=_fragment(_NONE, _LANE, [(i, 0) for i in range(8)]),
)
"""8x8x8 over 8 lanes: each holds a column of A and C, and a row of B."""

LAYOUTS = (LANES_32, LANES_8)
"""The probed layouts."""


def gpu(**changes: Any) -> DeviceInfo:
    """A GPU with subgroups of 32 lanes and matrix units; `changes` replace fields."""
    fields: dict[str, Any] = {
        "max_workgroup_invocations": 1024,
        "max_workgroup_size": (1024, 1024, 64),
        "max_shared_memory_bytes": 49152,
        "compute_units": 132,
        "max_storage_buffers": 1024,
        "max_workgroup_subgroups": 32,
        "subgroup_operations": ("basic", "vote", "arithmetic", "ballot", "shuffle"),
        "subgroup_size_control": True,
        "compute_full_subgroups": True,
        "storage_8bit": True,
        "storage_16bit": True,
        "float16": True,
        "int8": True,
        "integer_dot_product": True,
        "vulkan_memory_model": True,
        "shared_memory_views": True,
        "cooperative_matrix": True,
        "cooperative_matrix_shapes": (LANES_32.shape, LANES_32_INT8.shape),
        "cooperative_matrix2": ("conversions",),
        "matrix_layouts": (LANES_32, LANES_32_INT8),
    }
    return toy_device(**{**fields, **changes})


def narrow_cpu(**changes: Any) -> DeviceInfo:
    """A software driver with subgroups of 8 lanes, two compute units and no matrices."""
    fields: dict[str, Any] = {
        "kind": "cpu",
        "max_shared_memory_bytes": 32768,
        "compute_units": 2,
        "subgroup_size": 8,
        "min_subgroup_size": 8,
        "max_subgroup_size": 8,
        "cooperative_matrix": False,
        "cooperative_matrix_shapes": (),
        "cooperative_matrix2": (),
        "matrix_layouts": (),
    }
    return gpu(**{**fields, **changes})


def plain(**changes: Any) -> DeviceInfo:
    """A GPU without matrix units whose driver does not tell its number of compute units."""
    fields: dict[str, Any] = {
        "compute_units": None,
        "max_shared_memory_bytes": 32768,
        "cooperative_matrix": False,
        "cooperative_matrix_shapes": (),
        "cooperative_matrix2": (),
        "matrix_layouts": (),
    }
    return gpu(**{**fields, **changes})


def _one_size(size: int, threads: int) -> DeviceInfo:
    """The least shared memory that Vulkan allows, subgroups of one size, no say in it."""
    return plain(
        subgroup_size=size,
        min_subgroup_size=size,
        max_subgroup_size=size,
        subgroup_size_control=False,
        compute_full_subgroups=False,
        max_shared_memory_bytes=16384,
        max_workgroup_invocations=threads,
        max_workgroup_size=(threads, threads, 64),
    )


VENDORS = {
    "Intel": plain(min_subgroup_size=8, max_workgroup_subgroups=64, max_storage_buffers=64),
    "AMD": plain(
        subgroup_size=64, max_subgroup_size=64, compute_units=40, max_shared_memory_bytes=65536
    ),
    "Arm": plain(
        subgroup_size=16,
        min_subgroup_size=16,
        max_subgroup_size=16,
        integer_dot_product=False,
        max_workgroup_invocations=512,
        max_workgroup_size=(512, 512, 512),
    ),
    "Qualcomm": plain(
        subgroup_size=64, min_subgroup_size=64, max_subgroup_size=128, integer_dot_product=False
    ),
    "Apple": plain(subgroup_size_control=False, max_storage_buffers=31),
}
"""As far as constraints can tell them apart; Apple's through a layer over Metal."""
SMALL = {
    f"{size} lanes, {threads} threads": _one_size(size, threads)
    for size in (8, 16, 32, 64)
    for threads in (128, 256)
}
