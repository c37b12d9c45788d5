"""One worker after another: who replaces those that are lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.device_info import DeviceInfo
from tuner.errors import NoWorkerError, TunerError, UsageError
from tuner.runner._deadlines import Deadlines
from tuner.runner._worker_messages import Start
from tuner.runner._worker_process import Worker


class Succession:
    """The worker of now, started when it is first needed after the last was lost. Thread-safe.

    Args:
        factory, arguments: what makes a worker's runner, see `Start`; to these the first worker
            gets `selector`, its successors the UUID and the snapshot of the device that it chose.
        pauses_s: seconds to wait before each attempt to start a successor.

    Attributes:
        info: the snapshot of the device, from the first worker.

    Raises:
        TunerError: as `Worker`, for the first.
    """

    def __init__(
        self,
        factory: str,
        arguments: Mapping[str, Any],
        *,
        selector: str | None,
        deadlines: Deadlines,
        pauses_s: Sequence[float],
    ) -> None:
        self._factory, self._arguments = factory, dict(arguments)
        self._deadlines, self._pauses_s = deadlines, tuple(pauses_s)
        self._lock = threading.Lock()
        self._lost = 0
        self._over: NoWorkerError | None = None
        self._closed = False
        self.latest = self._start(selector)
        """The worker of now, which may be lost already."""
        self.info: DeviceInfo = self.latest.info

    @property
    def losses(self) -> int:
        """How many workers were lost so far."""
        return self._lost + _is_lost(self.latest)

    def living(self) -> Worker:
        """The worker of now; a successor if it is gone.

        Raises:
            UsageError: closed.
            NoWorkerError: no successor starts, now or at an earlier call.
        """
        with self._lock:
            if self._closed:
                raise UsageError("the runner is closed")
            if self._over is not None:
                raise self._over
            if not self.latest.alive:
                self.latest.close(0.0)
                try:
                    successor = self._successor()
                except NoWorkerError as error:
                    self._over = error
                    raise
                predecessor, self.latest = self.latest, successor
                self._lost += _is_lost(predecessor)
            return self.latest

    def close(self) -> None:
        """Have the worker tear its runner down, or kill it if it does not. Idempotent."""
        with self._lock:
            self._closed = True
            self.latest.close(self._deadlines.close_s)

    def _successor(self) -> Worker:
        last: TunerError | None = None
        for pause_s in self._pauses_s:
            time.sleep(pause_s)
            try:
                worker = self._start(self.info.uuid, self.info)
            except TunerError as error:
                last = error
                continue
            found, lost = worker.info, self.info
            if (found.uuid, found.driver) == (lost.uuid, lost.driver):
                return worker
            worker.close(self._deadlines.close_s)
            raise NoWorkerError(
                f"after the worker was lost, {found.name} ({found.driver}) answers in place of "
                f"{lost.name} ({lost.driver}): run the same command again"
            )
        raise NoWorkerError(
            f"the worker was lost and no other one starts ({last}); if the device does not come "
            "back, restart the machine; then run the same command again to continue"
        )

    def _start(self, selector: str | None, known: DeviceInfo | None = None) -> Worker:
        arguments = {**self._arguments, "selector": selector}
        start = Start(factory=self._factory, arguments=arguments, known=known)
        return Worker(start, seconds=self._deadlines.start_s)


def _is_lost(worker: Worker) -> bool:
    """Whether it is gone, and not because it was told to go."""
    return not worker.alive and not worker.dismissed
