"""The oracle of appending to the planar int8 cache: codes and scales as IEEE float32 has them.

Codes and scales are compared as the integers that they are. Where the exact quotient lies so near
to a rounding boundary that a division within 2.5 ulp may cross it, a device may be off by one; all
else must be equal, what is not appended bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tuner.oracle.rounding import codes_near_boundaries, half_scales_near_boundaries
from tuner.problems import GROUP_CODES
from tuner.quant import quantise_groups

if TYPE_CHECKING:
    from tuner.kernels.base import Operands, Reference

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


@dataclass(frozen=True, slots=True)
class _Appended:
    """Where the rows of a launch lie in the cache of a side."""

    first: int
    count: int
    row: int
    scale_offset: int

    @classmethod
    def by(cls, operands: Operands) -> _Appended:
        scalars = operands.scalars
        first, count, offset = (int(scalars[n]) for n in ("first_row", "rows", "scale_offset"))
        return cls(first, count, operands.inputs["key"].shape[1], offset)

    def codes(self, cache: Array) -> Array:
        """A view of their codes [rows, row], int8."""
        start = self.first * self.row
        plane = cache.view(np.int8)[start : start + self.count * self.row]
        return plane.reshape(self.count, self.row)

    def scales(self, cache: Array) -> Array:
        """A view of their scales [rows, row / 32], as words of 16 bits."""
        groups = self.row // GROUP_CODES
        start = self.scale_offset // 2 + self.first * groups
        plane = cache.view(np.uint16)[start : start + self.count * groups]
        return plane.reshape(self.count, groups)

    def rest(self, cache: Array) -> Array:
        """A copy of the words [words] in which all of theirs is zero."""
        others = cache.copy()
        self.codes(others)[...] = 0
        self.scales(others)[...] = 0
        return others


def _reference(operands: Operands, rows: Array, *, rest: bool) -> Reference:
    # tuner.kernels imports this module for its families, so its types are known only later.
    from tuner.kernels.base import Reference

    appended = _Appended.by(operands)

    def seen(outputs: Mapping[str, Array]) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for side in SIDES:
            cache = outputs[f"{side}_cache"].reshape(-1)
            found[f"{side}_codes"] = appended.codes(cache)[rows].reshape(-1, 1)
            found[f"{side}_scales"] = appended.scales(cache)[rows].reshape(-1, 1)
            if rest:
                found[f"{side}_rest"] = appended.rest(cache).reshape(-1, 1)
        return found

    wanted = seen({name: operands.inputs[name] for name in operands.outputs})
    bounds = {name: np.zeros(array.shape) for name, array in wanted.items()}
    for side in SIDES:
        vectors = operands.inputs[side][rows]
        codes, scales = quantise_groups(vectors)
        wanted[f"{side}_codes"] = codes.reshape(-1, 1)
        wanted[f"{side}_scales"] = scales.view(np.uint16).reshape(-1, 1)
        grouped = vectors.reshape(-1, GROUP_CODES)
        bounds[f"{side}_codes"] = _one_off(codes_near_boundaries(grouped))
        bounds[f"{side}_scales"] = _one_off(half_scales_near_boundaries(grouped))
    return Reference(
        outputs={name: array.astype(np.float64) for name, array in wanted.items()},
        bounds=lambda _arithmetic: bounds,
        seen=seen,
        zero_may_differ=frozenset(bounds),
    )


def _one_off(near: Array) -> Array:
    """The bound where a device may be one off."""
    return near.reshape(-1, 1).astype(np.float64)
