"""What a trial is made of on its way to a record, and which failure becomes which state."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from tuner.errors import (
    CompileError,
    DeviceLostError,
    MeasurementError,
    OutOfMemoryError,
    RunTimeoutError,
    TemplateError,
    TunerError,
    UsageError,
    VulkanError,
    WorkerDiedError,
)
from tuner.evaluate.building import RenderedPass, RenderMemo
from tuner.kernels.base import Candidate, ValidationCase, Values
from tuner.oracle import worst_of
from tuner.records import Check, PassStatistics, Record, State
from tuner.runner.protocol import Job, MeasurePlan

MADE_BADLY = (CompileError, TemplateError)
"""What making a variant's kernel may raise."""
RAN_BADLY = (VulkanError, OutOfMemoryError, RunTimeoutError, WorkerDiedError)
"""What a runner may raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What all trials of a run share.

    `read_gb_s` is the read bandwidth measured in the run; `plan` says how to time;
    `footprint_bytes` how many bytes the copies of the operands shall take in all (see
    `residents.copies_for`).
    """

    name: str = ""
    read_gb_s: float | None = None
    sampler: str = ""
    plan: MeasurePlan = field(default_factory=MeasurePlan)
    footprint_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a trial ended early. `lost` is set where the device went with it."""

    state: State
    error: str
    lost: DeviceLostError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A legal variant rendered for its problem, with the identity of its record.

    `render` remembers what was rendered for it, which the validation cases mostly share. `broken`
    is set, and `passes` empty, where the template does not render.
    """

    candidate: Candidate
    passes: tuple[RenderedPass, ...]
    key: str
    render: RenderMemo
    broken: Failure | None = None

    @property
    def values(self) -> Values:
        """The variant's canonical values."""
        return self.candidate.values


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTrial:
    """A trial whose pipelines exist, or the failure in making them.

    `job` launches on the timed operands, `case_jobs` on the validation cases.
    """

    draft: Draft
    job: Job | None = None
    case_jobs: tuple[tuple[ValidationCase, Job], ...] = ()
    failure: Failure | None = None
    compile_seconds: float = 0.0
    pipeline_seconds: float = 0.0
    statistics: tuple[PassStatistics, ...] = ()

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All jobs, the timed one first."""
        timed = () if self.job is None else (self.job,)
        return timed + tuple(job for _, job in self.case_jobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What validation found: the worst check as far as it got, and why it ended, if early."""

    check: Check | None = None
    failure: Failure | None = None
    seconds: float = 0.0

    def followed_by(self, later: Findings) -> Findings:
        """Both together: the worse check, the later failure, the sum of the seconds."""
        checks = [check for check in (self.check, later.check) if check is not None]
        return Findings(
            check=worst_of(checks) if checks else None,
            failure=later.failure or self.failure,
            seconds=self.seconds + later.seconds,
        )


class TrialLostDeviceError(DeviceLostError):
    """The device was lost in a trial; `record` is what the trial left."""

    def __init__(self, record: Record, cause: DeviceLostError) -> None:
        self.record = record
        super().__init__(cause.call, cause.name, cause.code, cause.hint, faults=cause.faults)


def failure_of(error: TunerError, *, making: bool = False) -> Failure:
    """The failure that an error stands for, in T4's words.

    `making`: it was raised while the kernel or its pipelines were made, so that whatever is neither
    a deadline nor a lost device or worker is a failure to compile. A usage error says that the
    variant breaks a limit which its family's constraints forgot, or is legal on no validation case.
    """
    if isinstance(error, RunTimeoutError):
        return Failure(state="timeout", error=str(error))
    if isinstance(error, DeviceLostError):
        return Failure(state="runtime", error=f"device lost: {error}", lost=error)
    if isinstance(error, WorkerDiedError):
        return Failure(state="runtime", error=str(error))
    if isinstance(error, UsageError):
        return Failure(state="constraints", error=str(error))
    if making or isinstance(error, MADE_BADLY):
        return Failure(state="compile", error=str(error))
    assert isinstance(error, (*RAN_BADLY, MeasurementError))
    return Failure(state="runtime", error=str(error))


def utc_now() -> str:
    """The time as records carry it: ISO 8601 in UTC, so that text order is order in time."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
