"""`calibrate`: what the device can do at best, as a table and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli import options
from tuner.cli.output import bandwidth, mebibytes, microseconds, note, print_json, print_table, say

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.records import Calibration, Observation
    from tuner.results import Store


def calibrate(
    *,
    device: options.Device = None,
    out: options.Out = options.RESULTS,
    cache: options.Cache = None,
    in_process: options.InProcess = False,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the bandwidth curves, too.")] = False,
    json: options.Json = False,
) -> None:
    """Measure and store what the device can do.

    That is: read, write and copy bandwidth at each size, the time of an empty launch, and what its
    sensors read.
    """
    from tuner import calibration
    from tuner.cli.session import open_store, opened, session_name, warn_of_cpu

    with (
        opened(device, cache=cache, in_process=in_process) as open_device,
        open_store(out, open_device.info) as store,
    ):
        warn_of_cpu(open_device.info)
        note(f"{open_device.info.name} ({open_device.info.driver}): calibrating")
        measured = calibration.full(open_device.runner, session_name(), reason="asked for")
        store.append_calibration(measured)
        picture = _draw(store, measured) if plot else None
    if json:
        print_json(measured)
        return
    _print_curves(measured)
    say()
    for line in _lines(measured):
        say(line)
    if picture is not None:
        say(str(picture))


def _draw(store: Store, measured: Calibration) -> Path:
    from tuner.cli.report import PLOTS_FOLDER
    from tuner.plots import bandwidth_curves, save

    figure = bandwidth_curves(measured, store.device())
    return save(figure, store.folder / PLOTS_FOLDER / "bandwidth.png")


def _print_curves(measured: Calibration) -> None:
    columns = [f"{curve.transfer} GB/s" for curve in measured.curves]
    found = [dict(curve.points) for curve in measured.curves]
    sizes = sorted({nbytes for points in found for nbytes in points})
    print_table(
        ("size", *columns),
        [(_size(n), *(bandwidth(points.get(n)) for points in found)) for n in sizes],
        right=("size", *columns),
    )


def _size(nbytes: int) -> str:
    return mebibytes(nbytes) if nbytes >= 2**20 else f"{nbytes / 2**10:,.0f} KiB"


def _lines(measured: Calibration) -> list[str]:
    ceiling = f"{bandwidth(measured.read_gb_s)} GB/s from memory ({measured.method})"
    lines = [f"{measured.device} reads {ceiling}", *launch_floors(measured)]
    if measured.submission_ns is not None:
        lines.append(f"empty submission: {microseconds(measured.submission_ns)} µs of the host")
    if measured.timer_step_ns is not None:
        lines.append(f"timestamps advance by {measured.timer_step_ns:.4g} ns")
    if measured.clock_state is not None and measured.clock_state.reference_ns:
        lines.append(f"reference kernel: {microseconds(measured.clock_state.reference_ns[-1])} µs")
    lines.append(f"sensors: {sensors(measured.observed)}")
    return lines


def launch_floors(measured: Calibration) -> list[str]:
    """A line for each launch floor."""
    return [
        f"launch floor of {floor.passes} pass{'es' if floor.passes > 1 else ''}: "
        f"{microseconds(floor.isolated_ns)} µs isolated, {microseconds(floor.batched_ns)} batched"
        for floor in measured.floors
    ]


def sensors(observed: Observation | None) -> str:
    """What sensors said, in one line."""
    if observed is None:
        return "none found"
    parts = []
    if observed.core_mhz is not None:
        low, high = observed.core_mhz
        parts.append(f"{low:,.0f} MHz" if low == high else f"{low:,.0f} to {high:,.0f} MHz")
    if observed.memory_mhz is not None:
        parts.append(f"memory {observed.memory_mhz[1]:,.0f} MHz")
    if observed.power_w is not None:
        parts.append(f"{observed.power_w:,.0f} W")
    if observed.temperature_c is not None:
        parts.append(f"{observed.temperature_c:.0f} °C")
    if observed.throttled:
        parts.append(f"held down by {', '.join(observed.throttled)}")
    return f"{observed.source}: {', '.join(parts) or 'nothing told'}"
