"""Dispatch rules: what a family's rule for one problem says of another is what the family itself
would launch there."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.made_devices import gpu
from tuner import kernels
from tuner.device_info import DeviceInfo
from tuner.errors import UsageError
from tuner.export.chosen import published
from tuner.export.launch_rule import Launch
from tuner.kernels.base import Candidate, Family, Pass, Values
from tuner.kernels.space import canonical, reasons
from tuner.problems import Problem, QsaStepProblem
from tuner.workloads import geometries

CANDIDATES = 6
"""Variants of each family."""
BATCHES = 8
"""Other problems that each is launched on."""


def varied(
    family: Family, problem: Problem, device: DeviceInfo, dice: random.Random
) -> list[Values]:
    """Legal variants: the baseline, starts, and some with a parameter or two changed."""
    found = {str(v): v for v in (family.baseline, *family.starts)}
    for values in list(found.values()):
        changed = dict(values)
        for parameter in dice.sample(family.parameters, min(2, len(family.parameters))):
            changed[parameter.name] = dice.choice(parameter.values)
        found[str(changed)] = canonical(family, changed)
    legal = [v for v in found.values() if not reasons(family, v, problem, device)]
    dice.shuffle(legal)
    return legal[:CANDIDATES]


def batches(problem: Problem, dice: random.Random) -> Iterator[Problem]:
    """Problems of other sizes for the same kernels."""
    while True:
        sizes: dict[str, Any] = {
            name: dice.choice((0, 1, 2, 3, 5, 31, 128, 700, 2049, 2055, 9001, 70_000))
            for name in problem.SIZES
        }
        if "lengths" in problem.__struct_fields__:
            sizes["lengths"] = dice.choice(("equal", "uniform:1"))
        try:
            changed = msgspec.structs.replace(problem, **sizes)
            _ = changed.counts
            yield changed
        except UsageError:
            continue


def passes(c: Candidate, family: Family) -> tuple[Pass, ...]:
    return family.passes(c, family.timing_scalars(c.problem))


def kernels_of(launched: tuple[Pass, ...]) -> list[Any]:
    return [(each.name, dict(each.constants), each.subgroup_size) for each in launched]


def assert_launched(launch: Launch, launched: tuple[Pass, ...], scratch: dict[str, int]) -> None:
    assert launch.groups == {each.name: each.groups for each in launched}
    assert launch.scratch_bytes == scratch
    for each in launched:
        assert {name: each.push[name] for name in launch.push_constants} == launch.push_constants


def test_a_chain_without_a_step_is_not_launched_where_that_has_something_to_do() -> None:
    """Four tokens a block, a budget of 16 blocks; the rule is that of a step without block keys,
    without selection, or with both."""
    family = kernels.family("qsa_chain")

    def refusal(tuned: QsaStepProblem, context: int) -> str | None:
        assert family.dispatch is not None
        rule = published(family.dispatch(Candidate(family.baseline, tuned, gpu())))
        return rule.refusal(msgspec.structs.replace(tuned, context=context))

    step = QsaStepProblem(context=400, budget=64)
    between, short = (msgspec.structs.replace(step, context=n) for n in (401, 41))
    assert refusal(step, 403) is refusal(step, 7) is refusal(step, 70_000) is None
    assert refusal(between, 70_002) is refusal(between, 42) is None
    assert "is 1, it may be at most 0" in str(refusal(between, 404))
    assert refusal(short, 66) is None
    assert "is 17, it may be at most 16" in str(refusal(short, 69))


def test_the_chain_is_never_cut_by_a_row_that_sees_less_than_another() -> None:
    """Of rows with whole and fresh tails that with the longest tail sees most, not the last."""
    family = kernels.family("qsa_chain")
    assert family.dispatch is not None
    for rows in (1, 2, 3, 5, 8):
        for context in (*range(rows, 40), *range(60, 100)):
            problem = QsaStepProblem(rows=rows, context=context, budget=64)
            rule = published(family.dispatch(Candidate(family.baseline, problem, gpu())))
            assert rule.known(problem)["seen"] == problem.row_tokens().max()


DEVICES = {"wide": gpu(), "narrow grid": gpu(max_workgroup_count=(97, 65535, 65535))}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", kernels.families(), ids=lambda family: family.name)
def test_a_rule_says_of_other_problems_what_the_family_does(family: Family, device: str) -> None:
    dice, compared = random.Random(family.name), 0
    for problem in geometries(family.kind):
        for values in varied(family, problem, DEVICES[device], dice):
            c = Candidate(values, problem, DEVICES[device])
            assert family.dispatch is not None
            rule, own = published(family.dispatch(c)), passes(c, family)
            assert_launched(rule.launch(problem), own, family.scratch_bytes(c))
            for other in itertools.islice(batches(problem, dice), BATCHES):
                there = Candidate(values, other, DEVICES[device])
                if reasons(family, values, other, DEVICES[device]) or rule.refusal(other):
                    continue
                launched = passes(there, family)
                if kernels_of(launched) == kernels_of(own):
                    assert_launched(rule.launch(other), launched, family.scratch_bytes(there))
                    compared += 1
                    for here, before in zip(launched, own, strict=True):
                        sized = {n for n, value in here.push.items() if value != before.push[n]}
                        assert sized <= set(rule.push_constants)
    assert compared >= 10
