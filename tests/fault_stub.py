"""Runners for worker processes that crash, hang or lose their device where they are told to.

`toy` and `small` are factories for `WorkerRunner(factory=…)`: fake runners for the toy family and
for `tests.small_kernels`. Their options are plain data, so that they reach the worker.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec
import numpy as np

from tests.small_kernels import emulate, job, step
from tests.toy_device import toy_device, toy_outputs, toy_time_ns
from tuner.device_info import DeviceInfo
from tuner.errors import (
    DeviceLostError,
    NoDeviceError,
    OutOfMemoryError,
    TunerError,
    VulkanError,
)
from tuner.runner.fake import Call, FakeRunner, Method, Workload
from tuner.runner.protocol import Execution, Job
from tuner.runner.worker import WorkerRunner

How = Literal[
    "segfault",
    "abort",
    "exit",
    "hang",
    "deaf",
    "lost",
    "out of memory",
    "host out of memory",
    "bug",
    "refused",
    "out of bounds",
]
LOST = ("vkWaitForFences", "VK_ERROR_DEVICE_LOST", -4)
FAULT_LINE = "invalid write at 0x1000 to 0x1fff"
_LINE = 34
_METHODS: dict[Method, str] = {
    "load": "l",
    "prepare": "p",
    "execute": "e",
    "measure": "m",
    "read_bandwidth": "r",
    "bandwidth_curve": "c",
    "empty_launches": "n",
    "keep_warm": "w",
    "observe": "o",
}
assert set(_METHODS) == set(get_args(Method)), "each method has its letter"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong, and when: at calls of `method` (any if empty) for jobs whose source holds
    all `marks`; of these, with `at`, only at the calls with these numbers, and, with `once`, only
    once the file of that name is there.

    Numbers count the calls of all methods of all workers that share a ledger.
    """

    how: How
    method: str = ""
    marks: tuple[str, ...] = ()
    at: tuple[int, ...] = ()
    once: str = ""

    def means(self, call: Call, number: int) -> bool:
        """Whether a call is meant."""
        source = b"" if call.job is None else b"".join(p.spirv for p in call.job.passes)
        return (
            self.method in ("", call.method)
            and all(mark.encode() in source for mark in self.marks)
            and (not self.at or number in self.at)
            and (not self.once or Path(self.once).exists())
        )


def wait_for(ready: Callable[[], object], *, patience_s: float = 60.0) -> None:
    """Until something holds, looking at it every few milliseconds."""
    deadline = time.monotonic() + patience_s
    while not ready():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


class Ledger:
    """A file with a line for each call: its method, and a digest of job and workload.

    It outlives every process, so that a test knows what was done by workers that died.
    """

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._lock = threading.Lock()

    def enter(self, call: Call) -> int:
        """Add a call; returns how many were in the file before it."""
        line = f"{_METHODS[call.method]} {job_digest(call)}\n".encode()
        assert len(line) == _LINE
        with self._lock:
            os.write(self._handle, line)
            return os.lseek(self._handle, 0, os.SEEK_CUR) // _LINE - 1

    @staticmethod
    def read(path: Path) -> list[tuple[str, str]]:
        """All calls: letter of the method, digest of the job."""
        return [(line[0], line[2:]) for line in path.read_text().splitlines()]

    @staticmethod
    def count(path: Path) -> int:
        """How many calls there were; a missing file has none."""
        return path.stat().st_size // _LINE if path.exists() else 0

    @staticmethod
    def wait_for(path: Path, count: int) -> None:
        """Until there were so many calls."""
        wait_for(lambda: Ledger.count(path) >= count)


def job_digest(call: Call) -> str:
    source = b"" if call.job is None else b"".join(p.spirv for p in call.job.passes)
    return hashlib.sha256(source + call.workload.encode()).hexdigest()[: _LINE - 3]


class _Misfortune:
    """The `faults` of a fake runner: misbehaves as planned."""

    def __init__(
        self, faults: Sequence[Fault], ledger: Path | None, pause_s: float, hold: Path | None
    ) -> None:
        self._faults, self._pause_s, self._hold = faults, pause_s, hold
        self._ledger = Ledger(ledger) if ledger else None
        self._lost = False

    def __call__(self, call: Call) -> TunerError | None:
        number = self._ledger.enter(call) if self._ledger else call.number
        if call.method == "measure":
            time.sleep(self._pause_s)
            wait_for(lambda: self._hold is None or not self._hold.exists())
        for fault in self._faults:
            if not self._lost and fault.means(call, number):
                if fault.how != "lost":
                    return misbehave(fault.how)
                self._lost = True
        return DeviceLostError(*LOST, faults=(FAULT_LINE,)) if self._lost else None


def misbehave(how: How) -> TunerError | None:
    """Do it; an error that a driver would return is returned."""
    match how:
        case "segfault":
            os.write(2, b"driver: about to read address 8\n")
            ctypes.string_at(8)
        case "abort":
            os.abort()
        case "exit":
            os._exit(3)
        case "hang":
            threading.Event().wait()
        case "deaf":
            # Holds Python's lock, so that no other thread of the process runs either.
            ctypes.PyDLL(None).pause()
        case "host out of memory":
            bytearray(1 << 62)
        case "bug":
            raise ZeroDivisionError("a bug in the runner")
        case "out of memory":
            return OutOfMemoryError("scratch", 2**40, 2**30)
        case "refused":
            return VulkanError("vkQueueSubmit", "VK_ERROR_UNKNOWN", -13)
        case "out of bounds":
            pass  # What is written there is the runner's to know.
    return None


def toy(
    *,
    faults: Sequence[Mapping[str, Any]] = (),
    ledger: str | None = None,
    pause_s: float = 0.0,
    hold_if: str | None = None,
    prepare_seconds: float = 0.0,
    no_device_if: str | None = None,
    other_device_if: str | None = None,
    at_start: How | None = None,
    device: Mapping[str, Any] | None = None,
    known: DeviceInfo | None = None,
    **_: Any,
) -> FakeRunner:
    """A runner for the toy family, exact and without noise.

    `hold_if`, `no_device_if` and `other_device_if` name files: while they are there, measurements
    do not end, and no or another device is found.
    """
    if at_start is not None:
        misbehave(at_start)
    if no_device_if and Path(no_device_if).exists():
        raise NoDeviceError("Vulkan reports no device")
    changes = dict(device or {})
    assert known in (None, toy_device(**changes)), "a successor knows the device"
    if other_device_if and Path(other_device_if).exists():
        changes["uuid"] = "another"
    plan = msgspec.convert(list(faults), list[Fault])
    return FakeRunner(
        toy_device(**changes),
        outputs=toy_outputs,
        times=toy_time_ns,
        faults=_Misfortune(
            plan, Path(ledger) if ledger else None, pause_s, Path(hold_if) if hold_if else None
        ),
        noise=0.0,
        prepare_seconds=prepare_seconds,
    )


class _Small(FakeRunner):
    """Writes out of bounds where a `culprit` is told to: over its guard and over all operands."""

    def _execution(self, job: Job, resident: Workload) -> Execution:
        if job.passes[0].name != "execute: out of bounds":
            return super()._execution(job, resident)
        for each in self.workloads.values():
            for array in each.inputs.values():
                array.view(np.uint8)[...] = 0xDE
        return Execution(outputs={}, broken_guards=("o",))

    def release(self, jobs: Sequence[Job]) -> None:
        for each in jobs:
            method, _, how = each.passes[0].name.partition(": ")
            if method == "release":
                misbehave(cast("How", how))
        super().release(jobs)


def small(
    *,
    measure_seconds: float = 0.0,
    prepare_seconds: float = 0.0,
    ledger: str | None = None,
    hold_if: str | None = None,
    **_: Any,
) -> FakeRunner:
    """A runner that emulates the kernels of `tests.small_kernels`, and obeys `culprit` jobs.

    While there is a file named `hold_if`, pipelines do not get ready.
    """
    entries = Ledger(Path(ledger)) if ledger else None

    def faults(call: Call) -> TunerError | None:
        nonlocal lost
        if entries is not None:
            entries.enter(call)
        if call.method == "measure":
            time.sleep(measure_seconds)
        if call.method == "prepare":
            wait_for(lambda: hold_if is None or not Path(hold_if).exists())
        for each in () if call.job is None else call.job.passes:
            method, _, how = each.name.partition(": ")
            if method == call.method:
                lost = lost or how == "lost"
                if not lost:
                    return misbehave(cast("How", how))
        return DeviceLostError(*LOST, faults=(FAULT_LINE,)) if lost else None

    lost = False
    return _Small(toy_device(), outputs=emulate, faults=faults, prepare_seconds=prepare_seconds)


def culprit(how: How, method: Method | Literal["release"] = "execute", *, count: int = 1000) -> Job:
    """A job that makes a `small` runner misbehave when that method is called with it."""
    return job(msgspec.structs.replace(step("idle", count=count), name=f"{method}: {how}"))


def worker(
    *faults: Fault, factory: str = "toy", deadlines: Any = None, **options: Any
) -> WorkerRunner:
    """A worker runner with one of the factories here."""
    plain = {name: str(v) if isinstance(v, Path) else v for name, v in options.items()}
    return WorkerRunner(
        factory=f"{__name__}:{factory}",
        options={"faults": [msgspec.to_builtins(fault) for fault in faults], **plain},
        deadlines=deadlines,
        restart_pauses_s=(0.0, 0.1, 0.2, 0.4),
    )


def kill_worker(runner: WorkerRunner) -> None:
    """Kill the worker while it idles, and wait until that can be known."""
    os.kill(runner.pid, signal.SIGKILL)
    os.waitid(os.P_PID, runner.pid, os.WEXITED | os.WNOWAIT)
