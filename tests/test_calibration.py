"""Calibrations: what a full one has, and when one is due."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.made_records import gpu, made_calibration, made_full_calibration, software
from tuner import calibration
from tuner.records import Calibration, ClockState, LaunchFloor
from tuner.results import Store
from tuner.runner.fake import FakeRunner

LATER = "2026-12-01T00:00:00Z"


def changed(each: Calibration, **changes: Any) -> Calibration:
    return msgspec.structs.replace(each, **changes)


def test_a_quick_one_has_the_ceiling_alone() -> None:
    made = calibration.quick(FakeRunner(gpu(), noise=0.0), "s")
    assert made.read_gb_s == pytest.approx(1000.0)
    assert [nbytes for nbytes, _ in made.points] == list(calibration.GPU_READS)
    assert (made.device_uuid, made.driver, made.session) == (gpu().uuid, gpu().driver, "s")
    assert not made.is_full


@pytest.mark.parametrize("info", [gpu(), software()], ids=["gpu", "software"])
def test_a_full_one_has_curves_and_floors(info: Any) -> None:
    made = calibration.full(FakeRunner(info, noise=0.0), "s", reason="asked for")
    sizes = calibration.CPU_CURVE if info.is_cpu else calibration.GPU_CURVE
    assert made.is_full
    assert made.reason == "asked for"
    assert [curve.transfer for curve in made.curves] == ["read", "write", "copy"]
    for curve, gb_s in zip(made.curves, (1000.0, 500.0, 1000.0), strict=True):
        assert curve.points == tuple((nbytes, pytest.approx(gb_s)) for nbytes in sizes)
    assert made.floor(2) == LaunchFloor(passes=2, isolated_ns=4000.0, batched_ns=4000.0)
    assert made.floor(9) is None
    assert made.submission_ns == 20_000.0


def test_it_is_read_back_from_the_store_as_it_was(tmp_path: Path) -> None:
    made = calibration.full(FakeRunner(gpu()), "s", reason="asked for")
    with Store(tmp_path) as store:
        store.append_calibration(made)
    assert Store(tmp_path, read_only=True).calibrations() == (made,)


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        ([], "the first of this device"),
        ([made_calibration()], "the first of this device"),
        ([changed(made_full_calibration(), device_uuid="another")], "the first of this device"),
        ([changed(made_full_calibration(), driver="NVIDIA 1")], "the driver was NVIDIA 1"),
        ([changed(made_full_calibration(), read_gb_s=4400.0)], "read bandwidth is +4.5 % off"),
        ([changed(made_full_calibration(), read_gb_s=4800.0)], "read bandwidth is -4.2 % off"),
        (
            [
                changed(
                    made_full_calibration(),
                    clock_state=ClockState(reference_ns=(1.0, 60_000.0, 9e9)),
                )
            ],
            "reference kernel takes +10.0 % since",
        ),
        ([made_full_calibration()], None),
        ([changed(made_full_calibration(), read_gb_s=4500.0)], None),
        (
            [
                changed(made_full_calibration(), read_gb_s=1.0),
                changed(made_full_calibration(), time=LATER),
            ],
            None,
        ),
    ],
)
def test_when_a_full_one_is_due(known: list[Calibration], reason: str | None) -> None:
    fresh = changed(made_calibration(), clock_state=ClockState(reference_ns=(66_000.0,)))
    found = calibration.why_full(fresh, known, gpu())
    assert (found is None) == (reason is None)
    assert reason is None or (found is not None and reason in found)


def test_of_a_cpu_driver_none_is_due() -> None:
    assert calibration.why_full(made_calibration(software()), [], software()) is None


def test_it_is_repeated_only_when_due() -> None:
    runner = FakeRunner(gpu(), noise=0.0, read_gb_s=4600.0)
    first = calibration.up_to_date(runner, "one", ())
    assert (first.is_full, first.reason) == (True, "the first of this device")
    second = calibration.up_to_date(runner, "two", [first])
    assert not second.is_full
    slower = FakeRunner(gpu(), noise=0.0, read_gb_s=4000.0)
    third = calibration.up_to_date(slower, "three", [first, second])
    assert third.is_full
    assert third.reason.startswith("the read bandwidth is -13.0 % off")
