"""Sample streams of known truth: what is said of them is true as often as it claims to be."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from tests.made_samples import (
    INDEPENDENT,
    TRUTH_NS,
    Make,
    dependent,
    drifting,
    h200_noise,
    heavy_tailed,
    normal,
    quantised,
    skewed,
    stepping,
    two_modes,
)
from tuner.timing import Comparison, Series, StoppingRule, compare, median_interval, summarise
from tuner.timing.dependence import effective_count

TRIES = 400


def name(make: Make) -> str:
    return make.__name__


def share(happens: Callable[[np.random.Generator], bool], tries: int = TRIES) -> float:
    """How often something happens, each time with other chance."""
    return sum(happens(np.random.default_rng(seed)) for seed in range(tries)) / tries


def quick(a: Series, b: Series) -> Comparison:
    return compare(a, b, resamples=1000)


def covers(make: Make, count: int) -> Callable[[np.random.Generator], bool]:
    def happens(random: np.random.Generator) -> bool:
        interval = median_interval(make(random, count).tolist())
        return interval.low_ns <= TRUTH_NS <= interval.high_ns

    return happens


# --- intervals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", INDEPENDENT, ids=name)
@pytest.mark.parametrize("count", [12, 50])
def test_the_interval_covers_the_truth_at_its_nominal_rate(make: Make, count: int) -> None:
    covered = share(covers(make, count))
    assert covered >= 0.95 - 2.33 * math.sqrt(0.95 * 0.05 / TRIES)


@pytest.mark.parametrize("make", [normal, skewed], ids=name)
def test_the_interval_is_no_wider_than_it_must_be(make: Make) -> None:
    assert share(covers(make, 50)) < 0.995


@pytest.mark.parametrize(("correlation", "least"), [(0.3, 0.94), (0.6, 0.92), (0.8, 0.88)])
def test_dependence_widens_the_interval_to_what_it_should_be(
    correlation: float, least: float
) -> None:
    make = dependent(correlation)
    assert share(covers(make, 100)) >= least

    def covers_as_if_independent(random: np.random.Generator) -> bool:
        samples = np.sort(make(random, 100))  # ranks 40 to 61 of 100: 95 %
        return bool(samples[39] <= TRUTH_NS <= samples[60])

    assert share(covers_as_if_independent) < least - 0.03


def test_looking_until_it_is_precise_keeps_the_coverage() -> None:
    rule = StoppingRule(min_samples=10, max_samples=1000, budget_ns=TRUTH_NS * 400)
    endings, counts = [], []

    def happens(random: np.random.Generator) -> bool:
        samples: list[float] = []
        while (ended_by := rule.ended(samples)) is None:
            samples += normal(random, rule.wanted(samples, TRUTH_NS)).tolist()
        endings.append(ended_by)
        counts.append(len(samples))
        interval = median_interval(samples)
        return interval.low_ns <= TRUTH_NS <= interval.high_ns

    assert share(happens) >= 0.95 - 2.33 * math.sqrt(0.95 * 0.05 / TRIES)
    assert endings.count("precise") >= 0.95 * TRIES
    assert 100 <= np.median(counts) <= 200


# --- flags -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [drifting, stepping], ids=name)
def test_drift_and_steps_are_flagged(make: Make) -> None:
    assert share(lambda random: not summarise(make(random, 80).tolist()).stable, 200) >= 0.9
    assert share(lambda random: summarise(make(random, 80).tolist()).autocorrelated, 200) >= 0.9


def test_two_modes_are_flagged_and_told() -> None:
    def happens(random: np.random.Generator) -> bool:
        found = summarise(two_modes(random, 60).tolist())
        slow = found.modes_ns[-1] / found.modes_ns[0]
        return found.bimodal and slow == pytest.approx(1.05, abs=0.01)

    assert share(happens, 200) >= 0.9


@pytest.mark.parametrize("make", [normal, skewed, heavy_tailed, quantised], ids=name)
def test_no_more_than_chance_is_flagged(make: Make) -> None:
    found = [summarise(make(np.random.default_rng(s), 60).tolist()) for s in range(TRIES)]
    assert sum(summary.bimodal for summary in found) / TRIES <= 0.02
    assert sum(summary.autocorrelated for summary in found) / TRIES <= 0.025
    assert sum(not summary.stable for summary in found) / TRIES <= 0.02


# --- comparisons -------------------------------------------------------------------------------


def errors(make: Make) -> tuple[float, float]:
    """How often A is called different from A, and how often a ratio of 1.02 is not covered."""
    wrong = missed = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        a, b = (make(random, 60) for _ in range(2))
        same = quick(Series(samples_ns=a.tolist()), Series(samples_ns=b.tolist()))
        wrong += same.verdict != "no difference shown"
        slower = Series(samples_ns=(1.02 * b).tolist())
        ratio = quick(Series(samples_ns=a.tolist()), slower)
        missed += not ratio.low <= 1.02 <= ratio.high
    return wrong / 200, missed / 200


@pytest.mark.parametrize("make", INDEPENDENT, ids=name)
def test_the_ratio_is_covered_and_a_is_no_different_from_a(make: Make) -> None:
    assert max(errors(make)) <= 0.05


@pytest.mark.parametrize("correlation", [0.3, 0.5])
def test_dependent_samples_mislead_little_more(correlation: float) -> None:
    assert max(errors(dependent(correlation))) <= 0.08


def test_dependence_counts_in_a_comparison() -> None:
    a = dependent(0.9)(np.random.default_rng(1), 100)
    shuffled = np.random.default_rng(2).permutation(a)
    assert effective_count(a.tolist()) < 0.3 * effective_count(shuffled.tolist())
    alone = compare(Series(samples_ns=shuffled.tolist()), Series(samples_ns=shuffled.tolist()))
    wide = compare(Series(samples_ns=a.tolist()), Series(samples_ns=a.tolist()))
    assert wide.high - wide.low > 1.7 * (alone.high - alone.low)


def test_a_against_a_on_the_h200_is_called_different_at_most_once_in_twenty() -> None:
    noise = h200_noise()

    def once(random: np.random.Generator) -> bool:
        same = quick(noise.once(random, 50), noise.once(random, 50))
        return same.verdict != "no difference shown"

    def in_turns(random: np.random.Generator) -> bool:
        same = quick(noise.turns(random, [20] * 8), noise.turns(random, [20] * 8))
        return same.verdict != "no difference shown"

    assert share(once, 200) <= 0.05
    assert share(in_turns, 200) <= 0.05


def test_two_per_cent_on_the_h200_are_found_nine_times_in_ten() -> None:
    noise = h200_noise()

    def in_turns(random: np.random.Generator) -> bool:
        a, b = (noise.turns(random, [20] * 8, factor=factor) for factor in (1.0, 1.02))
        return quick(a, b).verdict == "slower"

    assert share(in_turns, 200) >= 0.9


def test_one_per_cent_is_found_about_every_other_time_and_never_the_wrong_way() -> None:
    noise = h200_noise()
    verdicts = []
    for seed in range(200):
        random = np.random.default_rng(seed)
        a, b = (noise.turns(random, [20] * 8, factor=factor) for factor in (1.0, 0.99))
        verdicts.append(quick(a, b).verdict)
    assert verdicts.count("faster") > 80
    assert verdicts.count("slower") <= 1


def test_without_what_lies_between_measurements_too_much_is_claimed() -> None:
    """Why single measurements need `between`: their samples alone tell too little."""
    noise = h200_noise()

    def happens(random: np.random.Generator) -> bool:
        a, b = (noise.once(random, 50).samples_ns for _ in range(2))
        return compare(Series(samples_ns=a), Series(samples_ns=b)).verdict != "no difference shown"

    assert share(happens, 200) > 0.15
