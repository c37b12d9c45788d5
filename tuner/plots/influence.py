"""Which parameters matter: the best time each of their values allows, against the best of all."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tuner import kernels
from tuner.device_info import DeviceInfo
from tuner.errors import UnknownNameError
from tuner.plots import style
from tuner.records import Record
from tuner.results import outcomes
from tuner.results.outcomes import BaselineOf

MAX_PANELS = 9
Value = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """What one parameter does.

    `slowdowns` gives for each value, problem by problem, the best time with this value over the
    best time of all (1: the best variant has it). `explained` is the share of the variance of the
    logarithm of the time that the parameter alone explains, adjusted for how many values it has
    (epsilon squared), averaged over problems; None where no problem has more variants than values.
    """

    parameter: str
    slowdowns: Mapping[Value, tuple[float, ...]]
    explained: float | None


def influences(
    records: Sequence[Record], *, baseline_of: BaselineOf | None = None
) -> tuple[Influence, ...]:
    """Every parameter with at least two values among the correct records, strongest first, those
    of which too little is known last.

    The baseline is left out: it differs from the rest in everything. A variant says nothing of a
    parameter that it has no use for.
    """
    slowdowns: dict[str, dict[Value, list[float]]] = defaultdict(lambda: defaultdict(list))
    shares: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes(records, baseline_of=baseline_of):
        timed = [
            (kernels.meaningful(record.family, record.values), record.timed_ns)
            for record in outcome.records
            if record.is_timed and record is not outcome.baseline
        ]
        if not timed:
            continue
        best = min(time for _, time in timed)
        for name in dict.fromkeys(name for values, _ in timed for name in values):
            by_value: dict[Value, list[float]] = defaultdict(list)
            for values, time in timed:
                if name in values:
                    by_value[values[name]].append(time)
            for value, times in by_value.items():
                slowdowns[name][value].append(min(times) / best)
            share = _explained(list(by_value.values()))
            if share is not None:
                shares[name].append(share)
    found = [
        Influence(
            parameter=name,
            slowdowns={value: tuple(slowdowns[name][value]) for value in slowdowns[name]},
            explained=fmean(shares[name]) if shares[name] else None,
        )
        for name in slowdowns
        if len(slowdowns[name]) > 1
    ]
    return tuple(sorted(found, key=_weight))


def _weight(influence: Influence) -> tuple[float, str]:
    explained = influence.explained
    return math.inf if explained is None else -explained, influence.parameter


def parameter_influence(
    records: Sequence[Record],
    device: DeviceInfo | None = None,
    *,
    baseline_of: BaselineOf | None = None,
) -> Figure:
    """A panel a parameter: slow-down of the best variant with each value, a dot a problem.

    Of several families the one with the most trials is shown.
    """
    source = style.source(records, device)
    family = (
        max(Counter(r.family for r in source.records).items(), key=lambda i: i[1])[0]
        if source.records
        else ""
    )
    ours = [record for record in source.records if record.family == family]
    found = influences(ours, baseline_of=baseline_of)
    shown = found[:MAX_PANELS]
    lines, columns = style.panel_grid(len(shown), most_columns=3)
    note = (
        f"{family} without its baseline · a dot is a problem, the line their median · percentages: "
        "share of the variance of log time that the parameter alone explains, adjusted for the "
        "number of its values"
    )
    if len(found) > len(shown):
        note += " · least important, not shown: " + ", ".join(
            i.parameter for i in found[MAX_PANELS:]
        )
    figure = style.new_figure(
        max(8.4, 3.2 * columns),
        0.4 + 2.4 * lines,
        title="Influence of the parameters: best time with a value, against the best of all",
        sources=[source],
        note=note if shown else "",
    )
    if not shown:
        return style.empty(
            figure,
            "nothing to compare yet: beside the baseline, two correct variants\n"
            "of one problem are needed that differ in a parameter",
        )
    top = max(s for each in shown for values in each.slowdowns.values() for s in values)
    for number, each in enumerate(shown):
        axes = figure.add_subplot(lines, columns, number + 1)
        _panel(axes, each, _ordered(family, each), top)
        if number % columns == 0:
            axes.set_ylabel("time / best time", size=style.SMALL_SIZE, color=style.TEXT)
    return figure


def _panel(axes: Axes, influence: Influence, values: Sequence[Value], top: float) -> None:
    style.dress(axes, grid="y")
    for place, value in enumerate(values):
        dots = influence.slowdowns[value]
        middle = median(dots)
        offsets = [0.5 * (i / max(1, len(dots) - 1) - 0.5) for i in range(len(dots))]
        axes.plot(
            [place + offset for offset in offsets],
            dots,
            "o",
            color=style.BLUE,
            markersize=3.5,
            alpha=0.6,
            markeredgewidth=0,
        )
        axes.hlines(middle, place - 0.36, place + 0.36, color=style.VERMILION, linewidth=2)
    style.log_ticks(axes, "y", 0.95, max(1.5, top * 1.15))
    labels = [str(value) for value in values]
    # Labels side by side where they fit, else turned.
    turned = len(labels) * max(map(len, labels)) > 30
    axes.set_xticks(
        range(len(labels)),
        labels,
        rotation=90 if len(labels) > 8 else 45 if turned else 0,
        ha="right" if turned and len(labels) <= 8 else "center",
        rotation_mode="anchor" if turned and len(labels) <= 8 else "default",
    )
    axes.set_xlim(-0.6, len(labels) - 0.4)
    share = influence.explained
    axes.set_title(
        f"{influence.parameter}: "
        + ("too few trials to tell" if share is None else f"{100 * share:.0f} %"),
        size=style.TEXT_SIZE,
        color=style.TEXT,
        loc="left",
    )


def _ordered(family: str, influence: Influence) -> list[Value]:
    """The values in the order the family declares, or by number and name if it is unknown."""
    found = sorted(influence.slowdowns, key=lambda value: (isinstance(value, str), value))
    try:
        declared = list(kernels.family(family).parameter(influence.parameter).values)
    except UnknownNameError:
        return found
    return sorted(found, key=lambda v: declared.index(v) if v in declared else len(declared))


def _explained(groups: Sequence[Sequence[float]]) -> float | None:
    """Epsilon squared of log time: the variance between the groups' means over the whole, without
    what as many groups explain by chance; None for groups of one."""
    logs = [[math.log(time) for time in group] for group in groups]
    every = [value for group in logs for value in group]
    mean = fmean(every)
    whole = sum((value - mean) ** 2 for value in every)
    if len(every) <= len(logs):
        return None
    if whole <= 0:
        return 0.0
    within = whole - sum(len(group) * (fmean(group) - mean) ** 2 for group in logs)
    return max(0.0, 1 - within / (len(every) - len(logs)) * (len(every) - 1) / whole)
