"""Sampling against pretended devices: how launches are spread, when it ends, a cold clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.errors import VulkanError
from tuner.runner._sampling import Taken, Timed, elapsed, ended, next_batch, take_samples
from tuner.runner.protocol import MeasurePlan

MS = 1e6


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
    warm_ns: float = 0.0
    runs: list[tuple[int, int]] = field(default_factory=list)
    longest_ns: float = 0.0

    def run(self, warmup: int, samples: int) -> Timed:
        self.runs.append((warmup, samples))
        assert samples <= self.capacity
        self.warm_ns = 0.0
        load = sum(self._launch() for _ in range(warmup))
        taken = tuple(self._launch() for _ in range(samples))
        self.longest_ns = max(self.longest_ns, load + sum(taken))
        return Timed(load, taken)

    def _launch(self) -> float:
        warm = min(1.0, self.warm_ns / self.ramp_ns)
        took = self.launch_ns * (self.slowdown + (1.0 - self.slowdown) * warm)
        self.warm_ns += took
        return took


def sample(clock: PretendedClock, plan: MeasurePlan) -> Taken:
    return take_samples(clock, plan)


@pytest.mark.parametrize("launch_ns", [3e3, 9e4, 6e5, 5e6])
@pytest.mark.parametrize("slowdown", [1.0, 2.0, 6.0])
def test_samples_are_taken_at_full_speed(launch_ns: float, slowdown: float) -> None:
    clock = PretendedClock(launch_ns, slowdown)
    taken = sample(clock, MeasurePlan(warmup_ms=30.0))
    assert max(taken.samples_ns) == pytest.approx(launch_ns)
    assert taken.warmup_launches * launch_ns >= 0.4 * 30 * MS


def test_a_typical_kernel_takes_one_submission_after_the_estimate() -> None:
    clock = PretendedClock(90e3)
    taken = sample(clock, MeasurePlan())
    assert len(clock.runs) == 3
    assert clock.runs[0] == (0, 1)
    assert len(taken.samples_ns) == 200
    assert taken.ended_by == "max_samples"


@pytest.mark.parametrize("launch_ms", [1.0, 15.0, 30.0, 120.0, 390.0])
def test_no_submission_is_planned_to_be_longer_than_allowed(launch_ms: float) -> None:
    clock = PretendedClock(launch_ms * MS)
    plan = MeasurePlan(budget_ms=3000.0, max_samples=40)
    sample(clock, plan)
    assert clock.longest_ns <= plan.max_submission_ms * MS * 1.01


def test_later_submissions_are_warmed_up_too() -> None:
    clock = PretendedClock(2 * MS, slowdown=3.0)
    taken = sample(clock, MeasurePlan(budget_ms=2000.0, max_samples=400))
    later = [warmup for warmup, samples in clock.runs if samples > 2]
    assert len(later) > 2
    assert all(warmup * 2 * MS >= 14 * MS for warmup in later)
    assert sorted(taken.samples_ns)[len(taken.samples_ns) // 2] == pytest.approx(2 * MS)


@pytest.mark.parametrize("launch_ms", [150.0, 700.0, 9000.0])
def test_a_very_slow_kernel_gets_by_with_few_samples(launch_ms: float) -> None:
    clock = PretendedClock(launch_ms * MS)
    taken = sample(clock, MeasurePlan())
    assert 3 <= len(taken.samples_ns) <= 4
    assert taken.ended_by == "budget"


def test_a_fast_kernel_is_not_launched_without_bounds() -> None:
    clock = PretendedClock(10.0)
    sample(clock, MeasurePlan(warmup_ms=1000.0))
    assert max(warmup for warmup, _ in clock.runs) <= 20_000


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
    assert all(warmup == 0 for warmup, _ in clock.runs)


@settings(deadline=None)  # simulates up to 20,000 launches
@given(
    launch_ns=st.floats(10.0, 3e9),
    slowdown=st.floats(1.0, 8.0),
    plan=st.builds(
        MeasurePlan,
        warmup_ms=st.floats(0.0, 100.0),
        min_samples=st.integers(1, 20),
        max_samples=st.integers(1, 60),
        budget_ms=st.floats(0.0, 200.0),
        max_submission_ms=st.floats(1.0, 500.0),
        give_up_ns=st.none() | st.floats(1.0, 3e9),
    ),
)
def test_any_plan_ends_by_one_of_its_rules(
    launch_ns: float, slowdown: float, plan: MeasurePlan
) -> None:
    clock = PretendedClock(launch_ns, slowdown, capacity=100)
    taken = sample(clock, plan)
    count, spent = len(taken.samples_ns), sum(taken.samples_ns)
    assert 1 <= count <= plan.max_samples
    if taken.ended_by == "max_samples":
        assert count == plan.max_samples
    elif taken.ended_by == "budget":
        patience = max(4 * plan.budget_ms, plan.max_submission_ms) * MS
        assert spent >= plan.budget_ms * MS
        assert count >= plan.min_samples or (count >= 3 and spent >= patience)
    else:
        assert plan.give_up_ns is not None
        assert min(taken.samples_ns) > plan.give_up_ns


def test_rules_are_asked_in_order() -> None:
    plan = MeasurePlan(min_samples=3, max_samples=4, budget_ms=0.001, give_up_ns=1.0)
    assert ended(plan, []) is None
    assert ended(plan, [500.0, 500.0]) is None
    assert ended(plan, [10.0, 10.0, 10.0]) == "gave_up"
    assert ended(plan, [500.0, 500.0, 500.0]) == "budget"
    assert ended(plan, [500.0] * 4) == "max_samples"


def test_a_batch_holds_at_least_one_sample() -> None:
    batch = next_batch(MeasurePlan(max_submission_ms=1.0), 5e9, [], 512)
    assert (batch.warmup, batch.samples) == (0, 1)


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


@dataclass
class SteppedClock(PretendedClock):
    """A device that rests at its idle clock until it has been under load for `ramp_ns` in all."""

    def _launch(self) -> float:
        took = self.launch_ns * (self.slowdown if self.warm_ns < self.ramp_ns else 1.0)
        self.warm_ns += took
        return took

    def run(self, warmup: int, samples: int) -> Timed:
        warm_ns = self.warm_ns
        timed = super().run(0, 0)
        self.warm_ns = warm_ns
        load = sum(self._launch() for _ in range(warmup))
        timed = Timed(load, tuple(self._launch() for _ in range(samples)))
        self.longest_ns = max(self.longest_ns, load + sum(timed.samples_ns))
        return timed


@pytest.mark.parametrize("launch_ns", [3e3, 9e4, 6e6])
def test_a_clock_that_rises_in_steps_needs_time_and_not_equal_launches(launch_ns: float) -> None:
    plan = MeasurePlan()
    trap = take_samples(SteppedClock(launch_ns, 5.0, ramp_ns=300 * MS), plan)
    settled = SteppedClock(launch_ns, 5.0, ramp_ns=300 * MS)
    taken = take_samples(settled, plan, settle=True)
    assert max(trap.samples_ns) > 4 * launch_ns
    assert max(taken.samples_ns) == pytest.approx(launch_ns)
    assert settled.longest_ns <= 1.3 * plan.max_submission_ms * MS
