"""Which problems a command takes, which family is tuned for them, and what is too large."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.made_records import decode, gpu, made_record, software
from tests.toy_family import TOY
from tuner import kernels
from tuner.cli import options, summary, tune
from tuner.cli.session import misfit
from tuner.errors import OutOfMemoryError, UsageError
from tuner.kernels import space
from tuner.kernels.base import Family
from tuner.search import ProblemResult, RunResult

PROBLEM = decode(8, 16_384)
FAMILY = "paged_decode_q8"


def chosen(*models: str, families: Sequence[str] = tune.DEFAULT_FAMILIES) -> list[str]:
    """What is tuned for these models: families, with the switches of the problem."""
    choice = options.ProblemChoice(models=list(models), sequences="1", context="8192")
    tasks = tune._tasks(families, choice, gpu(), choosing=True)
    return [" ".join((family.name, *problem.switched)) for family, problem in tasks]


def test_problems_with_switches_are_for_the_family_that_has_them() -> None:
    assert chosen("Llama-3.1-8B", "gpt-oss-120b") == [
        "paged_decode_q8",
        "paged_decode_q8_switched sinks",
        "paged_decode_q8_switched window sinks",
    ]
    assert chosen("Gemma-3-27B") == ["paged_decode_q8", "paged_decode_q8_switched window"]
    every = [family.name for family in kernels.families()]
    assert chosen("MPT-7B", families=every) == [
        f"paged_decode_{name} alibi" for name in ("q8_switched", "f32", "f16")
    ]
    # None of the default families has it: the row says which have.
    assert chosen("DeepSeek-V2-Lite") == ["paged_decode_q8_switched value_head_size"]
    own = options.ProblemChoice(models=["gpt-oss-120b"])
    asked = tune._tasks(["paged_decode_q8"], own, gpu(), choosing=False)
    assert {family.name for family, _ in asked} == {"paged_decode_q8"}


@pytest.mark.parametrize("family", kernels.families(), ids=lambda family: family.name)
def test_every_family_solves_its_default_problems(family: Family) -> None:
    for device in (gpu(), software()):
        found = options.ProblemChoice().problems(family, device)
        assert found
        assert [space.refusals(family, problem, device) for problem in found] == [()] * len(found)


def test_where_one_problem_is_needed_the_shapes_to_choose_from_are_named() -> None:
    choice = options.ProblemChoice(models=["gpt-oss-120b"], sequences="1", context="64")
    family = kernels.family("paged_decode_q8_switched")
    with pytest.raises(UsageError, match=r"2 problems where one is needed: give one") as told:
        choice.one(family, gpu())
    for text in re.findall(r"--shape (\S+)", str(told.value)):
        again = options.ProblemChoice(shapes=[text])
        assert again.one(family, gpu()) in choice.problems(family, gpu())


def test_what_cannot_fit_is_known_without_making_operands() -> None:
    info = gpu()
    room = max(heap.size_bytes for heap in info.memory_heaps)
    fits, too_large = decode(1, 64), decode(60_000, 131_072)
    assert misfit(TOY, fits, info) is None
    error = misfit(TOY, too_large, info)
    assert error is not None
    assert error.needed_bytes == TOY.operand_bytes(too_large) > room
    assert error.available_bytes <= room


def test_a_problem_that_does_not_fit_is_told_beside_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large, family = decode(60_000, 131_072), kernels.family(FAMILY)
    tasks = [(family, large), (family, PROBLEM)]
    fitting, others = tune._by_size(tasks, gpu())
    assert fitting == [(family, PROBLEM)]
    result = ProblemResult(
        family=family, problem=PROBLEM, ended="trials", best=made_record(PROBLEM)
    )
    alone = summary.Ran(
        info=gpu(),
        result=RunResult(problems=(result,), interrupted=False, seconds=1.0),
        written=summary.Written(),
        calibration=None,
        folder=tmp_path,
    )
    both = alone.beside(others, order=tasks)
    assert [each.problem for each in both.result.problems] == [large, PROBLEM]
    assert (alone.ok, both.ok) == (True, False)
    summary.print_result(both)
    assert f"\n{large.label}: needs " in capsys.readouterr().out
    with pytest.raises(OutOfMemoryError, match="lower its sequences or context"):
        tune._by_size(tasks[:1], gpu())
