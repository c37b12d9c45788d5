"""Whether one thing is faster than another: the ratio of two medians, with its interval."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt

from tuner.errors import MeasurementError
from tuner.timing.dependence import Floats, effective_count
from tuner.timing.summary import MIN_ROUNDS, medians_of_rounds, require_samples

Verdict = Literal["faster", "slower", "no difference shown"]
Units = Literal["samples", "rounds", "rounds in pairs"]

RESAMPLES = 2000
CLAIM = 0.98
"""Confidence of a ratio's interval, and so of a verdict. Above the 95 % that is meant to hold: what
lies between measurements is an estimate itself, and noise is not the same everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Samples of one thing in the order they were taken, nanoseconds.

    `rounds` counts the samples of each round, where they were taken in several stretches with other
    work between; empty for one stretch. `between` is the relative standard deviation of the median
    of such a measurement when all is measured anew, beyond what its samples tell; 0 where that is
    unknown. Series of the same `run`, if not empty, took their rounds in turns, so that each round
    of one pairs with one of the other.

    Raises:
        MeasurementError: no samples, one that is no time above zero, or the rounds do not add up.
    """

    samples_ns: Sequence[float]
    rounds: Sequence[int] = ()
    between: float = 0.0
    run: str = ""

    def __post_init__(self) -> None:
        require_samples(self.samples_ns)
        if self.rounds and sum(self.rounds) != len(self.samples_ns):
            raise MeasurementError(
                f"rounds of {sum(self.rounds)} samples in all, but {len(self.samples_ns)} samples"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """B beside A: `ratio` is B's median time over A's, so below 1 where B is faster.

    `low` to `high` holds the true ratio with the confidence asked for, as far as the noise goes
    that the series tell of. The verdict is about B. `units` is what was resampled.
    """

    ratio: float
    low: float
    high: float
    verdict: Verdict
    units: Units


def compare(
    a: Series,
    b: Series,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = CLAIM,
) -> Comparison:
    """The ratio of B's median to A's with a bootstrap interval, and what may be claimed from it.

    Resampled is what is as good as independent (Kalibera & Jones 2013): rounds, in pairs if they
    were taken in turns, if both series have `MIN_ROUNDS`; else samples, where what a resample
    deviates is stretched by the root of how much less the samples are worth than independent ones.
    What the samples cannot know goes in as a random factor of each resample.

    The interval is the percentile interval, widened for few units as Hesterberg (2015) proposes;
    not BCa, whose acceleration comes from a jackknife, which fails for medians (Efron & Tibshirani
    1993). A difference is claimed only if 1 lies outside of it.
    """
    random = np.random.default_rng(seed)
    if min(len(a.rounds), len(b.rounds)) >= MIN_ROUNDS:
        paired = bool(a.run) and a.run == b.run and len(a.rounds) == len(b.rounds)
        units: Units = "rounds in pairs" if paired else "rounds"
        # In pairs, the same few rounds have to tell two medians.
        worth: float = min(len(a.rounds), len(b.rounds)) - paired
        chosen = _chosen(random, len(a.rounds), resamples)
        medians_a = _of_rounds(a, chosen)
        medians_b = _of_rounds(b, chosen if paired else _chosen(random, len(b.rounds), resamples))
    else:
        units = "samples"
        worth = min(_worth(a), _worth(b))
        medians_a, medians_b = (_of_samples(each, random, resamples, confidence) for each in (a, b))
    logs = np.log(medians_b) - np.log(medians_a)
    logs += random.normal(0.0, math.hypot(a.between, b.between), resamples)
    ratio = float(np.median(b.samples_ns) / np.median(a.samples_ns))
    tail = _tail(worth, confidence)
    low, high = np.exp(np.quantile(logs, (tail, 1 - tail))).tolist()
    return Comparison(
        ratio=ratio,
        low=min(low, ratio),
        high=max(high, ratio),
        verdict="faster" if high < 1 else "slower" if low > 1 else "no difference shown",
        units=units,
    )


def differ(before: Sequence[float], after: Sequence[float], *, limit: float) -> bool:
    """Whether two measurements of the same thing are shown to differ, and by more than `limit`.

    `limit` is a fraction: 0.03 is three per cent, either way.
    """
    found = compare(Series(samples_ns=before), Series(samples_ns=after), resamples=500)
    far = abs(math.log(found.ratio)) > math.log1p(limit)
    return far and found.verdict != "no difference shown"


_Places = npt.NDArray[np.int64]


def _chosen(random: np.random.Generator, rounds: int, resamples: int) -> _Places:
    """The rounds of each resample, one resample a row."""
    return random.integers(0, rounds, (resamples, rounds))


def _of_rounds(series: Series, chosen: _Places) -> Floats:
    """The median of all samples of the chosen rounds, for each resample."""
    samples = np.asarray(series.samples_ns, dtype=np.float64)
    order = np.argsort(samples, kind="stable")
    ordered = samples[order]
    round_of = np.repeat(np.arange(len(series.rounds)), series.rounds)[order]
    times = (chosen[:, :, None] == np.arange(len(series.rounds))).sum(axis=1, dtype=np.int32)
    # Each sample counts as often as its round was chosen.
    counted = np.cumsum(times[:, round_of], axis=1, dtype=np.int32)
    total = counted[:, -1:]
    lower, upper = (2 * counted >= total).argmax(axis=1), (2 * counted > total).argmax(axis=1)
    return np.asarray((ordered[lower] + ordered[upper]) / 2)


def _of_samples(
    series: Series, random: np.random.Generator, resamples: int, confidence: float
) -> Floats:
    """The median of as many samples, drawn with replacement, for each resample; see `compare`.

    Drawing n places evenly and taking the k-th smallest is drawing that one place from the beta
    distribution of the k-th of n uniform values; for an even n the next smallest follows from it.
    """
    ordered = np.sort(np.asarray(series.samples_ns, dtype=np.float64))
    count, centre = len(ordered), float(np.median(ordered))
    if len(series.rounds) > 1:
        error = _of_few_rounds(series, confidence)
        return np.asarray(centre * np.exp(random.normal(0.0, error, resamples)))
    k = (count + 1) // 2
    place = random.beta(k, count - k + 1, resamples)
    medians = ordered[(place * count).astype(np.int64)]
    if count % 2 == 0:
        after = 1 - (1 - place) * random.random(resamples) ** (1 / (count - k))
        medians = (medians + ordered[(after * count).astype(np.int64)]) / 2
    stretch = math.sqrt(count / effective_count(series.samples_ns))
    return np.asarray(centre * (medians / centre) ** stretch)


def _of_few_rounds(series: Series, confidence: float) -> float:
    """Relative standard error of the median by rounds too few to be resampled.

    It is so much larger than what they show as Student's t reaches further than a normal one.
    """
    count = len(series.rounds)
    logs = [math.log(median) for median in medians_of_rounds(series.samples_ns, series.rounds)]
    error = statistics.stdev(logs) / math.sqrt(count)
    return error * _student(count - 1, confidence) / _normal(confidence)


def _worth(series: Series) -> float:
    """How many independent units are resampled; few rounds carry their own allowance."""
    return math.inf if len(series.rounds) > 1 else effective_count(series.samples_ns)


def _tail(worth: float, confidence: float) -> float:
    """Probability left out at each end of the bootstrap distribution of so many units.

    A percentile interval is too narrow for few units: by the root of n / (n - 1), and as a normal
    one is beside Student's. So it reaches further out (Hesterberg 2015).
    """
    if worth <= 2:
        return 0.0
    if math.isinf(worth):
        return (1 - confidence) / 2
    return NormalDist().cdf(-math.sqrt(worth / (worth - 1)) * _student(worth - 1, confidence))


def _normal(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)


@functools.lru_cache(maxsize=256)
def _student(degrees: float, confidence: float) -> float:
    """The two-sided quantile of Student's t (Abramowitz & Stegun 26.7.5; for 3 degrees 1 % low)."""
    z = _normal(confidence)
    return math.fsum(
        (
            z,
            (z**3 + z) / (4 * degrees),
            (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2),
            (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3),
        )
    )
