"""When sampling ends, by which rule, and how often it is asked."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.errors import UsageError
from tuner.runner.protocol import MeasurePlan
from tuner.timing import StoppingRule, median_interval

MS = 1e6


def drawn(
    rule: StoppingRule, seed: int, *, median_ns: float = 1e5, noise: float = 0.01
) -> tuple[list[float], str, int]:
    """Samples taken as the rule says, what ended it, and how often it was asked for more."""
    rng = np.random.default_rng(seed)
    samples: list[float] = []
    asked = 0
    while (ended_by := rule.ended(samples)) is None:
        wanted = rule.wanted(samples, median_ns)
        samples += (median_ns * np.exp(rng.normal(0, noise, wanted))).tolist()
        asked += 1
    return samples, ended_by, asked


def test_rules_are_asked_in_order() -> None:
    rule = StoppingRule(min_samples=3, max_samples=8, budget_ns=1000.0, give_up_ns=1.0)
    assert rule.ended([]) is None
    assert rule.ended([500.0, 501.0]) is None
    assert rule.ended([10.0, 12.0, 11.0]) == "gave_up"
    assert rule.ended([500.0, 600.0, 550.0]) == "budget"
    assert rule.ended([500.0, 600.0, 550.0, 580.0] * 2) == "max_samples"
    assert rule.ended([500.0, 500.5, 500.25, 500.75] * 2) == "precise"


def test_too_few_samples_are_never_precise() -> None:
    rule = StoppingRule(min_samples=1, budget_ns=math.inf)
    assert rule.ended([500.0] * 5) is None
    assert rule.ended([500.0] * 6) == "precise"


def test_precision_0_is_never_reached() -> None:
    rule = StoppingRule(precision=0.0, max_samples=30)
    samples, ended_by, _ = drawn(rule, 0)
    assert (len(samples), ended_by) == (30, "max_samples")


@pytest.mark.parametrize("noise", [0.001, 0.002, 0.004, 0.01])
@pytest.mark.parametrize("seed", range(5))
def test_noise_decides_how_many_samples_are_taken(noise: float, seed: int) -> None:
    rule = StoppingRule(max_samples=1000, budget_ns=80 * MS)
    samples, ended_by, asked = drawn(rule, seed, median_ns=0.2 * MS, noise=noise)
    assert ended_by == "precise"
    assert median_interval(samples).width <= 0.005
    # A normal median's 95 % interval: 2 x 1.96 x 1.2533 sigma / sqrt(n). A batch holds 100.
    needed = (4.92 * noise / 0.005) ** 2
    assert max(100, 0.5 * needed) <= len(samples) <= max(100, 4 * needed)
    assert asked <= 4


def test_slow_samples_stop_at_the_budget_and_at_patience() -> None:
    slow, ended_by, _ = drawn(StoppingRule(), 1, median_ns=7 * MS)
    assert (ended_by, len(slow)) == ("budget", 10)
    slower, ended_by, _ = drawn(StoppingRule(), 1, median_ns=150 * MS)
    assert (ended_by, len(slower)) == ("budget", 3)


def test_what_is_far_too_slow_is_given_up_after_three() -> None:
    samples, ended_by, asked = drawn(StoppingRule(give_up_ns=9e4), 1)
    assert (ended_by, len(samples), asked) == ("gave_up", 3, 1)


def test_cheap_samples_are_not_asked_for_one_by_one() -> None:
    samples, ended_by, asked = drawn(StoppingRule(), 2, median_ns=3000.0, noise=0.05)
    assert (len(samples), ended_by, asked) == (200, "max_samples", 1)


@given(
    median_ns=st.floats(10.0, 3e9),
    noise=st.floats(0.0, 0.3),
    plan=st.builds(
        MeasurePlan,
        precision=st.floats(0.0, 0.1),
        min_samples=st.integers(1, 20),
        max_samples=st.integers(1, 60),
        budget_ms=st.floats(0.0, 200.0),
        max_submission_ms=st.floats(1.0, 500.0),
        give_up_ns=st.none() | st.floats(1.0, 3e9),
    ),
)
def test_any_rule_ends_as_it_says(median_ns: float, noise: float, plan: MeasurePlan) -> None:
    rule = plan.rule
    samples, ended_by, _ = drawn(rule, 3, median_ns=median_ns, noise=noise)
    count, spent = len(samples), math.fsum(samples)
    assert 1 <= count <= plan.max_samples
    if ended_by == "precise":
        assert count >= plan.min_samples
        assert median_interval(samples).width <= plan.precision
    elif ended_by == "max_samples":
        assert count == plan.max_samples
    elif ended_by == "budget":
        assert spent >= rule.budget_ns
        assert count >= plan.min_samples or (count >= 3 and spent >= rule.patience_ns)
    else:
        assert plan.give_up_ns is not None
        assert min(samples) > plan.give_up_ns


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"precision": -0.1}, "precision is -0.1"),
        ({"precision": 1.0}, "precision is 1.0"),
        ({"precision": math.nan}, "precision is nan"),
        ({"min_samples": 0}, "min_samples is 0"),
        ({"max_samples": 0}, "max_samples is 0"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(limits: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StoppingRule(**limits)  # type: ignore[arg-type]
