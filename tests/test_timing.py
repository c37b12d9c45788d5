"""Summaries of samples: the interval of the median, the spread, drift."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.errors import MeasurementError
from tuner.timing import median_interval, overlap, summarise

SAMPLES = st.lists(st.floats(1.0, 1e12), min_size=1, max_size=80)


def one_to(count: int) -> list[float]:
    """1 to `count` in an order in which neighbours lie on different sides of the median."""
    half = (count + 1) // 2
    low, high = range(1, half + 1), range(half + 1, count + 1)
    return [float(x) for pair in itertools.zip_longest(low, high) for x in pair if x is not None]


def test_known_samples() -> None:
    summary = summarise([5.0, 1.0, 4.0, 2.0, 3.0])
    assert summary.median_ns == 3.0
    assert (summary.low_ns, summary.high_ns) == (1.0, 5.0)
    assert summary.count == 5
    assert summary.coverage == pytest.approx(1 - 2 / 32)
    assert summary.spread == pytest.approx(1.4826 / 3)


def test_an_even_count_takes_the_mean_of_the_middle_two() -> None:
    assert summarise([1.0, 2.0, 4.0, 100.0]).median_ns == 3.0


@pytest.mark.parametrize(
    ("count", "rank"), [(6, 1), (8, 1), (9, 2), (10, 2), (15, 4), (20, 6), (30, 10), (50, 18)]
)
def test_interval_ranks_are_those_of_the_tables(count: int, rank: int) -> None:
    """Ranks (from 1) of the 95 % interval of the median, as printed in statistics books."""
    summary = summarise(one_to(count))
    assert summary.low_ns == rank
    assert summary.high_ns == count + 1 - rank
    assert summary.coverage >= 0.95


@given(st.integers(1, 400))
def test_coverage_is_the_binomial_sum_and_the_next_rank_would_fall_short(count: int) -> None:
    summary = summarise(one_to(count))
    rank = int(summary.low_ns)

    def covered(r: int) -> float:
        return 1 - 2 * sum(math.comb(count, i) for i in range(r)) / 2**count

    assert summary.coverage == pytest.approx(covered(rank))
    assert summary.coverage >= 0.95 or rank == 1
    assert covered(rank + 1) < 0.95


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    rng = random.Random(1)
    true_median = math.exp(0.0)
    inside = 0
    for _ in range(2000):
        summary = summarise([rng.lognormvariate(0, 0.5) for _ in range(15)])
        inside += summary.low_ns <= true_median <= summary.high_ns
    assert 0.95 < inside / 2000 < 0.98  # coverage of ranks 4 and 12 of 15 is 0.9648


@given(SAMPLES)
def test_the_median_lies_in_its_interval_and_the_interval_in_the_range(xs: list[float]) -> None:
    summary = summarise(xs)
    reach = median_interval(xs).tick_ns / 2
    assert summary.low_ns <= summary.median_ns <= summary.high_ns
    assert min(xs) - reach <= summary.low_ns <= max(xs)
    assert min(xs) <= summary.high_ns <= max(xs) + reach
    assert summary.count == len(xs)
    assert summary.spread >= 0


@given(SAMPLES, st.randoms(use_true_random=False))
def test_order_moves_no_median_and_only_widens(xs: list[float], rng: random.Random) -> None:
    shuffled = xs[:]
    rng.shuffle(shuffled)
    a, b = summarise(xs), summarise(shuffled)
    assert (a.median_ns, a.spread) == (b.median_ns, b.spread)
    less, more = sorted((a, b), key=lambda summary: summary.effective_count)
    assert 0 < less.effective_count <= more.effective_count <= len(xs)
    assert less.low_ns <= more.low_ns
    assert more.high_ns <= less.high_ns


def test_samples_in_long_waves_are_worth_few_and_flagged() -> None:
    waves = [100.0 + 5 * math.sin(i / 8) + (i * 7919 % 13) / 10 for i in range(100)]
    summary, shuffled = summarise(waves), summarise(random.Random(3).sample(waves, 100))
    assert summary.autocorrelated
    assert summary.effective_count < 15
    assert not shuffled.autocorrelated
    assert shuffled.effective_count > 40
    assert summary.high_ns - summary.low_ns > 1.7 * (shuffled.high_ns - shuffled.low_ns)


def test_copies_that_take_turns_earn_no_credit() -> None:
    summary = summarise([100.0 + 3 * (i % 2) + (i * 7919 % 13) / 10 for i in range(50)])
    assert summary.effective_count == 50
    assert not summary.autocorrelated


def test_a_coarse_clock_widens_by_half_its_step() -> None:
    interval = median_interval([96.0, 128.0] * 10)
    assert interval.tick_ns == 32.0
    assert (interval.low_ns, interval.high_ns) == (80.0, 144.0)
    assert median_interval([96.0, 128.0, 97.5]).tick_ns == 0.0


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=40), st.sampled_from([2.0, 0.5, 8.0]))
def test_scaling_the_samples_scales_times_and_leaves_ratios(xs: list[int], factor: float) -> None:
    a, b = summarise([float(x) for x in xs]), summarise([x * factor for x in xs])
    assert b.median_ns == a.median_ns * factor
    assert (b.spread, b.drift, b.stable) == (a.spread, a.drift, a.stable)


def test_one_outlier_moves_neither_median_nor_spread() -> None:
    quiet = [100.0 + i % 3 for i in range(21)]
    loud = [*quiet[:-1], 1e9]
    assert summarise(loud).median_ns == summarise(quiet).median_ns
    assert summarise(loud).spread == pytest.approx(summarise(quiet).spread)


def test_a_step_between_the_halves_is_unstable() -> None:
    summary = summarise([100.0 + i % 2 for i in range(10)] + [120.0 + i % 2 for i in range(10)])
    assert not summary.stable
    assert summary.drift == pytest.approx(0.2, abs=0.01)


def test_a_slow_ramp_is_unstable() -> None:
    assert not summarise([100.0 + i for i in range(20)]).stable


def test_noise_around_one_value_is_stable() -> None:
    rng = random.Random(2)
    assert summarise([100 + rng.random() * 20 for _ in range(40)]).stable


def test_a_drift_too_small_to_matter_is_stable() -> None:
    assert summarise([1000.0] * 10 + [1005.0] * 10).stable


def test_few_samples_are_never_called_drifting() -> None:
    assert summarise([100.0, 101.0, 102.0, 150.0, 151.0, 152.0]).stable


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_refused_with_its_place(bad: float) -> None:
    with pytest.raises(MeasurementError, match="sample 2 of 3"):
        summarise([1.0, bad, 2.0])


def test_no_samples_are_refused() -> None:
    with pytest.raises(MeasurementError, match="nothing was measured"):
        summarise([])


@given(*[st.tuples(st.floats(0, 10), st.floats(0, 10)).map(lambda t: tuple(sorted(t)))] * 2)
def test_overlap_is_symmetric_and_right(a: tuple[float, float], b: tuple[float, float]) -> None:
    assert overlap(a, b) == overlap(b, a) == (max(a[0], b[0]) <= min(a[1], b[1]))


def test_oddities_are_said_in_words() -> None:
    rng = random.Random(5)
    quiet = [100e3 + rng.gauss(0, 500) for _ in range(60)]
    assert summarise(quiet).oddities == ()
    step = [x * (1.0 if i < 30 else 1.08) for i, x in enumerate(quiet)]
    drifts, bimodal, dependent = summarise(step).oddities
    assert drifts.startswith("drifts: the second half of the samples differs by +8.")
    assert bimodal == "bimodal: samples lie around 99.97 and 108 µs"
    assert dependent.startswith("autocorrelated: 60 samples are worth ")
