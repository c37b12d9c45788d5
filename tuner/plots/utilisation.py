"""How near the kernels come to the device's read bandwidth, by problem and by context length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from tuner.device_info import DeviceInfo
from tuner.plots import problems, style
from tuner.problems import Problem
from tuner.records import Record
from tuner.results import Outcome, Peer, best_by_context, outcomes
from tuner.results.outcomes import BaselineOf

MAX_PANELS = 9
TICKS_APART = 0.15
"""Part of the axis between two contexts that are both named: names need room."""
PEER_LINE: dict[str, Any] = {
    "linestyle": ":",
    "linewidth": 1.1,
    "markersize": 4,
    "fillstyle": "none",
}
AXIS = "% of the device's measured read bandwidth"
SIZE_AXES = {"context": "longest context, tokens"}
"""What the axis of a panel is called; of other sizes than these as their field."""


def utilisation_by_problem(
    records: Sequence[Record],
    device: DeviceInfo | None = None,
    *,
    baseline_of: BaselineOf | None = None,
) -> Figure:
    """Bars for the baseline and the best variant of each problem, up to the ceiling of 100 %."""
    source = style.source(records, device)
    shown = problems.in_order(outcomes(source.records, baseline_of=baseline_of))
    figure = style.new_figure(
        9.0,
        1.1 + 0.42 * max(3, len(shown)),
        title="Utilisation of the read bandwidth, by problem",
        sources=[source],
    )
    if not shown:
        return style.empty(figure, "no trials yet")
    axes = figure.add_subplot()
    for place, outcome in enumerate(shown):
        _bar(axes, place + 0.19, outcome.baseline, style.GREY)
        _bar(axes, place - 0.19, outcome.best, style.BLUE, outcome.speedup)
        if outcome.best is None:
            axes.text(1, place - 0.19, "no correct variant", size=style.SMALL_SIZE, va="center")
    axes.set_yticks(range(len(shown)), problems.names(shown))
    axes.set_ylim(len(shown) - 0.45, -0.55)
    ceiling = max([style.CEILING, *[_percent(o.best) for o in shown]])
    # Room for the values behind the longest bar; ticks stop at the ceiling.
    axes.set_xlim(0, ceiling * 1.25)
    axes.set_xticks([tick for tick in range(0, 1000, 20) if tick <= ceiling])
    axes.axvline(style.CEILING, color=style.VERMILION, linestyle="--", linewidth=1.2, zorder=2.5)
    axes.set_xlabel(AXIS, size=style.TEXT_SIZE, color=style.TEXT)
    style.dress(axes, grid="x")
    style.legend(
        figure,
        [
            Line2D([], [], color=style.BLUE, linewidth=6, label="best variant"),
            Line2D([], [], color=style.GREY, linewidth=6, label="baseline"),
            Line2D([], [], color=style.VERMILION, linestyle="--", label=_ceiling_label(source)),
        ],
        columns=3,
    )
    return figure


def utilisation_by_context(
    records: Sequence[Record],
    device: DeviceInfo | None = None,
    *,
    baseline_of: BaselineOf | None = None,
    peers: Sequence[Peer] = (),
) -> Figure:
    """Best utilisation of each strategy against context length, a panel per batch and geometry.

    Peers are drawn dotted, each by the bytes of its own cache.
    """
    source = style.source(records, device)
    panels = _panels(problems.in_order(outcomes(source.records, baseline_of=baseline_of)), peers)
    # Those with peers to compare, contexts, long lines and many of them tell most.
    chosen = sorted(
        panels,
        key=lambda panel: (
            not panel.peers,
            panel.size != "context",
            -panel.contexts,
            -len(panel.lines),
        ),
    )[:MAX_PANELS]
    shown = [panel for panel in panels if panel in chosen]
    alike = len({panel.size for panel in shown}) == 1
    lines, columns = style.panel_grid(len(shown), most_columns=3)
    figure = style.new_figure(
        max(6.5, 3.3 * columns),
        0.6 + 2.5 * lines,
        title="Utilisation against context length, best of each strategy",
        sources=[source],
        note=f"{MAX_PANELS} of {len(panels)} batches shown" if len(panels) > MAX_PANELS else "",
    )
    if not shown:
        return style.empty(figure, "no correct trials yet")
    looks = style.looks(name for panel in shown for name in panel.lines)
    kinds = sorted({peer.kind for peer in peers})
    peer_looks = style.looks((kind for panel in shown for kind in panel.peers), kinds)
    # One scale for all panels, so that they can be compared.
    top = max([style.CEILING, *[y for p in shown for line in p.lines.values() for _, y in line]])
    for number, panel in enumerate(shown):
        axes = figure.add_subplot(lines, columns, number + 1)
        _draw(axes, panel, looks | peer_looks)
        axes.set_ylim(0, top * 1.06)
        if number % columns == 0:
            axes.set_ylabel("% of read bandwidth", size=style.SMALL_SIZE, color=style.TEXT)
        if number + columns >= len(shown) or not alike:
            axes.set_xlabel(
                SIZE_AXES.get(panel.size, panel.size), size=style.SMALL_SIZE, color=style.TEXT
            )
    handles = [Line2D([], [], label=name, **look) for name, look in looks.items()]
    handles += [
        Line2D([], [], label=f"peers, {kind}", **look, **PEER_LINE)
        for kind, look in peer_looks.items()
    ]
    handles.append(
        Line2D([], [], color=style.VERMILION, linestyle="--", label=_ceiling_label(source))
    )
    style.legend(figure, handles, columns=4)
    return figure


def _draw(axes: Axes, panel: _Panel, looks: Mapping[str, dict[str, Any]]) -> None:
    """The lines of a panel, of strategies and of peers, each in its look."""
    for name, points in panel.lines.items():
        axes.plot(*zip(*points, strict=True), **looks[name], markersize=5, linewidth=1.6)
    for kind, points in panel.peers.items():
        axes.plot(*zip(*points, strict=True), **looks[kind], **PEER_LINE)
    axes.axhline(style.CEILING, color=style.VERMILION, linestyle="--", linewidth=1.0)
    axes.set_title(panel.name, size=style.TEXT_SIZE, color=style.TEXT, loc="left")
    drawn = (*panel.lines.values(), *panel.peers.values())
    _token_axis(axes, sorted({x for line in drawn for x, _ in line}))
    style.dress(axes, grid="y")


class _Panel(NamedTuple):
    """`lines` has (context, utilisation in %) for each strategy, by context; `peers` likewise.

    `size` is the problems' field that stands for the context: some have rows or parts instead.
    """

    name: str
    size: str
    lines: dict[str, list[tuple[int, float]]]
    peers: dict[str, list[tuple[int, float]]]

    @property
    def contexts(self) -> int:
        """How many contexts there are points at."""
        return len({x for line in self.lines.values() for x, _ in line})


def _panels(listed: Sequence[Outcome], peers: Sequence[Peer]) -> list[_Panel]:
    groups: dict[tuple[Any, ...], dict[str, dict[int, float]]] = {}
    known: dict[tuple[Any, ...], Problem] = {}
    several = len({outcome.family for outcome in listed}) > 1
    for outcome in listed:
        problem = outcome.problem
        key = (problem.series, outcome.family, problem.order[:-1])
        known[key] = problem
        for record in outcome.records:
            if record.is_timed and record.utilisation is not None:
                strategy = _strategy(record, outcome.baseline)
                line = groups.setdefault(key, {}).setdefault(strategy, {})
                best = line.get(problem.extent, 0.0)
                line[problem.extent] = max(best, 100 * record.utilisation)
    return [
        _Panel(
            f"{key[0]}\n{key[1]}" if several else str(key[0]),
            known[key].SIZES[-1],
            {name: sorted(line.items()) for name, line in sorted(lines.items())},
            _peers_within(peers, known[key], max(x for line in lines.values() for x in line)),
        )
        for key, lines in groups.items()
    ]


def _peers_within(
    peers: Sequence[Peer], problem: Problem, longest: int
) -> dict[str, list[tuple[int, float]]]:
    return best_by_context(p for p in peers if p.solves(problem) and p.context <= longest)


def _strategy(record: Record, baseline: Record | None) -> str:
    """A variant's strategy; of a family that has no such parameter it is the baseline's, or not."""
    if "strategy" in record.values:
        return str(record.values["strategy"])
    is_baseline = baseline is not None and record.values == baseline.values
    return style.BASELINE if is_baseline else record.family


def _token_axis(axes: Axes, contexts: Sequence[int]) -> None:
    """A binary logarithmic axis; an empty context stands one octave left of a single token."""
    apart = TICKS_APART * (_octaves(contexts[-1]) - _octaves(contexts[0]))
    ticks: list[float] = []
    for context in contexts:
        if not ticks or _octaves(context) >= apart + _octaves(ticks[-1]):
            ticks.append(float(context))
    if contexts[0] == 0:
        axes.set_xscale("symlog", base=2, linthresh=1, linscale=0.5)
    else:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.tokens_text(value)))
    axes.set_xlim(contexts[0] / 1.5 or -0.5, contexts[-1] * 1.5 or 0.5)


def _octaves(context: float) -> float:
    """Where a context stands on the axis, in octaves from none on."""
    return 1 + math.log2(context) if context else 0.0


def _bar(
    axes: Axes, place: float, record: Record | None, colour: str, speedup: float | None = None
) -> None:
    if record is None or record.median_ns is None:
        return
    value = _percent(record)
    axes.barh(place, value, height=0.36, color=colour)
    share = style.percent_text(value) if record.utilisation is not None else "not calibrated"
    label = f"{share}   {style.time_text(record.median_ns)}"
    if speedup is not None:
        label += f"   {speedup:.1f}x"
    axes.text(
        value + 1,
        place,
        label,
        size=style.SMALL_SIZE - 0.5,
        va="center",
        color=style.TEXT,
        # The ceiling may run behind a value.
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2},
        zorder=4,
    )


def _percent(record: Record | None) -> float:
    return 100 * record.utilisation if record and record.utilisation is not None else 0.0


def _ceiling_label(source: style.Source) -> str:
    measured = [record.read_gb_s for record in source.records if record.read_gb_s]
    if not measured:
        return "ceiling"
    low, high = (style.bandwidth_text(each) for each in (min(measured), max(measured)))
    text = low if low == high else f"{low} to {high}"
    return f"read bandwidth measured in the same run, {text} GB/s"
