"""Searches of the toy family on the fake runner: a store in memory, and who watches a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from tests.toy_family import TOY, ToyCompiler, toy_device, toy_problem, toy_render, toy_runner
from tuner.errors import ResultsError
from tuner.evaluate import Session
from tuner.kernels.base import Family, Values
from tuner.kernels.space import canonical, legal
from tuner.problems import Problem
from tuner.records import FINAL, REFERENCE, Record
from tuner.runner.fake import FakeRunner
from tuner.runner.protocol import MeasurePlan
from tuner.search import Interrupts, RunResult, Settings, Silent, Status, tune

PROBLEM = toy_problem(4, 4096)
SPACE = legal(TOY, PROBLEM, toy_device())
BASELINE = canonical(TOY, TOY.baseline)
PLAN = MeasurePlan(min_samples=5, max_samples=8, budget_ms=0.01)


class Records:
    """A record store in memory."""

    def __init__(self, kept: tuple[Record, ...] = ()) -> None:
        self.kept = list(kept)
        self.fail_after: int | None = None

    def find(self, variant: str) -> Record | None:
        return next((r for r in reversed(self.kept) if r.variant == variant), None)

    def append(self, record: Record) -> None:
        if self.fail_after is not None and len(self.kept) >= self.fail_after:
            raise ResultsError("records.jsonl", "No space left on device")
        self.kept.append(record)

    def records(self) -> tuple[Record, ...]:
        return tuple(self.kept)


class Watch(Silent):
    """Keeps what a run tells."""

    def __init__(self) -> None:
        self.started: list[Values] = []
        self.finished: list[tuple[Record, Status]] = []
        self.finals: list[int] = []
        self.problems: list[Any] = []

    def trial_started(self, values: Values, status: Status) -> None:
        self.started.append(values)

    def trial_finished(self, record: Record, status: Status) -> None:
        self.finished.append((record, status))

    def finals_started(self, count: int, status: Status) -> None:
        self.finals.append(count)

    def problem_started(self, status: Status) -> None:
        self.problems.append(status)

    def problem_finished(self, result: Any) -> None:
        self.problems.append(result)


class Interrupting(Watch):
    """Sends SIGINT to this process when the n-th trial gets the device."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def trial_started(self, values: Values, status: Status) -> None:
        super().trial_started(values, status)
        if len(self.started) == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def run(
    journal: Path,
    *,
    store: Records | None = None,
    runner: FakeRunner | None = None,
    problems: tuple[Problem, ...] = (PROBLEM,),
    family: Family = TOY,
    progress: Silent | None = None,
    interrupts: Interrupts | None = None,
    session: Session | Callable[[], Session] | None = None,
    **settings: Any,
) -> RunResult:
    chosen: dict[str, Any] = {"workers": 1, "seed": 3, "trials": 20, **settings}
    return tune(
        runner or toy_runner(),
        ToyCompiler(),
        [(family, problem) for problem in problems],
        Records() if store is None else store,
        storage=journal,
        settings=Settings(**chosen),
        session=session or Session(name="s", plan=PLAN, read_gb_s=1000.0),
        progress=progress,
        interrupts=interrupts,
        render=toy_render,
    )


def searched(store: Records) -> list[Record]:
    return [record for record in store.kept if record.note not in (FINAL, REFERENCE)]


def only_study(journal: Path) -> optuna.Study:
    storage = JournalStorage(JournalFileBackend(str(journal)))
    (summary,) = optuna.get_all_study_summaries(storage)
    return optuna.load_study(study_name=summary.study_name, storage=storage)
