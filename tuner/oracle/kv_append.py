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

from tuner.quant import CODE_MAX, GROUP_CODES, quantise_groups

if TYPE_CHECKING:
    from tuner.kernels.base import ArithmeticClass, Operands, Reference

Array = npt.NDArray[Any]

SIDES = ("key", "value")
CODE_MARGIN = 1e-4
"""Codes from a boundary within which 2.5 ulp of 127, in each of two divisions, may matter."""
SCALE_MARGIN = 4e-7
"""The same for a scale, relative to it: 2.5 ulp of float32 and a little."""
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
        near_codes, near_scales = near_boundaries(vectors)
        bounds[f"{side}_codes"] = near_codes.reshape(-1, 1).astype(np.float64)
        bounds[f"{side}_scales"] = near_scales.reshape(-1, 1).astype(np.float64)

    def bounds_of(_arithmetic: ArithmeticClass) -> dict[str, Array]:
        return bounds

    return Reference(
        outputs={name: array.astype(np.float64) for name, array in wanted.items()},
        bounds=bounds_of,
        seen=seen,
        zero_may_differ=frozenset(bounds),
    )


def near_boundaries(vectors: Array) -> tuple[Array, Array]:
    """Which codes [..., row] and which scales [..., row/32] may be off by one.

    Where 127/peak is a power of two no division is inexact, so that the rule for ties itself shows:
    there nothing may be off.
    """
    grouped = vectors.astype(np.float64).reshape(*vectors.shape[:-1], -1, GROUP_CODES)
    peak = np.abs(grouped).max(axis=-1)
    safe = np.where(peak > 0, peak, 1.0)
    inexact = (peak > 0) & (np.frexp(safe / CODE_MAX)[0] != 0.5)
    quotients = np.abs(grouped) / safe[..., None] * CODE_MAX
    codes = np.abs(quotients % 1 - 0.5) <= CODE_MARGIN
    scale = safe / CODE_MAX
    with np.errstate(over="ignore"):
        below, above = ((scale * (1 + sign * SCALE_MARGIN)).astype(np.float16) for sign in (-1, 1))
    return (
        (codes & inexact[..., None]).reshape(vectors.shape),
        inexact & (below != above),
    )
