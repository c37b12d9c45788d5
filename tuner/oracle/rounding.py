"""Which codes and scales a device that divides within 2.5 ulp may round to the other side."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.quant import CODE_MAX

Array = npt.NDArray[Any]

CODE_MARGIN = 1e-4
"""Codes from a boundary within which 2.5 ulp of 127, in each of two divisions, may matter."""
SCALE_MARGIN = 4e-7
"""The same for a scale that goes to float16, relative to it: 2.5 ulp of float32 and a little."""


def codes_near_boundaries(vectors: Array) -> Array:
    """Which codes may be off by one, for vectors [..., D] that are quantised each by its peak.

    Where 127/peak is a power of two no division is inexact, so that the rule for ties itself shows:
    there nothing may be off.
    """
    peak = np.abs(vectors).astype(np.float64).max(axis=-1, keepdims=True)
    safe = np.where(peak > 0, peak, 1.0)
    quotients = np.abs(vectors).astype(np.float64) / safe * CODE_MAX
    return np.asarray((np.abs(quotients % 1 - 0.5) <= CODE_MARGIN) & _inexact(peak))


def half_scales_near_boundaries(vectors: Array) -> Array:
    """Which float16 scales [...] of vectors [..., D] may be the neighbour of the right one."""
    peak = np.abs(vectors).astype(np.float64).max(axis=-1)
    scale = peak / CODE_MAX
    with np.errstate(over="ignore"):
        below, above = ((scale * (1 + s * SCALE_MARGIN)).astype(np.float16) for s in (-1, 1))
    return np.asarray(_inexact(peak) & (below != above))


def _inexact(peak: Array) -> Array:
    safe = np.where(peak > 0, peak, 1.0)
    return np.asarray((peak > 0) & (np.frexp(safe / CODE_MAX)[0] != 0.5))
