"""Bimodality: the dip, its critical values, and what is told of two modes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.timing.modes import critical_dip, dip, modes


def test_known_dips() -> None:
    """Two equal heaps, each a point, are as far from one as can be: a quarter."""
    assert dip([0.0] * 50 + [1.0] * 50) == pytest.approx(0.25, abs=0.01)
    assert dip(np.arange(100.0)) == pytest.approx(1 / 200)
    # Solved as linear programmes over all unimodal distributions.
    assert dip([0.0, 1.0, 5.0, 6.0]) == pytest.approx(0.2)
    assert dip([0.0, 1.0, 2.0, 10.0, 11.0, 12.0]) == pytest.approx(0.2)
    assert dip([0.0, 1.0, 2.0, 3.0, 20.0, 21.0, 22.0, 30.0, 31.0]) == pytest.approx(85 / 504)


@given(st.lists(st.integers(0, 10**6), min_size=4, max_size=60, unique=True))
def test_a_dip_is_bounded_and_blind_to_scale_place_and_direction(values: list[int]) -> None:
    ordered = np.sort(np.asarray(values, dtype=float))
    found = dip(ordered)
    assert 1 / (2 * len(values)) <= found + 1e-12
    assert found <= 0.25 + 1e-12
    assert dip(4 * ordered + 8) == pytest.approx(found)
    assert dip(-ordered[::-1]) == pytest.approx(found)


@pytest.mark.parametrize("count", [20, 50, 120])
def test_uniform_samples_dip_beyond_the_critical_value_once_in_a_hundred(count: int) -> None:
    random = np.random.default_rng(count)
    beyond = [dip(np.sort(random.random(count))) > critical_dip(count) for _ in range(1000)]
    assert 0.002 <= np.mean(beyond) <= 0.02


def test_two_heaps_are_told_apart_and_one_is_not() -> None:
    random = np.random.default_rng(0)
    heaps = np.concatenate([random.normal(100, 0.5, 40), random.normal(104, 0.5, 20)])
    assert modes(heaps.tolist()) == pytest.approx((100, 104), abs=0.3)
    one = random.normal(100, 0.5, 60).tolist()
    assert modes(one) == (np.median(one),)


def test_heaps_too_near_to_matter_are_one() -> None:
    random = np.random.default_rng(0)
    heaps = np.concatenate([random.normal(100, 0.1, 40), random.normal(100.8, 0.1, 40)])
    assert dip(np.sort(heaps)) > critical_dip(80)
    assert len(modes(heaps.tolist())) == 1


def test_a_few_outliers_are_no_mode_and_few_samples_have_one() -> None:
    random = np.random.default_rng(0)
    assert len(modes([*random.normal(100, 0.5, 57).tolist(), 300.0, 310.0, 320.0])) == 1
    assert len(modes([100.0, 101.0] * 9)) == 1


def test_a_coarse_clock_alone_makes_no_modes() -> None:
    random = np.random.default_rng(0)
    coarse = np.round(random.normal(100, 1.5, 200) / 3) * 3
    assert len(set(coarse)) <= 5
    assert len(modes(coarse.tolist())) == 1
