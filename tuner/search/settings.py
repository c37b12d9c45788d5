"""How a run searches, and what it comes to. Plain data."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tuner.device_info import DeviceInfo
from tuner.errors import UsageError
from tuner.kernels.base import Family, Value, Values
from tuner.problems import Problem
from tuner.records import Record, State
from tuner.search.objective import OBJECTIVES, Objective
from tuner.timing import MIN_ROUNDS

SamplerName = Literal["tpe", "random", "grid", "cmaes", "gp"]
SAMPLERS: tuple[SamplerName, ...] = ("tpe", "random", "grid", "cmaes", "gp")
RETRIED: frozenset[State] = frozenset({"timeout", "runtime"})
"""How a variant fails that might do better another time; other failures are certain."""

REFERENCE_EVERY = 10
"""Trials on a GPU between two times of the reference variant."""

LEAST_TRIALS = 10
"""Trials that a problem has before its time can end its search: its baseline, without which there
is no speed-up to speak of, the best variants of the family's other problems, the first of its
starts. Fewer are no search: a model learns nothing from them (`tuner.search.model`)."""

Ending = Literal[
    "trials",
    "seconds",
    "exhausted",
    "met before",
    "interrupted",
    "device lost",
    "does not fit",
    "nothing legal",
]
"""Why the search on a problem ended.

"exhausted": every legal variant is tried. "met before": earlier runs had spent this budget.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decides how a run goes.

    `trials` and `seconds` are budgets of the run, shared out over its problems (see
    `tuner.search.shares`); what earlier runs of the same studies spent counts. None is no limit.
    Whatever `seconds` are, each problem has its first `LEAST_TRIALS`. `workers` threads prepare
    variants, so many may be ready or in preparation at once (default: as many as processors).
    `overlap` says whether they go on preparing while the device is timed (default: unless the
    device is the CPU, whose times they would spoil). `retry_failed` tries variants again that have
    hung, crashed or lost the device; without it they are never proposed again on that device and
    driver. Runs with equal seeds propose alike only as far as their times are alike. `objective`:
    what is minimised; with "both" the search looks for the front of variants that none beats in
    time and energy.
    The best `finalists` are timed again in turns, in `final_rounds`, three where time is over by
    then, and, on a GPU as long as it is open who wins, up to `most_final_rounds`. After
    `reference_every` trials a reference variant is timed again, and so is what ran while it
    drifted; 0 is never (default: 10, or 0 on a CPU, whose times drift with whatever else it does).
    `only` has, by family, the values that parameters may have; those of the baseline, which is
    always measured, aside.
    """

    trials: int | None = None
    seconds: float | None = None
    sampler: SamplerName = "tpe"
    objective: Objective = "time"
    seed: int = 0
    workers: int | None = None
    overlap: bool | None = None
    retry_failed: bool = False
    finalists: int = 6
    final_rounds: int = MIN_ROUNDS
    most_final_rounds: int = 20
    reference_every: int | None = None
    only: Mapping[str, Mapping[str, Collection[Value]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise UsageError(f"sampler {self.sampler!r}: use one of {', '.join(SAMPLERS)}")
        if self.objective not in OBJECTIVES:
            raise UsageError(f"objective {self.objective!r}: use one of {', '.join(OBJECTIVES)}")
        if self.objective == "both" and self.sampler == "cmaes":
            raise UsageError("sampler 'cmaes' knows one objective only: use --sampler tpe")
        for name in ("trials", "seconds", "workers"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} is {value}, must be above 0 and finite")
        if self.final_rounds < MIN_ROUNDS:
            raise UsageError(
                f"final_rounds is {self.final_rounds}, must be {MIN_ROUNDS} or more: fewer do not "
                "tell how rounds differ"
            )

    def worker_count(self) -> int:
        """Threads that prepare variants."""
        if self.workers is not None:
            return self.workers
        return min(16, _processors())

    def reference_after(self, device: DeviceInfo) -> int:
        """Trials after which a reference is due; 0 for never."""
        if self.reference_every is not None:
            return self.reference_every
        return 0 if device.is_cpu else REFERENCE_EVERY

    def overlaps(self, device: DeviceInfo) -> bool:
        """Whether variants are prepared while others are timed."""
        return not device.is_cpu if self.overlap is None else self.overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How far the search on one problem is.

    `trials` counts variants with a result in the study, with those of earlier runs; of these
    `measured` were tried in this run and `known` answered from earlier records. `best` is the
    fastest so far. `seconds_left` is None where there is no telling: without a limit, before the
    first result, and while `LEAST_TRIALS` take longer than the problem's time. `busy` is the share
    of wall time in which the device thread validated or timed.
    """

    family: Family
    problem: Problem
    index: int
    problems: int
    legal: int
    trials: int
    trial_limit: int | None
    measured: int = 0
    known: int = 0
    best: Record | None = None
    failures: Mapping[State, int] = field(default_factory=dict)
    seconds_left: float | None = None
    busy: float = 0.0


class Progress(Protocol):
    """What a run tells while it goes on, on the thread that called `tune`."""

    def problem_started(self, status: Status) -> None:
        """A problem's turn begins."""
        ...

    def trial_started(self, values: Values, status: Status) -> None:
        """A variant gets the device."""
        ...

    def trial_finished(self, record: Record, status: Status) -> None:
        """A variant has a result, new or known."""
        ...

    def finals_started(self, count: int, status: Status) -> None:
        """The best `count` variants are measured again, in turns."""
        ...

    def problem_finished(self, result: ProblemResult) -> None:
        """A problem's turn is over."""
        ...


class Silent:
    """A `Progress` that tells nobody; a base for those that care for a part."""

    def problem_started(self, status: Status) -> None:
        """A problem's turn begins."""

    def trial_started(self, values: Values, status: Status) -> None:
        """A variant gets the device."""

    def trial_finished(self, record: Record, status: Status) -> None:
        """A variant has a result, new or known."""

    def finals_started(self, count: int, status: Status) -> None:
        """The best `count` variants are measured again, in turns."""

    def problem_finished(self, result: ProblemResult) -> None:
        """A problem's turn is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemResult:
    """What the search on one problem came to.

    `best` (the fastest) and `baseline` are the records to go by; None where nothing was correct.
    `front` has the variants that none beats in both time and energy, fastest first, so that the
    last takes the least energy; empty where no energy was measured. `search_seconds` is the wall
    time from the first trial to the end of the last, without what went before and the finals.
    `error` says what went wrong with the problem as a whole.
    """

    family: Family
    problem: Problem
    ended: Ending
    legal: int = 0
    trials: int = 0
    measured: int = 0
    known: int = 0
    best: Record | None = None
    baseline: Record | None = None
    front: tuple[Record, ...] = ()
    failures: Mapping[State, int] = field(default_factory=dict)
    seconds: float = 0.0
    search_seconds: float = 0.0
    busy: float = 0.0
    error: str | None = None

    @property
    def is_short(self) -> bool:
        """Whether there was no time for more than its first trials, `LEAST_TRIALS`."""
        return self.ended == "seconds" and self.trials <= LEAST_TRIALS


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run came to. `error` says why it stopped early, if it did (a lost device).

    `seconds_over` is what it took beyond its budget of seconds, earlier runs included.
    """

    problems: tuple[ProblemResult, ...]
    interrupted: bool
    seconds: float
    seconds_over: float = 0.0
    error: str | None = None

    @property
    def measured(self) -> int:
        """Variants tried in this run."""
        return sum(result.measured for result in self.problems)

    @property
    def pace(self) -> float | None:
        """Variants tried a second while searching: settling, references timed again and waiting
        for variants count, what lies around the searches does not. None if nothing was tried."""
        seconds = sum(result.search_seconds for result in self.problems)
        return self.measured / seconds if seconds and self.measured else None

    @property
    def busy(self) -> float:
        """Share of wall time in which the device thread validated or timed."""
        spent = sum(result.seconds for result in self.problems)
        return sum(r.busy * r.seconds for r in self.problems) / spent if spent else 0.0


def _processors() -> int:
    """Those that this process may use, where the system tells; else all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
