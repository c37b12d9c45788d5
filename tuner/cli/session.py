"""What every command that runs kernels needs: an open device, a compiler, a calibration."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.output import note

if TYPE_CHECKING:
    from tuner.compile import Compiler
    from tuner.device_info import DeviceInfo
    from tuner.errors import OutOfMemoryError
    from tuner.kernels.base import Family
    from tuner.problems import Problem
    from tuner.records import Record
    from tuner.results import Store
    from tuner.runner.vulkan import VulkanRunner
    from tuner.runner.worker import WorkerRunner

HOST_COPIES = 2
"""Operands in the host's memory at once: as they are made, and as they go to the worker."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An open device and a compiler whose caches persist."""

    runner: VulkanRunner | WorkerRunner
    compiler: Compiler

    @property
    def info(self) -> DeviceInfo:
        """The device's snapshot."""
        return self.runner.info


def default_cache() -> Path:
    """The folder for compiled kernels and pipelines: `kvtune` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvtune"


@contextmanager
def opened(
    selector: str | None,
    *,
    cache: Path | None = None,
    validation: bool = False,
    in_process: bool = False,
    launch_s: float | None = None,
) -> Iterator[Opened]:
    """Open a device for the block, in a worker process unless `in_process`.

    `launch_s` is how many seconds a launch may take, by default as `tuner.runner` has it.

    Raises:
        NoDeviceError: no driver, or none or several devices that match.
        UsageError: a worker process is asked for that this system cannot have.
    """
    from tuner.compile import Compiler

    folder = cache or default_cache()
    compiler = Compiler(folder / "spirv")
    make = _in_process if in_process else _in_worker
    with closing(make(selector, validation, folder / "pipelines", launch_s)) as runner:
        yield Opened(runner, compiler)


def _in_process(
    selector: str | None, validation: bool, cache: Path, launch_s: float | None
) -> VulkanRunner:
    from tuner.runner.vulkan import VulkanRunner

    return VulkanRunner(selector, validation, cache_dir=cache, timeout_s=launch_s)


def _in_worker(
    selector: str | None, validation: bool, cache: Path, launch_s: float | None
) -> WorkerRunner:
    from tuner.errors import UsageError
    from tuner.runner._deadlines import Deadlines
    from tuner.runner.worker import WorkerRunner

    if not hasattr(os, "memfd_create"):
        raise UsageError(
            f"the worker process that does the device work needs Linux, this is {sys.platform}: "
            "give --in-process to do it here, where a kernel that crashes ends the run"
        )

    deadlines = Deadlines(launch_s=launch_s)
    return WorkerRunner(selector, validation, cache_dir=cache, deadlines=deadlines)


def session_name() -> str:
    """A name for this run, unique among runs, in order of time."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(2)}"


@contextmanager
def open_store(out: Path, info: DeviceInfo) -> Iterator[Store]:
    """The device's results below `out`, open for writing, its snapshot brought up to date.

    Raises:
        ResultsError: the folder cannot be written to, or what is in it is damaged.
    """
    from tuner.results import Store

    with Store(out / info.slug) as store:
        for repair in store.repairs:
            note(f"note: {repair}")
        store.write_device(info)
        yield store


def misfit(family: Family, problem: Problem, info: DeviceInfo) -> OutOfMemoryError | None:
    """The reason why a problem's operands cannot fit on the device, or on the host on their way to
    it, found without making them."""
    from tuner._host_memory import HOST, available_host_bytes
    from tuner.errors import OutOfMemoryError

    needed, what = family.operand_bytes(problem), problem.label
    heaps = [heap for heap in info.memory_heaps if heap.device_local] or info.memory_heaps
    room = max((min(h.size_bytes, h.budget_bytes or h.size_bytes) for h in heaps), default=needed)
    if needed > room:
        return OutOfMemoryError(what, needed, room, way_out=problem.way_smaller)
    on_host, host_room = HOST_COPIES * needed, available_host_bytes()
    if on_host > host_room:
        return OutOfMemoryError(what, on_host, host_room, holder=HOST, way_out=problem.way_smaller)
    return None


def require_fit(tasks: Iterable[tuple[Family, Problem]], info: DeviceInfo) -> None:
    """Do nothing if the operands of each problem fit on the device.

    Raises:
        OutOfMemoryError: those of one do not.
    """
    for family, problem in tasks:
        if error := misfit(family, problem, info):
            raise error


def warn_of_host_clock(records: Iterable[Record]) -> None:
    """Say where times are not the device's own, and why."""
    timed = [record for record in records if record.clock == "host"]
    if timed:
        why = timed[-1].clock_trouble or "this device has no timestamps"
        note(
            f"note: these times are from the host's clock, because {why}. They are uncertain by "
            "tens of microseconds: for shorter launches use `tuner bench --measure batched`"
        )


def warn_of_cpu(info: DeviceInfo) -> None:
    """Say of a software driver that its figures mean nothing."""
    if info.is_cpu:
        note(
            f"note: {info.name} is a CPU driver: figures from it prove that everything works, "
            "never how fast a kernel is on a GPU"
        )
