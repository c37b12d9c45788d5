"""Ratios of a comparison: a point and its interval for each problem."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tuner.plots import style
from tuner.results import Pair
from tuner.timing import Verdict

_LOOKS: dict[Verdict, tuple[str, str]] = {
    "faster": (style.GREEN, "o"),
    "slower": (style.VERMILION, "D"),
    "no difference shown": (style.GREY, "s"),
}
_LEAST_REACH = 1.02
"""The axis shows at least this much to both sides of equal times."""
_WIDE = 1.7
"""From this range of ratios on the axis is logarithmic."""


def ratios(pairs: Sequence[Pair], *, names: tuple[str, str], limit: float | None = None) -> Figure:
    """B's time over A's by problem, with its 98 % interval; `limit` is drawn if given.

    `names` says what A and B are.
    """
    devices = dict.fromkeys(
        f"{name} = {which} · {record.device} · {record.driver} · {record.time[:10]}"
        for pair in pairs[:1]
        for name, which, record in (("A", names[0], pair.a), ("B", names[1], pair.b))
    )
    figure = style.new_figure(
        8.5,
        1.5 + 0.34 * max(2, len(pairs)),
        title="Time of B over time of A",
        sources=[],
        note="\n".join(devices),
    )
    if not pairs:
        return style.empty(figure, "nothing to compare")
    axes = figure.add_subplot()
    for row, pair in enumerate(pairs):
        _draw(axes, row, pair)
    _dress(axes, pairs, limit)
    style.legend(
        figure,
        [
            Line2D([], [], color=colour, marker=marker, label=f"B {verdict}".replace("B no", "no"))
            for verdict, (colour, marker) in _LOOKS.items()
        ],
        columns=3,
    )
    return figure


def _draw(axes: Axes, row: int, pair: Pair) -> None:
    found = pair.comparison
    colour, marker = _LOOKS[found.verdict]
    axes.plot((found.low, found.high), (row, row), color=colour, linewidth=2.2)
    axes.plot(found.ratio, row, color=colour, marker=marker, markersize=6)
    axes.annotate(
        f"{found.ratio:#.4g}",
        (found.high, row),
        xytext=(8, 0),
        textcoords="offset points",
        size=style.SMALL_SIZE - 1,
        va="center",
        color=style.TEXT,
    )


def _dress(axes: Axes, pairs: Sequence[Pair], limit: float | None) -> None:
    several = len({pair.family for pair in pairs}) > 1
    labels = [f"{p.problem.label}\n{p.family}" if several else p.problem.label for p in pairs]
    axes.set_yticks(range(len(pairs)), labels)
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    axes.axvline(1.0, color=style.BLACK, linewidth=1.0)
    edges = [pair.comparison.low for pair in pairs] + [pair.comparison.high for pair in pairs]
    if limit is not None:
        edges.append(1 + limit)
        axes.axvline(1 + limit, color=style.VERMILION, linestyle="--", linewidth=1.2)
    low, high = min(*edges, 1 / _LEAST_REACH), max(*edges, _LEAST_REACH)
    # Room on the right for the last value.
    reach = high / low
    low, high = low / reach**0.06, high * reach**0.14
    if reach > _WIDE:
        style.log_ticks(axes, "x", low, high)
    else:
        axes.set_xlim(low, high)
    axes.set_xlabel("time of B / time of A (left of 1: B is faster)", size=style.TEXT_SIZE)
    style.dress(axes, grid="x")
