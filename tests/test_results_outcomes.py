"""What trials come to, and records as rows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.made_records import BASELINE, decode, gpu, made_record, made_run, software
from tuner.records import FINAL
from tuner.results import Store, outcomes, outcomes_to_frame, row, to_frame
from tuner.results.frame import rows
from tuner.results.outcomes import declared_baseline, interval

H200 = Path(__file__).parents[1] / "results" / "published" / "nvidia-h200"

# Outcomes and rows


def test_an_outcome_names_best_ties_baseline_and_failures() -> None:
    problem = decode(8, 16384)
    fast, close, slow = ({**BASELINE, "strategy": "packed_f16", "subgroups": n} for n in (1, 2, 4))
    made = [
        made_record(problem, dict(BASELINE), median_us=1000.0),
        made_record(problem, slow, median_us=200.0),
        made_record(problem, close, median_us=100.5),
        made_record(problem, fast, median_us=100.0),
        made_record(problem, {**fast, "subgroups": 8}, state="timeout"),
        made_record(decode(1, 4096), fast, median_us=1.0),
    ]
    (outcome, other) = outcomes(made, baseline_of=lambda _: BASELINE)
    assert outcome.best == made[3]
    assert outcome.tied == (made[2],)
    assert outcome.baseline == made[0]
    assert outcome.speedup == pytest.approx(10.0)
    assert outcome.failures == {"timeout": 1}
    assert (other.baseline, other.speedup) == (None, None)


def test_a_final_measurement_decides_over_a_faster_first_one() -> None:
    """Finalists were timed side by side; their first times may have met a faster clock."""
    near = made_record(values={"n": 0}, median_us=99.9)
    finals = [made_record(values={"n": n}, median_us=99.9 + n / 10, note=FINAL) for n in (1, 2)]
    firsts = [made_record(values={"n": n}, median_us=80.0) for n in (1, 2)]
    (outcome,) = outcomes([near, *firsts, *finals], baseline_of=lambda _: None)
    assert outcome.best == finals[0]
    assert outcome.ranked == (*finals, near)


def test_what_is_proven_faster_than_all_finalists_goes_before_them() -> None:
    """As after a run that was resumed and stopped: nothing faster than it was in any final."""
    faster = made_record(values={"n": 0}, median_us=60.0)
    finals = [made_record(values={"n": n}, median_us=99.9 + n / 10, note=FINAL) for n in (1, 2)]
    (outcome,) = outcomes([faster, *finals], baseline_of=lambda _: None)
    assert outcome.best == faster
    assert outcome.ranked == (faster, *finals)


def test_the_baseline_is_known_from_before_it_had_all_its_parameters() -> None:
    old = made_record(values={"strategy": "baseline"}, median_us=500.0)
    other = made_record(values={"strategy": "matrix"}, median_us=100.0)
    baseline = {"strategy": "baseline", "layout": "token_major"}
    (outcome,) = outcomes([old, other], baseline_of=lambda _: baseline)
    assert outcome.baseline == old
    (outcome,) = outcomes([other], baseline_of=lambda _: baseline)
    assert outcome.baseline is None


def test_the_committed_results_have_their_baselines() -> None:
    found = outcomes(Store(H200, read_only=True).records())
    assert {outcome.family for outcome in found if outcome.baseline is None} == set()
    slower = {outcome.family for outcome in found if (outcome.speedup or 0.0) < 1}
    assert slower == set()


def test_a_baseline_that_other_values_come_to_as_well_stays_the_baseline() -> None:
    other = {**BASELINE, "strategy": "packed_f16"}
    first = made_record(values=dict(BASELINE), median_us=100.0)
    again = msgspec.structs.replace(first, values=other, time="2026-11-29T13:00:00Z")
    (outcome,) = outcomes([first, again], baseline_of=lambda _: BASELINE)
    assert outcome.baseline == outcome.best == again
    assert outcome.speedup == 1.0


def test_an_outcome_without_any_correct_record_has_no_best() -> None:
    (outcome,) = outcomes([made_record(state="compile")], baseline_of=lambda _: None)
    assert (outcome.best, outcome.tied, outcome.speedup) == (None, (), None)


@given(st.permutations(range(6)))
def test_the_best_does_not_depend_on_the_order(order: list[int]) -> None:
    made = [
        made_record(values={"subgroups": n}, median_us=100.0 if n < 3 else 200.0) for n in range(6)
    ]
    (outcome,) = outcomes([made[i] for i in order], baseline_of=lambda _: None)
    assert outcome.best == min(made[:3], key=lambda r: r.variant)
    assert {r.variant for r in outcome.tied} | {outcome.best.variant} == {
        r.variant for r in made[:3]
    }


def test_devices_and_drivers_are_kept_apart() -> None:
    newer = msgspec.structs.replace(gpu(), driver_info="590.1")
    made = [made_record(device=d) for d in (gpu(), software(), newer)]
    assert [(o.device, o.driver) for o in outcomes(made, baseline_of=lambda _: None)] == [
        (r.device, r.driver) for r in made
    ]


def test_a_record_without_interval_has_its_median_as_one() -> None:
    assert interval(made_record(low_ns=None, high_ns=None, median_ns=5.0)) == (5.0, 5.0)


def test_a_row_is_flat_and_in_the_units_it_names() -> None:
    record = made_record(median_us=100.0)
    cells = row(record)
    assert cells["median_us"] == pytest.approx(100.0)
    assert cells["problem_sequences"] == 8
    assert cells["param_strategy"] == "scalar_f32"
    assert cells["gb_s"] == pytest.approx(record.bytes_moved / 100e3)
    assert cells["utilisation"] == pytest.approx(record.bytes_moved / 100e3 / 4600)
    assert cells["stable"] is True
    assert all(v is None or isinstance(v, str | int | float | bool) for v in cells.values())


def test_rows_have_one_set_of_columns_for_all_families() -> None:
    columns, found = rows([made_record(values={"a": 1}), made_record(values={"b": 2})])
    assert {"param_a", "param_b"} <= set(columns)
    assert len(columns) == len(set(columns))
    assert all(set(each) <= set(columns) for each in found)
    assert columns[:3] == ("family", "problem", "problem_sequences")


def test_the_frame_has_a_row_a_record() -> None:
    made = made_run([decode(1, 4096)], trials=8)
    frame = to_frame(made)
    assert len(frame) == len(made)
    assert list(frame["variant"]) == [record.variant for record in made]
    assert frame.loc[frame["state"] == "correct", "median_us"].notna().all()
    assert len(to_frame([])) == 0
    failed = to_frame([made_record(state="compile")])
    assert failed["median_us"].dtype == float


def test_the_frame_of_outcomes_has_a_row_a_problem() -> None:
    made = [
        made_record(values=dict(BASELINE), median_us=1000.0),
        made_record(values={**BASELINE, "subgroups": 2}, median_us=100.0),
        made_record(decode(1, 4096), values={**BASELINE, "subgroups": 2}, state="timeout"),
    ]
    frame = outcomes_to_frame(outcomes(made, baseline_of=lambda _: BASELINE))
    assert list(frame["problem"]) == [decode(8, 16384).label, decode(1, 4096).label]
    assert frame["median_us"].tolist()[0] == pytest.approx(100.0)
    assert frame["speedup"].tolist()[0] == pytest.approx(10.0)
    assert frame["failed"].tolist() == [0, 1]
    assert "subgroups=2" in frame["best"].tolist()[0]
    assert frame["speedup"].dtype == frame["median_us"].dtype == float
    assert len(outcomes_to_frame([])) == 0


def test_the_declared_baseline_is_the_familys_own() -> None:
    found = declared_baseline("paged_decode_q8")
    assert found is not None
    assert found["strategy"] == "baseline"
    assert declared_baseline("no such family") is None
