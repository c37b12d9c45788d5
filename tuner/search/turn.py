"""One problem's turn in a run: what is known, where to start, the search, the finals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tuner.errors import DeviceLostError, NoWorkerError, OutOfMemoryError
from tuner.evaluate import Evaluator, Failure, Findings, PreparedTrial
from tuner.kernels.base import Values
from tuner.kernels.selection import Variants
from tuner.kernels.space import canonical, starts
from tuner.results.front import front
from tuner.search.crew import Crew
from tuner.search.desk import RecordStore
from tuner.search.finalists import hold_finals, outcome_of
from tuner.search.interrupts import Interrupts
from tuner.search.loop import search_problem
from tuner.search.proposer import Proposer
from tuner.search.settings import RETRIED, Ending, ProblemResult, Progress, Settings
from tuner.search.shares import Shares
from tuner.search.studylog import MAX_CRASHES, Budget, StudyLog
from tuner.search.tally import Tally

NEIGHBOURS = 4
"""How many other problems' best variants are tried early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """All that one problem's search needs; `shares` says how much of the run's budgets it has."""

    evaluator: Evaluator
    variants: Variants
    proposer: Proposer
    log: StudyLog
    store: RecordStore
    crew: Crew
    settings: Settings
    tally: Tally
    progress: Progress
    shares: Shares

    @property
    def budget(self) -> Budget:
        """The problem's share of the run's budgets, as if every problem took its own."""
        return self.shares.budget(self.tally.index)

    def take_stock(self) -> None:
        """Count what earlier runs found, and set the limits of this one."""
        tally, log = self.tally, self.log
        tally.trials, tally.spent_before = len(log.finished), log.seconds
        tally.trial_limit = self.budget.trials
        outcome = outcome_of(self.evaluator, self.store)
        if outcome is not None:
            tally.best, tally.baseline = outcome.best, outcome.baseline
            tally.failures.update(outcome.failures)
            for state in RETRIED if self.settings.retry_failed else ():
                del tally.failures[state]

    def play(
        self, neighbours: Iterable[Values], interrupts: Interrupts, at_half: Callable[[], None]
    ) -> ProblemResult:
        """Search and hold the finals, unless earlier runs have done all that the budget allows.

        `neighbours` are the best variants of other problems; for `at_half` see `search_problem`.

        Raises:
            ResultsError: records or studies cannot be kept.
        """
        if self.log.covers(self.budget):
            return self.tally.result("met before")
        try:
            self._start_points(neighbours)
            ending, leaving = search_problem(
                self.evaluator,
                self.proposer,
                self.log,
                self.store,
                crew=self.crew,
                settings=self.settings,
                tally=self.tally,
                progress=self.progress,
                interrupts=interrupts,
                at_first=self._begin_share,
                at_half=at_half,
            )
            try:
                if ending != "interrupted":
                    self._hold_finals()
            finally:
                self.crew.result_of(leaving)
            if ending != "interrupted":
                self._conclude(ending)
        except OutOfMemoryError as error:
            return self._result("does not fit", str(error))
        except (DeviceLostError, NoWorkerError) as error:
            return self._result("device lost", str(error))
        return self._result(ending)

    def _result(self, ending: Ending, error: str | None = None) -> ProblemResult:
        """As it is at the end, with the best that the records show: what an export takes too."""
        self.crew.keep_warm()
        outcome = outcome_of(self.evaluator, self.store)
        if outcome is not None:
            self.tally.best, self.tally.baseline = outcome.best, outcome.baseline
            metered = (record for record in outcome.records if record.energy is not None)
            self.tally.front = front(filter(self.evaluator.is_current, metered))
        return self.tally.result(ending, error)

    def _start_points(self, neighbours: Iterable[Values]) -> None:
        """The baseline, what was under way when the last run ended, known-good variants."""
        family, log, proposer = self.evaluator.family, self.log, self.proposer
        for values in log.crashed:
            if proposer.exclude(values):
                self._give_up(values)
        proposer.resume((trial.values, trial.costs) for trial in log.finished)
        proposer.try_first(
            [
                canonical(family, family.baseline),
                *log.retry,
                *(
                    self.variants[self.variants.nearest(values)]
                    for values in list(neighbours)[:NEIGHBOURS]
                ),
                *starts(family, self.variants, self.evaluator.runner.info),
            ]
        )

    def _begin_share(self) -> None:
        tally = self.tally
        tally.begin_share(self.shares.left(tally.index, tally.spent_before))

    def _give_up(self, values: Values) -> None:
        """Record a variant that was under way each of the last times that the process died."""
        failure = Failure(
            state="runtime",
            error=f"the process died {MAX_CRASHES} times while this variant was under way",
        )
        trial = PreparedTrial(draft=self.evaluator.draft(values), failure=failure)
        record = self.evaluator.record(trial, Findings(failure=failure))
        self.store.append(record)
        self.log.finish(self.log.start(values), record, known=False)

    def _hold_finals(self) -> None:
        started = time.monotonic()
        hold_finals(
            self.evaluator,
            self.store,
            crew=self.crew,
            settings=self.settings,
            tally=self.tally,
            progress=self.progress,
        )
        self.tally.busy_seconds += time.monotonic() - started

    def _conclude(self, ending: Ending) -> None:
        charged = self.log.seconds - self.tally.spent_before
        self.log.spend(self.tally.searched - charged)
        everything = Budget(trials=None, seconds=None)
        self.log.cover(everything if ending == "exhausted" else self.budget)
