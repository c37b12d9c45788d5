"""The oracle of appending to the planar int8 cache: codes and scales as IEEE float32 has them.

Codes and scales are compared as the integers that they are. Where the exact quotient lies so near
to a rounding boundary that a division within 2.5 ulp may cross it, a device may be off by one; all
else must be equal, what is not appended bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tuner.oracle.rounding import codes_near_boundaries, half_scales_near_boundaries
from tuner.quant import GROUP_CODES, quantise_groups

if TYPE_CHECKING:
    from tuner.kernels.base import ArithmeticClass, Operands, Reference

Array = npt.NDArray[Any]

SIDES = ("key", "value")
SAMPLED_ROWS = 256


def kv_append_reference(operands: Operands) -> Reference:
    """Per side: `…_codes` [rows * row, 1], `…_scales` [rows * row/32, 1], `…_rest` [words, 1]."""
    return _reference(operands, np.arange(int(operands.scalars["rows"])), rest=True)


def sampled_kv_append_reference(operands: Operands, count: int) -> Reference:
    """Codes and scales of the first rows and the last of a large launch."""
    rows = np.arange(int(operands.scalars["rows"]))
    half = max(count, SAMPLED_ROWS) // 2
    return _reference(operands, np.unique(np.concatenate([rows[:half], rows[-half:]])), rest=False)


def _reference(operands: Operands, rows: Array, *, rest: bool) -> Reference:
    # tuner.kernels imports this module for its families, so its types are known only later.
    from tuner.kernels.base import Reference

    row = operands.inputs["key"].shape[1]
    first = int(operands.scalars["first_row"])
    every = int(operands.scalars["rows"])
    scale_offset = int(operands.scalars["scale_offset"])
    groups = row // GROUP_CODES

    def codes(buffer: Array) -> Array:
        return buffer.view(np.int8)[first * row : (first + every) * row].reshape(every, row)

    def scales(buffer: Array) -> Array:
        start = scale_offset // 2 + first * groups
        plane = buffer.view(np.uint16)[start : start + every * groups]
        return plane.reshape(every, groups)

    def seen(outputs: Mapping[str, Array]) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for side in SIDES:
            buffer = outputs[f"{side}_cache"].reshape(-1)
            found[f"{side}_codes"] = codes(buffer)[rows].reshape(-1, 1)
            found[f"{side}_scales"] = scales(buffer)[rows].reshape(-1, 1)
            if rest:
                others = buffer.copy()
                codes(others)[...] = 0
                scales(others)[...] = 0
                found[f"{side}_rest"] = others.reshape(-1, 1)
        return found

    wanted = seen({name: operands.inputs[name] for name in operands.outputs})
    bounds: dict[str, Array] = {name: np.zeros(array.shape) for name, array in wanted.items()}
    for side in SIDES:
        vectors = operands.inputs[side][rows]
        made_codes, made_scales = quantise_groups(vectors)
        wanted[f"{side}_codes"] = made_codes.reshape(-1, 1)
        wanted[f"{side}_scales"] = made_scales.view(np.uint16).reshape(-1, 1)
        grouped = vectors.reshape(-1, GROUP_CODES)
        near_codes = codes_near_boundaries(grouped)
        bounds[f"{side}_codes"] = near_codes.reshape(-1, 1).astype(np.float64)
        near_scales = half_scales_near_boundaries(grouped)
        bounds[f"{side}_scales"] = near_scales.reshape(-1, 1).astype(np.float64)

    def bounds_of(_arithmetic: ArithmeticClass) -> dict[str, Array]:
        return bounds

    return Reference(
        outputs={name: array.astype(np.float64) for name, array in wanted.items()},
        bounds=bounds_of,
        seen=seen,
        zero_may_differ=frozenset(bounds),
    )
