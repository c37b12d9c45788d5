"""How a search went: every trial, the best so far, and where trials failed."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from tuner.device_info import DeviceInfo
from tuner.plots import problems, style
from tuner.records import FINAL, REFERENCE, Record
from tuner.results import Outcome, outcomes
from tuner.results.outcomes import BaselineOf

MAX_PANELS = 6
FAILURES = {
    "constraints": ("|", style.BLACK),
    "compile": ("s", style.PURPLE),
    "runtime": ("X", style.ORANGE),
    "timeout": ("^", style.GREEN),
    "correctness": ("D", style.VERMILION),
}
"""Marker and colour of each state of failure."""


def search_history(
    records: Sequence[Record],
    device: DeviceInfo | None = None,
    *,
    baseline_of: BaselineOf | None = None,
) -> Figure:
    """Time of each trial and of the best so far against the trial's number, a panel a problem.

    Where the best were measured again at the end, what that said of the best is told beside it.
    With more problems than panels, those with the most trials are shown.
    """
    again = _measured_again(records, device, baseline_of)
    # The final measurement is no part of the search.
    source = style.source([r for r in records if r.note not in (FINAL, REFERENCE)], device)
    found = outcomes(source.records, baseline_of=baseline_of)
    most = sorted(found, key=lambda outcome: -len(outcome.records))[:MAX_PANELS]
    shown = problems.in_order(most)
    lines, columns = style.panel_grid(len(shown), most_columns=2)
    figure = style.new_figure(
        9.0,
        0.7 + 2.2 * lines,
        title="Search history: time of each trial, and the best so far",
        sources=[source],
        note=(
            f"{len(shown)} of {len(found)} problems shown, those with the most trials"
            if len(found) > len(shown)
            else ""
        ),
    )
    if not shown:
        return style.empty(figure, "no trials yet")
    for number, (outcome, name) in enumerate(zip(shown, problems.names(shown), strict=True)):
        axes = figure.add_subplot(lines, columns, number + 1)
        _panel(axes, outcome, again.get((outcome.family, outcome.problem.key)))
        axes.set_title(name.replace("\n", ", "), size=style.TEXT_SIZE, loc="left")
        if number + columns >= len(shown):
            axes.set_xlabel("trial", size=style.SMALL_SIZE, color=style.TEXT)
    style.legend(figure, _handles(shown), columns=8)
    return figure


def _measured_again(
    records: Sequence[Record], device: DeviceInfo | None, baseline_of: BaselineOf | None
) -> dict[tuple[str, str], float]:
    """By family and problem's key, where finals were held, the time that they gave the best, ns."""
    known = outcomes(style.source(records, device).records, baseline_of=baseline_of)
    return {
        (outcome.family, outcome.problem.key): outcome.best.median_ns
        for outcome in known
        if outcome.best is not None and outcome.best.note == FINAL and outcome.best.median_ns
    }


def _panel(axes: Axes, outcome: Outcome, again_ns: float | None) -> None:
    numbered = list(enumerate(outcome.records, 1))
    fastest_ns = min((r.timed_ns for _, r in numbered if r.is_timed), default=0.0)
    unit = style.time_unit(fastest_ns)
    timed = [(n, r.timed_ns / unit.size) for n, r in numbered if r.is_timed]
    axes.set_xlim(0, len(numbered) + 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    style.dress(axes, grid="y")
    if timed:
        axes.set_ylabel(f"time, {unit.name}", size=style.SMALL_SIZE, color=style.TEXT)
        axes.plot(*zip(*timed, strict=True), ".", color=style.SKY, markersize=5)
        best = _best_so_far(timed, len(numbered))
        axes.plot(*zip(*best, strict=True), color=style.BLUE, linewidth=1.8)
        if outcome.baseline is not None and outcome.baseline.median_ns:
            level = outcome.baseline.median_ns / unit.size
            axes.axhline(level, color=style.GREY, linestyle="--", linewidth=1.2)
        times = [time for _, time in timed]
        # Room below for the line of text and the failures' marks, so that they hide no trial.
        room = max(1.6, (max(times) / min(times)) ** 0.14)
        style.log_ticks(axes, "y", min(times) / room, max(times) * 1.25)
        told = style.time_text(fastest_ns, unit)
        if again_ns is not None:
            told += f", measured again {style.time_text(again_ns, unit)}"
        axes.annotate(
            told,
            best[-1],
            xytext=(-2, -3),
            textcoords="offset points",
            # A single trial stands in the middle: left of it there is too little room.
            ha="right" if len(numbered) > 1 else "center",
            va="top",
            size=style.SMALL_SIZE,
            color=style.BLUE,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
        )
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no correct trial", transform=axes.transAxes, ha="center")
    _mark_failures(axes, numbered)


def _mark_failures(axes: Axes, numbered: Sequence[tuple[int, Record]]) -> None:
    """A mark on the axis for each trial that failed."""
    for state, (marker, colour) in FAILURES.items():
        at = [n for n, record in numbered if record.state == state]
        if not at:
            continue  # An empty line that is not clipped defeats the layout.
        axes.plot(
            at,
            [0.0] * len(at),
            marker=marker,
            color=colour,
            linestyle="none",
            markersize=5,
            transform=axes.get_xaxis_transform(),
            clip_on=False,
            zorder=5,
        )


def _best_so_far(timed: Sequence[tuple[int, float]], last: int) -> list[tuple[float, float]]:
    """Corners of the staircase from the first correct trial to the last trial."""
    corners: list[tuple[float, float]] = [timed[0]]
    for number, time in timed[1:]:
        if time < corners[-1][1]:
            corners += [(number, corners[-1][1]), (number, time)]
    return [*corners, (last, corners[-1][1])]


def _handles(shown: Sequence[Outcome]) -> list[Line2D]:
    handles = [
        Line2D([], [], color=style.SKY, marker=".", linestyle="none", label="trial"),
        Line2D([], [], color=style.BLUE, linewidth=1.8, label="best so far"),
    ]
    if any(outcome.baseline for outcome in shown):
        handles.append(Line2D([], [], color=style.GREY, linestyle="--", label="baseline"))
    failed = {record.state for outcome in shown for record in outcome.records}
    handles += [
        Line2D([], [], color=colour, marker=marker, linestyle="none", label=f"failed: {state}")
        for state, (marker, colour) in FAILURES.items()
        if state in failed
    ]
    return handles
