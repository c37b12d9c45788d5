"""What a device can do at best: measured, kept, and measured again when it no longer holds.

A *quick* calibration is the read bandwidth alone, the ceiling that utilisation is a share of: every
run measures its own. A *full* one adds curves of bandwidth against size, launch floors, and how
the clock stood. It holds for a device, a driver and a state of the clock, see `why_full`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import msgspec

from tuner.device_info import DeviceInfo
from tuner.evaluate import utc_now
from tuner.records import Calibration, Curve, LaunchFloor, Transfer
from tuner.runner.protocol import Bandwidth, EmptyLaunches, Runner
from tuner.timing import summarise

_MIB = 2**20
CPU_READS = (16 * _MIB, 64 * _MIB)
GPU_READS = (64 * _MIB, 256 * _MIB, 1024 * _MIB, 2048 * _MIB)
"""Bytes of the ceiling's reads, ascending: the ceiling depends on the size."""
CPU_CURVE = tuple(2**power for power in (18, 20, 22, 24))
GPU_CURVE = tuple(2**power for power in range(18, 32))
"""Bytes of a curve's buffers: 256 KiB to 2 GiB, so that every level of caches has its sizes."""
TRANSFERS: tuple[Transfer, ...] = ("read", "write", "copy")
PASSES = (1, 2, 3)
"""Dispatches of a launch for which there are launch floors."""
OFF_LIMIT = 0.03
"""How far, as a fraction, a figure may be from that of a full calibration which still holds."""


def quick(runner: Runner, session: str, *, reason: str = "") -> Calibration:
    """The device's read bandwidth at a few sizes; the largest is the ceiling.

    Raises:
        OutOfMemoryError: not even the smallest read fits.
    """
    info = runner.info
    points: dict[int, tuple[float, Bandwidth]] = {}
    for nbytes in CPU_READS if info.is_cpu else GPU_READS:
        read = runner.read_bandwidth(nbytes)
        median_ns = summarise(read.samples_ns).median_ns
        points[read.bytes_read] = (read.bytes_read / median_ns, read)
    largest, (read_gb_s, read) = max(points.items())
    return Calibration(
        time=utc_now(),
        session=session,
        device=info.name,
        device_uuid=info.uuid,
        driver=info.driver,
        read_gb_s=read_gb_s,
        points=tuple(sorted((nbytes, gb_s) for nbytes, (gb_s, _) in points.items())),
        samples_ns=read.samples_ns,
        method=f"pure read of {largest / _MIB:,.0f} MiB, median; {read.detail}",
        reason=reason,
        clock_state=read.clock_state,
        observed=read.observed,
    )


def full(
    runner: Runner, session: str, *, reason: str, ceiling: Calibration | None = None
) -> Calibration:
    """Everything; `ceiling` is a quick calibration of just now, to be completed. Raises as `quick`.

    `reason` says why it was made.
    """
    known = ceiling or quick(runner, session)
    empty = [runner.empty_launches(passes) for passes in PASSES]
    sizes = CPU_CURVE if runner.info.is_cpu else GPU_CURVE
    return msgspec.structs.replace(
        known,
        reason=reason,
        curves=tuple(_curve(runner, transfer, sizes) for transfer in TRANSFERS),
        floors=tuple(map(_floor, empty)),
        submission_ns=statistics.median(ns for each in empty for ns in each.submission_ns),
        timer_step_ns=_timer_step(empty),
    )


def launch_floor(runner: Runner, passes: int) -> LaunchFloor:
    """What launches of so many dispatches cost that do nothing."""
    return _floor(runner.empty_launches(passes))


def up_to_date(runner: Runner, session: str, known: Iterable[Calibration]) -> Calibration:
    """A quick calibration where a full one among the `known` still holds, else a full one.

    Raises as `quick`.
    """
    fresh = quick(runner, session)
    reason = why_full(fresh, known, runner.info)
    if reason is None:
        return fresh
    return full(runner, session, reason=reason, ceiling=fresh)


def why_full(fresh: Calibration, known: Iterable[Calibration], info: DeviceInfo) -> str | None:
    """Why a full calibration is due, going by a quick one of just now; None if the last one holds.

    It is where there is none of the device with its driver, or where the read bandwidth or the
    reference kernel, which follows the clock, is off by more than `OFF_LIMIT`. Of a CPU driver,
    whose figures mean nothing, none is ever due.
    """
    if info.is_cpu:
        return None
    whole = [each for each in known if each.is_full and each.device_uuid == info.uuid]
    if not whole:
        return "the first of this device"
    same = [each for each in whole if each.driver == info.driver]
    if not same:
        return f"the driver was {max(whole, key=lambda each: each.time).driver}"
    last = max(same, key=lambda each: each.time)
    off = fresh.read_gb_s / last.read_gb_s - 1
    if abs(off) > OFF_LIMIT:
        return f"the read bandwidth is {100 * off:+.1f} % off that of {last.time}"
    before, now = _reference_ns(last), _reference_ns(fresh)
    if before and now and abs(now / before - 1) > OFF_LIMIT:
        return f"the reference kernel takes {100 * (now / before - 1):+.1f} % since {last.time}"
    return None


def _curve(runner: Runner, transfer: Transfer, sizes: tuple[int, ...]) -> Curve:
    points = runner.bandwidth_curve(transfer, sizes)
    return Curve(
        transfer=transfer,
        points=tuple(
            (point.nbytes, point.moved_bytes / summarise(point.samples_ns).median_ns)
            for point in points
        ),
    )


def _floor(empty: EmptyLaunches) -> LaunchFloor:
    # A coarse timer may show 0 for a launch that does nothing, which is no sample elsewhere.
    return LaunchFloor(
        passes=empty.passes,
        isolated_ns=statistics.median(empty.isolated.samples_ns),
        batched_ns=statistics.median(empty.batched.samples_ns),
    )


def _timer_step(empty: list[EmptyLaunches]) -> float | None:
    steps = [each.isolated.timer_step_ns for each in empty if each.isolated.timer_step_ns > 0]
    return min(steps, default=None)


def _reference_ns(calibration: Calibration) -> float | None:
    state = calibration.clock_state
    return statistics.median(state.reference_ns) if state and state.reference_ns else None
