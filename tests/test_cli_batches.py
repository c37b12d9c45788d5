"""Which variants `verify` takes on which problems, and what it says of those it does not take."""

from __future__ import annotations

import pytest

from tests.made_devices import gpu
from tuner import kernels
from tuner.cli import options, verify
from tuner.cli.batches import Pick, chosen_batches, parse_only, unverified
from tuner.errors import IllegalVariantError, OutOfMemoryError
from tuner.problems import Problem
from tuner.shapes import parse_shape
from tuner.workloads import geometries

ONE = Pick(count=1)


def chosen(asked: str | None, *models: str, every: bool = False) -> list[tuple[str, list[str]]]:
    """Families and the labels of the problems that they are verified on."""
    context = "64" if models else None
    choice = options.ProblemChoice(models=list(models), context=context)
    families, pairing = verify._chosen(asked, choice, {}, every=every)
    found = verify._with_problems(families, choice, gpu(), pairing)
    return [
        (family.name, [" ".join(p.switched) for p in problems]) for family, _, problems in found
    ]


def test_only_takes_assignments_one_by_one_or_together() -> None:
    wanted = {"strategy": ["matrix", "int_dot"], "subgroups": ["4"]}
    assert parse_only(["strategy=matrix", "subgroups=4", "strategy=int_dot"]) == wanted
    assert parse_only(["strategy=matrix strategy=int_dot subgroups=4"]) == wanted


def test_a_family_is_verified_on_all_problems_that_are_named_else_on_its_geometries() -> None:
    assert chosen("paged_decode_f16", "gpt-oss-120b") == [
        ("paged_decode_f16", ["sinks", "window sinks"])
    ]
    assert chosen("kv_append_q8") == [("kv_append_q8", [])]
    family, info = kernels.family("kv_append_q8"), gpu()
    first, *others = geometries(family.kind)
    batches, refused = chosen_batches(family, [], info, Pick(count="values"))
    assert [batch.problem for batch in batches] == [first, *others]
    assert [len(batch.variants) for batch in batches[1:]] == [1] * len(others)
    assert refused == {}
    named, _ = chosen_batches(family, [*others, first], info, Pick(count="values"))
    assert [batch.problem for batch in named] == [*others, first]
    assert all(len(batch.variants) > 1 for batch in named)


def test_without_a_family_each_problem_is_verified_with_the_one_that_tune_takes() -> None:
    assert chosen(None, "DeepSeek-V2-Lite", "MPT-7B", "Phi-4") == [
        ("paged_decode_q8", [""]),
        ("paged_decode_q8_switched", ["alibi"]),
        ("paged_decode_f16", ["value_head_size"]),
    ]
    assert chosen(None, "DeepSeek-V2-Lite", every=True) == [
        ("paged_decode_f32", ["value_head_size"]),
        ("paged_decode_f16", ["value_head_size"]),
    ]


def test_what_was_not_verified_is_said_with_the_reason() -> None:
    family, info = kernels.family("paged_decode_q8_switched"), gpu()
    problems: list[Problem] = [
        parse_shape(f"paged_decode:sequences=1,query_heads=4,kv_heads=2,head_size=64,{fields}")
        for fields in (
            "context=64,sinks=1",
            "context=64",
            "context=96",
            "context=64,value_head_size=32",
        )
    ]
    batches, refused = chosen_batches(family, problems, info, ONE)
    assert [batch.problem for batch in batches] == problems[:1]
    plain, sized = unverified(family, refused, {})
    assert plain == (
        "paged_decode_q8_switched was not verified on 1x64 h4/2 d64, 1x96 h4/2 d64, for which it "
        "has no kernel on this device (no switch is on: use paged_decode_q8, whose kernels need "
        "not ask for any)"
    )
    assert "1x64 h4/2 d64 value_head_size 32, for which" in sized
    assert sized.endswith("value_head_size is 32: use paged_decode_f16 or paged_decode_f32)")
    (line,) = unverified(family, {problems[0]: "why"}, {"strategy": ["matrix", "int_dot"]})
    assert "has no kernel with strategy=matrix|int_dot on this device (why)" in line


def test_where_nothing_can_be_verified_that_is_refused() -> None:
    family, info = kernels.family("paged_decode_q8"), gpu()
    switched = parse_shape(
        "paged_decode:sequences=1,context=9,query_heads=1,kv_heads=1,head_size=8,sinks=1"
    )
    with pytest.raises(IllegalVariantError, match="this family has no sinks"):
        chosen_batches(family, [switched], info, ONE)
    large = parse_shape("60000x128k:h64/8:d128")
    with pytest.raises(OutOfMemoryError, match="lower its sequences or context"):
        chosen_batches(family, [switched, large], info, ONE)
