"""Markdown: one table a device and family with the best variant of each problem."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tuner import kernels
from tuner.device_info import DeviceInfo
from tuner.kernels.space import describe
from tuner.records import Record
from tuner.results import clocks
from tuner.results.outcomes import BaselineOf, Outcome, interval, outcomes

COLUMNS = (
    "problem",
    "µs (95 % interval)",
    "GB/s",
    "of read bandwidth",
    "baseline, µs",
    "speed-up",
    "tied",
    "tried (failed)",
    "best variant",
)
SOFTWARE_NOTE = "Software driver: proves function, not speed."
LOWER_CLOCK = "↓"
LOWER_CLOCK_NOTE = (
    f"{LOWER_CLOCK}: on a lower clock than others; too long, if anything, and of a baseline the "
    "speed-up too large."
)


def text(
    records: Sequence[Record],
    *,
    device: DeviceInfo | None = None,
    baseline_of: BaselineOf | None = None,
) -> str:
    """Tables for all records; `device` adds a warning where its driver computes on the CPU."""
    is_gpu = device is not None and not device.is_cpu
    best_ns = clocks.fastest_ns(record.clock_state for record in records) if is_gpu else math.inf
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes(records, baseline_of=baseline_of):
        groups.setdefault((outcome.device, outcome.driver, outcome.family), []).append(outcome)
    parts = [_table(group, device, best_ns) for group in groups.values()]
    return "\n".join(parts) if parts else "No records.\n"


def _table(group: Sequence[Outcome], device: DeviceInfo | None, best_ns: float) -> str:
    """The outcomes of one family on one device; `best_ns`: the reference kernel's best time."""
    name, driver, family = group[0].device, group[0].driver, group[0].family
    newest = max(record.time for outcome in group for record in outcome.records)
    lines = [f"## {family} on {name}", "", f"{driver}, {newest[:10]}.", ""]
    if device is not None and device.is_cpu:
        lines += [SOFTWARE_NOTE, ""]
    lines.append(_line(COLUMNS))
    lines.append("|" + " --- |" + " ---: |" * (len(COLUMNS) - 2) + " --- |")
    cells = [_cells(outcome, best_ns) for outcome in group]
    lines += map(_line, cells)
    if any(LOWER_CLOCK in cell for row in cells for cell in row):
        lines += ["", LOWER_CLOCK_NOTE]
    return "\n".join(lines) + "\n"


def _cells(outcome: Outcome, reference_ns: float) -> tuple[str, ...]:
    """A row; times on a clock on which the reference kernel takes longer than that are marked."""
    failed = sum(outcome.failures.values())
    tried = f"{len(outcome.records)} ({failed})"
    best = outcome.best
    if best is None:
        return (outcome.problem.label, *["–"] * 6, tried, "none was correct")
    low, high = interval(best)
    baseline = outcome.baseline
    alone = baseline is best and len(outcome.records) == 1
    return (
        outcome.problem.label,
        f"{_time(best, reference_ns)} ({_number(low / 1000)}–{_number(high / 1000)})",
        _number(best.gb_s),
        f"{100 * best.utilisation:.1f} %" if best.utilisation is not None else "–",
        _time(baseline, reference_ns) if baseline else "–",
        f"{outcome.speedup:.1f}x" if outcome.speedup and not alone else "–",
        str(len(outcome.tied)),
        tried,
        "none but the baseline"
        if alone
        else f"`{describe(kernels.meaningful(best.family, best.values))}`",
    )


def _time(record: Record, reference_ns: float) -> str:
    mark = LOWER_CLOCK if clocks.is_lower(record, reference_ns) else ""
    return f"{_number(record.timed_ns / 1000)}{mark}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    digits = 2 if value < 10 else 1 if value < 1000 else 0
    return f"{value:,.{digits}f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
