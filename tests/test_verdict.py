"""Verdicts: the worst element is named, and what is no number never passes."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tuner.kernels.base import Reference
from tuner.oracle import judge, worst_of
from tuner.records import Check


def a_reference(wanted: np.ndarray, bound: float) -> Reference:
    return Reference(
        outputs={"out": wanted},
        bounds=lambda _: {"out": np.full(wanted.shape[:-1], bound)},
    )


WANTED = np.arange(24, dtype=float).reshape(2, 3, 4)


def test_the_worst_element_is_named_with_its_figures() -> None:
    got = WANTED.astype(np.float32)
    got[1, 2, 3] += 0.5
    got[0, 1, 0] -= 0.25
    verdict = judge({"out": got}, a_reference(WANTED, 0.1), "f32", "ragged")
    norm = np.linalg.norm(WANTED[1, 2])
    assert not verdict.ok
    assert verdict.check == Check(
        cases=1, error=float(0.5 / norm), bound=float(0.1 / norm), worst="case ragged: out[1, 2]"
    )
    assert verdict.message == (
        "case ragged: out[1, 2] is off by 1.16e-02 (relative 2-norm over 4 elements), 2.32e-03 is "
        "allowed; worst element [1, 2, 3]: got 23.5, wanted 23; 2 of 6 groups are wrong"
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_never_passes(value: float) -> None:
    got = WANTED.astype(np.float32)
    got[0, 2, 1] = value
    verdict = judge({"out": got}, a_reference(WANTED, 1e30), "f32", "x")
    assert not verdict.ok
    assert "out[0, 2] is off by NaN or infinity" in verdict.message
    assert "worst element [0, 2, 1]" in verdict.message
    assert msgspec.json.decode(msgspec.json.encode(verdict.check), type=Check) == verdict.check


def test_zeros_must_be_zeros() -> None:
    wanted = WANTED.copy()
    wanted[1, 0] = 0
    got = wanted.astype(np.float32)
    assert judge({"out": got}, a_reference(wanted, 0.1), "f32", "x").ok
    got[1, 0, 2] = 1e-30
    verdict = judge({"out": got}, a_reference(wanted, 0.1), "f32", "x")
    assert not verdict.ok
    assert "out[1, 0] is off by 1.00e-30 (absolute" in verdict.message


def test_an_error_at_its_bound_passes_and_beyond_it_does_not() -> None:
    got = WANTED.copy()
    got[0, 0, 0] += 0.5
    assert judge({"out": got}, a_reference(WANTED, 0.5), "f32", "x").ok
    assert not judge({"out": got}, a_reference(WANTED, np.nextafter(0.5, 0)), "f32", "x").ok


def test_groups_of_a_sample_go_by_their_index_in_the_whole() -> None:
    got = WANTED.reshape(6, 4).copy()
    got[4] += 1
    reference = replace(a_reference(WANTED.reshape(6, 4), 0.1), names={"out": np.arange(100, 106)})
    verdict = judge({"out": got}, reference, "f32", "timed")
    assert verdict.check.worst == "case timed: out[104]"


def test_outputs_of_another_shape_are_a_bug() -> None:
    with pytest.raises(ValueError, match=r"out is of shape \(2, 3\), wanted \(2, 3, 4\)"):
        judge({"out": WANTED[..., 0]}, a_reference(WANTED, 1), "f32", "x")
    with pytest.raises(ValueError, match="out is missing"):
        judge({}, a_reference(WANTED, 1), "f32", "x")


def test_worst_of_checks_is_the_one_nearest_its_bound() -> None:
    checks = [
        Check(cases=1, error=0.1, bound=1.0, worst="a"),
        Check(cases=2, error=0.01, bound=0.02, worst="b"),
        Check(cases=1, error=0.0, bound=0.0, worst="c"),
    ]
    assert worst_of(checks) == Check(cases=4, error=0.01, bound=0.02, worst="b")
    broken = Check(cases=1, error=1e-9, bound=0.0, worst="d")
    assert worst_of([*checks, broken]).worst == "d"
