"""A whole planar q8 cache in NumPy: where its planes lie, what they hold, what poisons them.

One side (keys or values) of a cache of `capacity` tokens is one buffer. A token's row holds the
numbers of all KV heads, head after head; each 32 numbers of a row share a scale, so that a group
straddles two heads where a head size is no multiple of 32. `tuner.quant` quantises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.errors import UsageError
from tuner.problems import GROUP_CODES
from tuner.quant import PLANE_BYTES, append_rows, planar_layout

SCALE_OFFSET = f"round_up(max_tokens * kv_heads * head_size, {PLANE_BYTES})"
"""`PlanarLayout.scale_offset` of a cache of `max_tokens` tokens, for dispatch rules."""

Array = npt.NDArray[Any]
Codes = npt.NDArray[np.int8]
Scales = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class PlanarLayout:
    """Where the planes of one side lie: for `capacity` tokens of rows of `row` numbers.

    Raises:
        UsageError: a row is no multiple of 32 numbers, or there is no token.
    """

    capacity: int
    row: int

    def __post_init__(self) -> None:
        if self.row < 1 or self.row % GROUP_CODES:
            raise UsageError(
                f"a cache row of {self.row} numbers (KV heads times head size) does not fill whole "
                f"groups of {GROUP_CODES}: use a multiple of {GROUP_CODES}"
            )
        if self.capacity < 1:
            raise UsageError(f"a cache of {self.capacity} tokens: use at least 1")

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.row // GROUP_CODES

    @property
    def scale_offset(self) -> int:
        """Byte at which the plane of scales begins."""
        return planar_layout(self.capacity, self.row)[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return planar_layout(self.capacity, self.row)[1]

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


def dequantise_groups(codes: Codes, scales: Scales) -> npt.NDArray[np.float64]:
    """The numbers that codes [..., row] with scales [..., row/32] stand for, exact in float64."""
    return codes.astype(np.float64) * np.repeat(scales.astype(np.float64), GROUP_CODES, axis=-1)


def write_rows(words: npt.NDArray[np.uint32], layout: PlanarLayout, first: int, x: Array) -> None:
    """Quantise rows x [n, row] into a side's buffer at tokens `first` on, in place.

    Raises:
        UsageError: they do not fit, or cannot be quantised.
    """
    if not 0 <= first <= layout.capacity - len(x):
        raise UsageError(
            f"{len(x)} rows at token {first} do not fit a cache of {layout.capacity} tokens"
        )
    append_rows(words, x, first=first, scale_offset=layout.scale_offset)
