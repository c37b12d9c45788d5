"""Tuning runs of the toy family whose device work is done by a worker, and their books.

The fake runner is exact, so what every record must hold is known beforehand: `expected`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.toy_family import TOY, ToyCompiler, toy_device, toy_problem, toy_render, toy_runner
from tuner.evaluate import Evaluator, Session
from tuner.kernels.base import Values
from tuner.kernels.space import legal
from tuner.problems import Problem
from tuner.records import FINAL, REFERENCE, Record
from tuner.results import Store
from tuner.runner._deadlines import Deadlines
from tuner.runner.protocol import MeasurePlan, Runner
from tuner.search import Progress, RunResult, Settings, tune

PROBLEMS = (toy_problem(4, 4096), toy_problem(2, 1024), toy_problem(1, 512))
SPACE = legal(TOY, PROBLEMS[0], toy_device())
PLAN = MeasurePlan(
    warmup_ms=1.0, min_samples=3, max_samples=4, budget_ms=0.01, max_submission_ms=1.0
)
SHORT = Deadlines(start_s=60.0, launch_s=1.0, prepare_s=3.0, close_s=20.0, spare_s=1.0)
"""Short for what hangs on purpose, and a thousand times what anything else takes."""


@dataclass(slots=True)
class Books:
    """What a whole test session adds up to."""

    acknowledged: int = 0
    """Records that a run was told are safe."""
    lost: int = 0
    """Of these, those that were not there later."""
    events: dict[str, int] = field(default_factory=dict)
    """What was done to the runs, by name."""

    def count(self, event: str, times: int = 1) -> None:
        """Note what was done."""
        self.events[event] = self.events.get(event, 0) + times

    def check(self, acknowledged: Iterable[str], folder: Path) -> None:
        """Compare the variants of acknowledged records with what the folder holds."""
        told = list(acknowledged)
        kept = [record.variant for record in Store(folder, read_only=True).records()]
        missing = [variant for variant in told if variant not in kept]
        self.acknowledged += len(told)
        self.lost += len(missing)
        assert missing == []


def tune_toy(
    folder: Path,
    runner: Runner,
    *,
    problems: tuple[Problem, ...] = PROBLEMS[:1],
    progress: Progress | None = None,
    **settings: Any,
) -> RunResult:
    """One run with its results in `folder`; by default the whole space in order."""
    chosen: dict[str, Any] = {"sampler": "grid", "workers": 2, **settings}
    with Store(folder) as store:
        return tune(
            runner,
            ToyCompiler(),
            [(TOY, problem) for problem in problems],
            store,
            storage=folder / "studies.jsonl",
            settings=Settings(**chosen),
            session=Session(name="s", plan=PLAN),
            progress=progress,
            render=toy_render,
        )


def marks_of(values: Values) -> tuple[str, ...]:
    """What only the sources of that variant hold together (see `tests.toy_family.toy_render`)."""
    *names, last = sorted(values)
    return (*(f"'{name}': {values[name]!r}," for name in names), f"'{last}': {values[last]!r}}}")


def searched(folder: Path) -> list[Record]:
    """The records of the search, without those of finals."""
    return [
        record
        for record in Store(folder, read_only=True).records()
        if record.note not in (FINAL, REFERENCE)
    ]


@functools.cache
def expected(problem: Problem) -> dict[str, float]:
    """The median of every variant in nanoseconds, by its key."""
    records = [_undisturbed(problem).run(values) for values in legal(TOY, problem, toy_device())]
    return {record.variant: record.median_ns or 0.0 for record in records}


def expected_time(problem: Problem, values: Values) -> float:
    """The median of one variant in nanoseconds."""
    return expected(problem)[_undisturbed(problem).draft(values).key]


@functools.cache
def _undisturbed(problem: Problem) -> Evaluator:
    return Evaluator(
        toy_runner(noise=0.0),
        ToyCompiler(),
        TOY,
        problem,
        session=Session(plan=PLAN),
        render=toy_render,
    )


def check_run(folder: Path, problems: Iterable[Problem] = PROBLEMS[:1]) -> list[Record]:
    """That every variant was tried once, that all which are correct have their times, and that the
    best is the fastest of these; returns the records of the variants that failed.
    """
    records = searched(folder)
    assert len({record.variant for record in records}) == len(records)
    times = {key: ns for problem in problems for key, ns in expected(problem).items()}
    assert {record.variant for record in records} == times.keys()
    for record in Store(folder, read_only=True).records():
        assert record.state != "correct" or record.median_ns == times[record.variant]
    return [record for record in records if record.state != "correct"]


def best_of(folder: Path, problem: Problem) -> float | None:
    """The median of the best that the folder's records tell, by the newest of each variant."""
    newest = {
        record.variant: record
        for record in Store(folder, read_only=True).records()
        if record.problem == problem
    }
    correct = [r.median_ns for r in newest.values() if r.state == "correct" and r.median_ns]
    return min(correct, default=None)
