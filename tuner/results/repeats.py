"""How alike repeated measurements of the same variant come out, and records as series."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable

from tuner.records import Record
from tuner.timing import MIN_ROUNDS, Series

MIN_REPEATS = 5
"""Fewer repeated measurements than this say nothing of how such come out."""
_MAD_TO_SIGMA = 1.4826
_INTERVAL_TO_SIGMA = 2 * 1.96


def between_measurements(records: Iterable[Record]) -> float | None:
    """Relative standard deviation between medians of the same variant, measured at other times.

    What the measurements' own intervals explain is taken off. Robust: a median absolute deviation,
    over all variants that `records`, in the order of time, have more than once, each against its
    time before. None where there are fewer than `MIN_REPEATS` such pairs.
    """
    timed: dict[str, list[Record]] = {}
    for record in records:
        if record.is_timed and record.ended_by != "gave_up":
            timed.setdefault(record.variant, []).append(record)
    pairs = [pair for same in timed.values() for pair in itertools.pairwise(same)]
    if len(pairs) < MIN_REPEATS:
        return None
    changes = [abs(math.log(after.timed_ns / before.timed_ns)) for before, after in pairs]
    explained = [_sigma(before) ** 2 + _sigma(after) ** 2 for before, after in pairs]
    seen = (_MAD_TO_SIGMA * statistics.median(changes)) ** 2
    return math.sqrt(max(0.0, seen - statistics.median(explained)) / 2)


def series(record: Record, between: float | None = None) -> Series:
    """A correct record as a series for `tuner.timing.compare`.

    `between`, from `between_measurements`, counts where the record's own rounds do not tell it.
    """
    told = len(record.rounds) >= MIN_ROUNDS
    return Series(
        samples_ns=record.samples_ns,
        rounds=record.rounds,
        between=0.0 if told or between is None else between,
        run=record.interleaved,
    )


def _sigma(record: Record) -> float:
    """Relative standard error of the median, from its interval."""
    low = record.low_ns or record.timed_ns
    high = record.high_ns or record.timed_ns
    return (high - low) / record.timed_ns / _INTERVAL_TO_SIGMA
