"""Which times were taken on a lower clock than others, as the reference kernel tells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from tuner.records import ClockState, Record

LOWER = 1.05
"""So many times as long the reference kernel takes on a clock that is called lower."""


def reference_ns(state: ClockState | None) -> float:
    """What the reference kernel took behind most samples; infinite where it was not timed."""
    return math.inf if state is None else statistics.median(state.reference_ns or (math.inf,))


def fastest_ns(states: Iterable[ClockState | None]) -> float:
    """The least of these, which must be of one device; infinite without any."""
    return min(map(reference_ns, states), default=math.inf)


def is_lower(record: Record, best_ns: float) -> bool:
    """Whether a record is of a clock known to be lower than one on which the reference took
    `best_ns`, and no sensor says that power or heat had lowered it, as they would in use."""
    held_down = record.observed is not None and record.observed.held_down
    return not held_down and LOWER * best_ns < reference_ns(record.clock_state) < math.inf
