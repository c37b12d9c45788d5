"""The workloads that a worker shall hold, with what is needed to load them into its successor."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.device_info import DeviceInfo
from tuner.errors import NoWorkerError, OutOfMemoryError
from tuner.runner._deadlines import Deadlines
from tuner.runner._worker_arrays import pack
from tuner.runner._worker_messages import Load
from tuner.runner._worker_process import Worker
from tuner.runner.protocol import Array, OutputSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A workload as it was loaded. The arrays are the caller's, not copies."""

    name: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, OutputSpec]
    copies: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all copies."""
        inputs = sum(array.nbytes for array in self.inputs.values())
        return self.copies * (inputs + sum(spec.nbytes for spec in self.outputs.values()))


class Residents:
    """All that is resident, by name. For one thread at a time.

    Args:
        info, deadlines: of the device, and how long an upload may take.
        pauses_s: seconds to wait before each attempt to load again what fitted before.
    """

    def __init__(self, info: DeviceInfo, deadlines: Deadlines, pauses_s: Sequence[float]) -> None:
        self._info, self._deadlines, self._pauses_s = info, deadlines, tuple(pauses_s)
        self._kept: dict[str, Resident] = {}

    def load(self, worker: Worker, resident: Resident) -> None:
        """Load a workload, in place of one of its name, into a worker that has all others.

        Raises:
            LostError and what the runner raises, above all OutOfMemoryError.
        """
        # A refused upload may or may not have taken its predecessor's place.
        worker.loaded.discard(resident.name)
        self._upload(worker, resident)
        self._kept[resident.name] = resident

    def forget(self, name: str) -> None:
        """It shall not be resident any more; unknown names are ignored."""
        self._kept.pop(name, None)

    def restore(self, worker: Worker, *, but: str = "") -> None:
        """Load into a new worker what the last one held, but for the workload of that name.

        Raises:
            LostError: the worker is gone.
            NoWorkerError: it does not fit any more, though memory that a lost worker held was given
                time to come back.
        """
        for name, resident in self._kept.items():
            if name not in worker.loaded and name != but:
                self._load_again(worker, resident)

    def _load_again(self, worker: Worker, resident: Resident) -> None:
        last: OutOfMemoryError | None = None
        for pause_s in self._pauses_s:
            time.sleep(pause_s)
            try:
                return self._upload(worker, resident)
            except OutOfMemoryError as error:
                last = error
        raise NoWorkerError(f"a new worker has no room for what the last one held: {last}")

    def _upload(self, worker: Worker, resident: Resident) -> None:
        what = f"loading workload {resident.name!r}"
        packed, descriptor = pack(what, resident.inputs)
        request = Load(
            name=resident.name,
            inputs=packed,
            outputs=dict(resident.outputs),
            copies=resident.copies,
        )
        seconds = self._deadlines.upload(self._info, resident.total_bytes)
        try:
            worker.ask(request, None, what=what, seconds=seconds, descriptor=descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        worker.loaded.add(resident.name)
