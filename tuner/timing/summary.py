"""What one measurement says: the median, its interval, spread, drift, and what is odd about it.

The median stands for a measurement, with the interval that order statistics give for it: exact for
samples that are independent, whatever their distribution (Le Boudec 2010). Samples
that depend on their neighbours know less than their number says, so their interval is that of as
many as would be independent. What drifts no interval can mend, so a summary says too whether the
second half of the samples disagrees with the first.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.errors import MeasurementError
from tuner.timing.dependence import effective_count, is_autocorrelated
from tuner.timing.modes import modes

CONFIDENCE = 0.95
DRIFT_LIMIT = 0.01
"""Halves whose medians differ by less than this fraction are never called drifting."""
MIN_SAMPLES_FOR_DRIFT = 8
"""Below this, two halves are disjoint by chance too often (4 against 4: 2 of 70 orders)."""
MIN_ROUNDS = 6
"""So many rounds stand for themselves: the least whose range holds the median with 95 %."""

_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The interval of a median, nanoseconds, and the probability with which it holds the truth.

    `coverage` is at least `CONFIDENCE` where there are samples enough; else the interval is the
    whole range, and `coverage` what that is worth. `effective_count` is how many independent
    samples the samples are worth. Where samples repeat, the clock is coarse, and the interval
    reaches `tick_ns` / 2, half the smallest step between samples, further to both sides.
    """

    median_ns: float
    low_ns: float
    high_ns: float
    coverage: float
    effective_count: float
    tick_ns: float

    @property
    def width(self) -> float:
        """From end to end, as a fraction of the median."""
        return (self.high_ns - self.low_ns) / self.median_ns if self.median_ns > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a set of samples says. Times in nanoseconds.

    `low_ns` to `high_ns` holds the true median with probability `coverage` (see `Interval`).
    `spread` is the median absolute deviation, scaled to a standard deviation of a normal
    distribution, over the median. `drift` is the second half's median over the first's, less 1.
    `stable` is False where the intervals of the two halves are disjoint and the drift is beyond
    `DRIFT_LIMIT`: the clock, not the kernel, may then have been measured. `autocorrelated` says
    that neighbours are alike beyond chance; the interval has been widened for it. `modes_ns` are
    the values around which the samples lie: the median, or two others where they are bimodal.
    """

    median_ns: float
    low_ns: float
    high_ns: float
    spread: float
    count: int
    coverage: float
    drift: float
    stable: bool
    effective_count: float
    autocorrelated: bool
    modes_ns: tuple[float, ...]

    @property
    def bimodal(self) -> bool:
        """Whether the samples lie around two values."""
        return len(self.modes_ns) > 1

    @property
    def oddities(self) -> tuple[str, ...]:
        """What to know before the median is trusted, a line each."""
        found = []
        if not self.stable:
            found.append(f"drifts: the second half of the samples differs by {self.drift:+.1%}")
        if self.bimodal:
            low, high = (f"{mode / 1e3:,.4g}" for mode in self.modes_ns)
            found.append(f"bimodal: samples lie around {low} and {high} µs")
        if self.autocorrelated:
            worth = f"{self.count} samples are worth {self.effective_count:.0f} independent ones"
            found.append(f"autocorrelated: {worth}, for which the interval is widened")
        return tuple(found)


def summarise(samples_ns: Sequence[float], rounds: Sequence[int] = ()) -> Summary:
    """Summary of samples in the order they were taken; `rounds` as in `median_interval`.

    Raises:
        MeasurementError: no samples, or one that is not a finite number above zero.
    """
    require_samples(samples_ns)
    interval = median_interval(samples_ns, rounds)
    median = interval.median_ns
    drift, stable = _drift(samples_ns)
    return Summary(
        median_ns=median,
        low_ns=interval.low_ns,
        high_ns=interval.high_ns,
        spread=_MAD_TO_SIGMA * _median(sorted(abs(x - median) for x in samples_ns)) / median,
        count=len(samples_ns),
        coverage=interval.coverage,
        drift=drift,
        stable=stable,
        effective_count=interval.effective_count,
        autocorrelated=is_autocorrelated(samples_ns),
        modes_ns=modes(samples_ns),
    )


def require_samples(samples_ns: Sequence[float]) -> None:
    """See that there are samples, and times that can be.

    Raises:
        MeasurementError: no samples, or one that is not a finite number above zero.
    """
    if not samples_ns:
        raise MeasurementError("no samples: nothing was measured")
    for place, sample in enumerate(samples_ns, 1):
        if not (math.isfinite(sample) and sample > 0):
            raise MeasurementError(
                f"sample {place} of {len(samples_ns)} is {sample} ns, must be above 0: "
                "the timestamps of this driver cannot be used as they are"
            )


def median_interval(samples_ns: Sequence[float], rounds: Sequence[int] = ()) -> Interval:
    """The median of one or more samples with its interval, in the order they were taken.

    Independent samples get the ranks of the binomial distribution. Where they are worth fewer, the
    number of them below the true median varies more by the root of that ratio, and so the ranks
    stand further apart. `rounds` counts the samples of each of several stretches with other work
    between: from two on it is their medians that are independent, and that get the ranks.
    """
    if len(rounds) > 1:
        return _interval_of_rounds(samples_ns, rounds)
    ordered = sorted(samples_ns)
    count, effective = len(ordered), effective_count(samples_ns)
    rank, coverage = _median_ranks(count)
    if effective < count:
        stretched = (count / 2 - rank) * math.sqrt(count / effective)
        rank = max(0, math.floor(count / 2 - stretched))
        coverage = min(coverage, math.erf((count / 2 - rank) / count * math.sqrt(2 * effective)))
    tick = _tick(ordered)
    return Interval(
        median_ns=_median(ordered),
        low_ns=ordered[rank] - tick / 2,
        high_ns=ordered[-1 - rank] + tick / 2,
        coverage=coverage,
        effective_count=effective,
        tick_ns=tick,
    )


def medians_of_rounds(samples_ns: Sequence[float], rounds: Sequence[int]) -> list[float]:
    """The median of each round; `rounds` counts their samples."""
    ends = list(itertools.accumulate(rounds))
    return [_median(sorted(samples_ns[end - n : end])) for end, n in zip(ends, rounds, strict=True)]


def _interval_of_rounds(samples_ns: Sequence[float], rounds: Sequence[int]) -> Interval:
    ordered = sorted(samples_ns)
    median, tick = _median(ordered), _tick(ordered)
    medians = sorted(medians_of_rounds(samples_ns, rounds))
    rank, coverage = _median_ranks(len(medians))
    return Interval(
        median_ns=median,
        low_ns=min(median, medians[rank]) - tick / 2,
        high_ns=max(median, medians[-1 - rank]) + tick / 2,
        coverage=coverage,
        effective_count=min(effective_count(samples_ns), effective_count(medians)),
        tick_ns=tick,
    )


def overlap(first: tuple[float, float], second: tuple[float, float]) -> bool:
    """Whether two closed intervals (low, high) share a point: if so, neither is proven faster."""
    return first[0] <= second[1] and second[0] <= first[1]


def _tick(ordered: Sequence[float]) -> float:
    """The clock's step, as far as samples that repeat give it away; 0 where none does."""
    steps = [after - before for before, after in itertools.pairwise(ordered)]
    return min((step for step in steps if step > 0), default=0.0) if 0.0 in steps else 0.0


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


@functools.lru_cache(maxsize=256)
def _median_ranks(count: int) -> tuple[int, float]:
    """(rank r from 0, coverage) of the interval from the r-th smallest to the r-th largest.

    The true median lies below the r-th smallest (from 0) of n samples if at most r of them lie
    below the median: sum of C(n, i) for i up to r, over 2^n. The largest r is taken for which both
    tails together stay within 1 - CONFIDENCE. Integers throughout, so exact.
    """
    rank, below, term = 0, 1, 1
    allowed = 2**count * round((1 - CONFIDENCE) * 10_000) // 20_000
    for i in range(1, count // 2):
        term = term * (count - i + 1) // i
        if below + term > allowed:
            break
        rank, below = i, below + term
    return rank, 1 - 2 * below / 2**count


def _drift(samples_ns: Sequence[float]) -> tuple[float, bool]:
    half = len(samples_ns) // 2
    if half == 0:
        return 0.0, True
    first, second = sorted(samples_ns[:half]), sorted(samples_ns[-half:])
    drift = _median(second) / _median(first) - 1
    if len(samples_ns) < MIN_SAMPLES_FOR_DRIFT or abs(drift) <= DRIFT_LIMIT:
        return drift, True
    rank, _ = _median_ranks(half)
    intervals = [(part[rank], part[-1 - rank]) for part in (first, second)]
    return drift, overlap(intervals[0], intervals[1])
