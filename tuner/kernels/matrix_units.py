"""What strategies on matrix units ask of a probed layout, whatever they feed the units with.

Scores are [tokens, heads] = keys x query, so that a lane's accumulators belong to few query heads.
"""

from __future__ import annotations

from typing import NamedTuple

from tuner.device_info import DeviceInfo, Fragment, MatrixLayout
from tuner.kernels.base import Candidate, Parameter, Values
from tuner.kernels.limits import operations_reason

MAX_HEAD_TILES = 4
"""Matrices side by side whose columns are the query heads of one subgroup, at most."""
WEIGHT_PADDING = 8
"""Added to each head's row of weights in shared memory: its rows start in different banks."""
LAG = 8
"""How far, in powers of two, the reference of the softmax may lag behind the maximum."""


def by_matrix(values: Values) -> bool:
    """Whether the strategy is one on matrix units."""
    return values["strategy"] == "matrix"


EXCHANGE = Parameter(
    name="exchange",
    values=("shared", "convert"),
    help="how weights pass from accumulator to operand: through shared memory, or by the "
    "conversion of NV cooperative matrix 2",
    used=by_matrix,
)


def layout_of(values: Values, device: DeviceInfo) -> MatrixLayout | None:
    """The probed layout of 16-bit floats of the variant's `matrix_shape`, if the device has it."""
    for layout in device.matrix_layouts:
        if shape_name(layout) == values["matrix_shape"] and layout.shape.a_type == "float16":
            return layout
    return None


def shape_name(layout: MatrixLayout) -> str:
    """The shape as the parameter `matrix_shape` has it: rows x columns x terms."""
    return f"{layout.shape.m}x{layout.shape.n}x{layout.shape.k}"


def sharing_masks(lane_base: tuple[int, ...]) -> tuple[int, ...]:
    """The bits of a lane's number that do not change its base: lanes that share columns."""
    lanes = range(len(lane_base))
    bits = (1 << bit for bit in range(len(lane_base).bit_length() - 1))
    return tuple(m for m in bits if all(lane_base[i] == lane_base[i ^ m] for i in lanes))


class ScoreElements(NamedTuple):
    """Offsets of a lane's rows and columns of the scores, and its elements among them."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    places: tuple[tuple[int, int, int], ...]
    """(element, number of its row, number of its column)"""


def score_elements(fragment: Fragment) -> ScoreElements:
    """The elements of an accumulator that each lane holds."""
    rows = tuple(dict.fromkeys(fragment.element_row))
    columns = tuple(dict.fromkeys(fragment.element_column))
    places = zip(fragment.element_row, fragment.element_column, strict=True)
    return ScoreElements(
        rows,
        columns,
        tuple(
            (e, rows.index(row), columns.index(column)) for e, (row, column) in enumerate(places)
        ),
    )


def features_reason(device: DeviceInfo) -> str | None:
    """What a device lacks for matrices of 16-bit floats and a softmax between them, if anything."""
    if not (device.cooperative_matrix and device.float16 and device.vulkan_memory_model):
        return "matrix needs KHR cooperative matrices, 16-bit floats and Vulkan's memory model"
    return operations_reason(device, ("basic", "shuffle", "vote", "arithmetic"))


def layout_reason(c: Candidate) -> str | None:
    """Why there is no layout of the candidate's `matrix_shape` and `subgroup_size` to work with."""
    layout = layout_of(c.values, c.device)
    if layout is None:
        known = [shape_name(i) for i in c.device.matrix_layouts if i.shape.a_type == "float16"]
        listed = ", ".join(known) or "none"
        return f"no probed layout of shape {c['matrix_shape']}; the device has: {listed}"
    if len(layout.a.lane_row) != c["subgroup_size"]:
        return f"layouts were probed for subgroups of {len(layout.a.lane_row)} lanes"
    sharing = 1 << len(sharing_masks(layout.c.lane_column))
    if sharing * len(set(layout.c.lane_column)) != len(layout.c.lane_column):
        return "the lanes that hold one head's scores do not differ in whole bits"
    return None


def exchange_reason(c: Candidate) -> str | None:
    """Why the device cannot pass weights on as the candidate says; None if it can."""
    if c["exchange"] == "convert" and "conversions" not in c.device.cooperative_matrix2:
        return "exchange=convert needs NV cooperative matrix 2 with conversions"
    return None
