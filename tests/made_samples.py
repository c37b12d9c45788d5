"""Sample streams whose truth is known, and what measurements on an H200 are like."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tuner.timing import Series

Floats = npt.NDArray[np.float64]
Make = Callable[[np.random.Generator, int], Floats]
"""A stream of so many samples from a source of chance."""

H200_NOISE = Path(__file__).with_name("data") / "h200_noise.npz"
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
    """The noise of the H200, as its records of 2026-11-30 have it (NVIDIA 580.159.04).

    A file of its own: what is said of the method must not hang on which results are published.
    `streams` holds every fourth measurement of at least 50 samples that was neither bimodal nor
    drifting (those are flagged, and measured again), its first 200 samples, in parts per 100,000
    above the median; `between` is what `between_measurements` told of all the records.
    """
    with np.load(H200_NOISE) as file:
        samples = 1 + file["streams"] / 1e5
        streams = np.split(samples, np.cumsum(file["lengths"])[:-1])
        return Noise(tuple(streams), float(file["between"]))
