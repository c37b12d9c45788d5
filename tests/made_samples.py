"""Sample streams whose truth is known, and the noise that committed records of an H200 hold."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tuner.results import Store, between_measurements
from tuner.timing import Series, summarise

Floats = npt.NDArray[np.float64]
Make = Callable[[np.random.Generator, int], Floats]
"""A stream of so many samples from a source of chance."""

H200 = Path(__file__).parents[1] / "results" / "published" / "nvidia-h200"
TRUTH_NS = 86_000.0
"""The median of all streams here, of 1 % spread unless they say otherwise."""


def normal(random: np.random.Generator, count: int) -> Floats:
    return TRUTH_NS * (1 + 0.01 * random.standard_normal(count))


def skewed(random: np.random.Generator, count: int) -> Floats:
    """A floor, and a tail of slower launches."""
    return TRUTH_NS * (0.98 + 0.02 * np.exp(0.8 * random.standard_normal(count)))


def heavy_tailed(random: np.random.Generator, count: int) -> Floats:
    """No variance: now and then a sample is several times the median."""
    return TRUTH_NS * np.exp(0.005 * random.standard_t(1.5, count))


def two_modes(random: np.random.Generator, count: int) -> Floats:
    """Three launches in ten take 5 % longer; the median lies among the others."""
    slow = random.random(count) < 0.3
    # 0.5 = 0.7 Phi(z), so z = 0.566: that much of sigma below is where the faster mode is centred.
    faster = 1 - 0.005 * 0.56595
    return TRUTH_NS * (faster + 0.05 * slow + 0.005 * random.standard_normal(count))


def quantised(random: np.random.Generator, count: int) -> Floats:
    """A clock in steps of half a per cent, between which launches begin anywhere."""
    tick = 0.005 * TRUTH_NS
    start = random.random(count) * tick
    end = start + normal(random, count)
    return tick * (np.floor(end / tick) - np.floor(start / tick))


def dependent(correlation: float) -> Make:
    """Neighbours alike: a first-order autoregression."""

    def make(random: np.random.Generator, count: int) -> Floats:
        values = random.standard_normal(count)
        for place in range(1, count):
            fresh = math.sqrt(1 - correlation**2) * values[place]
            values[place] = correlation * values[place - 1] + fresh
        return TRUTH_NS * (1 + 0.01 * values)

    return make


def drifting(random: np.random.Generator, count: int) -> Floats:
    """4 % slower at the end than at the start."""
    return normal(random, count) * np.linspace(0.98, 1.02, count)


def stepping(random: np.random.Generator, count: int) -> Floats:
    """Another tenant comes at the middle: 3 % slower from there on."""
    return normal(random, count) * np.where(np.arange(count) < count // 2, 1.0, 1.03)


INDEPENDENT: tuple[Make, ...] = (normal, skewed, heavy_tailed, two_modes, quantised)


@dataclass(frozen=True, slots=True)
class Noise:
    """What measurements on a device are like: samples over their median, and `between`."""

    streams: tuple[Floats, ...]
    between: float

    def samples(self, random: np.random.Generator, count: int) -> Floats:
        """So many neighbours out of a measurement, by chance."""
        stream = self.streams[random.integers(len(self.streams))]
        start = random.integers(len(stream) - count + 1)
        return stream[start : start + count] * math.exp(random.normal(0.0, self.between))

    def once(self, random: np.random.Generator, count: int, *, factor: float = 1.0) -> Series:
        """One measurement of something that takes `factor` times as long."""
        samples = TRUTH_NS * factor * self.samples(random, count)
        return Series(samples_ns=samples.tolist(), between=self.between)

    def turns(
        self, random: np.random.Generator, counts: Sequence[int], *, factor: float = 1.0
    ) -> Series:
        """A measurement in rounds, taken in turns with all others that this makes."""
        parts = [TRUTH_NS * factor * self.samples(random, count) for count in counts]
        samples = np.concatenate(parts).tolist()
        return Series(samples_ns=samples, rounds=tuple(counts), run="together")


@functools.cache
def h200_noise() -> Noise:
    """The noise of the H200 in the committed records.

    Streams are measurements of 50 samples and more that are neither bimodal nor drifting: those are
    flagged, and measured again. `between` is that of variants which the records have twice.
    """
    records = Store(H200, read_only=True).records()
    between = between_measurements(records)
    assert between is not None
    streams = []
    for record in records:
        if record.state == "correct" and len(record.samples_ns) >= 50:
            summary = summarise(record.samples_ns)
            if summary.stable and not summary.bimodal:
                streams.append(np.asarray(record.samples_ns) / summary.median_ns)
    return Noise(tuple(streams), between)
