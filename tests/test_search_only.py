"""A search of a part of the space: what it tries, and what it has of searches of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.made_records import decode
from tests.toy_family import TOY, toy_device
from tests.toy_search import BASELINE, SPACE, Records, run
from tuner import kernels
from tuner.cli.options import ProblemChoice
from tuner.cli.tune import _allowed
from tuner.errors import UnknownNameError, UsageError
from tuner.kernels import space

HALF = {"toy": {"mode": ["half"]}}


def test_only_what_is_allowed_is_tried_and_the_baseline(tmp_path: Path) -> None:
    store = Records()
    result = run(tmp_path / "journal", store=store, trials=12, only=HALF)
    (found,) = result.problems
    assert BASELINE["mode"] != "half"
    assert found.baseline is not None
    assert found.baseline.values == BASELINE
    others = [record for record in store.kept if record.values != BASELINE]
    assert len({record.variant for record in others}) == 11
    assert {record.values["mode"] for record in others} == {"half"}
    assert found.best is not None
    assert found.best.values["mode"] == "half"
    assert found.legal == 1 + len(SPACE.having(HALF["toy"])) < len(SPACE)


def test_it_has_a_budget_of_its_own_and_measures_nothing_twice(tmp_path: Path) -> None:
    store = Records()
    run(tmp_path / "journal", store=store, trials=12)
    before = {record.variant for record in store.kept}
    (found,) = run(tmp_path / "journal", store=store, trials=6, only=HALF).problems
    assert (found.trials, found.ended) == (6, "trials")
    assert found.known > 0
    tried = [record.variant for record in store.kept if record.note == ""]
    assert len(set(tried)) == len(tried) == len(before) + found.measured
    (again,) = run(tmp_path / "journal", store=store, trials=6, only=HALF).problems
    assert (again.measured, again.ended) == (0, "met before")


def test_where_nothing_of_it_is_legal_not_even_the_baseline_is_tried(tmp_path: Path) -> None:
    store = Records()
    nothing = {"toy": {"mode": ["half"], "tile": [max(TOY.parameter("tile").values)]}}
    assert not SPACE.having(nothing["toy"])
    (found,) = run(tmp_path / "journal", store=store, only=nothing).problems
    assert (found.ended, store.kept) == ("nothing legal", [])
    tile = nothing["toy"]["tile"][0]
    assert found.error is not None
    told, _, why = found.error.partition(": ")
    assert told == f"no variant with mode=half tile={tile} is legal"
    assert why == f"tile={tile} means nothing beside the other values: it must be 1"


def test_the_reason_is_that_of_the_variant_nearest_to_legal() -> None:
    family, device = kernels.family("paged_decode_q8"), toy_device()
    assert not device.cooperative_matrix
    told = space.why_none(family, decode(1, 4096), device, {"strategy": ["matrix"]})
    assert any("cooperative matri" in reason for reason in told), told


def test_the_command_asks_each_family_for_what_it_has() -> None:
    none = ProblemChoice()
    assert _allowed(
        ["paged_decode_q8"], ["strategy=int_dot", "subgroups=4", "subgroups=8"], none
    ) == {"paged_decode_q8": {"strategy": ["int_dot"], "subgroups": [4, 8]}}
    assert set(_allowed(["all"], ["strategy=matrix"], none)) > {
        "paged_decode_q8",
        "paged_attention",
    }
    assert "cache_write_q8" not in _allowed(["all"], ["strategy=matrix"], none)
    with pytest.raises(UnknownNameError, match="legal: baseline, scalar_f32"):
        _allowed(["paged_decode_q8"], ["strategy=matrices"], none)
    with pytest.raises(UsageError, match="'matrix' is no assignment"):
        _allowed(["all"], ["matrix"], none)
