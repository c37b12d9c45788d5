"""The last measurement in turns: the order, who falls out, drift, and who wins a tie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.made_records import made_record
from tests.toy_family import TOY, ToyCompiler, toy_problem, toy_render, toy_runner
from tuner.errors import UsageError, VulkanError
from tuner.evaluate import Evaluator, PreparedTrial, Session, measure_again, time_again
from tuner.kernels.base import Values
from tuner.kernels.space import canonical
from tuner.records import FINAL, REFERENCE, PassStatistics, Record
from tuner.results import latest, outcomes
from tuner.runner.fake import Call, FakeRunner, Workload
from tuner.runner.protocol import Job, MeasurePlan
from tuner.search import Settings

PLAN = MeasurePlan(precision=0.0, min_samples=5, max_samples=12, budget_ms=1e3)
VARIANTS = tuple(
    canonical(TOY, {**TOY.starts[0], "width": width, "unroll": unroll})
    for width, unroll in ((32, 1), (64, 1), (128, 1), (32, 2))
)


class Speeds:
    """How long a launch takes by the job's place in `jobs`, and what the device adds over time.

    `device` is asked with the number of the measurement for a factor.
    """

    def __init__(self, factors: tuple[float, ...], device: Callable[[int], float]) -> None:
        self.factors, self.device = factors, device
        self.jobs: list[Job] = []
        self.asked = 0

    def __call__(self, job: Job, workload: Workload) -> float:
        self.asked += 1
        return 1e5 * self.factors[self.jobs.index(job)] * self.device(self.asked)


def race(
    factors: tuple[float, ...],
    *,
    device: Callable[[int], float] = lambda _: 1.0,
    faults: Callable[[Call], Any] = lambda _: None,
    **options: Any,
) -> tuple[list[int], tuple[Record, ...]]:
    """The order in which the variants were measured, by place, and their records."""
    speeds = Speeds(factors, device)
    runner = toy_runner(times=speeds, noise=0.01, seed=3, faults=faults)
    evaluator = Evaluator(
        runner, ToyCompiler(), TOY, toy_problem(4, 4096), session=Session(), render=toy_render
    )
    trials = [evaluator.prepare(evaluator.draft(v)) for v in VARIANTS[: len(factors)]]
    speeds.jobs = [_job(trial) for trial in trials]
    runner.calls.clear()
    records = measure_again(evaluator, trials, plan=PLAN, **options)
    order = [speeds.jobs.index(c.job) for c in runner.calls if c.method == "measure" and c.job]
    assert runner.jobs == []
    return order, records


def _job(trial: PreparedTrial) -> Job:
    assert trial.job is not None
    return trial.job


def test_all_take_turns_between_two_times_of_the_reference() -> None:
    order, records = race((1.0, 1.0, 1.001))
    assert order[:7] == [0, 1, 2, 0, 2, 1, 0]
    assert Counter(order) == {0: 7, 1: 6, 2: 6}
    for record in records:
        assert record.note == FINAL
        assert record.rounds == (12,) * 6
        assert len(record.samples_ns) == 72
        assert len(record.reference_ns) == 7
        assert record.rounds_repeated == 0
    assert len({record.interleaved for record in records}) == 1


def test_one_alone_is_timed_in_rounds_too() -> None:
    order, (record,) = race((1.0,))
    assert order == [0] * 7
    assert len(record.rounds) == 6


def test_who_is_shown_to_be_slower_falls_out() -> None:
    _, records = race((1.0, 1.1, 1.0, 1.5))
    assert [len(record.rounds) for record in records] == [6, 3, 6, 3]
    assert [record.state for record in records] == ["correct"] * 4


def test_a_slow_reference_stays_to_show_drift() -> None:
    order, records = race((1.2, 1.0, 1.0))
    assert Counter(order)[0] == 7
    assert [len(record.rounds) for record in records] == [6, 6, 6]


def test_more_rounds_decide_as_long_as_there_is_time() -> None:
    """Each measurement comes out otherwise by 1 %, so that six rounds leave it open."""
    shifts = np.random.default_rng(1).normal(1.0, 0.01, 500)
    options: dict[str, Any] = {"device": lambda n: shifts[n], "rounds": 6, "most_rounds": 100}
    _, near = race((1.0, 1.006), seconds=60.0, **options)
    assert 6 < len(near[1].rounds) < 100
    _, alike = race((1.0, 1.0), seconds=60.0, **options)
    assert 6 < len(alike[1].rounds) < 100
    _, clear = race((1.0, 1.1), seconds=60.0, **options)
    assert len(clear[0].rounds) == 6


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    [(0.0, 3), (19.0, 3), (20.0, 4), (25.0, 4), (26.0, 5), (32.0, 6), (1e3, 6)],
)
def test_no_round_after_the_third_begins_when_the_time_is_over(
    seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement takes 3 s, so that round n begins when 6 n - 3 s are over; two are granted."""
    _, records = race((1.0, 1.0), device=slow(monkeypatch), seconds=seconds)
    assert [len(record.rounds) for record in records] == [rounds] * 2


def test_when_the_time_is_over_no_more_rounds_are_thrown_away_than_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restless = slow(monkeypatch, lambda n: 1.0 + 0.1 * (n // 2 % 2))
    order, records = race((1.0, 1.0), device=restless, seconds=0.0)
    assert records[0].rounds_repeated == 3
    assert len(order) == 1 + 2 * (3 + 3)


def slow(
    monkeypatch: pytest.MonkeyPatch, device: Callable[[int], float] = lambda _: 1.0
) -> Callable[[int], float]:
    """`device`, on a pretended clock of which each measurement takes 3 s."""
    seconds = [0.0]
    clock = SimpleNamespace(monotonic=lambda: seconds[0], perf_counter=lambda: seconds[0])
    monkeypatch.setattr("tuner.evaluate.finals.time", clock)

    def measured(number: int) -> float:
        seconds[0] += 3.0
        return device(number)

    return measured


def test_a_round_in_which_the_reference_changed_is_taken_again() -> None:
    # 3 measurements a round; the device slows down for the fifth to the ninth.
    order, records = race((1.0, 1.0, 1.0), device=lambda n: 1.1 if 5 <= n <= 9 else 1.0)
    assert records[0].rounds_repeated == 2
    assert len(order) == 7 + 2 * 6 + 2 * 3
    assert all(len(record.rounds) == 6 for record in records)
    reference = records[0].reference_ns
    assert len(reference) == 9
    assert max(reference) > 1.08 * min(reference)


def test_a_device_that_never_rests_does_not_hold_the_finals_up() -> None:
    _, records = race((1.0, 1.0), device=lambda n: 1.0 + 0.1 * (n // 2 % 2))
    assert records[0].rounds_repeated == 6
    assert all(len(record.rounds) == 6 for record in records)


def test_drift_within_a_round_does_not_choose_the_winner() -> None:
    """The device slows down all the time: whoever is timed later looks slower."""
    _, records = race((1.0, 0.97), device=lambda n: 1.0 + 0.004 * n)
    by_median = min(records, key=lambda record: record.median_ns or 0)
    assert by_median is records[1]
    (outcome,) = outcomes(records, baseline_of=lambda _: None)
    assert outcome.best is not None
    assert outcome.best.variant == records[1].variant


def test_when_the_reference_fails_the_next_takes_its_place() -> None:
    def faults(call: Call) -> VulkanError | None:
        if call.method == "measure" and call.number == 4:
            return VulkanError("vkQueueSubmit", "VK_ERROR_UNKNOWN", -13)
        return None

    _, records = race((1.0, 1.0, 1.0), faults=faults)
    failed = [record for record in records if record.state == "runtime"]
    assert len(failed) == 1
    assert all(len(r.rounds) == 6 for r in records if r.state == "correct")


@pytest.mark.parametrize("place", [0, 1])
def test_times_of_nothing_are_a_failure_of_the_variant_alone(place: int) -> None:
    factors = [1.0, 1.0, 1.0]
    factors[place] = 0.0
    _, records = race(tuple(factors))
    assert [record.state == "runtime" for record in records] == [f == 0.0 for f in factors]
    assert "is 0.0 ns, must be above 0" in str(records[place].error)
    assert all(len(r.rounds) == 6 for r in records if r.state == "correct")


# ---- who wins


def finals(*rows: tuple[Values, float, int, int], rounds: int = 8) -> tuple[Record, ...]:
    """Records of one race: values, time in µs, registers and bytes of code."""
    random = np.random.default_rng(5)
    made = []
    for values, median_us, registers, code in rows:
        shifts = np.repeat(1 + 0.003 * random.standard_normal(rounds), 10)
        noise = 1 + 0.01 * random.standard_normal(rounds * 10)
        samples = tuple((median_us * 1e3 * shifts * noise).tolist())
        told: dict[str, int | float | str | bool] = {
            "Register Count": registers,
            "Binary Size": code,
        }
        made.append(
            made_record(
                values=dict(values),
                note=FINAL,
                interleaved="one race",
                rounds=(10,) * rounds,
                samples_ns=samples,
                median_ns=median_us * 1e3,
                low_ns=median_us * 998,
                high_ns=median_us * 1002,
                statistics=(PassStatistics(name="attend", statistics=told),),
            )
        )
    return tuple(made)


A, B, C = ({"n": n} for n in range(3))


def test_of_those_that_tie_the_one_with_fewer_registers_is_preferred() -> None:
    made = finals((A, 100.0, 168, 9000), (B, 100.05, 96, 9900), (C, 103.0, 32, 100))
    (outcome,) = outcomes(made, baseline_of=lambda _: None)
    assert outcome.best == made[1]
    assert outcome.tied == (made[0],)
    assert outcome.ranked[0] == made[0]


def test_of_equal_registers_the_smaller_code_is_preferred() -> None:
    made = finals((A, 100.0, 96, 9000), (B, 100.05, 96, 8000))
    (outcome,) = outcomes(made, baseline_of=lambda _: None)
    assert outcome.best == made[1]


def test_without_figures_of_the_driver_the_fastest_is_preferred() -> None:
    made = finals((A, 100.0, 168, 9000), (B, 100.05, 96, 9900))
    unknown = [made[0], msgspec.structs.replace(made[1], statistics=())]
    (outcome,) = outcomes(unknown, baseline_of=lambda _: None)
    assert outcome.best == made[0]


def test_what_was_not_timed_in_turns_is_not_preferred_for_its_simplicity() -> None:
    made = finals((A, 100.0, 168, 9000), (B, 100.05, 96, 9900))
    apart = [msgspec.structs.replace(record, interleaved="") for record in made]
    (outcome,) = outcomes(apart, baseline_of=lambda _: None)
    assert outcome.best == apart[0]
    assert outcome.tied == (apart[1],)
    other_run = [made[0], msgspec.structs.replace(made[1], interleaved="another run")]
    (outcome,) = outcomes(other_run, baseline_of=lambda _: None)
    assert outcome.best == other_run[0]
    assert outcome.tied == (other_run[1],)


# ---- references


def test_one_more_measurement_is_a_record_of_its_own_that_decides_nothing() -> None:
    runner: FakeRunner = toy_runner()
    evaluator = Evaluator(
        runner, ToyCompiler(), TOY, toy_problem(4, 4096), session=Session(), render=toy_render
    )
    first = evaluator.run(VARIANTS[0])
    again = time_again(evaluator, VARIANTS[0], note=REFERENCE)
    assert (again.variant, again.state, again.note) == (first.variant, "correct", REFERENCE)
    assert latest([first, again]) == (first,)
    assert runner.jobs == []


def test_fewer_rounds_than_can_tell_are_refused() -> None:
    with pytest.raises(UsageError, match="final_rounds is 5, must be 6 or more"):
        Settings(final_rounds=5)
