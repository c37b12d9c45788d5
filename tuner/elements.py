"""Floating-point elements as a device stores them, and back, in NumPy.

NumPy has no bfloat16: such arrays are uint16, the upper halves of float32 words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.errors import UnknownNameError

Array = npt.NDArray[Any]

STORED: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
}
"""The NumPy type of a buffer by element type."""
SMALLEST_NORMAL = {"f32": 2.0**-126, "f16": 2.0**-14, "bf16": 2.0**-126}
"""Below it a device may take a value for zero."""
UNIT_ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
"""The largest relative error of storing a number."""


def stored(values: Array, element: str) -> Array:
    """Numbers rounded to nearest, ties to even, as a buffer of that element type holds them.

    Raises:
        UnknownNameError: no such element type.
    """
    if element not in STORED:
        raise UnknownNameError("element type", element, STORED)
    if element != "bf16":
        return np.asarray(values, STORED[element])
    single = np.ascontiguousarray(values, np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # Rounding must not carry a NaN's low bits into an infinity.
    return np.where(np.isnan(single), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def widened(buffer: Array) -> npt.NDArray[np.float64]:
    """What a buffer of stored elements holds, exactly."""
    if buffer.dtype == np.uint16:
        with np.errstate(invalid="ignore"):  # signalling NaNs become quiet ones
            return (buffer.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return buffer.astype(np.float64)
