"""Devices side by side: how much of its own bandwidth each uses, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tuner.device_info import DeviceInfo
from tuner.plots import problems, style
from tuner.problems import Problem
from tuner.records import Record
from tuner.results import Outcome, outcomes
from tuner.results.outcomes import BaselineOf


class Results(NamedTuple):
    """The results of one device, for a comparison."""

    records: Sequence[Record]
    device: DeviceInfo | None = None


def device_comparison(
    results: Sequence[Results], *, baseline_of: BaselineOf | None = None
) -> Figure:
    """Best variant per problem on each device: utilisation as bars, time as dots.

    Problems that were tuned on one device only are shown with what there is.
    """
    sources = [style.source(each.records, each.device) for each in results]
    tables = [
        {(o.family, o.problem): o for o in outcomes(source.records, baseline_of=baseline_of)}
        for source in sources
    ]
    every: dict[tuple[str, Problem], Outcome] = {}
    for table in tables:
        every |= {key: outcome for key, outcome in table.items() if key not in every}
    rows = problems.in_order(every.values())
    height = 0.62 / max(1, len(sources))
    figure = style.new_figure(
        11.0,
        1.2 + max(0.4, 0.2 * len(sources)) * max(3, len(rows)),
        title="Devices compared: best variant of each problem",
        sources=sources,
    )
    if not rows:
        return style.empty(figure, "no trials yet")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    times: list[float] = []
    for row, shown in enumerate(rows):
        for number, table in enumerate(tables):
            outcome = table.get((shown.family, shown.problem))
            place = row + (number - (len(tables) - 1) / 2) * height
            times += _draw((left, right), outcome, place=place, height=height, number=number)
    _dress(left, right, rows, times)
    style.legend(
        figure,
        [
            Line2D([], [], color=_colour(i), marker=_marker(i), linewidth=5, label=source.device)
            for i, source in enumerate(sources)
        ],
        columns=3,
    )
    return figure


def _draw(
    axes: tuple[Axes, Axes], outcome: Outcome | None, *, place: float, height: float, number: int
) -> list[float]:
    """Draw one device's row; returns the time in µs if there is one."""
    left, right = axes
    best = outcome.best if outcome else None
    if best is None or best.median_ns is None:
        why = "not tuned" if outcome is None else "no correct variant"
        left.text(0.7, place, why, size=style.SMALL_SIZE - 1, va="center", color=style.FAINT)
        return []
    percent = 100 * (best.utilisation or 0.0)
    left.barh(place, percent, height=height * 0.92, color=_colour(number))
    label = style.percent_text(percent) if best.utilisation is not None else "not calibrated"
    left.text(percent + 0.7, place, label, size=style.SMALL_SIZE - 1, va="center")
    time_us = best.median_ns / 1000
    right.plot(time_us, place, marker=_marker(number), color=_colour(number), markersize=5)
    right.annotate(
        style.time_text(best.median_ns),
        (time_us, place),
        xytext=(6, 0),
        textcoords="offset points",
        size=style.SMALL_SIZE - 1,
        va="center",
    )
    return [time_us]


def _dress(left: Axes, right: Axes, rows: Sequence[Outcome], times: Sequence[float]) -> None:
    left.set_yticks(range(len(rows)), problems.names(rows))
    left.set_ylim(len(rows) - 0.45, -0.55)
    left.set_xlim(0, max(112.0, left.get_xlim()[1] * 1.05))
    left.set_xticks(range(0, 101, 20))
    left.axvline(style.CEILING, color=style.VERMILION, linestyle="--", linewidth=1.2)
    left.set_xlabel("% of the device's own read bandwidth", size=style.TEXT_SIZE)
    right.set_xlabel("time, µs", size=style.TEXT_SIZE)
    for axes in (left, right):
        style.dress(axes, grid="x")
    right.tick_params(axis="y", length=0)
    if times:
        # Room on the right for the last value.
        style.log_ticks(right, "x", min(times) / 1.5, max(times) * 6)


def _colour(number: int) -> str:
    return style.PALETTE[number % len(style.PALETTE)]


def _marker(number: int) -> str:
    return style.MARKERS[number % len(style.MARKERS)]
