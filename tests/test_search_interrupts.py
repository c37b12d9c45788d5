"""Signals to a search: the trial under way is finished, everything is kept."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import optuna
import pytest

from tests.toy_family import toy_problem, toy_runner
from tests.toy_search import PROBLEM, Interrupting, Records, only_study, run
from tuner.kernels.base import Values
from tuner.search import Interrupts, RunResult, Status
from tuner.search import interrupts as interrupts_module


def test_ctrl_c_finishes_the_trial_and_keeps_everything(journal: Path) -> None:
    store, runner = Records(), toy_runner()
    before = signal.getsignal(signal.SIGINT)
    result = run(
        journal, store=store, runner=runner, progress=Interrupting(6), workers=3, trials=30
    )
    assert result.interrupted
    assert result.problems[0].ended == "interrupted"
    assert len(store.kept) == result.problems[0].measured == 6
    assert result.problems[0].best is not None
    assert runner.jobs == []
    assert runner.workloads == {}
    assert signal.getsignal(signal.SIGINT) is before
    states = [t.state for t in only_study(journal).trials]
    assert optuna.trial.TrialState.RUNNING not in states


def test_signals_close_together_are_one(journal: Path) -> None:
    class Twice(Interrupting):
        def trial_started(self, values: Values, status: Status) -> None:
            super().trial_started(values, status)
            if len(self.started) == self.at:
                os.kill(os.getpid(), signal.SIGINT)

    result = run(journal, progress=Twice(3), trials=20)
    assert result.interrupted
    assert result.measured == 3


def test_a_second_signal_acts_as_usual_after_what_the_caller_wants(
    monkeypatch: pytest.MonkeyPatch, journal: Path
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(interrupts_module, "ONE_S", 0.0)
    interrupts = Interrupts(
        first=lambda: heard.append("first"), second=lambda: heard.append("second")
    )
    before = signal.getsignal(signal.SIGINT)
    with interrupts:
        result = run(journal, progress=Interrupting(3), trials=20, interrupts=interrupts)
        assert (result.measured, heard) == (3, ["first"])
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before
    assert heard == ["first", "second"]


def test_an_interrupt_ends_the_run_not_only_the_problem(journal: Path) -> None:
    problems = (PROBLEM, toy_problem(1, 64))
    result = run(journal, problems=problems, progress=Interrupting(2), trials=20)
    assert len(result.problems) == 1


def test_the_library_leaves_signals_alone_in_other_threads(journal: Path) -> None:
    found: list[RunResult] = []
    thread = threading.Thread(target=lambda: found.append(run(journal, trials=4)))
    thread.start()
    thread.join()
    assert found[0].measured == 4
