"""Time against energy, a panel a problem: every variant, and the front of those that none beats."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tuner.device_info import DeviceInfo
from tuner.plots import problems, style
from tuner.records import Record
from tuner.results import Outcome, outcomes
from tuner.results.front import front

MAX_PANELS = 6


def energy_against_time(records: Sequence[Record], device: DeviceInfo | None = None) -> Figure:
    """Energy of a decoded token against the time of a launch, for variants that have both."""
    source = style.source([r for r in records if r.energy_j_per_token], device)
    found = problems.in_order(outcomes(source.records))
    shown = found[:MAX_PANELS]
    lines, columns = style.panel_grid(len(shown), most_columns=3)
    figure = style.new_figure(
        max(6.0, 3.3 * columns),
        0.6 + 2.6 * lines,
        title="Energy of a decoded token against time",
        sources=[source],
        note=f"{MAX_PANELS} of {len(found)} problems shown" if len(found) > MAX_PANELS else "",
    )
    if not shown:
        return style.empty(figure, "no energy was measured")
    for number, (outcome, name) in enumerate(zip(shown, problems.names(shown), strict=True)):
        axes = figure.add_subplot(lines, columns, number + 1)
        _panel(axes, outcome)
        axes.set_title(name.replace("\n", ", "), size=style.TEXT_SIZE, loc="left")
        if number % columns == 0:
            axes.set_ylabel("mJ a token", size=style.SMALL_SIZE, color=style.TEXT)
        if number + columns >= len(shown):
            axes.set_xlabel("time of a launch, µs", size=style.SMALL_SIZE, color=style.TEXT)
        style.dress(axes, grid="y")
    style.legend(
        figure,
        [
            Line2D([], [], color=style.GREY, marker="o", linestyle="", label="variant"),
            Line2D([], [], color=style.BLUE, marker="o", label="none is better in both"),
        ],
        columns=2,
    )
    return figure


def _panel(axes: Axes, outcome: Outcome) -> None:
    best = front(outcome.records)
    axes.plot(*_points(outcome.records), "o", color=style.GREY, markersize=4, alpha=0.7)
    axes.plot(*_points(best), "o-", color=style.BLUE, markersize=5, linewidth=1.4)


def _points(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    priced = [
        (record.median_ns / 1e3, 1e3 * record.energy_j_per_token)
        for record in records
        if record.median_ns and record.energy_j_per_token
    ]
    return [x for x, _ in priced], [y for _, y in priced]
