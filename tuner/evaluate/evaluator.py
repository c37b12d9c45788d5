"""One trial from values to record: render, compile, prepare, validate, time.

An expected failure of a variant ends as the state of its record; what is raised is a fault of the
caller's, of the problem (it does not fit), or a lost device.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import msgspec

from tuner import templates
from tuner._host_memory import HOST, available_host_bytes
from tuner.errors import (
    DeviceLostError,
    MeasurementError,
    OutOfMemoryError,
)
from tuner.evaluate.building import (
    Render,
    SpirvCompiler,
)
from tuner.evaluate.preparation import Preparation
from tuner.evaluate.residents import (
    TIMING_INPUTS,
    ResidentCase,
    ResidentCases,
    TimedWorkload,
    load_timed,
    with_cached_bounds,
)
from tuner.evaluate.timings import timing_fields
from tuner.evaluate.trials import (
    RAN_BADLY,
    Draft,
    Failure,
    Findings,
    PreparedTrial,
    Session,
    TrialLostDeviceError,
    failure_of,
    utc_now,
)
from tuner.kernels.base import ArithmeticClass, Family, Operands, Reference, Values
from tuner.oracle import Verdict, worst_of
from tuner.problems import AnyProblem, Problem
from tuner.records import Check, Record
from tuner.runner.protocol import Execution, Job, Measurement, MeasurePlan, Runner

SUSPICIOUS_UTILISATION = 1.05
"""Beyond this share of the read bandwidth a time is not believed at once."""
SAMPLED_GROUPS = 4
"""How many parts of the timed operands' answer are compared with the oracle."""
IDLE_SECONDS = 0.05
"""A device that idles for longer, while answers are judged, is said to have idled."""


class _Judged(Protocol):
    @property
    def workload(self) -> str: ...

    def verdict(self, execution: Execution, arithmetic: ArithmeticClass) -> Verdict: ...


class Evaluator:
    """Tries variants of one family on one problem; workloads stay on the device between trials.

    `draft`, `prepare` and `foresee` may be called from any thread; everything else by one thread at
    a time, the device thread.

    Args:
        runner, compiler: what trials run on and are compiled with.
        family, problem: what is tried, and for what.
        session: what goes into every record, and how to time.
        cases: validation cases to share with other evaluators of the same family.
        render: stands in for `tuner.templates.render` in tests.
        idled: called where the device has idled for a while, so that its clock can be kept up:
            after uploads, and while the host judges answers.
    """

    def __init__(
        self,
        runner: Runner,
        compiler: SpirvCompiler,
        family: Family,
        problem: Problem,
        *,
        session: Session | None = None,
        cases: ResidentCases | None = None,
        render: Render = templates.render,
        idled: Callable[[], None] = lambda: None,
    ) -> None:
        self.runner, self.compiler = runner, compiler
        self.family, self.problem = family, problem
        self.session = session or Session()
        self._info = runner.info
        self._cases = ResidentCases(runner, family) if cases is None else cases
        self._owns_cases = cases is None
        self._idled = idled
        self._preparation = Preparation(
            runner, compiler, family, problem, cases=self._cases, render=render
        )
        self._lock = threading.Lock()
        self._operands: tuple[Operands, Reference] | None = None
        self._timed: TimedWorkload | None = None

    # ---- any thread

    def draft(self, values: Values) -> Draft:
        """Render a variant and name it.

        Raises:
            IllegalVariantError: it is not legal here; says why.
        """
        return self._preparation.draft(values)

    def is_current(self, record: Record) -> bool:
        """Whether a record of this problem tells of a kernel that could be made today."""
        return self._preparation.is_current(record)

    def prepare(self, draft: Draft) -> PreparedTrial:
        """Compile a variant and make its pipelines, for timing and for validation."""
        return self._preparation.prepare(draft)

    def foresee(self, variants: Iterable[Values]) -> None:
        """Make the operands and the right answers by which such variants are judged.

        Whoever needs them makes them, too: but then on the device thread, while the device idles.
        """
        cases = map(self._cases.reference, self._preparation.validation_cases)
        references = (*cases, self._timed_operands()[1])
        for arithmetic in {self.family.arithmetic(values) for values in variants}:
            for reference in references:
                reference.bounds(arithmetic)

    # ---- the device thread

    def load(self) -> None:
        """Make the problem's workloads resident; other methods do so when they need it.

        Raises:
            OutOfMemoryError: the problem does not fit; says how much it needs.
        """
        self._resident_cases()
        self._timed_workload()

    def run(self, values: Values) -> Record:
        """One whole trial on the calling thread. Raises as `draft` and `finish`."""
        return self.finish(self.prepare(self.draft(values)))

    def finish(self, trial: PreparedTrial, *, give_up_ns: float | None = None) -> Record:
        """Validate, then time; the trial's pipelines are released.

        A variant slower than `give_up_ns` is given up after a few samples.

        Raises:
            TrialLostDeviceError: the device is gone; carries the record.
            OutOfMemoryError: the problem itself does not fit on the device.
        """
        try:
            self.load()
            findings = self.validate(trial)
            if findings.failure is not None:
                return self.record(trial, findings)
            return self._time(trial, findings, give_up_ns)
        finally:
            self.release(trial)

    def validate(self, trial: PreparedTrial) -> Findings:
        """Run the validation cases up to the first wrong answer; the trial stays prepared."""
        if trial.failure is not None:
            return Findings(failure=trial.failure)
        jobs = dict(trial.case_jobs)
        cases = [resident for resident in self._resident_cases() if resident.case in jobs]
        return self._judge([(resident, jobs[resident.case]) for resident in cases], trial.draft)

    def check_sampled(self, trial: PreparedTrial) -> Findings:
        """Launch on the timed operands and judge a few groups; the trial stays prepared."""
        if trial.failure is not None or trial.job is None:
            return Findings(failure=trial.failure)
        return self._judge([(self._timed_workload(), trial.job)], trial.draft)

    def measure(self, trial: PreparedTrial, plan: MeasurePlan) -> Measurement:
        """Time a prepared trial on the timed operands. Raises what `Runner.measure` raises."""
        assert trial.job is not None
        return self.runner.measure(trial.job, self._timed_workload().workload, plan)

    def record(
        self,
        trial: PreparedTrial,
        findings: Findings,
        measurements: Sequence[Measurement] = (),
        *,
        note: str = "",
        in_rounds: bool = False,
    ) -> Record:
        """The record of a trial: correct if it was measured and `findings` has no failure.

        `in_rounds`: other variants were measured between the measurements.

        Raises:
            TrialLostDeviceError: the failure is a lost device, which the runner cannot replace.
        """
        failure = findings.failure
        timing: dict[str, Any] = {}
        if failure is None:
            try:
                timing = timing_fields(measurements, in_rounds=in_rounds)
            except MeasurementError as error:
                failure = failure_of(error)
        info, draft = self._info, trial.draft
        record = Record(
            variant=draft.key,
            time=utc_now(),
            session=self.session.name,
            device=info.name,
            device_uuid=info.uuid,
            driver=info.driver,
            compiler=self.compiler.identity,
            family=self.family.name,
            problem=cast("AnyProblem", self.problem),
            values=dict(draft.values),
            state="correct" if failure is None else failure.state,
            error=None if failure is None else failure.error,
            check=findings.check,
            bytes_moved=self.family.bytes_moved(self.problem),
            read_gb_s=self.session.read_gb_s,
            compile_seconds=trial.compile_seconds,
            pipeline_seconds=trial.pipeline_seconds,
            validate_seconds=findings.seconds,
            statistics=trial.statistics,
            passes=0 if trial.job is None else len(trial.job.passes),
            sampler=self.session.sampler,
            note=note,
            **timing,
        )
        if failure is not None and failure.lost is not None and self.runner.losses is None:
            raise TrialLostDeviceError(record, failure.lost)
        return record

    def release(self, trial: PreparedTrial) -> None:
        """Give the trial's pipelines back; once for each trial, as `finish` does by itself."""
        # A lost device takes nothing back; saying so would hide the trial's own failure.
        with contextlib.suppress(DeviceLostError):
            self.runner.release(trial.jobs)

    def close(self) -> None:
        """Unload the problem's operands, and the validation cases unless they are shared."""
        if self._timed is not None:
            self.runner.unload(self._timed.workload)
            self._timed = None
        if self._owns_cases:
            self._cases.close()

    # ---- inside

    def _timed_operands(self) -> tuple[Operands, Reference]:
        """The operands that are timed, and the right answer to a few groups of them.

        Raises:
            OutOfMemoryError: the host has no room for them.
        """
        with self._lock:
            if self._operands is None:
                try:
                    operands = self.family.operands(self.problem, TIMING_INPUTS, 0)
                    reference = self.family.sampled_reference(operands, SAMPLED_GROUPS)
                except MemoryError:
                    raise OutOfMemoryError(
                        self.problem.label,
                        self.family.operand_bytes(self.problem),
                        available_host_bytes(),
                        holder=HOST,
                        way_out=self.problem.way_smaller,
                    ) from None
                self._operands = operands, with_cached_bounds(reference)
            return self._operands

    def _timed_workload(self) -> TimedWorkload:
        if self._timed is None:
            operands, reference = self._timed_operands()
            self._timed = load_timed(
                self.runner,
                self.family,
                self.problem,
                operands,
                reference=reference,
                footprint_bytes=self.session.footprint_bytes,
            )
            self._idled()
        return self._timed

    def _resident_cases(self) -> tuple[ResidentCase, ...]:
        return self._cases.use(self._preparation.validation_cases, self._idled)

    def _judge(self, runs: Sequence[tuple[_Judged, Job]], draft: Draft) -> Findings:
        """Launch and judge in turn, up to the first that fails."""
        started = idle_since = time.perf_counter()
        arithmetic = self.family.arithmetic(draft.values)
        checks: list[Check] = []
        failure = None
        try:
            executions = self.runner.execute([(job, judged.workload) for judged, job in runs])
            for (judged, _), execution in zip(runs, executions, strict=True):
                verdict = judged.verdict(execution, arithmetic)
                checks.append(verdict.check)
                if time.perf_counter() - idle_since > IDLE_SECONDS:
                    self._idled()
                    idle_since = time.perf_counter()
                if not verdict.ok:
                    failure = Failure(state="correctness", error=verdict.message)
                    break
        except RAN_BADLY as error:
            failure = failure_of(error)
        return Findings(
            check=worst_of(checks) if checks else None,
            failure=failure,
            seconds=time.perf_counter() - started,
        )

    def _time(self, trial: PreparedTrial, findings: Findings, give_up_ns: float | None) -> Record:
        """Check the timed operands and measure; both again if the time is too good to be true."""
        plan = msgspec.structs.replace(self.session.plan, give_up_ns=give_up_ns)
        note = ""
        while True:
            findings = findings.followed_by(self.check_sampled(trial))
            if findings.failure is not None:
                return self.record(trial, findings)
            started = time.perf_counter()
            try:
                measurement = self.measure(trial, plan)
            except RAN_BADLY as error:
                failed = Findings(failure=failure_of(error))
                return self.record(trial, findings.followed_by(failed))
            record = self.record(trial, findings, (measurement,), note=note)
            utilisation = record.utilisation or 0.0
            if utilisation <= SUSPICIOUS_UTILISATION or note:
                seconds = time.perf_counter() - started
                return msgspec.structs.replace(record, measure_seconds=seconds)
            note = (
                f"suspicious: measured at {100 * utilisation:.0f} % of the read bandwidth, then "
                "validated and measured again"
            )
