"""The two clocks of a launch: timestamps of the device, and the host's where it has none."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

from tuner import _vk
from tuner.device import Device
from tuner.runner._back_to_back import BackToBack, Rotation
from tuner.runner._commands import COMPUTE_TO_COMPUTE, TRANSFER_TO_COMPUTE, Commands
from tuner.runner._reference import Reference
from tuner.runner._sampling import REFERENCES, Submission, Timed, elapsed, stamp_trouble

_CAPACITY = 512
_QUERIES = 2 + 2 * (_CAPACITY + REFERENCES)
_ALL_COMMANDS = _vk.binding.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT
_EMPTY_SUBMISSIONS = 9
_HOST_REFERENCES = 32
"""Launches of the reference in a sample of the host's clock, whose reading is that uncertain."""


class Timestamps:
    """A pool of timestamp queries of one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        info = _vk.struct(
            "VkQueryPoolCreateInfo",
            queryType=_vk.binding.VK_QUERY_TYPE_TIMESTAMP,
            queryCount=_QUERIES,
        )
        self.pool = _vk.create("vkCreateQueryPool", "VkQueryPool", device.handle, info, _vk.NULL)

    def read(self, count: int) -> list[int]:
        """The first `count` stamps in ticks; the submission that wrote them must have ended."""
        out = _vk.ffi.new("uint64_t[]", count)
        _vk.call(
            "vkGetQueryPoolResults",
            *(self.device.handle, self.pool, 0, count, 8 * count, out, 8),
            _vk.binding.VK_QUERY_RESULT_64_BIT,
        )
        return list(out)

    def close(self) -> None:
        """Destroy the pool."""
        _vk.lib.vkDestroyQueryPool(self.device.handle, self.pool, _vk.NULL)


class DeviceClock:
    """Times launches by timestamps, all launches of a `run` in one submission.

    A sample's first stamp waits for all earlier work, its second for the last launch: between them
    are the passes, the barriers between passes and between launches, and nothing else.

    Attributes:
        step_ns: the greatest step that divides every difference of stamps so far: what the counter
            advances by.
    """

    capacity = _CAPACITY

    def __init__(
        self, timestamps: Timestamps, commands: Commands, rotation: Rotation, reference: Reference
    ) -> None:
        self._timestamps = timestamps
        self._commands = commands
        self._rotation = rotation
        self._reference = reference
        self._step_ticks = 0

    @property
    def dispatches(self) -> int:
        """See `Clock.dispatches`."""
        return self._rotation.launch.dispatches

    @property
    def step_ns(self) -> float:
        """See the class."""
        return self._step_ticks * self._timestamps.device.info.timestamp_period_ns

    def run(self, submission: Submission) -> Timed:
        """See `Clock.run`."""
        return self._timed(self._stamps(submission), submission)

    def trouble(self) -> str | None:
        """What is wrong with this device's timestamps, from some around launches; None if nothing.

        Some drivers say that they have timestamps and write the same number every time.
        """
        stamps = self._stamps(Submission(samples=1, references=REFERENCES))
        return stamp_trouble(stamps, self._timestamps.device.info.timestamp_valid_bits)

    def _stamps(self, submission: Submission) -> list[int]:
        """Run a submission: the stamps at its begin, behind fill and load, and of each sample."""
        timed = submission.samples + submission.references
        count = 2 + 2 * timed
        recording = self._commands.begin()
        _vk.lib.vkCmdResetQueryPool(recording, self._timestamps.pool, 0, count)
        TRANSFER_TO_COMPUTE.record(recording)
        self._stamp(recording, 0)
        self._fill(recording, submission.fill)
        self._stamp(recording, 1)
        for _ in range(submission.load):
            self._rotation.record(recording)
        for number in range(timed):
            COMPUTE_TO_COMPUTE.record(recording)
            self._stamp(recording, 2 + 2 * number)
            if number < submission.samples:
                for _ in range(submission.launches):
                    self._rotation.record(recording)
            else:
                self._reference.launch.record(recording, 0)
            self._stamp(recording, 3 + 2 * number)
        self._commands.submit()
        self._commands.wait(f"{submission.load} launches and {timed} timed ones")
        return self._timestamps.read(count)

    def break_down(self, fill: int, load: int, samples: int) -> list[tuple[float, ...]]:
        """Nanoseconds of each stretch between barriers, for every launch of which there is room.

        All in one submission, behind `fill` launches of the reference kernel and `load` launches.
        """
        stretches = self._rotation.launch.intervals
        samples = min(samples, _QUERIES // (stretches + 1))
        recording = self._commands.begin()
        count = samples * (stretches + 1)
        _vk.lib.vkCmdResetQueryPool(recording, self._timestamps.pool, 0, count)
        TRANSFER_TO_COMPUTE.record(recording)
        self._fill(recording, fill)
        for _ in range(load):
            self._rotation.record(recording)
        queries = iter(range(count))
        for _ in range(samples):
            self._rotation.record_stamped(recording, lambda: self._stamp(recording, next(queries)))
        self._commands.submit()
        self._commands.wait(f"{load} launches and {samples} broken down")
        info = self._timestamps.device.info
        stamps = self._timestamps.read(count)
        parts = [stamps[n : n + stretches + 1] for n in range(0, count, stretches + 1)]
        launches = [
            [ticks * info.timestamp_period_ns for ticks in elapsed(each, info.timestamp_valid_bits)]
            for each in parts
        ]
        return list(zip(*launches, strict=True))

    def _fill(self, recording: Any, launches: int) -> None:
        for _ in range(launches):
            self._reference.fill.record(recording, 0)

    def _stamp(self, recording: Any, query: int) -> None:
        _vk.lib.vkCmdWriteTimestamp(recording, _ALL_COMMANDS, self._timestamps.pool, query)

    def _timed(self, stamps: Sequence[int], submission: Submission) -> Timed:
        info = self._timestamps.device.info
        ticks = elapsed(stamps, info.timestamp_valid_bits)
        self._step_ticks = math.gcd(self._step_ticks, *ticks)
        fill_ns, load_ns, *timed_ns = (
            each * info.timestamp_period_ns for each in (ticks[0], ticks[1], *ticks[2::2])
        )
        samples = timed_ns[: submission.samples]
        return Timed(
            load_ns=load_ns,
            samples_ns=tuple(ns / submission.launches for ns in samples),
            references_ns=tuple(timed_ns[submission.samples :]),
            fill_ns=fill_ns,
        )


class HostClock:
    """Times launches by the host's clock, for devices without timestamps and to check those with.

    A sample of one launch is a submission of its own, less the time of an empty one. Of larger
    samples each is queued behind another, so that the device does not wait in between, and timed
    from the end of the one before it to its own: the time it takes to hear of an end is in both.
    """

    capacity = _CAPACITY
    step_ns = 0.0

    def __init__(
        self, commands: Commands, rotation: Rotation, reference: Reference, stream: BackToBack
    ) -> None:
        self._commands = commands
        self._rotation = rotation
        self._reference, self._fill = Rotation(reference.launch), Rotation(reference.fill)
        self._stream = stream
        self.overhead_ns = statistics.median(
            self._submission(rotation, 0) for _ in range(_EMPTY_SUBMISSIONS)
        )

    @property
    def dispatches(self) -> int:
        """See `Clock.dispatches`."""
        return self._rotation.launch.dispatches

    def run(self, submission: Submission) -> Timed:
        """See `Clock.run`."""
        fill_ns = self._submission(self._fill, submission.fill) if submission.fill else 0.0
        if submission.launches > 1:
            ends = self._stream.run(
                self._rotation, submission.load, submission.launches, submission.samples
            )
            samples_ns = [
                (after - before) / submission.launches
                for before, after in itertools.pairwise(ends[1:])
            ]
            load_ns = float(ends[1] - ends[0])
        else:
            load_ns = self._submission(self._rotation, submission.load) if submission.load else 0.0
            samples_ns = [self._alone(self._rotation, 1) for _ in range(submission.samples)]
        return Timed(
            load_ns=load_ns,
            samples_ns=tuple(max(1.0, ns) for ns in samples_ns),
            references_ns=tuple(
                max(1.0, self._alone(self._reference, _HOST_REFERENCES))
                for _ in range(submission.references)
            ),
            fill_ns=fill_ns,
        )

    def _alone(self, rotation: Rotation, launches: int) -> float:
        """Time of a launch, by a submission of so many, less what an empty one takes."""
        return (self._submission(rotation, launches) - self.overhead_ns) / launches

    def _submission(self, rotation: Rotation, launches: int) -> float:
        recording = self._commands.begin()
        TRANSFER_TO_COMPUTE.record(recording)
        for _ in range(launches):
            rotation.record(recording)
        started = time.perf_counter_ns()
        self._commands.submit()
        self._commands.wait(f"{launches} launches")
        return float(time.perf_counter_ns() - started)


def empty_submissions(commands: Commands, count: int = _EMPTY_SUBMISSIONS) -> tuple[float, ...]:
    """The host's time to submit an empty command buffer and to hear of its end, nanoseconds."""
    taken = []
    for _ in range(count):
        commands.begin()
        started = time.perf_counter_ns()
        commands.submit()
        commands.wait("an empty submission")
        taken.append(float(time.perf_counter_ns() - started))
    return tuple(taken)
