"""The planar q8 cache in NumPy: int8 codes in one plane, float16 scales of 32 codes in another.

One side (keys or values) of a cache of `capacity` tokens is one buffer. A token's row holds the
numbers of all KV heads, head after head; each 32 numbers of a row share a scale, so that a group
straddles two heads where a head size is no multiple of 32. Codes are quotients rounded to even by
the scale before it is rounded to float16; a group of zeros has codes and scale 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.errors import UsageError

Array = npt.NDArray[Any]
Codes = npt.NDArray[np.int8]
Scales = npt.NDArray[np.float16]

GROUP = 32
"""Numbers that share one scale."""
PLANE_ALIGNMENT = 16384
"""Both planes are padded to multiples of so many bytes."""
CODE_MAX = 127


@dataclass(frozen=True, slots=True)
class PlanarLayout:
    """Where the planes of one side lie: for `capacity` tokens of rows of `row` numbers.

    Raises:
        UsageError: a row is no multiple of 32 numbers, or there is no token.
    """

    capacity: int
    row: int

    def __post_init__(self) -> None:
        if self.row < 1 or self.row % GROUP:
            raise UsageError(
                f"a cache row of {self.row} numbers (KV heads times head size) does not fill whole "
                f"groups of {GROUP}: use a multiple of {GROUP}"
            )
        if self.capacity < 1:
            raise UsageError(f"a cache of {self.capacity} tokens: use at least 1")

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.row // GROUP

    @property
    def scale_offset(self) -> int:
        """Byte at which the plane of scales begins."""
        return _padded(self.capacity * self.row)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.scale_offset + _padded(2 * self.capacity * self.groups)

    def planes(self, words: npt.NDArray[np.uint32]) -> tuple[Codes, Scales]:
        """Views of a buffer: codes int8 [capacity, row] and scales float16 [capacity, row/32]."""
        data = words.view(np.uint8)
        codes = data[: self.capacity * self.row].view(np.int8)
        scales = data[self.scale_offset :][: 2 * self.capacity * self.groups].view(np.float16)
        return codes.reshape(self.capacity, self.row), scales.reshape(self.capacity, self.groups)

    def empty(self, code: int = -128, scale: float = np.nan) -> npt.NDArray[np.uint32]:
        """A buffer with this code and this scale everywhere, padding included: poison."""
        words = np.empty(self.nbytes // 4, np.uint32)
        data = words.view(np.uint8)
        data[: self.scale_offset].view(np.int8)[...] = code
        data[self.scale_offset :].view(np.float16)[...] = scale
        return words


def quantise_groups(x: Array) -> tuple[Codes, Scales]:
    """Quantise rows x [..., row] to codes int8 [..., row] and scales float16 [..., row/32].

    float32 throughout, as a device does it: d = max|x| / 127 of a group, code = x / d rounded half
    to even, scale = float16(d). An element is off by at most d / 2 + 127 * |d - float16(d)|.

    Raises:
        UsageError: a number that is not finite, a group whose scale overflows float16, or rows that
            are no multiple of 32 long.
    """
    x = np.asarray(x, np.float32)
    PlanarLayout(1, x.shape[-1])
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    unit = np.abs(groups).max(axis=-1) / np.float32(CODE_MAX)
    if not (unit < np.float32(65520)).all():
        raise UsageError(
            "cannot quantise: a group has a number that is not finite or beyond 127 * 65504, whose "
            "float16 scale would be infinite; scale it down first"
        )
    divisor = np.where(unit > 0, unit, np.float32(1))[..., None]
    quotient = np.where(unit[..., None] > 0, groups / divisor, np.float32(0))
    codes = np.clip(np.rint(quotient), -CODE_MAX, CODE_MAX).astype(np.int8)
    return codes.reshape(x.shape), unit.astype(np.float16)


def dequantise_groups(codes: Codes, scales: Scales) -> npt.NDArray[np.float64]:
    """The numbers that codes [..., row] with scales [..., row/32] stand for, exact in float64."""
    return codes.astype(np.float64) * np.repeat(scales.astype(np.float64), GROUP, axis=-1)


def write_rows(words: npt.NDArray[np.uint32], layout: PlanarLayout, first: int, x: Array) -> None:
    """Quantise rows x [n, row] into a side's buffer at tokens `first` on, in place.

    Raises:
        UsageError: they do not fit, or cannot be quantised.
    """
    if not 0 <= first <= layout.capacity - len(x):
        raise UsageError(
            f"{len(x)} rows at token {first} do not fit a cache of {layout.capacity} tokens"
        )
    codes, scales = layout.planes(words)
    codes[first : first + len(x)], scales[first : first + len(x)] = quantise_groups(x)


def _padded(nbytes: int) -> int:
    return -(-nbytes // PLANE_ALIGNMENT) * PLANE_ALIGNMENT
