"""Whether samples lie around one value or around two: Hartigan and Hartigan's dip (1985)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tuner.timing.dependence import Floats

MIN_SAMPLES_FOR_MODES = 20
MODES_APART = 0.01
"""Modes nearer to each other than this fraction are never told apart."""


def modes(samples_ns: Sequence[float]) -> tuple[float, ...]:
    """The median of the samples or, where they are bimodal, the medians around which they lie.

    Bimodal are samples whose dip one in a hundred unimodal ones would exceed at most, and of which
    the two halves of the best split into two clusters are `MODES_APART` or more apart. Samples that
    repeat are first spread over the clock's step, or any coarse clock would show many modes.
    """
    ordered = np.sort(np.asarray(samples_ns, dtype=np.float64))
    one = (float(np.median(ordered)),)
    if len(ordered) < MIN_SAMPLES_FOR_MODES or ordered[-1] / ordered[0] < 1 + MODES_APART:
        return one
    low, high = (float(np.median(cluster)) for cluster in _two_clusters(ordered))
    if high / low < 1 + MODES_APART or dip(_spread_ties(ordered)) <= critical_dip(len(ordered)):
        return one
    return low, high


def dip(ordered: Sequence[float] | Floats) -> float:
    """Largest distance of the empirical distribution from the nearest unimodal one.

    Of two or more different values in ascending order. The modal interval is narrowed, from the
    whole range, to where the greatest convex minorant and the least concave majorant lie furthest
    apart; what sticks out on both sides is the dip.
    """
    places = np.asarray(ordered, dtype=np.float64)
    count, first, last, found = len(places), 0, len(places) - 1, 1.0
    while True:
        # Heights in samples: the minorant bends in the lower corners of the steps, the majorant in
        # the upper ones.
        span = np.arange(first, last + 1)
        x = places[span]
        minorant = first + _hull(x, lower=True)
        majorant = first + _hull(x, lower=False)
        low, high = (
            np.interp(x, places[minorant], minorant),
            np.interp(x, places[majorant], majorant),
        )
        apart = high + 1.0 - low
        on_minorant = minorant[np.argmax(apart[minorant - first])]
        on_majorant = majorant[np.argmax(apart[majorant - first])]
        if max(apart[on_minorant - first], apart[on_majorant - first]) <= found:
            break
        if apart[on_minorant - first] > apart[on_majorant - first]:
            left, right = on_minorant, majorant[np.searchsorted(majorant, on_minorant)]
        else:
            left = minorant[np.searchsorted(minorant, on_majorant, "right") - 1]
            right = on_majorant
        # Outside of the narrower range the steps' other corners stick out.
        below, above = span <= left, span >= right
        found = max(found, *(span[below] + 1.0 - low[below]), *(high[above] + 1.0 - span[above]))
        if (left, right) == (first, last):
            break
        first, last = int(left), int(right)
    return float(found) / (2 * count)


def critical_dip(count: int) -> float:
    """The dip that one in a hundred samples of `count` independent uniform values exceeds.

    No unimodal distribution dips more than the uniform one. Fitted, to 2 %, to the 99 % points of
    simulated dips (4,000 each of 20 to 100 values, 1,500 each of 200 to 1,000).
    """
    return (0.63 - 0.45 / math.sqrt(count)) / math.sqrt(count)


def _two_clusters(ordered: Floats) -> tuple[Floats, Floats]:
    """The split, with a tenth of the samples or more on each side, of least squared distances."""
    count = len(ordered)
    sizes = np.arange(1, count)
    sums = np.cumsum(ordered - ordered.mean())[:-1]
    between = sums**2 * (1 / sizes + 1 / (count - sizes))
    margin = max(1, count // 10)
    between[: margin - 1] = between[count - margin :] = -1.0
    cut = int(np.argmax(between)) + 1
    return ordered[:cut], ordered[cut:]


def _spread_ties(ordered: Floats) -> Floats:
    """Equal samples spread evenly over the smallest step between different ones."""
    values, counts = np.unique(ordered, return_counts=True)
    if len(values) == len(ordered):
        return ordered
    step = np.diff(values).min()
    places = [(np.arange(count) + 0.5) / count - 0.5 for count in counts]
    spread: Floats = np.repeat(values, counts) + step * np.concatenate(places)
    return spread


def _hull(x: Floats, *, lower: bool) -> npt.NDArray[np.int64]:
    """Indices of the corners of the lower or upper convex hull of (x[i], i), x ascending."""
    sign = 1.0 if lower else -1.0
    places: list[float] = x.tolist()
    corners: list[int] = []
    for c, place in enumerate(places):
        while len(corners) > 1:
            a, b = corners[-2:]
            # Above 0 where the way from a over b to c turns left.
            if sign * ((places[b] - places[a]) * (c - a) - (b - a) * (place - places[a])) > 0:
                break
            corners.pop()
        corners.append(c)
    return np.asarray(corners, dtype=np.int64)
