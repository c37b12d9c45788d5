"""Jobs made ready: checked against the device's limits, their programs found or made."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner import _vk
from tuner.device import Device
from tuner.errors import UsageError
from tuner.records import PassStatistics
from tuner.runner._commands import Commands
from tuner.runner._programs import Program, ProgramKey, Programs, WhenIdle
from tuner.runner.protocol import Job, JobKey, JobPass, Prepared

_SPIRV_MAGIC = 0x07230203


@dataclass(frozen=True, slots=True)
class Step:
    """One pass as handles: what the recording of a dispatch needs."""

    pipeline: Any
    layout: Any
    push: Any
    push_bytes: int
    groups: tuple[int, int, int]
    beside: bool


@dataclass(frozen=True, slots=True)
class ReadyJob:
    """The steps of a job, the programs behind them, and the layout of its descriptor sets."""

    steps: tuple[Step, ...]
    programs: tuple[Program, ...]
    set_layout: Any
    prepared: Prepared


class Pipelines:
    """All jobs that are prepared, on programs that they share. Thread-safe."""

    def __init__(self, device: Device, cache_dir: Path | None = None) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._ready: dict[JobKey, ReadyJob] = {}
        self._users: Counter[JobKey] = Counter()
        self.programs = Programs(device, cache_dir)

    def prepare(self, job: Job) -> Prepared:
        """Make the job ready unless it is; each call takes a `release` of its own.

        Raises:
            UsageError: the job breaks a limit of the device that would crash a driver.
            VulkanError: the driver refuses the job.
        """
        key = job.key
        with self._lock:
            known = self._ready.get(key)
            if known is not None:
                self._users[key] += 1
                return known.prepared
        made = self._make(job)
        with self._lock:
            first = self._ready.setdefault(key, made)
            self._users[key] += 1
        if first is not made:
            self._release(made, _at_once)
        return first.prepared

    def ready(self, job: Job) -> ReadyJob:
        """The prepared job.

        Raises:
            UsageError: it is not prepared.
        """
        with self._lock:
            known = self._ready.get(job.key)
        if known is None:
            names = ", ".join(p.name for p in job.passes)
            raise UsageError(f"job ({names}) is not prepared: call prepare before running it")
        return known

    def release(self, job: Job, commands: Commands) -> None:
        """Undo one `prepare`; after the last, programs that no other job uses go, once `commands`
        no longer runs them.

        An unknown job is ignored.
        """
        key = job.key
        with self._lock:
            self._users[key] -= 1
            if self._users[key] > 0:
                return
            del self._users[key]
            known = self._ready.pop(key, None)
        if known is not None:
            self._release(known, commands.when_idle)

    def close(self) -> None:
        """Destroy everything and save the driver's cache; the device must be idle."""
        self._ready.clear()
        self.programs.close()

    def _make(self, job: Job) -> ReadyJob:
        for each in job.passes:
            self._check(each, len(job.bindings))
        started = time.perf_counter()
        programs: list[Program] = []
        with contextlib.ExitStack() as undo:
            for each in job.passes:
                programs.append(self.programs.use(_program_key(each, len(job.bindings))))
                undo.callback(self.programs.release, programs[-1], _at_once)
            undo.pop_all()
        seconds = time.perf_counter() - started
        statistics = tuple(
            PassStatistics(name=each.name, statistics=program.statistics)
            for each, program in zip(job.passes, programs, strict=True)
        )
        prepared = Prepared(
            pipeline_seconds=seconds,
            statistics=statistics if self._device.info.pipeline_executable_properties else (),
        )
        return ReadyJob(
            steps=tuple(map(_step, job.passes, programs)),
            programs=tuple(programs),
            set_layout=self.programs.set_layout(len(job.bindings)),
            prepared=prepared,
        )

    def _release(self, ready: ReadyJob, when_idle: WhenIdle) -> None:
        for program in ready.programs:
            self.programs.release(program, when_idle)

    def _check(self, each: JobPass, bindings: int) -> None:
        info = self._device.info
        if bindings > info.max_storage_buffers:
            raise UsageError(
                f"pass {each.name!r}: {bindings} storage buffers, the device takes "
                f"{info.max_storage_buffers}"
            )
        if len(each.spirv) % 4 or each.spirv[:4] != struct.pack("<I", _SPIRV_MAGIC):
            raise UsageError(f"pass {each.name!r}: {len(each.spirv)} bytes that are no SPIR-V")
        if len(each.push) > info.max_push_constant_bytes or len(each.push) % 4:
            raise UsageError(
                f"pass {each.name!r}: {len(each.push)} bytes of push constants, must be a multiple "
                f"of 4 up to {info.max_push_constant_bytes}"
            )
        if any(n > top for n, top in zip(each.groups, info.max_workgroup_count, strict=True)):
            raise UsageError(
                f"pass {each.name!r}: {each.groups} workgroups, the device takes "
                f"{info.max_workgroup_count}"
            )
        size = each.subgroup_size
        if size is not None and not (
            info.subgroup_size_control and info.min_subgroup_size <= size <= info.max_subgroup_size
        ):
            raise UsageError(
                f"pass {each.name!r}: subgroup size {size}, the device offers "
                f"{info.min_subgroup_size} to {info.max_subgroup_size}"
                + ("" if info.subgroup_size_control else " without control over it")
            )


def _program_key(each: JobPass, bindings: int) -> ProgramKey:
    return ProgramKey(
        spirv=each.spirv,
        subgroup_size=each.subgroup_size,
        bindings=bindings,
        push_bytes=len(each.push),
    )


def _step(each: JobPass, program: Program) -> Step:
    push = _vk.ffi.new("unsigned char[]", each.push) if each.push else _vk.NULL
    return Step(program.pipeline, program.layout, push, len(each.push), each.groups, each.beside)


def _at_once(destroy: Callable[[], None]) -> None:
    """For programs of a job that was never launched."""
    destroy()
