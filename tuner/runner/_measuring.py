"""One measurement from end to end: settle, sample, watch the sensors, meter the energy."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

from tuner._memory import Memory
from tuner.observers import Observer, metered, watched
from tuner.records import Energy, IntervalTimes
from tuner.runner._back_to_back import BackToBack, Rotation
from tuner.runner._clocks import DeviceClock, HostClock, Timestamps
from tuner.runner._commands import Commands
from tuner.runner._launch import Launch
from tuner.runner._reference import Reference
from tuner.runner._sampling import MS, REFERENCE_NS, Taken, load_of
from tuner.runner._settling import Care, SettledClock, take_settled
from tuner.runner._staging import Staging
from tuner.runner.protocol import Measurement, MeasurePlan

MOST_BACK_TO_BACK = 20_000
"""Launches of a submission whose energy is metered: the host records them, too."""


class Measuring:
    """What measurements of one device share; for one thread at a time.

    Args:
        observer: reads the device's sensors; None where there are none.
    """

    def __init__(
        self, memory: Memory, staging: Staging, commands: Commands, observer: Observer | None
    ) -> None:
        self._memory, self._staging, self._commands = memory, staging, commands
        self._observer = observer
        self._timestamps = Timestamps(memory.device)
        self._stream = BackToBack(memory.device, commands)
        self._reference: Reference | None = None
        self._trouble: str | None = None
        """Why the device's timestamps are not read although it has some."""
        self._settled = SettledClock()
        self._measured_at = -math.inf

    def measure(
        self, launch: Launch, plan: MeasurePlan, intervals: tuple[tuple[str, ...], ...]
    ) -> Measurement:
        """Time launches as `plan` says; `intervals` are the names of `Job.intervals`.

        Raises:
            RunTimeoutError, DeviceLostError: a launch hangs or kills the device.
            VulkanError: the device's timestamps fail, although they worked at first.
        """
        rotation = Rotation(launch)
        clock = self._clock(plan, rotation)
        try:
            with watched(self._observer) as seen:
                taken, state = take_settled(clock, plan, self._settled, self._care(plan), seen)
            breakdown = _breakdown(clock, plan, taken, intervals)
            energy = self._energy(rotation, plan, taken)
        finally:
            self._measured_at = time.monotonic()
        return Measurement(
            samples_ns=taken.samples_ns,
            copies=launch.copies,
            warmup_launches=taken.warmup_launches,
            ended_by=taken.ended_by,
            clock="gpu_timestamps" if isinstance(clock, DeviceClock) else "host",
            clock_trouble=self._trouble or "",
            measure=plan.measure,
            launches=taken.launches,
            timer_step_ns=clock.step_ns,
            clock_state=state,
            observed=seen.summary(),
            energy=energy,
            breakdown=breakdown,
        )

    def keep_warm(self, load_ms: float) -> None:
        """Launch the reference kernel for about so long.

        Only while the clock is up: one that has fallen needs settling all the same.
        """
        idle_ms = 1000 * (time.monotonic() - self._measured_at)
        if self._reference is None or idle_ms > MeasurePlan().settle_idle_ms:
            return
        launches = max(1, math.ceil(load_ms * MS / REFERENCE_NS))

        def record(recording: Any) -> None:
            assert self._reference is not None
            for _ in range(launches):
                self._reference.fill.record(recording, 0)

        self._commands.run("keeping warm", record)
        self._measured_at = time.monotonic()

    def close(self) -> None:
        """Destroy everything; the device must be idle."""
        if self._reference is not None:
            self._reference.close()
        self._stream.close()
        self._timestamps.close()

    def _clock(self, plan: MeasurePlan, rotation: Rotation) -> DeviceClock | HostClock:
        has_timestamps = self._memory.device.info.has_timestamps
        if self._reference is None:
            self._reference = Reference(self._memory, self._staging, self._commands)
            if has_timestamps:
                self._trouble = self._device_clock(Rotation(self._reference.launch)).trouble()
        if plan.clock == "device" and has_timestamps and self._trouble is None:
            return self._device_clock(rotation)
        return HostClock(self._commands, rotation, self._reference, self._stream)

    def _device_clock(self, rotation: Rotation) -> DeviceClock:
        assert self._reference is not None
        return DeviceClock(self._timestamps, self._commands, rotation, self._reference)

    def _care(self, plan: MeasurePlan) -> Care:
        if plan.settle == "always":
            return "settle"
        if plan.settle == "never" or self._memory.device.info.is_cpu:
            return "none"
        idle_ms = 1000 * (time.monotonic() - self._measured_at)
        return "settle" if idle_ms > plan.settle_idle_ms else "check"

    def _energy(self, rotation: Rotation, plan: MeasurePlan, taken: Taken) -> Energy | None:
        """Launch back to back for `plan.energy_ms` and read the meter; None without one."""
        if plan.energy_ms <= 0 or self._observer is None:
            return None
        each_ns = max(statistics.median_low(taken.samples_ns), 1.0)
        part_ms = min(plan.max_submission_ms, plan.energy_ms / 8)
        launches = min(max(1, int(part_ms * MS / each_ns)), MOST_BACK_TO_BACK)
        submissions = math.ceil(plan.energy_ms * MS / (launches * each_ns))
        with metered(self._observer) as meter:
            ends = self._stream.run(rotation, launches, launches, submissions)
        # From the end of the first submission on there was no pause.
        return meter.energy(ends[1], ends[-1], launches * submissions)


def _breakdown(
    clock: DeviceClock | HostClock,
    plan: MeasurePlan,
    taken: Taken,
    intervals: tuple[tuple[str, ...], ...],
) -> tuple[IntervalTimes, ...]:
    """Launches with timestamps between their passes; none without timestamps or several passes."""
    if plan.breakdown_samples < 1 or len(intervals) < 2 or not isinstance(clock, DeviceClock):
        return ()
    each_ns = max(statistics.median_low(taken.samples_ns), 1.0)
    half_ns = max(each_ns, plan.max_submission_ms * MS / 2)
    fill, load = load_of(min(plan.warmup_ms * MS, half_ns), each_ns, clock.dispatches)
    samples = min(plan.breakdown_samples, int(half_ns / each_ns))
    stretches = clock.break_down(fill, load, samples)
    return tuple(
        IntervalTimes(passes=passes, samples_ns=samples)
        for passes, samples in zip(intervals, stretches, strict=True)
    )
