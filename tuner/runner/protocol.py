"""The runner's contract: everything that touches a device sits behind it.

What crosses is plain serialisable data, so that a runner may live in another process. The Vulkan
implementation (`tuner.runner.vulkan`) and the fake (`tuner.runner.fake`) pass one contract suite.

A *workload* is a named set of operands that is resident on the device. A *job* is one variant made
ready to launch: SPIR-V and launch geometry for each pass. `prepare` may be called from several
threads at once and beside the other methods; these are called by one thread at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tuner.device_info import DeviceInfo
from tuner.records import (
    ClockState,
    Energy,
    IntervalTimes,
    Measure,
    Observation,
    PassStatistics,
    Transfer,
)
from tuner.timing import EndedBy, StoppingRule

ENERGY_MS = 1000.0
"""Load over which energy is measured: meters step some ten times a second."""
BREAKDOWN_SAMPLES = 40
"""Launches that tell where a launch spends its time, where one asks for it."""
MAX_BATCH_LAUNCHES = 2_000
"""Launches of a batched sample: what they cost the host to record is bounded."""
_MS = 1e6
_SLOW_BUDGETS = 4

Array = npt.NDArray[Any]


class JobPass(msgspec.Struct, frozen=True, kw_only=True):
    """One dispatch: `push` is the packed push-constant block, `groups` the workgroup counts.

    `beside`: no barrier goes between it and the pass before it.
    """

    name: str
    spirv: bytes
    push: bytes
    groups: tuple[int, int, int]
    subgroup_size: int | None = None
    beside: bool = False


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A variant ready to launch.

    `bindings` names the buffer behind each binding number; `scratch_bytes` the size of each scratch
    buffer, of which those named in `counters` are all zero before and after a launch. Between two
    passes the runner puts a barrier that makes all writes visible, unless the second runs `beside`.
    """

    passes: tuple[JobPass, ...]
    bindings: tuple[str, ...]
    scratch_bytes: dict[str, int]
    counters: tuple[str, ...] = ()

    @property
    def intervals(self) -> tuple[tuple[str, ...], ...]:
        """Names of the passes between two barriers, in order."""
        found: list[tuple[str, ...]] = []
        for each in self.passes:
            before = found.pop() if each.beside and found else ()
            found.append((*before, each.name))
        return tuple(found)

    @property
    def key(self) -> JobKey:
        """What makes two jobs the same, hashable."""
        return self.passes, self.bindings, tuple(sorted(self.scratch_bytes.items())), self.counters


JobKey = tuple[tuple[JobPass, ...], tuple[str, ...], tuple[tuple[str, int], ...], tuple[str, ...]]
Assignment = tuple[Job, str]
"""A job, and the name of the workload that it is to be launched on."""


class OutputSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and NumPy dtype name of one output buffer."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Pipelines made: how long the driver took, and its statistics."""

    pipeline_seconds: float
    statistics: tuple[PassStatistics, ...] = ()


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """One validated run: the output arrays, and what the launch did to buffers that it must not.

    `broken_guards` names the buffers whose guard words were overwritten, `dirty_counters` the
    counters that were not left zero.
    """

    outputs: dict[str, Array]
    broken_guards: tuple[str, ...] = ()
    dirty_counters: tuple[str, ...] = ()


class MeasurePlan(msgspec.Struct, frozen=True, kw_only=True):
    """How to time a job. Times are host choices, not results.

    `measure`: "isolated" puts each launch between two timestamps of its own, behind a wait for all
    earlier work; "batched" puts as many between two timestamps as take `batch_ms` (or
    `batch_launches`), and divides.
    `clock`: "host" times from outside, also where the device has timestamps.
    `warmup_ms`: load from the job itself, in the same submission, before the first sample.
    `rule` says when sampling ends: `precision` is the width of the median's interval, as a fraction
    of the median, at which it is known well enough (0: never), `budget_ms` the device time it may
    cost, `give_up_ns` the time beyond which a variant is given up after the first few samples.
    No submission is planned to take more than `max_submission_ms`.
    `settle`: when to load the device, before all that, until its clock stands still: "after_idle"
    (no CPU, and nothing measured for more than `settle_idle_ms`), "always" or "never". That load
    takes `settle_ms` at least and `settle_max_ms` at most (see `tuner.runner._settling`).
    `energy_ms`: load behind the samples over which energy is measured; 0 for none.
    `breakdown_samples`: launches behind the samples, with timestamps between their passes too, for
    jobs that have several; the samples themselves hold nothing but the launch.
    """

    measure: Measure = "isolated"
    batch_ms: float = 2.0
    batch_launches: int | None = None
    clock: Literal["device", "host"] = "device"
    warmup_ms: float = 30.0
    settle: Literal["after_idle", "always", "never"] = "after_idle"
    settle_ms: float = 500.0
    settle_max_ms: float = 2000.0
    settle_idle_ms: float = 200.0
    precision: float = 0.005
    min_samples: int = 10
    max_samples: int = 200
    budget_ms: float = 60.0
    max_submission_ms: float = 400.0
    give_up_ns: float | None = None
    energy_ms: float = 0.0
    breakdown_samples: int = 0

    @property
    def rule(self) -> StoppingRule:
        """When sampling ends.

        A job so slow that its samples exhaust the budget several times over, and a whole
        submission, gets by with fewer than the minimum.
        """
        return StoppingRule(
            precision=self.precision,
            min_samples=self.min_samples,
            max_samples=self.max_samples,
            budget_ns=self.budget_ms * _MS,
            patience_ns=max(_SLOW_BUDGETS * self.budget_ms, self.max_submission_ms) * _MS,
            give_up_ns=self.give_up_ns,
        )

    def launches_of_a_sample(self, each_ns: float) -> int:
        """How many launches go into a sample, if one takes `each_ns`; a batch never outlasts a
        submission's limit."""
        if self.measure == "isolated":
            return 1
        each = max(each_ns, 1.0)
        wanted = self.batch_launches or min(
            math.ceil(self.batch_ms * _MS / each), MAX_BATCH_LAUNCHES
        )
        return max(1, min(wanted, int(self.max_submission_ms * _MS / each)))

    def rule_of_samples(self, launches: int) -> StoppingRule:
        """The rule for samples that are the mean of so many launches: each costs as many."""
        rule = self.rule
        return dataclasses.replace(
            rule, budget_ns=rule.budget_ns / launches, patience_ns=rule.patience_ns / launches
        )


ClockName = Literal["gpu_timestamps", "host"]


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Raw samples of whole launches (all passes), nanoseconds, in the order taken.

    A sample is the mean of `launches` launches. `copies` is how many copies of the operands the
    launches rotated over. `ended_by` names the rule that ended sampling. `clock` tells which clock
    was read, `clock_trouble` why it was not the device's although there is one. `timer_step_ns` is
    the smallest difference that its stamps showed (0: not known).
    """

    samples_ns: tuple[float, ...]
    copies: int
    warmup_launches: int
    ended_by: EndedBy
    clock: ClockName = "gpu_timestamps"
    clock_trouble: str = ""
    measure: Measure = "isolated"
    launches: int = 1
    timer_step_ns: float = 0.0
    clock_state: ClockState | None = None
    observed: Observation | None = None
    energy: Energy | None = None
    breakdown: tuple[IntervalTimes, ...] = ()


class EmptyLaunches(msgspec.Struct, frozen=True, kw_only=True):
    """What launches cost that do nothing, in `passes` dispatches: samples in nanoseconds.

    `submission_ns`: the host's time to submit an empty command buffer and to hear of its end.
    """

    passes: int
    isolated: Measurement
    batched: Measurement
    submission_ns: tuple[float, ...]


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer over a buffer of `nbytes`, again and again; samples of `moved_bytes` each."""

    nbytes: int
    moved_bytes: int
    samples_ns: tuple[float, ...]


class Bandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """One calibration point: a pure read of `bytes_read` bytes, raw samples in nanoseconds."""

    bytes_read: int
    samples_ns: tuple[float, ...]
    detail: str
    clock_state: ClockState | None = None
    observed: Observation | None = None


class Runner(Protocol):
    """Executes and times jobs on one device.

    Every method may raise `VulkanError`, `DeviceLostError`, `OutOfMemoryError`, `RunTimeoutError`
    or `WorkerDiedError`, which are about the job or workload at hand, and `NoWorkerError`, after
    which there is no going on.
    """

    @property
    def info(self) -> DeviceInfo:
        """The device's snapshot."""
        ...

    @property
    def losses(self) -> int | None:
        """How often the device, or the process that worked with it, was lost and replaced.

        None: this runner cannot replace them, and is of no more use after a `DeviceLostError`.
        """
        ...

    def load(
        self,
        name: str,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, OutputSpec],
        *,
        copies: int = 1,
    ) -> None:
        """Make a workload resident, in `copies` identical copies at different addresses.

        An operand that is both input and output is state: it holds the input before every
        `execute`, and before the first launch of a `measure`. Raises OutOfMemoryError beforehand,
        with sizes, if it does not fit. A name that is loaded already is replaced.
        """
        ...

    def unload(self, name: str) -> None:
        """Free a workload; unknown names are ignored."""
        ...

    def prepare(self, jobs: Sequence[Job]) -> tuple[Prepared, ...]:
        """Make the pipelines of all these jobs, or of none if one fails (thread-safe).

        Equal jobs share them; they live until they were released as often as prepared.
        """
        ...

    def release(self, jobs: Sequence[Job]) -> None:
        """Undo one `prepare` of each job: the last destroys its pipelines; unknown ones are
        ignored."""
        ...

    def execute(self, assignments: Sequence[Assignment]) -> Iterator[Execution]:
        """For each in turn: poison outputs and scratch, launch once, read back, check the guards.

        Poison is 0xFFFFFFFF in each word (a NaN as float32 and in pairs of float16); counters are
        zero, state is what was loaded. The first launch that fails raises, behind the executions
        before it, and one that broke a guard is the last: it may have written anywhere. What is
        not fetched may have been launched or not.
        """
        ...

    def measure(self, job: Job, workload: str, plan: MeasurePlan) -> Measurement:
        """Time launches of the job as `plan` says."""
        ...

    def read_bandwidth(self, nbytes: int, *, samples: int = 20) -> Bandwidth:
        """Time a pure read of `nbytes` bytes, the best of a few launch shapes."""
        ...

    def bandwidth_curve(self, transfer: Transfer, sizes: tuple[int, ...]) -> tuple[CurvePoint, ...]:
        """Time a transfer over buffers of these sizes in bytes; sizes that do not fit are left out.

        A small buffer is gone through many times in a launch, so that caches show.
        """
        ...

    def empty_launches(self, passes: int) -> EmptyLaunches:
        """Time launches of so many dispatches that do nothing, and an empty submission."""
        ...

    def keep_warm(self, load_ms: float) -> None:
        """Load a device that has nothing to do for so long, lest its clock falls meanwhile."""
        ...

    def observe(self) -> Observation | None:
        """What the system's sensors say of the device at this moment; None where there are none."""
        ...

    def close(self) -> None:
        """Tear everything down; idempotent."""
        ...
