"""The runner whose device work happens in another process, which may crash, hang or be killed.

A worker that is lost costs the one call that lost it. The next call starts another worker, into
which the resident workloads are loaded again; jobs are prepared again when they are needed. Calls
that were under way beside the guilty one are made again, each alone, so that a second loss has one
cause.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tuner.device_info import DeviceInfo
from tuner.errors import NoWorkerError, TunerError
from tuner.records import Observation, Transfer
from tuner.runner._deadlines import Deadlines
from tuner.runner._worker_arrays import unpack
from tuner.runner._worker_gate import Gate
from tuner.runner._worker_messages import (
    BandwidthCurve,
    EmptyLaunch,
    Execute,
    Executed,
    KeepWarm,
    Measure,
    Numbered,
    Observe,
    Prepare,
    ReadBandwidth,
    Release,
    Request,
    Unload,
    ValidationMessages,
)
from tuner.runner._worker_process import LostError, PreparedJob, Step, Worker
from tuner.runner._worker_residents import Resident, Residents
from tuner.runner._worker_succession import Succession
from tuner.runner.protocol import (
    Array,
    Assignment,
    Bandwidth,
    CurvePoint,
    EmptyLaunches,
    Execution,
    Job,
    JobKey,
    Measurement,
    MeasurePlan,
    OutputSpec,
    Prepared,
)

T = TypeVar("T")

VULKAN = "tuner.runner.vulkan:VulkanRunner"
ATTEMPTS = 3
"""How often a call is made in all that is not known to be why the worker was lost."""
RESTART_PAUSES_S = (0.0, 1.0, 4.0)
"""Before each attempt to start another worker: a GPU may need some seconds to come back."""


class WorkerRunner:
    """A `Runner` that drives another one in a worker process.

    Arrays given to `load` are kept, not copied, until `unload`: they must not change meanwhile.

    Args:
        selector, validation, cache_dir: as for `tuner.runner.vulkan.VulkanRunner`.
        deadlines: how long each kind of call may take before the worker is killed.
        factory: what makes the worker's runner, as "module:callable"; called with `selector`,
            `validation`, `timeout_s`, `cache_dir` and, from the second worker on, `known` as
            VulkanRunner is, and with `options`.
        options: further arguments of the factory, plain data.
        restart_pauses_s: seconds to wait before each attempt to replace a lost worker.

    Raises:
        NoDeviceError and whatever else making the runner raises.
        WorkerDiedError, RunTimeoutError: the worker does not start.
    """

    def __init__(
        self,
        selector: str | None = None,
        validation: bool = False,
        *,
        cache_dir: Path | None = None,
        deadlines: Deadlines | None = None,
        factory: str = VULKAN,
        options: Mapping[str, Any] | None = None,
        restart_pauses_s: Sequence[float] = RESTART_PAUSES_S,
    ) -> None:
        self._deadlines = deadlines or Deadlines()
        self._workers = Succession(
            factory,
            {
                "validation": validation,
                "timeout_s": self._deadlines.launch_s,
                "cache_dir": None if cache_dir is None else str(cache_dir),
                **(options or {}),
            },
            selector=selector,
            deadlines=self._deadlines,
            pauses_s=restart_pauses_s,
        )
        self._info = self._workers.info
        self._residents = Residents(self._info, self._deadlines, restart_pauses_s)
        self._gate, self._lock = Gate(), threading.Lock()
        self._users: dict[JobKey, int] = {}

    @property
    def info(self) -> DeviceInfo:
        """The device's snapshot, taken when the first worker started."""
        return self._info

    @property
    def losses(self) -> int:
        """How many workers were lost so far."""
        return self._workers.losses

    @property
    def pid(self) -> int:
        """Process id of the worker of now, which may be lost already."""
        return self._workers.latest.pid

    @property
    def messages(self) -> tuple[str, ...]:
        """What the validation layer has said to the worker of now; nothing once that is gone."""
        with self._gate.entered():
            told = self._told(self._workers.latest, ValidationMessages(), tuple[str, ...])
        return told or ()

    def load(
        self,
        name: str,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, OutputSpec],
        *,
        copies: int = 1,
    ) -> None:
        """See `Runner.load`."""
        resident = Resident(name=name, inputs=dict(inputs), outputs=dict(outputs), copies=copies)
        self._made(
            lambda: self._residents.load(self._filled(but=name), resident),
            blameless=f"loading workload {name!r}",
        )

    def unload(self, name: str) -> None:
        """See `Runner.unload`."""
        self._residents.forget(name)
        with self._gate.entered():
            worker = self._workers.latest
            if name in worker.loaded:
                worker.loaded.discard(name)
                self._told(worker, Unload(name=name), None)

    def prepare(self, jobs: Sequence[Job]) -> tuple[Prepared, ...]:
        """See `Runner.prepare`."""
        prepared = self._made(lambda: self._prepare(self._workers.living(), jobs))
        with self._lock:
            for job in jobs:
                self._users[job.key] = self._users.get(job.key, 0) + 1
        return prepared

    def release(self, jobs: Sequence[Job]) -> None:
        """See `Runner.release`. The worker hears of the last release of each job only."""
        times: dict[int, int] = {}
        with self._lock:
            worker = self._workers.latest
            for job in jobs:
                left = self._users.pop(job.key, 0) - 1
                if left > 0:
                    self._users[job.key] = left
                elif (known := worker.prepared.pop(job.key, None)) is not None:
                    times[known.number] = known.times
        if times:
            with self._gate.entered():
                # Not to a successor: what that has prepared meanwhile is somebody else's.
                self._told(worker, Release(times=times), None)

    def execute(self, assignments: Sequence[Assignment]) -> Iterator[Execution]:
        """See `Runner.execute`. All are launched before the first execution is given back.

        A job that broke a guard may have written anywhere: it costs the worker, whose successor
        has all workloads as they were.
        """
        executions: list[Execution] = []
        error: TunerError | None = None
        try:
            self._made(lambda: self._launch(assignments, executions))
        except TunerError as caught:
            error = caught
        yield from executions
        if error is not None:
            raise error

    def measure(self, job: Job, workload: str, plan: MeasurePlan) -> Measurement:
        """See `Runner.measure`."""

        def time_it() -> Measurement:
            worker = self._ready_for([job])
            measurement: Measurement = worker.ask(
                Measure(job=self._meant(worker, job), workload=workload, plan=plan),
                Measurement,
                what=f"measuring {_named(job)} on {workload!r}",
                seconds=self._deadlines.measure(self._info, plan),
            )
            return measurement

        return self._made(time_it)

    def read_bandwidth(self, nbytes: int, *, samples: int = 20) -> Bandwidth:
        """See `Runner.read_bandwidth`."""
        seconds = self._deadlines.read_bandwidth(self._info, nbytes)
        request = ReadBandwidth(nbytes=nbytes, samples=samples)
        found: Bandwidth = self._calibrated(request, Bandwidth, f"reading {nbytes} bytes", seconds)
        return found

    def bandwidth_curve(self, transfer: Transfer, sizes: tuple[int, ...]) -> tuple[CurvePoint, ...]:
        """See `Runner.bandwidth_curve`."""
        seconds = self._deadlines.bandwidth_curve(self._info, sizes)
        request = BandwidthCurve(transfer=transfer, sizes=sizes)
        found: tuple[CurvePoint, ...] = self._calibrated(
            request, tuple[CurvePoint, ...], f"the bandwidth of a {transfer} by size", seconds
        )
        return found

    def empty_launches(self, passes: int) -> EmptyLaunches:
        """See `Runner.empty_launches`."""
        seconds = 2 * self._deadlines.measure(self._info, MeasurePlan())
        found: EmptyLaunches = self._calibrated(
            EmptyLaunch(passes=passes), EmptyLaunches, "launches that do nothing", seconds
        )
        return found

    def keep_warm(self, load_ms: float) -> None:
        """See `Runner.keep_warm`."""
        seconds = self._deadlines.execute(self._info)
        self._calibrated(KeepWarm(load_ms=load_ms), None, "keeping the device warm", seconds)

    def observe(self) -> Observation | None:
        """See `Runner.observe`."""
        seconds = self._deadlines.execute(self._info)
        found: Observation | None = self._calibrated(
            Observe(), Observation | None, "reading sensors", seconds
        )
        return found

    def close(self) -> None:
        """See `Runner.close`. A worker that does not end by itself is killed."""
        self._workers.close()

    # ---- calls that survive the worker

    def _made(self, attempt: Callable[[], T], *, blameless: str = "") -> T:
        """Make a call: again, and alone, if the worker was lost and not known to be by its fault.

        `blameless` names a call that no variant is to blame for. It is made again in any case.

        Raises:
            DeviceLostError, RunTimeoutError, WorkerDiedError: this call has lost the worker, or an
                interrupt ended all calls.
            NoWorkerError: the blameless call lost the worker time and again.
        """
        error: TunerError | None = None
        for number in range(ATTEMPTS):
            with self._gate.entered(alone=number > 0):
                try:
                    return attempt()
                except LostError as lost:
                    error = lost.error
                    if lost.given_up or (lost.guilty and not blameless):
                        raise error from None
        assert error is not None
        raise _lost_too_often(blameless, error) if blameless else error

    def _calibrated(self, request: Request, kind: Any, what: str, seconds: float) -> Any:
        """Ask for what needs neither a variant nor a workload of the caller's."""
        return self._made(
            lambda: self._filled().ask(request, kind, what=what, seconds=seconds),
            blameless=what,
        )

    def _told(self, worker: Worker, request: Request, kind: Any) -> Any:
        """Ask what matters to no other worker than this one; None if it is gone."""
        if not worker.alive:
            return None
        seconds = self._deadlines.launch(self._info) + self._deadlines.spare_s
        try:
            return worker.ask(request, kind, what=type(request).__name__, seconds=seconds)
        except LostError:
            return None

    # ---- what is in the worker

    def _ready_for(self, jobs: Sequence[Job]) -> Worker:
        """The worker, with all workloads in it, and the jobs prepared that the caller had prepared.

        Raises:
            LostError: the worker was lost, perhaps over a job.
            NoWorkerError: as `_filled`.
        """
        worker = self._filled()
        lacking = {job.key: job for job in jobs if job.key not in worker.prepared}
        self._prepare(worker, [job for key, job in lacking.items() if key in self._users])
        return worker

    def _filled(self, *, but: str = "") -> Worker:
        """The worker, with all workloads in it but the one of that name.

        Raises:
            LostError: it was lost by another call's fault.
            NoWorkerError: it was lost over the workloads, again and again.
        """
        error: TunerError | None = None
        for _ in range(ATTEMPTS):
            worker = self._workers.living()
            try:
                self._residents.restore(worker, but=but)
                return worker
            except LostError as lost:
                if not lost.guilty:
                    raise
                error = lost.error
        assert error is not None
        raise _lost_too_often("loading the workloads again", error)

    def _prepare(self, worker: Worker, jobs: Sequence[Job]) -> tuple[Prepared, ...]:
        steps = [
            Step(f"making the pipelines of {_named(job)}", self._deadlines.prepare_s)
            for job in jobs
        ]
        answers = worker.ask_each(Prepare(jobs=tuple(jobs)), Numbered, steps)
        made: list[Numbered] = [numbered for numbered, _ in answers]
        with self._lock:
            for job, numbered in zip(jobs, made, strict=True):
                known = worker.prepared.get(job.key)
                times = 1 if known is None else known.times + 1
                worker.prepared[job.key] = PreparedJob(numbered.number, times)
        return tuple(numbered.prepared for numbered in made)

    def _launch(self, assignments: Sequence[Assignment], executions: list[Execution]) -> None:
        """Launch in a worker; puts into `executions` what was done, whether it raises or not."""
        executions.clear()
        worker = self._ready_for([job for job, _ in assignments])
        seconds = self._deadlines.execute(self._info)
        steps = [
            Step(f"a launch of {_named(job)} on {workload!r}", seconds)
            for job, workload in assignments
        ]
        meant = tuple((self._meant(worker, job), workload) for job, workload in assignments)
        answers = worker.ask_each(Execute(assignments=meant), Executed, steps)
        for executed, descriptor in answers:
            executions.append(
                Execution(
                    outputs=unpack(executed.outputs, descriptor),
                    broken_guards=executed.broken_guards,
                    dirty_counters=executed.dirty_counters,
                )
            )
            if executed.broken_guards:
                worker.close(0.0)
                return

    def _meant(self, worker: Worker, job: Job) -> Job | int:
        """How a worker is told of a job: by its number, or whole if the caller did not prepare it.

        The runner refuses that.
        """
        known = worker.prepared.get(job.key)
        return job if known is None else known.number


def _named(job: Job) -> str:
    return ", ".join(each.name for each in job.passes)


def _lost_too_often(what: str, error: TunerError) -> NoWorkerError:
    return NoWorkerError(f"{what} lost the worker {ATTEMPTS} times, the last time so: {error}")
