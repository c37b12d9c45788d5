"""The two clocks of a launch: timestamps of the device, and the host's where it has none."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from tuner import _vk
from tuner.device import Device
from tuner.runner._commands import COMPUTE_TO_COMPUTE, TRANSFER_TO_COMPUTE, Commands
from tuner.runner._launch import Launch
from tuner.runner._sampling import Timed, elapsed

_CAPACITY = 512
_ALL_COMMANDS = _vk.binding.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT


class Timestamps:
    """A pool of timestamp queries of one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        info = _vk.struct(
            "VkQueryPoolCreateInfo",
            queryType=_vk.binding.VK_QUERY_TYPE_TIMESTAMP,
            queryCount=2 * _CAPACITY + 1,
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

    A sample's first stamp waits for all earlier work, its second for the launch: between them are
    the passes and the barriers between passes, and nothing else.
    """

    capacity = _CAPACITY

    def __init__(self, timestamps: Timestamps, commands: Commands, launch: Launch) -> None:
        self._timestamps = timestamps
        self._commands = commands
        self._launch = launch
        self._next_copy = 0

    def run(self, warmup: int, samples: int) -> Timed:
        """See `Clock.run`."""
        lib, pool = _vk.lib, self._timestamps.pool
        count = 2 * samples + 1
        recording = self._commands.begin()
        lib.vkCmdResetQueryPool(recording, pool, 0, count)
        TRANSFER_TO_COMPUTE.record(recording)
        lib.vkCmdWriteTimestamp(recording, _ALL_COMMANDS, pool, 0)
        for _ in range(warmup):
            COMPUTE_TO_COMPUTE.record(recording)
            self._record_launch(recording)
        for query in range(1, count, 2):
            COMPUTE_TO_COMPUTE.record(recording)
            lib.vkCmdWriteTimestamp(recording, _ALL_COMMANDS, pool, query)
            self._record_launch(recording)
            lib.vkCmdWriteTimestamp(recording, _ALL_COMMANDS, pool, query + 1)
        self._commands.submit()
        self._commands.wait(f"{warmup + samples} launches")
        return self._timed(self._timestamps.read(count))

    def _record_launch(self, recording: Any) -> None:
        self._launch.record(recording, self._next_copy)
        self._next_copy = (self._next_copy + 1) % self._launch.copies

    def _timed(self, stamps: Sequence[int]) -> Timed:
        info = self._timestamps.device.info
        ns = [
            ticks * info.timestamp_period_ns for ticks in elapsed(stamps, info.timestamp_valid_bits)
        ]
        return Timed(ns[0], tuple(ns[1::2]))


class HostClock:
    """Times launches by the host's clock, one submission each, less an empty one's time."""

    capacity = _CAPACITY

    def __init__(self, commands: Commands, launch: Launch) -> None:
        self._commands = commands
        self._launch = launch
        self._next_copy = 0
        self._overhead_ns = statistics.median(self._submission(0) for _ in range(9))

    def run(self, warmup: int, samples: int) -> Timed:
        """See `Clock.run`."""
        warmup_ns = self._submission(warmup) if warmup else 0.0
        times = (self._submission(1) - self._overhead_ns for _ in range(samples))
        return Timed(warmup_ns, tuple(max(1.0, ns) for ns in times))

    def _submission(self, launches: int) -> float:
        recording = self._commands.begin()
        TRANSFER_TO_COMPUTE.record(recording)
        for _ in range(launches):
            COMPUTE_TO_COMPUTE.record(recording)
            self._launch.record(recording, self._next_copy)
            self._next_copy = (self._next_copy + 1) % self._launch.copies
        started = time.perf_counter_ns()
        self._commands.submit()
        self._commands.wait(f"{launches} launches")
        return float(time.perf_counter_ns() - started)
