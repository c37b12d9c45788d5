"""The budgets of a search: shared out among problems, met before, raised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.toy_family import TOY, ToyCompiler, toy_problem, toy_render, toy_runner
from tests.toy_search import PLAN, PROBLEM, Records, run, searched
from tuner.errors import UsageError
from tuner.evaluate import Session
from tuner.kernels.base import Parameter
from tuner.search import Settings, tune
from tuner.search.studylog import Budget


def test_trials_are_shared_out_fairly(journal: Path) -> None:
    problems = (PROBLEM, toy_problem(1, 64), toy_problem(2, 64))
    result = run(journal, problems=problems, trials=20)
    assert [p.trials for p in result.problems] == [7, 7, 6]


def test_fewer_trials_than_problems_are_refused(journal: Path) -> None:
    problems = (PROBLEM, toy_problem(1, 64))
    with pytest.raises(UsageError, match="trials is 1 for 2 problems, .* give 2 or more"):
        run(journal, problems=problems, trials=1)
    assert [p.trials for p in run(journal, problems=problems, trials=2).problems] == [1, 1]


def test_seconds_are_shared_out_and_what_is_left_is_passed_on(journal: Path) -> None:
    """The first problem's space is small and soon exhausted."""
    tiny = replace(TOY, name="tiny", parameters=tuple(_one_value(p) for p in TOY.parameters))
    result = tune(
        toy_runner(prepare_seconds=0.02),
        ToyCompiler(),
        [(tiny, PROBLEM), (TOY, PROBLEM), (TOY, toy_problem(2, 4096))],
        Records(),
        storage=journal,
        settings=Settings(seconds=4.0, sampler="random", workers=1),
        session=Session(plan=PLAN),
        render=toy_render,
    )
    first, second, third = result.problems
    assert (first.ended, second.ended, third.ended) == ("exhausted", "seconds", "seconds")
    assert first.seconds < 1.0
    assert 1.4 < second.seconds < 2.4
    assert 1.4 < third.seconds < 2.4
    assert result.seconds < 5.0


def _one_value(parameter: Parameter) -> Parameter:
    return replace(parameter, values=parameter.values[:1])


def test_a_budget_met_before_measures_nothing(journal: Path) -> None:
    store = Records()
    first = run(journal, store=store, trials=15)
    kept = len(store.kept)
    runner = toy_runner()
    again = run(journal, store=store, runner=runner, trials=15)
    assert again.problems[0].ended == "met before"
    assert again.measured == 0
    assert len(store.kept) == kept
    assert runner.calls == []
    assert again.problems[0].best == first.problems[0].best
    assert again.problems[0].trials == 15


def test_a_larger_budget_goes_on_and_a_smaller_is_met(journal: Path) -> None:
    store = Records()
    run(journal, store=store, trials=10)
    assert run(journal, store=store, trials=5).problems[0].ended == "met before"
    more = run(journal, store=store, trials=18)
    assert (more.problems[0].trials, more.problems[0].measured) == (18, 8)
    tried = [str(record.values) for record in searched(store)]
    assert len(tried) == len(set(tried)) == 18


def test_seconds_spent_before_count(journal: Path) -> None:
    store = Records()
    slow = toy_runner(prepare_seconds=0.01)
    run(journal, store=store, runner=slow, trials=None, seconds=1.0, sampler="random")
    again = run(journal, store=store, runner=slow, trials=None, seconds=1.0, sampler="random")
    assert again.problems[0].ended == "met before"
    assert again.measured == 0


@pytest.mark.parametrize(
    ("earlier", "now", "covered"),
    [
        ((10, None), (10, None), True),
        ((10, None), (11, None), False),
        ((10, None), (None, 5.0), False),
        ((None, 5.0), (99, 5.0), True),
        ((10, 5.0), (10, 6.0), False),
        ((None, None), (10, 6.0), True),
        ((None, None), (None, None), True),
    ],
)
def test_which_budgets_cover_which(
    earlier: tuple[Any, Any], now: tuple[Any, Any], covered: bool
) -> None:
    before = Budget(trials=earlier[0], seconds=earlier[1])
    assert before.covers(Budget(trials=now[0], seconds=now[1])) is covered
