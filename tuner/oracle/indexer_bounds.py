"""How far the indexer's kernels may be off; the derivation is in docs/tolerances.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tuner.oracle.tolerance import (
    DEVIATIONS,
    ROUNDING_VARIANCE,
    ROUNDINGS,
    SHORT_SUM,
    SMALLEST_F16,
    TINY,
    U32,
    sum_variance,
)

if TYPE_CHECKING:
    from tuner.kernels.base import ArithmeticClass

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

NORM_ROUNDINGS = 16.0
"""Units for what all elements of a normalised vector share (mean, eps, inverse square root, 2.5 ulp
of a division) and for the products, table entries and the sum that each of them sees."""
SCORE_ROUNDINGS = 4.0
"""Units for the scale of a head, the sum over heads (one a head more) and the last product."""
SUBNORMAL_STEP = 2.0**-24
"""Spacing of float16's subnormals: what a product in 16 bits may lose, whatever its size."""


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


def score_bounds(arithmetic: ArithmeticClass, query: Array, keys: Array) -> Floats:
    """Largest error [N] of the scores of block keys [N, E] for one row's queries [I, E].

    Each head's dot product has the variance of its class; ReLU makes no error larger.
    """
    rounding, dims = ROUNDINGS[arithmetic], query.shape[-1]
    q, k = query.astype(np.float64), keys.astype(np.float64)
    dots, scatter = q @ k.T, q**2 @ (k**2).T
    variance = rounding.sum_unit**2 * sum_variance(dims, scatter, dots)
    variance += rounding.logit_unit**2 * sum_variance(SHORT_SUM, scatter, dots)
    variance += rounding.query_unit**2 * ROUNDING_VARIANCE * scatter
    error = DEVIATIONS * np.sqrt(variance.sum(axis=0))
    error += (len(q) + SCORE_ROUNDINGS) * U32 * np.maximum(dots, 0).sum(axis=0)
    error += TINY * len(q) * (np.abs(k).sum(axis=-1) + dims)
    largest = np.abs(q).max(axis=-1, keepdims=True, initial=0)
    if rounding.query_unit:
        vanishing = np.where(np.abs(q) < SMALLEST_F16 * largest, np.abs(q), 0)
        error += (vanishing @ np.abs(k).T).sum(axis=0)
    if rounding.logit_unit:
        subnormal = np.where(np.abs(k) < SMALLEST_F16, np.abs(k), 0)
        error += (np.abs(q) @ subnormal.T).sum(axis=0) + dims * SUBNORMAL_STEP * largest.sum()
    return np.asarray(error / np.sqrt(dims))
