"""A runner without a device: pretended answers, pretended times, faults on demand.

It keeps the contract of `tuner.runner.protocol` as far as that goes without computing: workloads
and jobs have to be loaded and prepared, memory runs out, plans are followed. What a job answers,
how long it takes and what goes wrong are functions that the caller gives.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from tuner.device_info import DeviceInfo
from tuner.errors import OutOfMemoryError, TunerError, UnknownNameError, UsageError
from tuner.records import Energy, IntervalTimes, Observation, PassStatistics, Transfer
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

Method = Literal[
    "load",
    "prepare",
    "execute",
    "measure",
    "read_bandwidth",
    "bandwidth_curve",
    "empty_launches",
    "keep_warm",
    "observe",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a runner's method, as `FakeRunner.calls` keeps it and `faults` gets it.

    `number` counts the calls of that method from 0.
    """

    method: Method
    number: int
    workload: str = ""
    job: Job | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Operands that are "resident"."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, OutputSpec]
    copies: int

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        inputs = sum(array.nbytes for array in self.inputs.values())
        return inputs + sum(spec.nbytes for spec in self.outputs.values())


Outputs = Callable[[Job, Workload], Mapping[str, Array]]
"""What a job writes to the output buffers; those it leaves out stay poisoned."""
Times = Callable[[Job, Workload], float]
"""Median time of one launch in nanoseconds."""
Watts = Callable[[Job, Workload], float]
"""What the device draws while it launches the job."""
Faults = Callable[[Call], TunerError | None]
"""The error that a call shall raise, None for none."""


def zeros(job: Job, workload: Workload) -> dict[str, Array]:
    """Every output zero."""
    return {name: np.zeros(s.shape, s.dtype) for name, s in workload.outputs.items()}


def by_bytes(job: Job, workload: Workload) -> float:
    """A terabyte a second, and two microseconds for each pass."""
    return workload.nbytes / 1000.0 + 2000.0 * len(job.passes)


def no_faults(call: Call) -> None:
    """Nothing goes wrong."""


class FakeRunner:
    """A `Runner` that pretends.

    Args:
        info: the device to be.
        outputs: what jobs answer (default: zeros).
        times: how long a launch takes (default: by bytes and passes).
        faults: asked at each call whether it shall fail.
        noise: standard deviation of a sample over its median; samples are seeded by `seed`.
        watts: what sensors tell of a job's power; None for a device without sensors.
        read_gb_s: the read bandwidth to pretend.
        prepare_seconds: how long `prepare` really sleeps.
        broken_guards: buffers that every execution reports as written past their end.
    """

    def __init__(
        self,
        info: DeviceInfo,
        *,
        outputs: Outputs = zeros,
        times: Times = by_bytes,
        faults: Faults = no_faults,
        noise: float = 0.01,
        seed: int = 0,
        watts: Watts | None = None,
        read_gb_s: float = 1000.0,
        prepare_seconds: float = 0.0,
        broken_guards: tuple[str, ...] = (),
    ) -> None:
        self._info = info
        self._outputs, self._times, self._faults = outputs, times, faults
        self._noise, self._random = noise, np.random.default_rng(seed)
        self._read_gb_s, self._prepare_seconds = read_gb_s, prepare_seconds
        self._broken_guards, self._watts = broken_guards, watts
        self._lock = threading.Lock()
        self._closed = False
        self._counts: Counter[Method] = Counter()
        self.calls: list[Call] = []
        self.workloads: dict[str, Workload] = {}
        self.jobs: list[Job] = []
        """Jobs prepared and not yet released; one that was prepared twice is here twice."""
        self.losses: int | None = None
        """See `Runner.losses`; set it to pretend a runner that survives, and count its losses."""

    @property
    def info(self) -> DeviceInfo:
        """The device it pretends to be."""
        return self._info

    def load(
        self,
        name: str,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, OutputSpec],
        *,
        copies: int = 1,
    ) -> None:
        """Keep the arrays; raises OutOfMemoryError beyond the device's budget."""
        self._called("load", name)
        if copies < 1:
            raise UsageError(f"copies is {copies}, must be at least 1")
        workload = Workload(inputs=dict(inputs), outputs=dict(outputs), copies=copies)
        others = sum(w.nbytes * w.copies for n, w in self.workloads.items() if n != name)
        available = sum(
            heap.size_bytes if heap.budget_bytes is None else heap.budget_bytes
            for heap in self._info.memory_heaps
            if heap.device_local
        )
        if workload.nbytes * copies > available - others:
            raise OutOfMemoryError(f"workload {name}", workload.nbytes * copies, available - others)
        self.workloads[name] = workload

    def unload(self, name: str) -> None:
        """Forget a workload."""
        self.workloads.pop(name, None)

    def prepare(self, jobs: Sequence[Job]) -> tuple[Prepared, ...]:
        """Note the jobs as prepared."""
        for job in jobs:
            self._called("prepare", job=job)
            if self._prepare_seconds:
                time.sleep(self._prepare_seconds)
        with self._lock:
            self.jobs.extend(jobs)
        return tuple(self._prepared(job) for job in jobs)

    def release(self, jobs: Sequence[Job]) -> None:
        """Undo one `prepare` of each."""
        with self._lock:
            for job in jobs:
                if job in self.jobs:
                    self.jobs.remove(job)

    def execute(self, assignments: Sequence[Assignment]) -> Iterator[Execution]:
        """What the jobs answer; poison where they answer nothing."""
        for job, workload in assignments:
            self._called("execute", workload, job)
            execution = self._execution(job, self._resident(job, workload))
            yield execution
            if execution.broken_guards:
                return

    def _prepared(self, job: Job) -> Prepared:
        statistics = tuple(
            PassStatistics(name=p.name, statistics={"Binary Size": len(p.spirv)})
            for p in job.passes
        )
        return Prepared(pipeline_seconds=self._prepare_seconds, statistics=statistics)

    def _execution(self, job: Job, resident: Workload) -> Execution:
        outputs = {
            name: np.frombuffer(b"\xff" * spec.nbytes, spec.dtype).reshape(spec.shape)
            for name, spec in resident.outputs.items()
        } | {name: resident.inputs[name] for name in resident.outputs if name in resident.inputs}
        return Execution(
            outputs=outputs | dict(self._outputs(job, resident)), broken_guards=self._broken_guards
        )

    def measure(self, job: Job, workload: str, plan: MeasurePlan) -> Measurement:
        """Samples around the pretended time, as many as the plan wants."""
        self._called("measure", workload, job)
        resident = self._resident(job, workload)
        median_ns = self._times(job, resident)
        launches = plan.launches_of_a_sample(median_ns)
        rule = plan.rule_of_samples(launches)
        samples: list[float] = []
        while (ended_by := rule.ended(samples)) is None:
            wanted = rule.wanted(samples, median_ns)
            noise = np.exp(self._random.normal(0.0, self._noise, wanted))
            samples += (median_ns * noise).tolist()
        return Measurement(
            samples_ns=tuple(samples),
            copies=resident.copies,
            warmup_launches=max(1, int(plan.warmup_ms * 1e6 / max(median_ns, 1.0))),
            ended_by=ended_by,
            clock="gpu_timestamps" if plan.clock == "device" else "host",
            measure=plan.measure,
            launches=launches,
            observed=self._observed(job, resident),
            energy=self._energy(job, resident, plan),
            breakdown=_shared_equally(job, median_ns, plan),
        )

    def read_bandwidth(self, nbytes: int, *, samples: int = 20) -> Bandwidth:
        """Samples around the pretended bandwidth."""
        self._called("read_bandwidth")
        noise = np.exp(self._random.normal(0.0, self._noise, samples))
        times = nbytes / self._read_gb_s * noise
        return Bandwidth(bytes_read=nbytes, samples_ns=tuple(times.tolist()), detail="pretended")

    def bandwidth_curve(self, transfer: Transfer, sizes: tuple[int, ...]) -> tuple[CurvePoint, ...]:
        """The pretended read bandwidth at every size; writes have half of it."""
        self._called("bandwidth_curve")
        gb_s = self._read_gb_s / (2.0 if transfer == "write" else 1.0)
        return tuple(
            CurvePoint(nbytes=nbytes, moved_bytes=nbytes, samples_ns=(nbytes / gb_s,) * 3)
            for nbytes in sorted(sizes)
        )

    def empty_launches(self, passes: int) -> EmptyLaunches:
        """Two microseconds for each pass, as in `by_bytes`."""
        self._called("empty_launches")
        each = Measurement(
            samples_ns=(2000.0 * passes,) * 3, copies=1, warmup_launches=1, ended_by="max_samples"
        )
        batched = msgspec.structs.replace(each, measure="batched", launches=10)
        return EmptyLaunches(
            passes=passes, isolated=each, batched=batched, submission_ns=(20_000.0,) * 3
        )

    def keep_warm(self, load_ms: float) -> None:
        """Nothing but a call."""
        self._called("keep_warm")

    def observe(self) -> Observation | None:
        """Sensors, if it has a function for `watts`."""
        self._called("observe")
        if self._watts is None:
            return None
        return Observation(source="pretended", looks=1, power_w=100.0)

    def _observed(self, job: Job, resident: Workload) -> Observation | None:
        if self._watts is None:
            return None
        return Observation(source="pretended", looks=1, power_w=self._watts(job, resident))

    def _energy(self, job: Job, resident: Workload, plan: MeasurePlan) -> Energy | None:
        if self._watts is None or plan.energy_ms <= 0:
            return None
        seconds = self._times(job, resident) / 1e9
        launches = max(1, int(plan.energy_ms / 1e3 / seconds))
        return Energy(
            joules_per_launch=self._watts(job, resident) * seconds,
            launches=launches,
            seconds=launches * seconds,
            method="counter",
        )

    def close(self) -> None:
        """Forget everything."""
        self._closed = True
        self.workloads.clear()
        self.jobs.clear()

    def _called(self, method: Method, workload: str = "", job: Job | None = None) -> None:
        if self._closed:
            raise UsageError("the runner is closed")
        with self._lock:
            call = Call(method=method, number=self._counts[method], workload=workload, job=job)
            self._counts[method] += 1
            self.calls.append(call)
        error = self._faults(call)
        if error is not None:
            raise error

    def _resident(self, job: Job, workload: str) -> Workload:
        if job not in self.jobs:
            raise UsageError("the job is not prepared: call prepare first")
        if workload not in self.workloads:
            raise UnknownNameError("workload", workload, self.workloads)
        return self.workloads[workload]


def _shared_equally(job: Job, median_ns: float, plan: MeasurePlan) -> tuple[IntervalTimes, ...]:
    """The pretended time, an equal share for each stretch between barriers."""
    stretches = job.intervals
    if plan.breakdown_samples < 1 or plan.clock == "host" or len(stretches) < 2:
        return ()
    samples = (median_ns / len(stretches),) * plan.breakdown_samples
    return tuple(IntervalTimes(passes=each, samples_ns=samples) for each in stretches)
