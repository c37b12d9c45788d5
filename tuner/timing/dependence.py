"""How far samples taken one after the other depend on each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MIN_SAMPLES_FOR_DEPENDENCE = 8
"""Below this a correlation between neighbours says nothing."""
CERTAINTY = 2.33
"""Standard errors beyond which neighbours are called correlated: one in a hundred by chance."""


def autocorrelations(values: Floats) -> Floats:
    """Autocorrelation at the lags 0 to n / 2 of a series; all 0 beyond lag 0 if it is constant."""
    count = len(values)
    centred = values - values.mean()
    spectrum = np.fft.rfft(centred, 2 * count)
    covariances: Floats = np.fft.irfft(spectrum * spectrum.conj(), 2 * count)[: count // 2 + 1]
    if covariances[0] <= 1e-12 * count:
        constant = np.zeros_like(covariances)
        constant[0] = 1.0
        return constant
    correlations: Floats = np.asarray(covariances / covariances[0])
    return correlations


def sides(samples_ns: Sequence[float] | Floats) -> Floats:
    """On which side of the median each sample lies: -1, 0 or 1."""
    samples = np.asarray(samples_ns, dtype=np.float64)
    return np.sign(samples - np.median(samples))


def effective_count(samples_ns: Sequence[float] | Floats) -> float:
    """How many independent samples would know the median as well as these do; at most their number.

    A median's variance depends on its samples only through the side of it on which each lies: in a
    stationary series of which distant members do not know of each other (Sen 1972), it is that of
    n / tau independent samples, where tau = 1 + 2 (r1 + r2 + ...) sums the autocorrelations of
    these signs. The sum is cut and smoothed as Geyer (1992) does for Markov chains: pairs of
    neighbouring lags, up to the first pair whose sum is not above 0, none larger than the one
    before. Samples that avoid each other (tau below 1) get no credit for it.
    """
    count = len(samples_ns)
    if count < MIN_SAMPLES_FOR_DEPENDENCE:
        return float(count)
    lags = autocorrelations(sides(samples_ns))
    pairs = lags[: len(lags) // 2 * 2].reshape(-1, 2).sum(axis=1)
    positive = np.logical_and.accumulate(pairs > 0)
    tau = 2 * float(np.minimum.accumulate(pairs)[positive].sum()) - 1
    return count / max(1.0, tau)


def is_autocorrelated(samples_ns: Sequence[float] | Floats) -> bool:
    """Whether neighbours lie on the same side of the median more often than chance would have it.

    A one-sided test of the signs' first autocorrelation, of which the standard error without any
    is 1 / sqrt(n) (Bartlett 1946).
    """
    count = len(samples_ns)
    if count < MIN_SAMPLES_FOR_DEPENDENCE:
        return False
    return bool(autocorrelations(sides(samples_ns))[1] > CERTAINTY / math.sqrt(count))
