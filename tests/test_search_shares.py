"""How the seconds of a run are shared out: on the toy, the fake runner and a pretended clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.toy_family import TOY, toy_problem, toy_runner
from tests.toy_search import Interrupting, Records, Watch, run, searched
from tuner.cli.summary import _shortage
from tuner.kernels.base import Family, Operands
from tuner.kernels.space import canonical
from tuner.problems import Problem
from tuner.runner.fake import FakeRunner
from tuner.runner.protocol import Job, Measurement, MeasurePlan
from tuner.search import LEAST_TRIALS, RunResult
from tuner.search.shares import MOST_FORESEEN, Shares

BASELINE = canonical(TOY, TOY.baseline)
TRIAL_S = 0.1
"""What a trial takes on the pretended device, about as on the H200."""


class Clock:
    """Stands still but for what the test lets take time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


@dataclass
class Beginning:
    """What the first trials of a problem wait for, in seconds."""

    clock: Clock
    operands_s: float
    baseline_s: float

    def family(self) -> Family:
        def operands(problem: Problem, inputs: str, seed: int) -> Operands:
            self.clock.now += self.operands_s if inputs == "timing" else 0.0
            return TOY.operands(problem, inputs, seed)

        scalars = {"scalars": lambda problem: TOY.operands(problem, "timing", 0).scalars}
        return replace(TOY, operands=operands, **scalars)

    def runner(self) -> FakeRunner:
        """One that takes the device's time; the baseline may take more than others."""
        beginning = self

        class Timed(FakeRunner):
            def measure(self, job: Job, workload: str, plan: MeasurePlan) -> Measurement:
                slow = all(
                    word in job.passes[0].spirv
                    for word in (b"'mode': 'plain'", b"'width': 32", b"'unroll': 1")
                )
                beginning.clock.now += beginning.baseline_s if slow else TRIAL_S
                return super().measure(job, workload, plan)

        made = toy_runner()
        return Timed(made.info, outputs=made._outputs, times=made._times)


def problems(count: int) -> tuple[Problem, ...]:
    return tuple(toy_problem(4, 4096 + n) for n in range(count))


def tuned(
    journal: Path, beginning: Beginning, seconds: float, count: int, **changes: Any
) -> RunResult:
    """A run whose threads take turns, so that the pretended clock tells the same each time."""
    return run(
        journal,
        runner=beginning.runner(),
        family=beginning.family(),
        problems=problems(count),
        **{"trials": None, "seconds": seconds, "overlap": False, "finalists": 2, **changes},
    )


# ---- the least that each problem gets


def test_slow_beginnings_cost_no_problem_its_baseline_and_first_trials(
    tmp_path: Path, clock: Clock
) -> None:
    """23 problems in 100 s, of which each takes longer than its share before its first result."""
    store, slow = Records(), Beginning(clock, operands_s=3.0, baseline_s=2.0)
    result = tuned(tmp_path / "j", slow, 100.0, 23, store=store, sampler="random")
    assert len(result.problems) == 23
    for each in result.problems:
        assert each.baseline is not None
        assert each.baseline.values == BASELINE
        assert each.trials >= LEAST_TRIALS
        assert each.ended == "seconds"
    tried = [record.values for record in searched(store) if record.problem == problems(1)[0]]
    assert tried[:2] == [BASELINE, canonical(TOY, TOY.starts[0])]
    assert result.seconds_over == pytest.approx(result.seconds - 100.0)
    assert result.seconds_over > 15.0
    assert result.problems[-1].is_short
    assert f"{result.seconds_over:.0f} s more" in (_shortage(result) or "")


def test_a_space_smaller_than_the_least_is_tried_as_a_whole(tmp_path: Path, clock: Clock) -> None:
    slow = Beginning(clock, operands_s=9.0, baseline_s=9.0)
    only = {TOY.name: {"mode": ("plain",), "split": (1,), "width": (32, 64)}}
    (result,) = tuned(tmp_path / "j", slow, 1.0, 1, only=only).problems
    assert result.ended == "exhausted"
    assert result.trials == result.legal < LEAST_TRIALS
    assert not result.is_short


def test_trials_given_limit_even_the_least(tmp_path: Path, clock: Clock) -> None:
    slow = Beginning(clock, operands_s=9.0, baseline_s=9.0)
    (result,) = tuned(tmp_path / "j", slow, 1.0, 1, trials=3).problems
    assert (result.ended, result.trials) == ("trials", 3)


def test_where_time_is_short_the_best_of_another_problem_comes_before_the_starts(
    tmp_path: Path, clock: Clock
) -> None:
    store, slow = Records(), Beginning(clock, operands_s=3.0, baseline_s=2.0)
    result = tuned(tmp_path / "j", slow, 1.0, 2, store=store)
    first = result.problems[0].best
    assert first is not None
    tried = [record.values for record in searched(store) if record.problem == problems(2)[1]]
    assert tried[:2] == [BASELINE, first.values]


# ---- how the rest is shared out


def test_a_slow_beginning_takes_from_all_problems_alike(tmp_path: Path, clock: Clock) -> None:
    class Uneven(Beginning):
        def family(self) -> Family:
            made = super().family()

            def operands(problem: Any, inputs: str, seed: int) -> Operands:
                self.operands_s = 4.0 if problem.context == 4096 + 3 else 0.2
                return made.operands(problem, inputs, seed)

            return replace(made, operands=operands)

    uneven = Uneven(clock, operands_s=0.0, baseline_s=0.5)
    result = tuned(tmp_path / "j", uneven, 32.0, 6, sampler="random", reference_every=0)
    searches = [each.search_seconds for each in result.problems]
    # Four of its own five seconds and a third would have been over before its first trial.
    assert searches[3] > 0.6 * sum(searches) / len(searches)
    assert min(each.trials for each in result.problems) > LEAST_TRIALS
    assert result.seconds == pytest.approx(32.0, abs=2.0)
    assert _shortage(result) is None


def test_the_clock_of_a_share_stands_until_the_first_result(tmp_path: Path, clock: Clock) -> None:
    watch, slow = Watch(), Beginning(clock, operands_s=5.0, baseline_s=3.0)
    tuned(tmp_path / "j", slow, 20.0, 1, progress=watch)
    (_, first), (_, second) = watch.finished[:2]
    assert watch.problems[0].seconds_left is None
    # 20 s without the beginning, and without a fifth for the finals.
    assert first.seconds_left == pytest.approx(0.8 * 12.0, abs=0.1)
    assert second.seconds_left == pytest.approx(first.seconds_left - TRIAL_S, abs=0.01)


def test_nothing_is_said_of_the_time_left_while_the_first_trials_take_longer(
    tmp_path: Path, clock: Clock
) -> None:
    watch, slow = Watch(), Beginning(clock, operands_s=0.5, baseline_s=0.5)
    tuned(tmp_path / "j", slow, 1.5, 1, progress=watch)
    left = [status.seconds_left for _, status in watch.finished]
    assert len(left) == LEAST_TRIALS
    assert left[0] is not None
    assert left[1:-1].count(None) > 3
    assert left[-1] == 0.0


def shares(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> tuple[Shares, Clock]:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return Shares(begun=clock.now, **fields), clock


def test_equal_beginnings_leave_equal_shares_that_come_to_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, clock = shares(monkeypatch, problems=10, seconds=100.0)
    found = []
    for index in range(10):
        clock.now += 4.0
        found.append(made.left(index, 0.0))
        clock.now += found[-1] or 0.0
        made.close(searched=found[-1] or 0.0, before=0.0)
    assert found == pytest.approx([6.0] * 10)
    assert (made.spent, made.over) == (pytest.approx(100.0), pytest.approx(0.0))


def test_one_slow_beginning_does_not_take_all_from_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, clock = shares(monkeypatch, problems=20, seconds=100.0)
    clock.now += 20.0
    assert made.left(0, 0.0) == pytest.approx((1 - MOST_FORESEEN) * 80.0 / 20)


def test_what_one_problem_takes_too_much_comes_off_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, clock = shares(monkeypatch, problems=3, seconds=30.0)
    assert made.left(0, 0.0) == 10.0
    clock.now += 20.0
    made.close(searched=20.0, before=0.0)
    assert made.left(1, 0.0) == 5.0
    clock.now += 40.0
    made.close(searched=40.0, before=0.0)
    assert made.left(2, 0.0) == 0.0
    assert made.over == 30.0


def test_what_earlier_runs_searched_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    made, clock = shares(monkeypatch, problems=2, seconds=40.0)
    assert made.left(0, 15.0) == 5.0
    clock.now += 5.0
    made.close(searched=5.0, before=15.0)
    assert made.left(1, 3.0) == 17.0
    assert Shares(begun=0.0, problems=2).left(1, 3.0) is None


# ---- runs that go on


def test_a_run_that_was_too_short_is_met_by_itself_and_goes_on_with_more(
    tmp_path: Path, clock: Clock
) -> None:
    store, slow = Records(), Beginning(clock, operands_s=3.0, baseline_s=2.0)
    first = tuned(tmp_path / "j", slow, 4.0, 2, store=store)
    assert _shortage(first) is not None
    kept = len(store.kept)
    again = tuned(tmp_path / "j", slow, 4.0, 2, store=store)
    assert [each.ended for each in again.problems] == ["met before"] * 2
    assert (again.measured, len(store.kept), _shortage(again)) == (0, kept, None)
    more = tuned(tmp_path / "j", slow, 24.0, 2, store=store)
    assert all(each.trials > LEAST_TRIALS for each in more.problems)
    tried = [(record.problem, str(record.values)) for record in searched(store)]
    assert len(tried) == len(set(tried))


@pytest.mark.parametrize("at", [1, 4])
def test_a_run_stopped_in_its_first_trials_has_the_rest_of_them_next_time(
    at: int, tmp_path: Path, clock: Clock
) -> None:
    store, slow = Records(), Beginning(clock, operands_s=3.0, baseline_s=2.0)
    stopped = tuned(tmp_path / "j", slow, 2.0, 2, store=store, progress=Interrupting(at))
    assert (stopped.interrupted, stopped.measured) == (True, at)
    result = tuned(tmp_path / "j", slow, 2.0, 2, store=store)
    assert [each.trials for each in result.problems] == [LEAST_TRIALS] * 2
    assert result.problems[0].measured == LEAST_TRIALS - at
    tried = [(record.problem, str(record.values)) for record in searched(store)]
    assert len(tried) == len(set(tried)) == 2 * LEAST_TRIALS


def test_records_that_are_known_cost_no_share(tmp_path: Path, clock: Clock) -> None:
    store, slow = Records(), Beginning(clock, operands_s=3.0, baseline_s=2.0)
    tuned(tmp_path / "one", slow, 2.0, 1, store=store)
    again = tuned(tmp_path / "two", slow, 2.0, 1, store=store)
    assert (again.problems[0].known, again.measured) == (LEAST_TRIALS, 0)


def results(*trials: int, over: float) -> RunResult:
    from tuner.search import ProblemResult

    made: Sequence[ProblemResult] = [
        ProblemResult(family=TOY, problem=toy_problem(), ended="seconds", trials=n) for n in trials
    ]
    return RunResult(problems=tuple(made), interrupted=False, seconds=9.0, seconds_over=over)


def test_the_summary_says_for_how_many_problems_the_time_was_too_short() -> None:
    assert _shortage(results(40, 50, over=3.0)) is None
    said = _shortage(results(40, LEAST_TRIALS, over=0.0)) or ""
    assert "1 of 2 problems had no time for more than their first 10 trials" in said
    assert "s more" not in said
    assert "the run took 31 s more" in (_shortage(results(10, 10, over=31.4)) or "")
