"""What a search has counted so far, and the status made from it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from tuner.kernels.base import Family
from tuner.problems import Problem
from tuner.records import Record, State
from tuner.search.settings import LEAST_TRIALS, Ending, ProblemResult, Status

FINALS_SHARE, FINALS_SECONDS = 0.2, 6.0
"""What is kept of a problem's time for its finals: this share, but no more than these seconds."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of one problem's search; for the device thread alone. See `Status` for the words.

    `begun`, when the problem's turn began, `first_trial`, when the first variant got the device in
    this run, `first_result`, from when on its share of time counts, and `deadline`, when the search
    is to end, are times of `time.monotonic`. `spent_before` is what earlier runs' searches took, in
    seconds, `finals_seconds` when no more rounds of finals begin, save the first few.
    """

    family: Family
    problem: Problem
    index: int
    problems: int
    begun: float
    legal: int = 0
    trial_limit: int | None = None
    deadline: float | None = None
    spent_before: float = 0.0
    finals_seconds: float = FINALS_SECONDS
    trials: int = 0
    measured: int = 0
    known: int = 0
    best: Record | None = None
    baseline: Record | None = None
    front: tuple[Record, ...] = ()
    failures: Counter[State] = field(default_factory=Counter)
    busy_seconds: float = 0.0
    first_trial: float | None = None
    first_result: float | None = None
    search_seconds: float = 0.0

    def add(self, record: Record, *, known: bool) -> None:
        """Count one more result."""
        self.trials += 1
        self.known += known
        self.measured += not known
        if record.state != "correct":
            self.failures[record.state] += 1
        elif self.best is None or (record.median_ns or 0) < (self.best.median_ns or 0):
            self.best = record

    def correct(self, again: Record) -> None:
        """Take the new time of a variant that was counted before."""
        best = self.best
        if again.state != "correct" or best is None or best.median_ns is None:
            return
        if again.variant == best.variant or (again.median_ns or 0) < best.median_ns:
            self.best = again

    def begin_share(self, seconds: float | None) -> None:
        """The first result is there, and so many seconds are left for search and finals."""
        self.first_result = time.monotonic()
        if seconds is not None:
            self.finals_seconds = min(FINALS_SHARE * seconds, FINALS_SECONDS)
            self.deadline = self.first_result + seconds - self.finals_seconds

    @property
    def time_is_over(self) -> bool:
        """Whether the time ends the search, which it does not before there are `LEAST_TRIALS`."""
        if self.deadline is None or self.trials < LEAST_TRIALS:
            return False
        return time.monotonic() >= self.deadline

    @property
    def half_spent(self) -> bool:
        """Whether half of the trials or of the time is over."""
        if self.trial_limit is not None and 2 * self.trials >= self.trial_limit:
            return True
        if self.first_result is None or self.deadline is None:
            return False
        return 2 * self.searched >= self.deadline - self.first_result

    @property
    def searched(self) -> float:
        """Seconds since the first result of this run."""
        return 0.0 if self.first_result is None else time.monotonic() - self.first_result

    @property
    def seconds(self) -> float:
        """Wall time since the problem's turn began."""
        return time.monotonic() - self.begun

    @property
    def busy(self) -> float:
        """Share of that time in which the device thread validated or timed."""
        return min(1.0, self.busy_seconds / max(1e-9, self.seconds))

    def status(self) -> Status:
        """As it is now."""
        return Status(
            family=self.family,
            problem=self.problem,
            index=self.index,
            problems=self.problems,
            legal=self.legal,
            trials=self.trials,
            trial_limit=self.trial_limit,
            measured=self.measured,
            known=self.known,
            best=self.best,
            failures=dict(self.failures),
            seconds_left=self._seconds_left,
            busy=self.busy,
        )

    @property
    def _seconds_left(self) -> float | None:
        """None: no telling, as the time does not end the search, or not yet."""
        if self.deadline is None:
            return None
        left = self.deadline - time.monotonic()
        return None if left < 0 and self.trials < LEAST_TRIALS else max(0.0, left)

    def result(self, ended: Ending, error: str | None = None) -> ProblemResult:
        """As it is at the end."""
        return ProblemResult(
            family=self.family,
            problem=self.problem,
            ended=ended,
            legal=self.legal,
            trials=self.trials,
            measured=self.measured,
            known=self.known,
            best=self.best,
            baseline=self.baseline,
            front=self.front,
            failures=dict(self.failures),
            seconds=self.seconds,
            search_seconds=self.search_seconds,
            busy=self.busy,
            error=error,
        )
