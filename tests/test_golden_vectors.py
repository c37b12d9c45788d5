"""The comparison rules themselves: what is right passes, what is off is named."""

from __future__ import annotations

import numpy as np
import pytest

from tests.golden_vectors import Golden, load, names


def last_compared(golden: Golden, key: str) -> tuple[int, ...] | None:
    """The last element of a result that its rule looks at, None if there is none."""
    rule, want = golden.rules[key], golden.want[key]
    looked_at = np.ones(want.shape, bool)
    if "rows" in rule:
        looked_at[~golden.want[rule["rows"]].astype(bool)] = False
    if rule["kind"] in ("prefix", "exact_prefix"):
        counts = np.minimum(golden.want[rule["count"]].astype(int), want.shape[1])
        looked_at &= np.arange(want.shape[1]) < counts[:, None]
    if rule["kind"] == "info" or not looked_at.any():
        return None
    return tuple(int(index) for index in np.argwhere(looked_at)[-1])


EVERY_RESULT = [
    (name, key)
    for name in names()
    for golden in (load(name),)
    for key in golden.rules
    if last_compared(golden, key) is not None
]


def made(want: dict[str, np.ndarray], rules: dict[str, dict[str, object]]) -> Golden:
    return Golden(
        name="made", op="", text="", inputs={}, attributes={"b0": 1}, want=want, rules=rules
    )


@pytest.mark.parametrize("name", names())
def test_the_wanted_results_pass(name: str) -> None:
    golden = load(name)
    assert not golden.differences(golden.want, bound=1e-15)


@pytest.mark.parametrize(("name", "key"), EVERY_RESULT)
def test_a_corrupted_element_is_found(name: str, key: str) -> None:
    golden = load(name)
    got, place = golden.want[key].copy(), last_compared(golden, key)
    assert place is not None
    got[place] = got[place] + 3 if got.dtype.kind == "f" else got[place] ^ 64
    (found,) = golden.differences(golden.want | {key: got})
    assert found.startswith(f"{name}: {key}: ")


def test_a_missing_result_is_found() -> None:
    assert made({"out": np.ones(3)}, {"out": {"kind": "exact"}}).differences({}) == [
        "made: out is missing"
    ]


def test_flagged_codes_may_be_off_by_one_but_not_for_an_oracle() -> None:
    want = {"codes": np.int8([[5, 6]]), "near": np.array([[True, False]])}
    golden = made(want, {"codes": {"kind": "codes", "near": "near"}})
    assert not golden.differences({"codes": np.int8([[6, 6]])})
    assert golden.differences({"codes": np.int8([[6, 6]])}, bound=0.0)
    assert golden.differences({"codes": np.int8([[7, 6]])})
    assert golden.differences({"codes": np.int8([[5, 7]])})


def test_groups_wanted_zero_must_be_zero_and_nan_fails() -> None:
    golden = made(
        {"out": np.array([[0.0, 0.0], [3.0, 4.0]])},
        {"out": {"kind": "rel2", "axes": [-1], "bound": 0.1}},
    )
    assert not golden.differences({"out": np.array([[0.0, 0.0], [3.3, 4.3]])})
    assert golden.differences({"out": np.array([[0.0, 1e-30], [3.0, 4.0]])})
    assert golden.differences({"out": np.array([[0.0, 0.0], [3.4, 4.4]])})
    assert golden.differences({"out": np.array([[0.0, 0.0], [np.nan, 4.0]])})


def test_partials_with_another_maximum_pass() -> None:
    want = np.array([[2.0, 3.0, 6.0, 9.0]])
    golden = made({"part": want}, {"part": {"kind": "partials", "bound": 1e-6}})
    assert not golden.differences({"part": np.array([[1.0, 6.0, 12.0, 18.0]])})
    assert golden.differences({"part": np.array([[1.0, 3.0, 6.0, 9.0]])})
    assert golden.differences({"part": np.array([[2.0, 3.0, 6.0, 9.1]])})


def test_prefixes_end_where_their_count_says() -> None:
    want = {"score": np.array([[4.0, 0.0, np.nan]]), "n": np.uint32([2])}
    golden = made(want, {"score": {"kind": "prefix", "count": "n", "bound": 0.1}})
    assert not golden.differences({"score": np.array([[4.3, 0.0, np.nan]])})
    assert golden.differences({"score": np.array([[4.0, 0.1, np.nan]])})
    assert golden.differences({"score": np.array([[4.0, 0.0, 1.0]])})
    want = {"vis": np.uint32([[1, 5, 9], [2, 3, 4]]), "n": np.uint32([2, 0xFFFFFFFF])}
    golden = made(want, {"vis": {"kind": "exact_prefix", "count": "n"}})
    assert not golden.differences({"vis": np.uint32([[1, 5, 0], [2, 3, 4]])})
    assert golden.differences({"vis": np.uint32([[1, 5, 9], [2, 3, 0]])})


def test_half_keys_may_round_either_way_in_their_rows() -> None:
    keys = np.array([[1.0 + 2.0**-11, -2.0]])
    bits = np.float16([[7.0, 7.0], [1.0, -2.0]]).view(np.uint16)
    golden = made(
        {"rows": bits, "keys": keys},
        {
            "rows": {"kind": "half_keys", "exact": "keys", "first": 1, "bound": 1e-6},
            "keys": {"kind": "info"},
        },
    )
    other = bits.copy()
    other[1, 0] += 1
    assert not golden.differences({"rows": other})
    other[1, 0] += 1
    assert golden.differences({"rows": other})
    other = bits.copy()
    other[0, 0] += 1
    assert golden.differences({"rows": other})


def test_rows_left_out_are_not_compared() -> None:
    want = {"out": np.ones((2, 3)), "on": np.array([True, False])}
    golden = made(want, {"out": {"kind": "exact", "rows": "on"}})
    assert not golden.differences({"out": np.array([[1.0] * 3, [2.0] * 3])})
    assert golden.differences({"out": np.array([[1.0, 1.0, 2.0], [1.0] * 3])})
