"""Measurements of one variant as the fields of its record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tuner.records import ClockState, Energy, IntervalTimes, Observation
from tuner.runner.protocol import Measurement
from tuner.timing import median_interval, require_samples

Range = tuple[float, float]


def timing_fields(
    measurements: Sequence[Measurement], *, in_rounds: bool = False
) -> dict[str, Any]:
    """The record's fields for the samples of all measurements together.

    `in_rounds`: others were measured between them, so that each is a round of its own.

    Raises:
        MeasurementError: there are no samples, or impossible ones.
    """
    samples = tuple(sample for measured in measurements for sample in measured.samples_ns)
    rounds = tuple(len(measured.samples_ns) for measured in measurements) if in_rounds else ()
    require_samples(samples)
    interval = median_interval(samples, rounds)
    last = measurements[-1]
    return {
        "samples_ns": samples,
        "rounds": rounds,
        "median_ns": interval.median_ns,
        "low_ns": interval.low_ns,
        "high_ns": interval.high_ns,
        "copies": last.copies,
        "clock": last.clock,
        "clock_trouble": last.clock_trouble,
        "ended_by": last.ended_by,
        "measure": last.measure,
        "launches": last.launches,
        "clock_state": _one_clock_state([m.clock_state for m in measurements if m.clock_state]),
        "observed": _one_observation([m.observed for m in measurements if m.observed]),
        "energy": _one_energy([m.energy for m in measurements if m.energy]),
        "breakdown": _one_breakdown([m.breakdown for m in measurements if m.breakdown]),
    }


def _one_breakdown(found: Sequence[tuple[IntervalTimes, ...]]) -> tuple[IntervalTimes, ...]:
    """Stretches in order, each with the samples of all measurements."""
    return tuple(
        IntervalTimes(
            passes=same[0].passes,
            samples_ns=tuple(ns for each in same for ns in each.samples_ns),
        )
        for same in zip(*found, strict=True)
    )


def _one_clock_state(found: Sequence[ClockState]) -> ClockState | None:
    if not found:
        return None
    return ClockState(
        reference_ns=tuple(ns for state in found for ns in state.reference_ns),
        settled_ms=sum(state.settled_ms for state in found),
        steady=all(state.steady for state in found),
        repeated=any(state.repeated for state in found),
    )


def _one_observation(found: Sequence[Observation]) -> Observation | None:
    if not found:
        return None
    powers = [(each.power_w, each.looks) for each in found if each.power_w is not None]
    heat = [each.temperature_c for each in found if each.temperature_c is not None]
    looks = sum(count for _, count in powers)
    return Observation(
        source=found[0].source,
        looks=sum(each.looks for each in found),
        power_w=sum(watts * count for watts, count in powers) / looks if looks else None,
        core_mhz=_hull([each.core_mhz for each in found if each.core_mhz]),
        memory_mhz=_hull([each.memory_mhz for each in found if each.memory_mhz]),
        temperature_c=max(heat, default=None),
        throttled=tuple(dict.fromkeys(name for each in found for name in each.throttled)),
    )


def _hull(ranges: Sequence[Range]) -> Range | None:
    if not ranges:
        return None
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _one_energy(found: Sequence[Energy]) -> Energy | None:
    if not found:
        return None
    launches = sum(each.launches for each in found)
    return Energy(
        joules_per_launch=sum(each.joules_per_launch * each.launches for each in found) / launches,
        launches=launches,
        seconds=sum(each.seconds for each in found),
        method=found[-1].method,
    )
