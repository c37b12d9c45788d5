"""Sampling against pretended devices: how launches are spread, when it ends, a cold clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.errors import VulkanError
from tuner.records import Measure
from tuner.runner import _sampling as sampling
from tuner.runner._sampling import (
    MAX_SHORT_DISPATCHES,
    SHORT_NS,
    Submission,
    Taken,
    Timed,
    elapsed,
    load_of,
    next_submission,
    take_samples,
)
from tuner.runner._settling import Care, SettledClock, settle, take_settled
from tuner.runner.protocol import MeasurePlan

MS = 1e6
REFERENCE_NS = 65e3


@dataclass
class PretendedClock:
    """A device whose clock rises with load and falls between submissions.

    A launch takes `launch_ns` at full speed. After `idle` the device runs at 1 / `slowdown` of it,
    and reaches full speed after `ramp_ns` of load.
    """

    launch_ns: float
    slowdown: float = 1.0
    ramp_ns: float = 20 * MS
    capacity: int = 512
    dispatches: int = 1
    warm_ns: float = 0.0
    runs: list[Submission] = field(default_factory=list)
    longest_ns: float = 0.0

    def run(self, submission: Submission) -> Timed:
        self.runs.append(submission)
        assert submission.samples <= self.capacity
        self._idle()
        fill = sum(self._timed(REFERENCE_NS) for _ in range(submission.fill))
        load = sum(self._launch() for _ in range(submission.load))
        samples = tuple(
            sum(self._launch() for _ in range(submission.launches)) / submission.launches
            for _ in range(submission.samples)
        )
        references = tuple(self._timed(REFERENCE_NS) for _ in range(submission.references))
        whole = fill + load + sum(samples) * submission.launches + sum(references)
        self.longest_ns = max(self.longest_ns, whole)
        return Timed(load, samples, references, fill)

    def _idle(self) -> None:
        self.warm_ns = 0.0

    def _launch(self) -> float:
        return self._timed(self.launch_ns)

    def _timed(self, at_full_speed_ns: float) -> float:
        took = at_full_speed_ns * self._slowness()
        self.warm_ns += took
        return took

    def _slowness(self) -> float:
        warm = min(1.0, self.warm_ns / self.ramp_ns)
        return self.slowdown + (1.0 - self.slowdown) * warm


def sample(clock: PretendedClock, plan: MeasurePlan) -> Taken:
    return take_samples(clock, plan)


@pytest.mark.parametrize("launch_ns", [3e3, 9e4, 6e5, 5e6])
@pytest.mark.parametrize("slowdown", [1.0, 2.0, 6.0])
def test_samples_are_taken_at_full_speed(launch_ns: float, slowdown: float) -> None:
    clock = PretendedClock(launch_ns, slowdown)
    taken = sample(clock, MeasurePlan(warmup_ms=30.0))
    assert max(taken.samples_ns) == pytest.approx(launch_ns)
    load_ns = [run.fill * REFERENCE_NS + run.load * launch_ns for run in clock.runs]
    assert sum(load_ns) * slowdown >= 0.4 * 30 * MS


def test_a_typical_kernel_takes_one_submission_after_the_estimate() -> None:
    clock = PretendedClock(90e3)
    taken = sample(clock, MeasurePlan())
    assert len(clock.runs) == 3
    assert clock.runs[0] == Submission(samples=1)
    assert 100 <= len(taken.samples_ns) <= 200
    assert taken.references_ns == (REFERENCE_NS,)


@pytest.mark.parametrize("launch_ms", [0.003, 1.0, 15.0, 30.0, 120.0, 390.0])
@pytest.mark.parametrize("measure", ["isolated", "batched"])
def test_no_submission_is_planned_to_be_longer_than_allowed(
    launch_ms: float, measure: Measure
) -> None:
    clock = PretendedClock(launch_ms * MS)
    plan = MeasurePlan(budget_ms=3000.0, max_samples=40, measure=measure, settle_max_ms=3000.0)
    settle(clock, plan)
    sample(clock, plan)
    assert clock.longest_ns <= plan.max_submission_ms * MS * 1.01


def test_later_submissions_are_warmed_up_too() -> None:
    clock = PretendedClock(2 * MS, slowdown=3.0)
    plan = MeasurePlan(precision=0.0, budget_ms=2000.0, max_samples=400)
    taken = sample(clock, plan)
    later = [run.load for run in clock.runs if run.samples > 2]
    assert len(later) > 2
    assert all(load * 2 * MS >= 14 * MS for load in later)
    assert sorted(taken.samples_ns)[len(taken.samples_ns) // 2] == pytest.approx(2 * MS)


@pytest.mark.parametrize("launch_ms", [150.0, 700.0, 9000.0])
def test_a_very_slow_kernel_gets_by_with_few_samples(launch_ms: float) -> None:
    clock = PretendedClock(launch_ms * MS)
    taken = sample(clock, MeasurePlan())
    assert 3 <= len(taken.samples_ns) <= 4
    assert taken.ended_by == "budget"


@dataclass
class HostBoundClock(PretendedClock):
    """A device whose clock falls while it waits for the host to record, some 10 µs a launch."""

    def run(self, submission: Submission) -> Timed:
        launches = submission.fill + submission.load + submission.samples * submission.launches
        self.runs.append(submission)
        load_ns = submission.fill * REFERENCE_NS + submission.load * self.launch_ns
        load_ns *= self.slowdown
        busy = load_ns / (load_ns + 1e4 * launches)
        slowness = self.slowdown = 1.0 if busy >= 0.7 else 2.0
        return Timed(
            load_ns=submission.load * self.launch_ns * slowness,
            samples_ns=(self.launch_ns * slowness,) * submission.samples,
            references_ns=(REFERENCE_NS * slowness,) * submission.references,
            fill_ns=submission.fill * REFERENCE_NS * slowness,
        )


@pytest.mark.parametrize("launch_us", [1.0, 4.0, 15.0, 100.0])
def test_the_host_that_records_short_launches_does_not_let_the_clock_fall(launch_us: float) -> None:
    clock, plan = HostBoundClock(launch_us * 1e3), MeasurePlan()
    settled = settle(clock, plan)
    assert (settled.steady, settled.reference_ns) == (True, REFERENCE_NS)
    assert 500.0 <= settled.load_ms < 530.0
    taken = take_samples(clock, plan)
    assert set(taken.samples_ns) == {launch_us * 1e3}
    assert set(taken.references_ns) == {REFERENCE_NS}


@pytest.mark.parametrize("load_ms", [0.0, 0.5, 5.0, 30.0, 400.0])
@pytest.mark.parametrize("each_ns", [1.0, 4e3, SHORT_NS - 1, SHORT_NS, 7e4, 3e8])
@pytest.mark.parametrize("dispatches", [1, 3, 10, 300])
def test_a_load_lasts_as_long_as_asked_and_few_of_its_dispatches_are_short(
    load_ms: float, each_ns: float, dispatches: int
) -> None:
    fill, load = load_of(load_ms * MS, each_ns, dispatches)
    wanted = load_ms * MS
    assert wanted <= fill * sampling.REFERENCE_NS + load * each_ns
    assert fill * sampling.REFERENCE_NS + load * each_ns < wanted + max(each_ns, 7e4)
    if each_ns >= dispatches * SHORT_NS:
        assert fill == 0
    else:
        assert load * dispatches < MAX_SHORT_DISPATCHES + dispatches


def test_giving_up_costs_three_samples() -> None:
    clock = PretendedClock(1 * MS)
    taken = sample(clock, MeasurePlan(budget_ms=1000.0, max_samples=500, give_up_ns=0.9 * MS))
    assert taken.ended_by == "gave_up"
    assert len(taken.samples_ns) == 3


def test_a_cold_estimate_does_not_make_it_give_up() -> None:
    clock = PretendedClock(1 * MS, slowdown=5.0)
    taken = sample(clock, MeasurePlan(give_up_ns=1.2 * MS))
    assert taken.ended_by != "gave_up"
    assert min(taken.samples_ns) == pytest.approx(1 * MS)


def test_without_warm_up_there_is_none() -> None:
    clock = PretendedClock(1 * MS)
    taken = sample(clock, MeasurePlan(warmup_ms=0.0))
    assert taken.warmup_launches == 0
    assert all(run.load == 0 for run in clock.runs)


@settings(deadline=None)  # simulates up to 20,000 launches
@given(
    launch_ns=st.floats(10.0, 3e9),
    slowdown=st.floats(1.0, 8.0),
    plan=st.builds(
        MeasurePlan,
        measure=st.sampled_from(["isolated", "batched"]),
        warmup_ms=st.floats(0.0, 30.0),
        min_samples=st.integers(1, 20),
        max_samples=st.integers(1, 60),
        budget_ms=st.floats(0.0, 200.0),
        max_submission_ms=st.floats(1.0, 500.0),
        give_up_ns=st.none() | st.floats(1.0, 3e9),
    ),
)
def test_any_plan_ends_by_its_rule(launch_ns: float, slowdown: float, plan: MeasurePlan) -> None:
    clock = PretendedClock(launch_ns, slowdown, capacity=100)
    taken = sample(clock, plan)
    assert 1 <= len(taken.samples_ns) <= plan.max_samples
    assert plan.rule_of_samples(taken.launches).ended(taken.samples_ns) == taken.ended_by
    assert taken.launches == 1 or plan.measure == "batched"


def test_a_submission_holds_at_least_one_sample() -> None:
    made = next_submission(MeasurePlan(max_submission_ms=1.0), 5e9, 9, first=True)
    assert (made.load, made.samples) == (0, 1)


# --- batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launch_ns", "launches"), [(4e3, 500), (90e3, 23), (1.5 * MS, 2), (3 * MS, 1), (100.0, 2000)]
)
def test_a_batch_takes_its_time_and_not_a_number(launch_ns: float, launches: int) -> None:
    taken = sample(PretendedClock(launch_ns), MeasurePlan(measure="batched"))
    assert taken.launches == launches
    assert max(taken.samples_ns) == pytest.approx(launch_ns)


def test_a_batch_of_a_given_number_is_that_unless_it_takes_too_long() -> None:
    plan = MeasurePlan(measure="batched", batch_launches=200, precision=0.0, budget_ms=200.0)
    taken = sample(PretendedClock(90e3), plan)
    assert (taken.launches, len(taken.samples_ns)) == (200, 12), taken.ended_by
    assert sample(PretendedClock(10 * MS), plan).launches == 40


def test_batched_samples_cost_the_budget_all_their_launches() -> None:
    plan = MeasurePlan(measure="batched", precision=0.0, min_samples=3, budget_ms=20.0)
    taken = sample(PretendedClock(90e3), plan)
    assert taken.ended_by == "budget"
    assert 10 <= len(taken.samples_ns) <= 12


# --- settling ----------------------------------------------------------------------------------


@dataclass
class SteppedClock(PretendedClock):
    """A device that rests at its idle clock until it has been under load for `ramp_ns` in all."""

    def _idle(self) -> None:
        """Not between submissions that follow one another."""

    def _slowness(self) -> float:
        return self.slowdown if self.warm_ns < self.ramp_ns else 1.0


@dataclass
class DriftingClock(SteppedClock):
    """A device that gets slower all the time, by 1 % in `ramp_ns`."""

    def _slowness(self) -> float:
        return 1.0 + 0.01 * self.warm_ns / self.ramp_ns


@pytest.mark.parametrize("launch_ns", [3e3, 9e4, 6e6, 2e8])
@pytest.mark.parametrize("rest_ms", [30.0, 200.0, 450.0, 900.0])
def test_a_clock_that_rises_in_steps_is_measured_on_the_last(
    launch_ns: float, rest_ms: float
) -> None:
    plan = MeasurePlan()
    settled = SteppedClock(launch_ns, 5.0, ramp_ns=rest_ms * MS)
    found = settle(settled, plan)
    assert 500.0 <= found.load_ms <= 2000.0 + launch_ns / MS
    if rest_ms < 500.0:
        assert found.steady
        assert max(take_samples(settled, plan).samples_ns) == pytest.approx(launch_ns)


def test_stability_alone_is_fooled_by_the_rest_before_the_step() -> None:
    plan = MeasurePlan()
    clock = SteppedClock(9e4, 5.0, ramp_ns=200 * MS)
    hasty = settle(clock, MeasurePlan(settle_ms=0.0))
    assert hasty.steady
    assert hasty.load_ms < 200.0
    assert min(take_samples(clock, plan).samples_ns) == pytest.approx(5.0 * 9e4)


def test_a_step_within_the_last_tenth_of_a_second_is_waited_for() -> None:
    clock = SteppedClock(9e4, 5.0, ramp_ns=480 * MS)
    found = settle(clock, MeasurePlan())
    assert found.steady
    assert found.load_ms >= 560.0


def test_a_clock_that_does_not_settle_is_told_of_after_the_longest_load() -> None:
    found = settle(DriftingClock(9e4, ramp_ns=50 * MS), MeasurePlan(settle_max_ms=800.0))
    assert not found.steady
    assert found.load_ms == pytest.approx(800.0, abs=30.0)


@dataclass
class FallingClock(SteppedClock):
    """A device at full speed that falls to a third of it in the `falls`-th submission from now.

    It comes back after `ramp_ns` of load.
    """

    falls: int = 0
    fallen: bool = False

    def _idle(self) -> None:
        self.falls -= 1
        if self.falls == 0:
            self.fallen, self.warm_ns = True, 0.0

    def _slowness(self) -> float:
        return 3.0 if self.fallen and self.warm_ns < self.ramp_ns else 1.0


@dataclass
class PretendedSensors:
    held_down: bool
    begun: int = 0

    def begin(self) -> None:
        self.begun += 1


def taken_with_care(
    clock: PretendedClock, known: SettledClock, care: Care, *, held_down: bool = False
) -> Any:
    sensors = PretendedSensors(held_down)
    taken, state = take_settled(clock, MeasurePlan(), known, care, sensors)
    assert sensors.begun == 1 + state.repeated
    return taken, state


def test_samples_on_a_clock_that_has_slowed_are_taken_again() -> None:
    known = SettledClock()
    clock = FallingClock(9e4, ramp_ns=200 * MS)
    _, first = taken_with_care(clock, known, "settle")
    assert (first.repeated, first.settled_ms >= 500.0) == (False, True)
    _, second = taken_with_care(clock, known, "check")
    assert (second.repeated, second.settled_ms) == (False, 0.0)
    clock.falls = 2
    taken, third = taken_with_care(clock, known, "check")
    assert third.repeated
    assert third.settled_ms >= 500.0
    assert max(taken.samples_ns) == pytest.approx(9e4)
    assert third.reference_ns == (REFERENCE_NS,)


def test_a_clock_that_power_lowers_is_measured_as_it_is() -> None:
    known = SettledClock()
    clock = FallingClock(9e4, ramp_ns=200 * MS)
    taken_with_care(clock, known, "settle")
    clock.falls = 2
    taken, state = taken_with_care(clock, known, "check", held_down=True)
    assert not state.repeated
    assert max(taken.samples_ns) == pytest.approx(3 * 9e4)


def test_who_asks_for_no_care_gets_none() -> None:
    known = SettledClock()
    clock = FallingClock(9e4, ramp_ns=200 * MS)
    taken_with_care(clock, known, "settle")
    clock.falls = 2
    taken, state = taken_with_care(clock, known, "none")
    assert (state.repeated, state.settled_ms) == (False, 0.0)
    assert min(taken.samples_ns) == pytest.approx(3 * 9e4)


def test_a_device_that_is_held_down_for_good_is_not_settled_every_time() -> None:
    known = SettledClock()
    clock = FallingClock(9e4, ramp_ns=math.inf)
    taken_with_care(clock, known, "settle")
    clock.falls = 2
    assert [taken_with_care(clock, known, "check")[1].repeated for _ in range(3)] == [
        True,
        False,
        False,
    ]


def test_the_reference_and_not_the_job_tells_of_the_clock() -> None:
    @dataclass
    class Noisy(SteppedClock):
        def _launch(self) -> float:
            self.launch_ns = 9e4 + 3e4 * (len(self.runs) % 2)
            return super()._launch()

    assert settle(Noisy(9e4, ramp_ns=0.0), MeasurePlan()).load_ms < 530.0


# --- stamps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [32, 36, 64])
@given(start=st.integers(0, 2**64 - 1), ticks=st.lists(st.integers(1, 2**20), min_size=1))
def test_a_counter_may_wrap_around(bits: int, start: int, ticks: list[int]) -> None:
    stamps = [start % 2**bits]
    for each in ticks:
        stamps.append((stamps[-1] + each) % 2**bits)
    assert elapsed(stamps, bits) == ticks


def test_bits_above_the_valid_ones_are_ignored() -> None:
    assert elapsed([0xABC0_0000_0010, 0xDEF0_0000_0017], 32) == [7]


@pytest.mark.parametrize(
    ("stamps", "how"), [([5, 5, 5], "all read the same"), ([50, 60, 40], "run backwards")]
)
def test_a_broken_clock_is_an_error(stamps: list[int], how: str) -> None:
    with pytest.raises(VulkanError, match=how):
        elapsed(stamps, 64)
