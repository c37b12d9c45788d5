"""How all figures look: palette, header with the source of the data, axes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from tuner.device_info import DeviceInfo
from tuner.records import Record
from tuner.results.outcomes import of_last_device

# Okabe and Ito's colours, told apart with every kind of colour vision.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, GREY = "#CC79A7", "#56B4E9", "#000000", "#999999"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
BASELINE = "baseline"
STRATEGIES = (
    *("scalar_f32", "packed_f16", "int_dot", "matrix", "lanes", "tiles", "matrix_lanes"),
    *("packed", "workgroup", "parts", "sliced", "teams", "direct", "staged"),
    *("deterministic", "atomic", "qsa_chain"),
)
"""Each looks alike in all figures, by its place: new ones go to the end."""
TEXT, FAINT, RULE = "#222222", "#5A5A5A", "#DDDDDD"

SOFTWARE_NOTE = "software driver: proves function, not speed"
CEILING = 100.0

TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 13.0, 9.0, 8.0
_CHARACTERS_PER_INCH = 15.5
_LINE_INCHES = 0.17


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The records a figure shows, all of one device and driver, and what to say of them."""

    records: tuple[Record, ...]
    left_out: int
    software: bool

    @property
    def device(self) -> str:
        """The device's name, as in the records."""
        return self.records[0].device if self.records else "no device"

    @property
    def line(self) -> str:
        """Device, driver, date and number of trials in one line; a variant is one trial, however
        often it was timed."""
        if not self.records:
            return "no records"
        first = self.records[0]
        dates = sorted({record.time[:10] for record in self.records})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        count = len({record.variant for record in self.records})
        trials = f"n = {count:,} trial{'s' if count != 1 else ''}"
        if self.left_out:
            trials += f" ({self.left_out} with other drivers left out)"
        return f"{first.device} · {first.driver} · {when} · {trials}"


def source(records: Sequence[Record], device: DeviceInfo | None) -> Source:
    """The records of the device and driver that were measured last."""
    if not records:
        return Source(records=(), left_out=0, software=bool(device and device.is_cpu))
    kept = of_last_device(records)
    software = device is not None and device.is_cpu and device.name == kept[0].device
    return Source(records=kept, left_out=len(records) - len(kept), software=software)


def new_figure(
    width: float,
    body: float,
    *,
    title: str,
    sources: Sequence[Source],
    note: str = "",
    software: bool = False,
) -> Figure:
    """An empty figure, `width` inches wide with `body` inches below its header.

    The header says what is shown and what it was measured with. Axes added later keep clear of it.
    `software`: what is shown without sources comes from a CPU driver.
    """
    lines: list[tuple[str, str]] = []
    for each in sources:
        lines += [(line, FAINT) for line in _wrapped(each.line, width)]
        if each.software:
            lines.append((SOFTWARE_NOTE, VERMILION))
    lines += [(line, FAINT) for line in _wrapped(note, width)]
    if software:
        lines.append((SOFTWARE_NOTE, VERMILION))
    header = 0.46 + _LINE_INCHES * len(lines)
    height = header + body
    below_header = (0.0, 0.0, 1.0, body / height)
    engine = ConstrainedLayoutEngine(rect=below_header, w_pad=0.08, h_pad=0.08)
    figure = Figure(figsize=(width, height), layout=engine, facecolor="white")
    left, top = 0.12 / width, 1 - 0.10 / height
    figure.text(left, top, title, size=TITLE_SIZE, weight="bold", color=TEXT, va="top")
    for number, (line, colour) in enumerate(lines):
        below = top - (0.27 + _LINE_INCHES * number) / height
        figure.text(left, below, line, size=SMALL_SIZE, color=colour, va="top")
    return figure


def looks(names: Iterable[str], known: Sequence[str] = STRATEGIES) -> dict[str, dict[str, Any]]:
    """Colour and marker of each of `names`, in the order in which a legend has them.

    The baseline is grey; `known` look the same whatever else is in the figure; all others come
    after these. Any six neighbours differ in both colour and marker, 49 in one of them.
    """
    named = set(names)
    found: dict[str, dict[str, Any]] = {}
    if BASELINE in named:
        found[BASELINE] = {"color": GREY, "marker": MARKERS[0]}
    for place, name in enumerate([*known, *sorted(named - {*known, BASELINE})]):
        if name in named:
            turn, column = divmod(place, len(PALETTE))
            marker = MARKERS[(column + turn) % len(MARKERS)]
            found[name] = {"color": PALETTE[column], "marker": marker}
    return found


def panel_grid(panels: int, *, most_columns: int) -> tuple[int, int]:
    """Lines and columns for so many panels; at least one of each."""
    columns = min(most_columns, max(1, panels))
    return max(1, math.ceil(panels / columns)), columns


def dress(axes: Axes, *, grid: str) -> None:
    """Take away what carries no data; keep grid lines along the `grid` axis ("x" or "y")."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(labelsize=SMALL_SIZE, color=GREY, labelcolor=TEXT)
    axes.grid(visible=True, axis="x" if grid == "x" else "y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)


def legend(figure: Figure, handles: Sequence[Artist], *, columns: int) -> None:
    """What the marks mean, below the axes, in so many columns or the fewer that the width holds."""
    for number in range(min(columns, len(handles)), 0, -1):
        made = figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=number,
            frameon=False,
            fontsize=SMALL_SIZE,
        )
        if number == 1 or made.get_window_extent().width <= figure.bbox.width:
            return
        made.remove()


def empty(figure: Figure, message: str) -> Figure:
    """The figure with a message where data would be."""
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.text(0.5, 0.5, message, ha="center", va="center", size=TEXT_SIZE + 2, color=FAINT)
    return figure


def log_ticks(axes: Axes, which: str, low: float, high: float) -> None:
    """A logarithmic axis from `low` to `high` with plain numbers, as many as fit."""
    inside: list[float] = []
    # The finest of these steps within a power of ten that gives no more than eight marks.
    for steps in ((1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 7), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)):
        marks = [step * 10.0**power for power in range(-3, 12) for step in steps]
        inside = [mark for mark in marks if low <= mark <= high]
        if len(inside) <= 8:
            break
    if len(inside) < 2:
        inside = [low, high]
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_locator(FixedLocator(inside))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)


class TimeUnit(NamedTuple):
    """A unit and how many nanoseconds it has."""

    name: str
    size: float


def time_unit(nanoseconds: float) -> TimeUnit:
    """The unit in which a time has up to three digits before its point."""
    # From 999.5 on, three digits round up into the next unit.
    for unit in (TimeUnit("ns", 1.0), TimeUnit("µs", 1e3), TimeUnit("ms", 1e6)):
        if nanoseconds < 999.5 * unit.size:
            return unit
    return TimeUnit("s", 1e9)


def time_text(nanoseconds: float, unit: TimeUnit | None = None) -> str:
    """A time with three digits or more, in its own unit or in this: 25.0 µs, 1.91 ms."""
    unit = unit or time_unit(nanoseconds)
    return f"{_three_digits(nanoseconds / unit.size)} {unit.name}"


def bandwidth_text(gb_s: float) -> str:
    """GB/s with three digits or more, without the unit."""
    return f"{gb_s:,.0f}" if gb_s >= 1000 else f"{gb_s:.3g}"


def percent_text(percent: float) -> str:
    """A percentage with one decimal."""
    return f"{percent:.1f} %"


def tokens_text(tokens: float) -> str:
    """A context length the way people say it: 4k for 4,096, plain where it is no whole number."""
    whole = round(tokens)
    return f"{whole // 1024}k" if whole >= 1024 and whole % 1024 == 0 else f"{whole:,}"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _three_digits(value: float) -> str:
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def _wrapped(text: str, width: float) -> list[str]:
    room = int(width * _CHARACTERS_PER_INCH)
    return [part for line in text.splitlines() for part in textwrap.wrap(line, room)]
