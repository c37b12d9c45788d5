"""One trial from values to record: render, compile, prepare, validate, time.

An expected failure of a variant ends as the state of its record; what is raised is a fault of the
caller's, of the problem (it does not fit), or a lost device.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast

import msgspec

from tuner import templates
from tuner.errors import (
    DeviceLostError,
    IllegalVariantError,
    MeasurementError,
    TemplateError,
    UsageError,
)
from tuner.evaluate.building import (
    Built,
    CompileMemo,
    Render,
    RenderedPass,
    RenderMemo,
    Scalars,
    SpirvCompiler,
    compile_passes,
    render_passes,
    variant_key,
)
from tuner.evaluate.residents import (
    TIMING_INPUTS,
    ResidentCase,
    ResidentCases,
    TimedWorkload,
    load_timed,
)
from tuner.evaluate.timings import timing_fields
from tuner.evaluate.trials import (
    MADE_BADLY,
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
from tuner.kernels.base import ArithmeticClass, Candidate, Family, Operands, ValidationCase, Values
from tuner.kernels.space import canonical, reasons, require_legal
from tuner.oracle import Verdict, worst_of
from tuner.problems import AnyProblem, Problem
from tuner.records import Check, PassStatistics, Record
from tuner.runner.protocol import Job, Measurement, MeasurePlan, Runner

SUSPICIOUS_UTILISATION = 1.05
"""Beyond this share of the read bandwidth a time is not believed at once."""
SAMPLED_GROUPS = 4
"""How many parts of the timed operands' answer are compared with the oracle."""


class _Judged(Protocol):
    def verdict(self, runner: Runner, job: Job, arithmetic: ArithmeticClass) -> Verdict: ...


class Evaluator:
    """Tries variants of one family on one problem; workloads stay on the device between trials.

    `draft` and `prepare` may be called from any thread; everything else by one thread at a time,
    the device thread.

    Args:
        runner, compiler: what trials run on and are compiled with.
        family, problem: what is tried, and for what.
        session: what goes into every record, and how to time.
        cases: validation cases to share with other evaluators of the same family.
        render: stands in for `tuner.templates.render` in tests.
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
    ) -> None:
        self.runner, self.compiler = runner, compiler
        self.family, self.problem = family, problem
        self.session = session or Session()
        self._info = runner.info
        self._own_cases = ResidentCases(runner, family) if cases is None else None
        self._cases = cases or self._own_cases or ResidentCases(runner, family)
        self._render = render
        self._validation_cases = family.validation_cases(problem)
        self._lock = threading.Lock()
        self._operands: Operands | None = None
        self._timed: TimedWorkload | None = None
        self._current: dict[str, bool] = {}

    # ---- any thread

    def draft(self, values: Values) -> Draft:
        """Render a variant and name it.

        Raises:
            IllegalVariantError: it is not legal here; says why.
        """
        require_legal(self.family, values, self.problem, self._info)
        candidate = Candidate(canonical(self.family, values), self.problem, self._info)
        render = RenderMemo(self._render)
        broken = None
        try:
            scalars = self.family.timing_scalars(self.problem)
            passes = _render(self.family, candidate, scalars, render)
        except TemplateError as error:
            passes, broken = (), failure_of(error)
        key = variant_key(self.family, candidate, passes, self.compiler.identity)
        return Draft(candidate=candidate, passes=passes, key=key, render=render, broken=broken)

    def is_current(self, record: Record) -> bool:
        """Whether a record of this problem tells of a kernel that could be made today.

        Not so if sources, compiler or space have changed since, or it is of another card.
        """
        if record.variant not in self._current:
            try:
                same = self.draft(record.values).key == record.variant
            except IllegalVariantError:
                same = False
            self._current[record.variant] = same
        return self._current[record.variant]

    def prepare(self, draft: Draft) -> PreparedTrial:
        """Compile a variant and make its pipelines, for timing and for validation.

        The cases run the same kernels (`Family.validated_as`); those on which the variant is not
        legal are left out.
        """
        if draft.broken is not None:
            return PreparedTrial(draft=draft, failure=draft.broken)
        making = _Making(self.runner)
        compiler = CompileMemo(self.compiler)
        try:
            built = compile_passes(self.family, draft.candidate, draft.passes, compiler)
            statistics = making.add(built)
            cases = self._legal_cases(draft.candidate)
            for case, values in cases.items():
                candidate = Candidate(values, case.problem, self._info)
                passes = _render(self.family, candidate, self._cases.scalars(case), draft.render)
                making.add(compile_passes(self.family, candidate, passes, compiler))
        except (*MADE_BADLY, *RAN_BADLY, UsageError) as error:
            making.release()
            return PreparedTrial(
                draft=draft,
                failure=failure_of(error, making=True),
                compile_seconds=making.compile_seconds,
                pipeline_seconds=making.pipeline_seconds,
            )
        job, *case_jobs = making.jobs
        return PreparedTrial(
            draft=draft,
            job=job,
            case_jobs=tuple(zip(cases, case_jobs, strict=True)),
            compile_seconds=making.compile_seconds,
            pipeline_seconds=making.pipeline_seconds,
            statistics=statistics,
        )

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
        for job in trial.jobs:
            # A lost device takes nothing back; saying so would hide the trial's own failure.
            with contextlib.suppress(DeviceLostError):
                self.runner.release(job)

    def close(self) -> None:
        """Unload the problem's operands, and the validation cases unless they are shared."""
        if self._timed is not None:
            self.runner.unload(self._timed.workload)
            self._timed = None
        if self._own_cases is not None:
            self._own_cases.close()

    # ---- inside

    def _timed_operands(self) -> Operands:
        with self._lock:
            if self._operands is None:
                self._operands = self.family.operands(self.problem, TIMING_INPUTS, 0)
            return self._operands

    def _timed_workload(self) -> TimedWorkload:
        if self._timed is None:
            self._timed = load_timed(
                self.runner,
                self.family,
                self.problem,
                self._timed_operands(),
                footprint_bytes=self.session.footprint_bytes,
                sampled_groups=SAMPLED_GROUPS,
            )
        return self._timed

    def _resident_cases(self) -> tuple[ResidentCase, ...]:
        return self._cases.use(self._validation_cases)

    def _legal_cases(self, candidate: Candidate) -> dict[ValidationCase, Values]:
        """The cases on which the variant is legal, each with the values it has there."""
        values = {
            case: self.family.validation_values(candidate, case) for case in self._validation_cases
        }
        return {
            case: chosen
            for case, chosen in values.items()
            if not reasons(self.family, chosen, case.problem, self._info)
        }

    def _judge(self, runs: Iterable[tuple[_Judged, Job]], draft: Draft) -> Findings:
        """Launch and judge one after the other, up to the first that fails."""
        started = time.perf_counter()
        arithmetic = self.family.arithmetic(draft.values)
        checks: list[Check] = []
        failure = None
        try:
            for judged, job in runs:
                verdict = judged.verdict(self.runner, job, arithmetic)
                checks.append(verdict.check)
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


class _Making:
    """The jobs of one trial as they are made; knows what to take down if one fails."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.jobs: list[Job] = []
        self.compile_seconds = 0.0
        self.pipeline_seconds = 0.0

    def add(self, built: Built) -> tuple[PassStatistics, ...]:
        """Make the pipelines of a job. Raises what `Runner.prepare` raises."""
        self.compile_seconds += built.compile_seconds
        prepared = self._runner.prepare(built.job)
        self.jobs.append(built.job)
        self.pipeline_seconds += prepared.pipeline_seconds
        return prepared.statistics

    def release(self) -> None:
        for job in self.jobs:
            self._runner.release(job)


def _render(
    family: Family, candidate: Candidate, scalars: Scalars, render: Render
) -> tuple[RenderedPass, ...]:
    return render_passes(
        family,
        candidate.values,
        candidate.problem,
        candidate.device,
        scalars=scalars,
        render=render,
    )
