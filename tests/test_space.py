"""Legality, its reasons, and picking from the legal space."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.toy_family import TOY, toy_device, toy_problem
from tuner.errors import IllegalVariantError, UnknownNameError, UsageError
from tuner.kernels.base import Candidate, Constraint, Parameter, Values
from tuner.kernels.space import (
    Variants,
    canonical,
    describe,
    every_value,
    legal,
    nearest_legal,
    pairwise,
    parse_values,
    reasons,
    require_legal,
)

DEVICE = toy_device()
PROBLEM = toy_problem()
NAMES = [p.name for p in TOY.parameters]
RAW = [
    dict(zip(NAMES, row, strict=True))
    for row in itertools.product(*(p.values for p in TOY.parameters))
]


def test_legal_is_exactly_the_raw_variants_without_reasons() -> None:
    expected = [values for values in RAW if not reasons(TOY, values, PROBLEM, DEVICE)]
    assert list(legal(TOY, PROBLEM, DEVICE)) == expected
    assert 0 < len(expected) < len(RAW)


def test_a_smaller_device_and_problem_allow_less() -> None:
    small = legal(TOY, toy_problem(context=1), toy_device(max_workgroup_invocations=64))
    assert {v["split"] for v in small} == {1}
    assert all(int(v["width"]) * int(v["unroll"]) <= 64 for v in small)


def test_a_rule_without_parameters_can_rule_out_everything() -> None:
    never = Constraint(needs=(), check=lambda c: f"needs 8 heads, not {c.problem.query_heads}")
    family = replace(TOY, constraints=(never,))
    assert len(legal(family, PROBLEM, DEVICE)) == 0
    assert "needs 8 heads, not 2" in reasons(family, TOY.baseline, PROBLEM, DEVICE)


def test_reasons_list_everything_that_is_wrong() -> None:
    values: Values = {"mode": "tilde", "width": 128, "unroll": 4, "tile": 1, "split": 2, "depth": 3}
    found = reasons(TOY, values, toy_problem(context=1), DEVICE)
    text = "\n".join(found)
    assert len(found) == 4
    assert "'depth'" in text
    assert "did you mean tiled?" in text
    assert "512 threads, the device has 256" in text
    assert "2 splits of 1 tokens" in text


def test_reasons_name_missing_and_meaningless_parameters() -> None:
    assert reasons(TOY, {"mode": "plain"}, PROBLEM, DEVICE)[0] == "width has no value"
    values = {**TOY.baseline, "tile": 16}
    assert reasons(TOY, values, PROBLEM, DEVICE) == (
        "tile=16 means nothing beside the other values: it must be 1",
    )


def test_require_legal_raises_with_the_reasons() -> None:
    require_legal(TOY, TOY.baseline, PROBLEM, DEVICE)
    with pytest.raises(IllegalVariantError, match="256") as caught:
        require_legal(TOY, {**TOY.baseline, "width": 128, "unroll": 4}, PROBLEM, DEVICE)
    assert caught.value.exit_code == 2


@given(st.sampled_from(RAW))
def test_canonical_is_idempotent_and_neutral(values: Values) -> None:
    once = canonical(TOY, values)
    assert canonical(TOY, once) == once
    assert list(once) == NAMES
    assert once["tile"] == (values["tile"] if values["mode"] == "tiled" else 1)


def test_reading_an_undeclared_parameter_is_said_plainly() -> None:
    sloppy = Constraint(needs=("width",), check=lambda c: str(c["unroll"]))
    with pytest.raises(LookupError, match=r"'unroll'.*'width'"):
        legal(replace(TOY, constraints=(sloppy,)), PROBLEM, DEVICE)


def test_parse_values_changes_the_base() -> None:
    values = parse_values(TOY, ["width=64", " mode = tiled ", "tile=8"], TOY.baseline)
    assert values == {"mode": "tiled", "width": 64, "unroll": 1, "tile": 8, "split": 1}
    assert describe(values) == "mode=tiled width=64 unroll=1 tile=8 split=1"
    # What is printed of a variant can be given back as it stands.
    assert parse_values(TOY, [describe(values)], TOY.baseline) == values
    assert parse_values(TOY, ["mode = tiled  width = 64", "tile=8"], TOY.baseline) == values


def test_parse_values_drops_what_lost_its_meaning_but_not_what_was_asked_for() -> None:
    tiled = parse_values(TOY, ["mode=tiled", "tile=16"], TOY.baseline)
    assert parse_values(TOY, ["mode=plain"], tiled)["tile"] == 1
    asked = parse_values(TOY, ["mode=plain", "tile=8"], tiled)
    assert "tile=8 means nothing" in reasons(TOY, asked, PROBLEM, DEVICE)[0]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("width", UsageError, "name=value"),
        ("widht=32", UnknownNameError, "did you mean width"),
        ("width=100", UnknownNameError, "did you mean 128 or 64.* legal: 32, 64, 128"),
        ("mode=tile", UnknownNameError, "did you mean tiled"),
    ],
)
def test_parse_values_refuses(text: str, error: type[UsageError], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_values(TOY, [text], TOY.baseline)


@given(st.sampled_from(RAW))
def test_nearest_legal_has_the_smallest_hamming_distance(values: Values) -> None:
    variants = legal(TOY, PROBLEM, DEVICE)

    def distance(other: Values) -> int:
        return sum(values[name] != other[name] for name in NAMES)

    found = nearest_legal(values, variants)
    assert distance(found) == min(map(distance, variants))
    assert nearest_legal(values, list(variants)) == found
    assert values not in variants or found == values


def test_nearest_legal_prefers_the_shorter_step_then_the_earlier_variant() -> None:
    parameter = Parameter(name="a", values=(1, 2, 3, 4, 8), help="")
    not_three = Constraint(needs=("a",), check=lambda c: "three" if c["a"] == 3 else None)
    family = replace(TOY, parameters=(parameter,), constraints=(not_three,))
    assert nearest_legal({"a": 3}, legal(family, PROBLEM, DEVICE)) == {"a": 2}
    assert nearest_legal({"a": 3}, [{"a": 8}, {"a": 4}]) == {"a": 8}
    with pytest.raises(UsageError, match="no legal variant"):
        nearest_legal({"a": 3}, [])


def test_variants_are_a_sequence_that_finds_its_members() -> None:
    variants = legal(TOY, PROBLEM, DEVICE)
    listed = list(variants)
    assert len(variants) == len(listed)
    assert [variants.find(values) for values in listed] == list(range(len(listed)))
    assert listed[-1] == variants[-1] == variants[-2:][1]
    assert variants.find({**listed[0], "width": 33}) is None
    assert variants.find({"width": 32}) is None
    assert {**listed[0], "tile": 16} not in variants
    shuffled = Variants.of(listed[::-1])
    assert list(shuffled) == listed[::-1]
    assert shuffled.find(listed[0]) == len(listed) - 1


def test_nearest_looks_only_among_those_allowed() -> None:
    variants = legal(TOY, PROBLEM, DEVICE)
    among = np.zeros(len(variants), np.bool_)
    with pytest.raises(UsageError, match="left to choose"):
        variants.nearest(variants[0], among)
    among[[5, 40]] = True
    assert variants.nearest(variants[40], among) == 40
    assert variants.nearest(variants[4], among) == 5


def test_what_a_declaration_does_not_say_is_neutral() -> None:
    family = replace(TOY, baseline={"mode": "plain"}, starts=({"width": 32}, {}))
    neutral = {parameter.name: parameter.values[0] for parameter in TOY.parameters}
    assert family.baseline == {**neutral, "mode": "plain"}
    assert family.starts == ({**neutral, "width": 32}, neutral)
    assert list(family.starts[0]) == list(neutral)


def test_too_many_values_are_refused() -> None:
    with pytest.raises(UsageError, match="256 values, the limit is 255"):
        Variants({"a": range(256)}, np.zeros((1, 1), np.uint8))


def _pairs(variants: Iterable[Values], names: list[str]) -> set[object]:
    return {((a, v[a]), (b, v[b])) for v in variants for a, b in itertools.combinations(names, 2)}


@settings(max_examples=30)
@given(st.lists(st.sampled_from(RAW), min_size=1, max_size=60))
def test_pairwise_covers_every_pair_that_occurs(variants: list[Values]) -> None:
    chosen = pairwise(variants)
    assert _pairs(chosen, NAMES) == _pairs(variants, NAMES)
    assert all(values in variants for values in chosen)


def test_pairwise_is_small_and_deterministic() -> None:
    variants = legal(TOY, PROBLEM, DEVICE)
    chosen = pairwise(variants)
    assert chosen == pairwise(variants)
    assert len(chosen) <= 20 < len(variants)
    assert pairwise([]) == ()
    assert len(pairwise(variants, ["width"])) == 3
    assert _pairs(pairwise(variants, ["mode", "split"]), ["mode", "split"]) == _pairs(
        variants, ["mode", "split"]
    )


def values_of(variants: Iterable[Values]) -> set[tuple[str, object]]:
    return {item for values in variants for item in values.items()}


@settings(max_examples=30)
@given(st.lists(st.sampled_from(RAW), min_size=1, max_size=60), st.integers(0, 9))
def test_every_value_that_occurs_is_covered(variants: list[Values], seed: int) -> None:
    chosen = every_value(variants, seed=seed)
    assert values_of(chosen) == values_of(variants)
    assert all(values in variants for values in chosen)
    assert chosen == every_value(variants, seed=seed)
    for number, values in enumerate(chosen):
        assert values_of([values]) - values_of(chosen[:number])


def test_every_value_takes_few_variants_and_few_kernels() -> None:
    parameters = {"split": range(20), "width": range(4), "unroll": range(3)}
    rows = list(itertools.product(*parameters.values()))
    variants = [dict(zip(parameters, row, strict=True)) for row in rows]
    chosen = every_value(variants)
    assert len(chosen) == 20
    assert len({(values["width"], values["unroll"]) for values in chosen}) == 4
    assert every_value(variants, seed=1) != chosen
    assert every_value([]) == ()


def test_having_keeps_what_has_one_of_the_values_of_each_parameter() -> None:
    variants = legal(TOY, PROBLEM, DEVICE)
    wanted = {"width": [64, 32], "split": [1]}
    kept = [v for v in variants if v["width"] in (32, 64) and v["split"] == 1]
    assert 0 < len(kept) < len(variants)
    assert list(variants.having(wanted)) == kept
    assert len(variants.having({"width": []})) == 0


def test_a_million_raw_combinations_take_a_second_or_two() -> None:
    letters = "abcdefghij"
    parameters = tuple(Parameter(name=n, values=(1, 2, 4, 8), help="") for n in letters)

    def near(a: str, b: str) -> Constraint:
        def check(candidate: Candidate) -> str | None:
            return "apart" if candidate[a] > 2 * candidate[b] else None

        return Constraint(needs=(a, b), check=check)

    rules = tuple(near(a, b) for a, b in itertools.pairwise(letters))
    family = replace(TOY, parameters=parameters, constraints=rules)
    start = time.process_time()
    variants = legal(family, PROBLEM, DEVICE)
    seconds = time.process_time() - start
    assert 4 ** len(letters) > 1_000_000
    assert len(variants) > 50_000
    assert seconds < 3.0
    start = time.process_time()
    assert len(pairwise(variants)) < 60
    assert time.process_time() - start < 10.0
