"""Comparisons: the ratio, its interval, what is resampled, what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.made_samples import normal
from tuner.errors import MeasurementError
from tuner.timing import Series, compare, differ, median_interval, summarise


def series(seed: int, count: int = 40, *, factor: float = 1.0, rounds: int = 0) -> Series:
    samples = (factor * normal(np.random.default_rng(seed), count)).tolist()
    each = (count // rounds,) * rounds if rounds else ()
    return Series(samples_ns=samples, rounds=each, run="one" if rounds else "")


def test_the_ratio_is_that_of_the_medians_and_the_verdict_is_about_b() -> None:
    found = compare(series(1), series(2, factor=0.9))
    expected = np.median(series(2, factor=0.9).samples_ns) / np.median(series(1).samples_ns)
    assert found.ratio == pytest.approx(expected)
    assert found.low <= found.ratio <= found.high < 1
    assert (found.verdict, found.units) == ("faster", "samples")
    assert compare(series(2, factor=0.9), series(1)).verdict == "slower"
    assert compare(series(1), series(2)).verdict == "no difference shown"


@settings(max_examples=40)
@given(st.lists(st.floats(1.0, 1e9), min_size=1, max_size=30), st.floats(0.1, 10.0))
def test_scaling_b_scales_the_ratio_and_its_interval(samples: list[float], factor: float) -> None:
    a = Series(samples_ns=samples)
    same = compare(a, a, resamples=200)
    scaled = compare(a, Series(samples_ns=[x * factor for x in samples]), resamples=200)
    assert same.ratio == 1.0
    assert same.low <= 1.0 <= same.high
    for name in ("ratio", "low", "high"):
        assert getattr(scaled, name) == pytest.approx(factor * getattr(same, name), rel=1e-9)


def test_the_same_seed_gives_the_same_interval() -> None:
    assert compare(series(1), series(2), seed=5) == compare(series(1), series(2), seed=5)
    assert compare(series(1), series(2), seed=5) != compare(series(1), series(2), seed=6)


@pytest.mark.parametrize("count", [9, 10, 51])
def test_resampled_medians_are_those_of_samples_drawn_with_replacement(count: int) -> None:
    """The interval against one from a plain bootstrap."""
    a, b = series(3, count), series(4, count)
    random = np.random.default_rng(0)
    medians = [
        np.median(random.choice(np.asarray(each.samples_ns), (20_000, count)), axis=1)
        for each in (a, b)
    ]
    logs = np.log(medians[1] / medians[0])
    found = compare(a, b, resamples=20_000)
    # The interval reaches out as Student's t with count - 1 degrees does, or a little more.
    assert found.low <= math.exp(np.quantile(logs, 0.025)) * 1.0005
    assert found.low >= math.exp(np.quantile(logs, 0.0005)) * 0.9995
    assert found.high >= math.exp(np.quantile(logs, 0.975)) * 0.9995
    assert found.high <= math.exp(np.quantile(logs, 0.9995)) * 1.0005


def test_rounds_taken_in_turns_cancel_what_they_share() -> None:
    random = np.random.default_rng(7)
    shared = np.repeat(1 + 0.1 * random.standard_normal(8), 10)
    a, b = (series(seed, 80, factor=factor) for seed, factor in ((1, 1.0), (2, 1.02)))
    rounds = (10,) * 8

    def sharing(each: Series, run: str) -> Series:
        samples = (shared * np.asarray(each.samples_ns)).tolist()
        return Series(samples_ns=samples, rounds=rounds, run=run)

    paired = compare(sharing(a, "x"), sharing(b, "x"))
    apart = compare(sharing(a, "x"), sharing(b, "y"))
    assert (paired.units, apart.units) == ("rounds in pairs", "rounds")
    assert apart.verdict == "no difference shown"
    assert paired.high - paired.low < 0.5 * (apart.high - apart.low)


def test_rounds_that_differ_widen_the_interval() -> None:
    quiet = series(1, 80, rounds=8)
    shifts = np.repeat([1.0, 0.97, 1.03, 1.01, 0.99, 1.02, 0.98, 1.0], 10)
    loud = Series(
        samples_ns=(shifts * np.asarray(quiet.samples_ns)).tolist(), rounds=(10,) * 8, run="z"
    )
    found = [compare(quiet, each) for each in (quiet, loud)]
    assert found[1].high - found[1].low > 2 * (found[0].high - found[0].low)


def test_few_rounds_count_as_student_says() -> None:
    shifts = np.repeat([0.97, 1.0, 1.03], 20)
    samples = np.asarray(series(1, 60).samples_ns)
    rounds = Series(samples_ns=(shifts * samples).tolist(), rounds=(20,) * 3)
    found = compare(rounds, rounds, confidence=0.95)
    # Either median: 3 % / sqrt(3), times Student's 4.30 for 2 degrees (by the series: 4.17).
    expected = math.sqrt(2) * 0.03 / math.sqrt(3) * 4.17
    assert math.log(found.high) == pytest.approx(expected, rel=0.1)


def test_what_samples_do_not_tell_widens_the_interval() -> None:
    a, b = series(1, 200), series(2, 200)
    known = compare(a, b, confidence=0.95)
    told = [Series(samples_ns=each.samples_ns, between=0.01) for each in (a, b)]
    wide = compare(*told, confidence=0.95)
    assert wide.high - wide.low == pytest.approx(2 * 1.96 * 0.01 * math.sqrt(2), rel=0.15)
    assert wide.high - wide.low > 4 * (known.high - known.low)


def test_the_interval_of_rounds_is_that_of_their_medians() -> None:
    samples = [100.0 + place for place in (0, 5, 1, 6, 2, 7, 3, 4) for _ in range(3)]
    alone = median_interval(samples)
    interval = median_interval(samples, (3,) * 8)
    reach = interval.tick_ns / 2
    assert (interval.low_ns + reach, interval.high_ns - reach) == (100.0, 107.0)
    assert interval.coverage == pytest.approx(1 - 2 / 2**8)
    assert interval.effective_count <= 8
    assert interval.median_ns == alone.median_ns
    assert summarise(samples, (3,) * 8).high_ns == interval.high_ns


def test_rounds_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(MeasurementError, match="rounds of 5 samples in all, but 4"):
        Series(samples_ns=[1.0] * 4, rounds=(2, 3))
    with pytest.raises(MeasurementError, match="nothing was measured"):
        Series(samples_ns=[])


@pytest.mark.parametrize("impossible", [0.0, -1.0, math.nan, math.inf])
def test_times_that_cannot_be_are_refused(impossible: float) -> None:
    with pytest.raises(MeasurementError, match=r"sample 3 of 3 is .* ns, must be above 0"):
        differ([1.0, 2.0], [1.0, 2.0, impossible], limit=0.01)
