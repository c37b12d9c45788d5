"""How alike repeated measurements come out, and records as series."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.made_records import made_record
from tuner.records import Record
from tuner.results import between_measurements, series
from tuner.timing import summarise


def repeated(between: float, *, variants: int = 60, times: int = 3) -> list[Record]:
    """Variants measured several times, whose medians differ by so much beyond their samples."""
    random = np.random.default_rng(4)
    made = []
    for _ in range(times):
        for variant in range(variants):
            shift = math.exp(random.normal(0, between))
            samples = tuple((1e5 * shift * (1 + 0.01 * random.standard_normal(40))).tolist())
            summary = summarise(samples)
            made.append(
                made_record(
                    variant=f"v{variant}",
                    samples_ns=samples,
                    median_ns=summary.median_ns,
                    low_ns=summary.low_ns,
                    high_ns=summary.high_ns,
                )
            )
    return made


@pytest.mark.parametrize("between", [0.005, 0.02])
def test_what_lies_between_measurements_is_found(between: float) -> None:
    assert between_measurements(repeated(between)) == pytest.approx(between, rel=0.25)


def test_without_any_little_is_found() -> None:
    found = between_measurements(repeated(0.0))
    assert found is not None
    assert found < 0.0015


def test_a_few_wild_ones_do_not_count() -> None:
    wild = repeated(0.005)
    wild += [made_record(variant=f"v{i}", median_us=100.0 * (2 + i)) for i in range(4)]
    assert between_measurements(wild) == pytest.approx(0.005, rel=0.3)


def test_few_repeats_and_given_up_ones_say_nothing() -> None:
    assert between_measurements(repeated(0.01, variants=4, times=2)) is None
    assert between_measurements(repeated(0.01, variants=60, times=1)) is None
    given_up = [made_record(variant="v", ended_by="gave_up") for _ in range(20)]
    failed = [made_record(variant="v", state="runtime") for _ in range(20)]
    assert between_measurements([*given_up, *failed]) is None


def test_a_records_own_rounds_tell_more_than_others_repeats() -> None:
    alone = series(made_record(), 0.01)
    assert (alone.between, alone.rounds, alone.run) == (0.01, (), "")
    samples = tuple(float(100 + i % 5) for i in range(24))
    record = made_record(samples_ns=samples, rounds=(4,) * 6, interleaved="finals 1")
    found = series(record, 0.01)
    assert (found.between, found.rounds, found.run) == (0.0, (4,) * 6, "finals 1")
    assert series(made_record()).between == 0.0
