"""What a device moves in a second, by the size of what it goes through."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from tuner.device_info import DeviceInfo
from tuner.plots import style
from tuner.records import Calibration, Curve

_LOOKS = {
    "read": (style.BLUE, "o"),
    "write": (style.ORANGE, "s"),
    "copy": (style.GREEN, "^"),
}
_MIB = 2**20
_EVERY = 2
"""Powers of two between two marks of the size axis."""


def bandwidth_curves(calibration: Calibration, device: DeviceInfo | None = None) -> Figure:
    """Read, write and copy bandwidth against size, beside the read bandwidth of the memory.

    Small buffers are gone through many times in a launch: where a cache holds them, it shows as a
    plateau.
    """
    figure = style.new_figure(
        8.0,
        3.9,
        title="Bandwidth against size",
        sources=[],
        note=f"{calibration.device} · {calibration.driver} · {calibration.time[:10]}",
        software=device is not None and device.is_cpu,
    )
    curves = [curve for curve in calibration.curves if curve.points]
    if not curves:
        return style.empty(figure, "no curves yet: run `tuner calibrate`")
    axes = figure.add_subplot()
    for curve in curves:
        colour, marker = _LOOKS[curve.transfer]
        sizes, speeds = zip(*curve.points, strict=True)
        axes.plot(sizes, speeds, color=colour, marker=marker, markersize=5, linewidth=1.6)
    axes.axhline(calibration.read_gb_s, color=style.VERMILION, linestyle="--", linewidth=1.2)
    highest = max(speed for curve in curves for _, speed in curve.points)
    axes.set_ylim(0, 1.08 * max(highest, calibration.read_gb_s))
    _size_axis(axes, curves)
    axes.set_xlabel("size of each buffer", size=style.TEXT_SIZE, color=style.TEXT)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_ylabel("GB/s", size=style.TEXT_SIZE, color=style.TEXT)
    style.dress(axes, grid="y")
    ceiling = f"read from memory, nothing cached: {calibration.read_gb_s:,.4g} GB/s"
    style.legend(
        figure,
        [
            *(_handle(curve) for curve in curves),
            Line2D([], [], color=style.VERMILION, linestyle="--", label=ceiling),
        ],
        columns=4,
    )
    return figure


def _handle(curve: Curve) -> Line2D:
    colour, marker = _LOOKS[curve.transfer]
    both = " (in and out)" if curve.transfer == "copy" else ""
    return Line2D([], [], color=colour, marker=marker, markersize=5, label=curve.transfer + both)


def _size_axis(axes: Axes, curves: list[Curve]) -> None:
    sizes = sorted({nbytes for curve in curves for nbytes, _ in curve.points})
    axes.set_xscale("log", base=2)
    marks = [2.0**power for power in range(10, 40, _EVERY)]
    axes.xaxis.set_major_locator(FixedLocator([m for m in marks if sizes[0] <= m <= sizes[-1]]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _size_text(value)))


def _size_text(nbytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", _MIB)):
        if nbytes >= size:
            return f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes / 2**10:,.0f} KiB"
