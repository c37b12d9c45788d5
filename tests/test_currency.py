"""Which records are of today's kernels: what changes an identity, and what does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.toy_export import family_of
from tests.toy_family import TOY, ToyCompiler, toy_device, toy_problem, toy_render, toy_runner
from tuner.device_info import DeviceInfo
from tuner.errors import TemplateError
from tuner.evaluate import Currency, Evaluator, Session
from tuner.evaluate.currency import CHANGED
from tuner.kernels.base import Family, Values
from tuner.problems import CacheWriteProblem
from tuner.records import Record
from tuner.runner.protocol import MeasurePlan
from tuner.templates import Rendered

TILED: Values = {"mode": "tiled", "width": 64, "unroll": 2, "tile": 8, "split": 1}
SPLIT: Values = {"mode": "half", "width": 32, "unroll": 1, "tile": 1, "split": 2}
PLAN = MeasurePlan(min_samples=5, max_samples=9, budget_ms=0.01)


def tried(values: Values, render: Any = toy_render, **device: Any) -> Record:
    """The record of a trial on a device that differs so from the usual one."""
    info = msgspec.structs.replace(toy_device(), **device)
    evaluator = Evaluator(
        toy_runner(info=info),
        ToyCompiler(refuse=("width=128",)),
        TOY,
        toy_problem(),
        session=Session(plan=PLAN),
        render=render,
    )
    return evaluator.run(values)


def currency(
    info: DeviceInfo | None = None,
    compiler: str = ToyCompiler.identity,
    family: Family = TOY,
    render: Any = toy_render,
) -> Currency:
    return Currency(
        info or toy_device(),
        compiler,
        family_of=lambda name: family if name == family.name else family_of(name),
        render=render,
    )


def unrenderable(template: str, context: Mapping[str, Any]) -> Rendered:
    raise TemplateError(template, "is undefined", 1)


@pytest.mark.parametrize("values", [TILED, SPLIT, {**TILED, "width": 128}])
def test_what_was_tried_just_now_is_current_whatever_came_of_it(values: Values) -> None:
    assert currency().objection(tried(values)) is None


def test_a_variant_that_cannot_be_rendered_is_named_as_its_record_was() -> None:
    record = tried(TILED, unrenderable)
    assert record.state == "compile"
    assert currency(render=unrenderable).objection(record) is None
    assert currency().objection(record) == CHANGED


def test_another_card_of_the_same_model_is_as_good() -> None:
    assert currency().objection(tried(TILED, uuid="another-card")) is None


def changed_render(template: str, context: Mapping[str, Any]) -> Rendered:
    rendered = toy_render(template, context)
    return replace(rendered, text=rendered.text.replace("'tiled'", "'tiled, better'"))


def test_only_the_variants_whose_sources_have_changed_are_earlier() -> None:
    today = currency(render=changed_render)
    assert today.objection(tried(TILED)) == CHANGED
    assert today.objection(tried(SPLIT)) is None


def test_what_else_makes_a_record_earlier_is_named() -> None:
    record = tried(TILED)
    writes = CacheWriteProblem(tokens=1, kv_heads=1, head_size=64)
    newer = msgspec.structs.replace(toy_device(), driver_info="2.0")
    narrow = replace(
        TOY, parameters=tuple(p for p in TOY.parameters if p.name != "tile"), constraints=()
    )
    found = [
        currency(compiler="toycc 2").objection(record),
        currency(info=newer).objection(record),
        currency().objection(msgspec.structs.replace(record, device="Other GPU")),
        currency().objection(msgspec.structs.replace(record, family="gone")),
        currency(family=narrow).objection(record),
        currency().objection(msgspec.structs.replace(record, problem=writes)),
    ]
    assert found == [
        CHANGED,
        f"measured with the driver {record.driver}",
        "measured on Other GPU",
        "unknown family 'gone': legal: toy",
        "no variant of today: unknown parameter of toy 'tile': legal: mode, width, unroll, split",
        "no variant of today: the family solves problems of the kind paged_decode",
    ]


def test_records_are_told_apart_in_their_order_with_the_commonest_reason() -> None:
    good, other = tried(TILED), tried(SPLIT)
    stale = [msgspec.structs.replace(good, variant=f"{n}", time=f"{n}") for n in range(3)]
    foreign = msgspec.structs.replace(good, variant="x", device="Other GPU")
    sifted = currency().sift([foreign, stale[0], good, stale[1], other, stale[2]])
    assert sifted.current == (good, other)
    assert sifted.earlier == (foreign, *stale)
    assert sifted.reason == CHANGED
    assert currency().sift([good]).reason == ""
    illegal = msgspec.structs.replace(good, variant="y", values={**TILED, "split": 99})
    assert currency().sift([good, illegal]).reason == "no variant of today"
