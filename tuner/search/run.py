"""A run: problem after problem, budgets shared out, whatever happens kept."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tuner import templates
from tuner.errors import UsageError
from tuner.evaluate import (
    Evaluator,
    Render,
    ResidentCases,
    Session,
    SpirvCompiler,
)
from tuner.kernels import space
from tuner.kernels.base import Family, Values
from tuner.kernels.selection import Variants
from tuner.problems import Problem
from tuner.runner.protocol import ENERGY_MS, Runner
from tuner.search.crew import Crew
from tuner.search.desk import RecordStore
from tuner.search.interrupts import Interrupts
from tuner.search.objective import require_meter
from tuner.search.proposer import Proposer
from tuner.search.settings import ProblemResult, Progress, RunResult, Settings, Silent
from tuner.search.shares import Shares
from tuner.search.studylog import Storage, StudyLog, open_storage
from tuner.search.tally import Tally
from tuner.search.turn import Turn

Task = tuple[Family, Problem]

WARMUP_MS = 5.0
"""Load before a trial's samples: less than elsewhere, since in a search the device hardly idles."""
PRECISION = 0.01
"""At which a trial's median is known well enough: measurements of the same variant differ by 0.6 %
anyway, whatever their samples say, and the finals measure the best again, in turns."""


def tune(
    runner: Runner,
    compiler: SpirvCompiler,
    tasks: Sequence[Task],
    store: RecordStore,
    *,
    storage: Path,
    settings: Settings,
    session: Session | Callable[[], Session] | None = None,
    progress: Progress | None = None,
    interrupts: Interrupts | None = None,
    render: Render = templates.render,
) -> RunResult:
    """Search the best variant of each (family, problem), one after the other.

    Every trial leaves a record in `store`, and a trial in a study in the journal file `storage`:
    what is known there is never measured again, and a run that was stopped goes on where it was.
    SIGINT and SIGTERM end the run after the trial that has the device; the result then says
    `interrupted`. A problem that does not fit, or a lost device, is reported in the result.

    `session` may be what makes it, by a calibration say: called before the first problem on which
    earlier runs have left something to do. `interrupts` that are given are open already.

    Raises:
        UsageError: no tasks, or fewer trials than tasks; the sampler needs a package that is
            missing, or the objective a meter.
        ResultsError: records or studies cannot be kept; what was kept so far is intact.
    """
    _require_trials(tasks, settings)
    require_meter(runner, settings.objective)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(contextlib.closing(open_storage(storage)))
        interrupts = interrupts or stack.enter_context(Interrupts())
        crew = stack.enter_context(Crew(runner, settings))
        run = _Run(
            runner=runner,
            compiler=compiler,
            store=store,
            storage=journal,
            settings=settings,
            make_session=session if callable(session) else lambda: session or Session(),
            progress=progress or Silent(),
            render=render,
            crew=crew,
            tasks=tasks,
            shares=Shares(
                problems=len(tasks),
                begun=started,
                trials=settings.trials,
                seconds=settings.seconds,
            ),
        )
        run.tune_problems(interrupts)
    lost = next((r.error for r in run.results if r.ended == "device lost"), None)
    if lost is None:
        run.close()
    return RunResult(
        problems=tuple(run.results),
        interrupted=interrupts.asked,
        seconds=time.monotonic() - started,
        seconds_over=run.shares.over,
        error=lost,
    )


def _require_trials(tasks: Sequence[Task], settings: Settings) -> None:
    """Do nothing if there is a task, and a trial for each.

    Raises:
        UsageError: there is not.
    """
    if not tasks:
        raise UsageError("nothing to tune: give at least one problem")
    if settings.trials is not None and settings.trials < len(tasks):
        raise UsageError(
            f"trials is {settings.trials} for {len(tasks)} problems, which share them: give "
            f"{len(tasks)} or more, or fewer problems"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """What a problem's turn begins with that takes no device, but a second or more to make.

    `proposer` is missing where nothing is legal.
    """

    variants: Variants
    proposer: Proposer | None = None


@dataclass(slots=True, kw_only=True)
class _Run:
    """What the problems of a run share."""

    runner: Runner
    compiler: SpirvCompiler
    store: RecordStore
    storage: Storage
    settings: Settings
    make_session: Callable[[], Session]
    progress: Progress
    render: Render
    crew: Crew
    tasks: Sequence[Task]
    shares: Shares
    session: Session | None = None
    results: list[ProblemResult] = field(default_factory=list)
    cases: dict[str, ResidentCases] = field(default_factory=dict)
    coming: dict[int, tuple[Evaluator, Future[_Ready]]] = field(default_factory=dict)

    def tune_problems(self, interrupts: Interrupts) -> None:
        """One after the other, up to an interrupt or the loss of the device."""
        for index in range(self.problems):
            result = self.tune_problem(index, interrupts)
            self.results.append(result)
            self.progress.problem_finished(result)
            if result.ended in ("interrupted", "device lost"):
                break

    def tune_problem(self, index: int, interrupts: Interrupts) -> ProblemResult:
        """One problem's turn."""
        family, problem = self.tasks[index]
        tally = Tally(
            family=family,
            problem=problem,
            index=index,
            problems=self.problems,
            begun=time.monotonic(),
        )
        evaluator, coming = self.coming.pop(index, (None, None))
        ready = self._ready(index) if coming is None else self.crew.result_of(coming)
        tally.legal = len(ready.variants)
        if ready.proposer is None:
            self.progress.problem_started(tally.status())
            return tally.result("nothing legal", self._why_nothing(family, problem))
        log = self._study_log(family, problem, ready.proposer)
        if self.session is None and not log.covers(self.shares.budget(index)):
            self._open_session()
            tally.begun = time.monotonic()
        turn = Turn(
            evaluator=evaluator or self._evaluator(family, problem),
            variants=ready.variants,
            proposer=ready.proposer,
            log=log,
            store=self.store,
            crew=self.crew,
            settings=self.settings,
            tally=tally,
            progress=self.progress,
            shares=self.shares,
        )
        return self._play(turn, interrupts)

    def _play(self, turn: Turn, interrupts: Interrupts) -> ProblemResult:
        tally = turn.tally
        turn.take_stock()
        self.progress.problem_started(tally.status())
        neighbours = self._neighbours(tally.family)
        result = turn.play(neighbours, interrupts, lambda: self._get_ready(tally.index + 1))
        self.shares.close(searched=tally.searched, before=tally.spent_before)
        if result.ended != "device lost":
            turn.evaluator.close()
        return result

    def _open_session(self) -> None:
        """Make the session; what that takes, by a calibration say, is no part of the budget."""
        started = time.monotonic()
        self.session = _timed_as_searched(self.make_session(), self.settings)
        self.shares.begun += time.monotonic() - started

    @property
    def problems(self) -> int:
        """How many there are."""
        return len(self.tasks)

    def _get_ready(self, index: int) -> None:
        """Have the scout make what that problem's turn begins with, if it comes to it.

        Its operands are then in memory beside those of the problem whose turn it is.
        """
        if self.crew.overlap and index < self.problems and index not in self.coming:
            evaluator = self._evaluator(*self.tasks[index])
            self.coming[index] = evaluator, self.crew.scout.submit(self._ready, index, evaluator)

    def _ready(self, index: int, evaluator: Evaluator | None = None) -> _Ready:
        """What that problem's turn begins with; with its evaluator also what this needs first."""
        family, problem = self.tasks[index]
        variants = self._allowed(family, problem)
        if not variants:
            return _Ready(variants=variants)
        proposer = Proposer(
            variants,
            self.settings.sampler,
            self.settings.seed,
            objectives=2 if self.settings.objective == "both" else 1,
        )
        if evaluator is not None:
            baseline = space.canonical(family, family.baseline)
            firsts = (baseline, *space.starts(family, variants, self.runner.info))
            evaluator.foresee(values for values in firsts if values in variants)
        return _Ready(variants=variants, proposer=proposer)

    def _allowed(self, family: Family, problem: Problem) -> Variants:
        """The legal variants that the settings let be tried."""
        legal = space.legal(family, problem, self.runner.info)
        baseline = space.canonical(family, family.baseline)
        return legal.having(self.settings.only.get(family.name, {}), beside=baseline)

    def _why_nothing(self, family: Family, problem: Problem) -> str:
        only = self.settings.only.get(family.name, {})
        listed = {name: list(values) for name, values in only.items()}
        why = "; ".join(space.why_none(family, problem, self.runner.info, listed))
        if not listed:
            return f"no variant is legal; the baseline: {why}"
        told = " ".join(f"{name}={'|'.join(map(str, values))}" for name, values in listed.items())
        return f"no variant with {told} is legal: {why}"

    def close(self) -> None:
        """Unload the validation cases."""
        for cases in self.cases.values():
            cases.close()

    def _evaluator(self, family: Family, problem: Problem) -> Evaluator:
        if family.name not in self.cases:
            self.cases[family.name] = ResidentCases(self.runner, family)
        return Evaluator(
            self.runner,
            self.compiler,
            family,
            problem,
            session=self.session,
            cases=self.cases[family.name],
            render=self.render,
            idled=self.crew.keep_warm,
        )

    def _neighbours(self, family: Family) -> list[Values]:
        """The best variants of this run's other problems, the latest first."""
        return [
            result.best.values
            for result in reversed(self.results)
            if result.family.name == family.name and result.best is not None
        ]

    def _study_log(self, family: Family, problem: Problem, proposer: Proposer) -> StudyLog:
        return StudyLog(
            self.storage,
            self._study_name(family, problem, proposer),
            proposer.encoding,
            isolated=self.runner.losses is not None,
            retry_failed=self.settings.retry_failed,
            find=self.store.find,
            objective=self.settings.objective,
        )

    def _study_name(self, family: Family, problem: Problem, proposer: Proposer) -> str:
        """Another study wherever earlier trials would not say what to expect of new ones."""
        info = self.runner.info
        identity = (
            family.name,
            problem.key,
            proposer.encoding.digest,
            info.uuid,
            info.driver,
            self.compiler.identity,
            _template_digest(),
        )
        digest = hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:12]
        goal = "" if self.settings.objective == "time" else f" {self.settings.objective}"
        return f"{family.name} {problem.label} {digest}{goal}"


def _timed_as_searched(session: Session, settings: Settings) -> Session:
    """The session as it is to be recorded, with energy measured where the objective needs it."""
    plan = msgspec.structs.replace(
        session.plan,
        warmup_ms=min(session.plan.warmup_ms, WARMUP_MS),
        precision=max(session.plan.precision, PRECISION),
    )
    if settings.objective != "time" and plan.energy_ms == 0:
        plan = msgspec.structs.replace(plan, energy_ms=ENERGY_MS)
    return dataclasses.replace(session, sampler=settings.sampler, plan=plan)


def _template_digest() -> str:
    """Changes with any template, its place among the others included."""
    root = templates.TEMPLATE_DIR
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.jinja")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
