"""The runner that executes and times jobs on a Vulkan device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tuner import _vk
from tuner._memory import Memory
from tuner.compile import Compiler
from tuner.device import open_device
from tuner.device_info import DeviceInfo
from tuner.errors import UnknownNameError, UsageError
from tuner.observers import find_observer, summarised
from tuner.records import Observation, Transfer
from tuner.runner import _bandwidth as bandwidth
from tuner.runner._clocks import empty_submissions
from tuner.runner._commands import TRANSFER_TO_COMPUTE, Commands
from tuner.runner._deadlines import Patience
from tuner.runner._execution import run_checked
from tuner.runner._launch import Launch
from tuner.runner._measuring import Measuring
from tuner.runner._pipelines import Pipelines
from tuner.runner._resident import Guarded, Scratch, Workload, record_fresh
from tuner.runner._staging import Staging
from tuner.runner.matrix_probe import find_layouts
from tuner.runner.protocol import (
    Array,
    Assignment,
    Bandwidth,
    CurvePoint,
    EmptyLaunches,
    Execution,
    Job,
    Measurement,
    MeasurePlan,
    OutputSpec,
    Prepared,
)

_CALIBRATION = "calibration"
"""The name of the workload that calibrating methods load for as long as they run."""


class VulkanRunner:
    """Executes and times jobs on one Vulkan device; see `tuner.runner.protocol.Runner`.

    Args:
        selector: which device, see `tuner.device.select`.
        validation: have the Khronos layer check every call.
        timeout_s: how long one submission may take; None for what suits the kind of device.
        cache_dir: where pipelines and matrix layouts are kept from one process to the next; nowhere
            if None.
        known: what an earlier runner found; of the same device nothing is probed again.

    Attributes:
        messages: what the validation layer has said so far (empty without `validation`).

    Raises:
        NoDeviceError: there is no such device.
        OutOfMemoryError, VulkanError: the device cannot be opened.
    """

    def __init__(
        self,
        selector: str | None = None,
        validation: bool = False,
        *,
        timeout_s: float | None = None,
        cache_dir: Path | None = None,
        known: DeviceInfo | None = None,
    ) -> None:
        with contextlib.ExitStack() as stack:
            self._device = device = open_device(selector, validation=validation)
            stack.callback(device.close)
            self.messages = device.messages
            self._memory = Memory(device)
            patience = Patience.of(device.info, timeout_s)
            self._commands = Commands(device, patience)
            stack.callback(self._commands.close)
            self._staging = Staging(self._memory, patience)
            stack.callback(self._staging.close)
            self._observer = find_observer(device.info)
            if self._observer is not None:
                stack.callback(self._observer.close)
            self._measuring = Measuring(self._memory, self._staging, self._commands, self._observer)
            stack.callback(self._measuring.close)
            self._scratch = Scratch(self._memory)
            stack.callback(self._scratch.close)
            self._pipelines = Pipelines(device, cache_dir)
            stack.callback(self._pipelines.close)
            self._workloads: dict[str, Workload] = {}
            stack.callback(self._unload_all)
            self._closed = False
            self._info = device.info
            self._info = self._probed(known, cache_dir)
            self._teardown = stack.pop_all()

    @property
    def info(self) -> DeviceInfo:
        """The device's snapshot."""
        return self._info

    @property
    def losses(self) -> None:
        """See `Runner.losses`: a device that is lost takes this runner with it."""
        return None

    def load(
        self,
        name: str,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, OutputSpec],
        *,
        copies: int = 1,
    ) -> None:
        """See `Runner.load`. A workload that is refused beforehand leaves its predecessor be."""
        self._require_open()
        workload = Workload(name, inputs, outputs, copies)
        workload.require(self._memory, replacing=self._workloads.get(name))
        self.unload(name)
        workload.allocate(self._memory)
        try:
            workload.upload(self._staging, self._commands, inputs)
        except BaseException:
            self._free(workload)
            raise
        self._workloads[name] = workload

    def unload(self, name: str) -> None:
        """See `Runner.unload`."""
        workload = self._workloads.pop(name, None)
        if workload is not None:
            self._free(workload)

    def prepare(self, jobs: Sequence[Job]) -> tuple[Prepared, ...]:
        """See `Runner.prepare`."""
        self._require_open()
        prepared: list[Prepared] = []
        with contextlib.ExitStack() as undo:
            for job in jobs:
                prepared.append(self._pipelines.prepare(job))
                undo.callback(self.release, [job])
            undo.pop_all()
        return tuple(prepared)

    def release(self, jobs: Sequence[Job]) -> None:
        """See `Runner.release`."""
        for job in jobs:
            self._pipelines.release(job, self._commands)

    def execute(self, assignments: Sequence[Assignment]) -> Iterator[Execution]:
        """See `Runner.execute`. Each is launched when it is fetched."""
        for job, workload in assignments:
            execution = self._execute(job, workload)
            yield execution
            if execution.broken_guards:
                return

    def _execute(self, job: Job, workload: str) -> Execution:
        resident = self._resident(workload)
        launch, copies = self._launch(job, resident.copies[:1])
        try:
            return run_checked(
                launch,
                copies[0],
                resident.outputs,
                staging=self._staging,
                commands=self._commands,
            )
        finally:
            self._commands.when_idle(launch.close)

    def measure(self, job: Job, workload: str, plan: MeasurePlan) -> Measurement:
        """See `Runner.measure`. What is written is made fresh once, before the first launch."""
        launch, copies = self._launch(job, self._resident(workload).copies)
        try:
            self._commands.run("making fresh", lambda recording: _record_fresh(recording, copies))
            return self._measuring.measure(launch, plan, job.intervals)
        finally:
            self._commands.when_idle(launch.close)

    def read_bandwidth(self, nbytes: int, *, samples: int = 20) -> Bandwidth:
        """See `Runner.read_bandwidth`. What was read in truth is in `bytes_read`."""
        self._require_open()
        reads = bandwidth.plan_reads(self.info, nbytes, self._memory.available_bytes())
        jobs = bandwidth.jobs(self.info, "read", reads.nbytes)
        with self._calibrating(bandwidth.workload(_CALIBRATION, "read", reads)):
            best, measured = self._best(jobs, bandwidth.SCOUT, bandwidth.sampling_plan(samples))
        return Bandwidth(
            bytes_read=reads.nbytes,
            samples_ns=measured.samples_ns,
            detail=f"{best}; "
            + ("1 copy" if reads.copies == 1 else f"{reads.copies} copies")
            + f"; {measured.clock}",
            clock_state=measured.clock_state,
            observed=measured.observed,
        )

    def bandwidth_curve(self, transfer: Transfer, sizes: tuple[int, ...]) -> tuple[CurvePoint, ...]:
        """See `Runner.bandwidth_curve`. Sizes are rounded down to whole granules."""
        self._require_open()
        buffers = 2 if transfer == "copy" else 1
        room = self._memory.available_bytes() // buffers
        fitting = bandwidth.fitting_sizes(self.info, sizes, room)
        if not fitting:
            return ()
        largest = bandwidth.TransferPlan(max(fitting), 1)
        with self._calibrating(bandwidth.workload(_CALIBRATION, transfer, largest)):
            return tuple(self._curve_point(transfer, nbytes) for nbytes in fitting)

    def keep_warm(self, load_ms: float) -> None:
        """See `Runner.keep_warm`."""
        self._require_open()
        self._measuring.keep_warm(load_ms)

    def empty_launches(self, passes: int) -> EmptyLaunches:
        """See `Runner.empty_launches`."""
        self._require_open()
        job = bandwidth.empty_job(passes)
        nothing = bandwidth.workload(
            _CALIBRATION, "read", bandwidth.TransferPlan(bandwidth.GRANULE_BYTES, 1)
        )
        with self._calibrating(nothing):
            self.prepare([job])
            try:
                isolated, batched = (
                    self.measure(job, _CALIBRATION, plan) for plan in bandwidth.FLOOR_PLANS
                )
            finally:
                self.release([job])
        return EmptyLaunches(
            passes=passes,
            isolated=isolated,
            batched=batched,
            submission_ns=empty_submissions(self._commands),
        )

    def observe(self) -> Observation | None:
        """See `Runner.observe`."""
        self._require_open()
        if self._observer is None:
            return None
        return summarised(self._observer.name, [self._observer.read()])

    def _free(self, workload: Workload) -> None:
        """Give a workload's memory back once neither a transfer nor a launch may touch it."""
        self._staging.when_idle(lambda: self._commands.when_idle(workload.close))

    def _curve_point(self, transfer: Transfer, nbytes: int) -> CurvePoint:
        moved = bandwidth.moved_bytes(self.info, nbytes)
        jobs = bandwidth.jobs(self.info, transfer, nbytes, moved=moved)
        _, measured = self._best(jobs, bandwidth.CURVE_SCOUT, bandwidth.CURVE_PLAN)
        return CurvePoint(
            nbytes=nbytes,
            moved_bytes=2 * moved if transfer == "copy" else moved,
            samples_ns=measured.samples_ns,
        )

    @contextlib.contextmanager
    def _calibrating(self, workload: Workload) -> Iterator[None]:
        """The workload, resident for the block, its inputs full of noise."""
        self._workloads[_CALIBRATION] = workload
        try:
            workload.allocate(self._memory)
            workload.tile(self._staging, self._commands, bandwidth.noise())
            yield
        finally:
            self.unload(_CALIBRATION)

    def _best(
        self, jobs: Iterable[tuple[str, Job]], scout: MeasurePlan, plan: MeasurePlan
    ) -> tuple[str, Measurement]:
        """Name and measurement of the job that is fastest in a short measurement of each."""
        timed: dict[str, tuple[float, Job]] = {}
        try:
            for name, job in jobs:
                self.prepare([job])
                timed[name] = 0.0, job
                timed[name] = min(self.measure(job, _CALIBRATION, scout).samples_ns), job
            best = min(timed, key=lambda name: timed[name][0])
            return best, self.measure(timed[best][1], _CALIBRATION, plan)
        finally:
            self.release([job for _, job in timed.values()])

    def close(self) -> None:
        """See `Runner.close`.

        A device that hangs cannot be torn down without hanging, too: then this returns, and a
        thread of its own waits for the device and tears it down should it come back.
        """
        if self._closed:
            return
        self._closed = True
        if self._settled():
            self._teardown.close()
        else:
            threading.Thread(target=self._close_when_idle, daemon=True).start()

    def _probed(self, known: DeviceInfo | None, cache_dir: Path | None) -> DeviceInfo:
        """The device's snapshot with what only a launch can tell, unless it was told before."""
        info = self._device.info
        if not info.cooperative_matrix:
            return info
        if known is not None and (known.uuid, known.driver) == (info.uuid, info.driver):
            return msgspec.structs.replace(info, matrix_layouts=known.matrix_layouts)
        layouts = find_layouts(self, Compiler(), cache_dir)
        return msgspec.structs.replace(info, matrix_layouts=layouts)

    def _close_when_idle(self) -> None:
        _vk.lib.vkDeviceWaitIdle(self._device.handle)
        if self._settled():
            self._teardown.close()

    def _settled(self) -> bool:
        """Whether nothing that was submitted is still running, after waiting for it once more."""
        return self._commands.settle() and self._staging.settle()

    def _unload_all(self) -> None:
        for name in tuple(self._workloads):
            self.unload(name)

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("the runner is closed")

    def _resident(self, workload: str) -> Workload:
        self._require_open()
        if workload not in self._workloads:
            raise UnknownNameError("workload", workload, self._workloads)
        return self._workloads[workload]

    def _launch(
        self, job: Job, operands: tuple[dict[str, Guarded], ...]
    ) -> tuple[Launch, list[dict[str, Guarded]]]:
        """The job bound to these copies, and all buffers of each copy, the shared scratch too."""
        ready = self._pipelines.ready(job)
        scratch = self._scratch.layout(job.scratch_bytes, job.counters, self._commands)
        copies = [{**copy, **scratch} for copy in operands]
        return Launch(self._device, ready, job.bindings, copies), copies


def _record_fresh(recording: object, copies: list[dict[str, Guarded]]) -> None:
    """Every buffer once: the scratch is the same in all copies."""
    buffers = {
        (id(buffer.buffer), buffer.base): buffer for copy in copies for buffer in copy.values()
    }
    record_fresh(recording, buffers.values())
    TRANSFER_TO_COMPUTE.record(recording)
