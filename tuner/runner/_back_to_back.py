"""Launches without a pause: copies in rotation, and submissions queued behind one another."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tuner.device import Device
from tuner.errors import RunTimeoutError
from tuner.runner._commands import COMPUTE_TO_COMPUTE, TRANSFER_TO_COMPUTE, Commands
from tuner.runner._launch import Launch


class Rotation:
    """A launch that takes the next copy of its operands each time, and never starts over."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._next_copy = 0

    def record(self, recording: Any) -> None:
        """Record a launch behind a barrier: launches share their scratch memory."""
        COMPUTE_TO_COMPUTE.record(recording)
        self.launch.record(recording, self._next_copy)
        self._turn()

    def record_stamped(self, recording: Any, stamp: Callable[[], None]) -> None:
        """Record a launch behind a barrier, and a stamp before, between and after its stretches."""
        COMPUTE_TO_COMPUTE.record(recording)
        stamp()
        self.launch.record(recording, self._next_copy, stamp)
        stamp()
        self._turn()

    def _turn(self) -> None:
        self._next_copy = (self._next_copy + 1) % self.launch.copies


class BackToBack:
    """Two command buffers in turns, so that the device has the next one when it ends with one.

    Args:
        commands: the runner's own; after a time-out they stay busy for as long as anything is that
            was submitted here, so that whoever waits for them waits for that, too.
    """

    def __init__(self, device: Device, commands: Commands) -> None:
        self._commands = commands
        self._turns = [Commands(device, commands.patience) for _ in range(2)]

    def run(self, rotation: Rotation, load: int, launches: int, submissions: int) -> list[int]:
        """One submission of `load` launches, then `submissions` of `launches` each.

        Returns `submissions + 2` times of `time.perf_counter_ns`: when the load was submitted, when
        it had ended, and when each of the others had.

        Raises:
            RunTimeoutError, DeviceLostError: as `Commands.wait`.
        """
        older, newer = self._turns
        times = [time.perf_counter_ns()]
        try:
            _submit(older, rotation, load)
            for _ in range(submissions):
                _submit(newer, rotation, launches)
                times.append(_ended(older))
                older, newer = newer, older
            times.append(_ended(older))
        except RunTimeoutError:
            # A fence waits for all that was submitted before it.
            self._commands.begin()
            self._commands.submit()
            raise
        return times

    def close(self) -> None:
        """Destroy everything; the device must be idle."""
        for commands in self._turns:
            commands.close()


def _submit(commands: Commands, rotation: Rotation, launches: int) -> None:
    recording = commands.begin()
    TRANSFER_TO_COMPUTE.record(recording)
    for _ in range(launches):
        rotation.record(recording)
    commands.submit()


def _ended(commands: Commands) -> int:
    commands.wait("launches back to back")
    return time.perf_counter_ns()
