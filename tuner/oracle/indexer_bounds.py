"""How far the indexer's kernels may be off; the derivation is in docs/tolerances.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.oracle.tolerance import DEVIATIONS, ROUNDING_VARIANCE, U32

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

NORM_ROUNDINGS = 16.0
"""Units for what all elements of a normalised vector share (mean, eps, inverse square root, 2.5 ulp
of a division) and for the products, table entries and the sum that each of them sees."""


def norm_rope_bounds(y: Array) -> Floats:
    """Largest 2-norm of the error of each normalised and turned vector, y [..., E]."""
    return np.asarray(_norm_units(y.shape[-1]) * U32 * np.linalg.norm(y, axis=-1))


def block_key_bounds(
    exact: Array, raw: Array, mean: Array, weight: Array, *, eps: float, one_plus: int
) -> Floats:
    """Largest error of each element of block keys rounded to float16.

    `exact` [N, E] are the keys before rounding, made from raw keys [N * R, E] of which `mean`
    [N, E] are the means. Turning mixes two elements, hence the largest of the vector twice.
    """
    ratio = len(raw) // max(1, len(mean))
    sizes = np.abs(raw.astype(np.float64)).reshape(-1, max(1, ratio), raw.shape[-1]).mean(axis=1)
    scale = np.abs(weight.astype(np.float64) + one_plus)
    scale = scale / np.sqrt((mean**2).mean(axis=-1, keepdims=True) + eps)
    off = _norm_units(exact.shape[-1]) * U32 * np.abs(exact)
    off += ratio * U32 * sizes * scale
    unit = np.spacing(np.abs(exact).astype(np.float16)).astype(np.float64)
    return np.asarray(unit / 2 + 2 * off.max(axis=-1, keepdims=True, initial=0))


def _norm_units(dims: int) -> float:
    """Units of float32 a norm may be off: the sum of squares in half (root), then the rest."""
    # Squares are positive: partial sums drift with the total, and scatter is at most its square.
    drift = np.sqrt(ROUNDING_VARIANCE * (dims / 3 + dims / 2 + 1))
    return float(DEVIATIONS * drift / 2 + NORM_ROUNDINGS)
