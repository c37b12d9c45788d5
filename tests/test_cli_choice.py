"""Which problems a command takes, which family is tuned for them, and what is too large."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.made_records import decode, gpu, made_record, software
from tests.toy_family import TOY
from tuner import kernels, workloads
from tuner.cli import bench, choosing, describe, options, summary, tune
from tuner.cli.session import misfit
from tuner.errors import OutOfMemoryError, UnknownNameError, UsageError
from tuner.kernels import space
from tuner.kernels.base import Family
from tuner.problems import PagedDecodeProblem
from tuner.records import ClockState
from tuner.search import ProblemResult, RunResult

PROBLEM = decode(8, 16_384)
FAMILY = "paged_decode_q8"


def chosen(
    *models: str,
    families: Sequence[str] | None = None,
    only: Sequence[str] = (),
    context: str = "8192",
) -> list[str]:
    """What is tuned for these models: families, with the switches of the problem."""
    choice = options.ProblemChoice(models=list(models), sequences="1", context=context)
    allowed = tune._allowed(families, only, choice)
    tasks = tune._tasks(families, allowed, choice, gpu())
    return [" ".join((family.name, *problem.switched)) for family, problem in tasks]


def test_problems_with_switches_are_for_the_family_that_has_them() -> None:
    assert chosen("Llama-3.1-8B", "gpt-oss-120b") == [
        "paged_decode_q8",
        "paged_decode_q8_switched sinks",
        "paged_decode_q8_switched window sinks",
    ]
    assert chosen("Gemma-3-27B") == ["paged_decode_q8", "paged_decode_q8_switched window"]
    assert chosen("MPT-7B", families=["all"]) == [
        f"paged_decode_{name} alibi" for name in ("q8_switched", "f32", "f16")
    ]
    assert chosen("Gemma-3-27B", families=["paged_decode_q8"]) == [
        "paged_decode_q8",
        "paged_decode_q8 window",
    ]


@pytest.mark.parametrize("model", workloads.models(), ids=lambda model: model.name)
def test_every_model_is_solved_by_a_default_family(model: workloads.ModelShape) -> None:
    choice = options.ProblemChoice(models=[model.name], sequences="1,64", context="64,32k")
    for info in (gpu(), software()):
        tasks = choosing.paired(choosing.default_families(), choice, info, "first")
        once = [problem for _, problem in tasks]
        assert len(once) == len(set(once)) == 4 * len(model.layers)
        for family, problem in tasks:
            assert space.reasons(family, family.baseline, problem, info) == ()


def test_values_of_another_size_are_for_float_caches_and_that_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert chosen("DeepSeek-V2-Lite", "Llama-3.1-8B") == [
        "paged_decode_q8",
        "paged_decode_f16 value_head_size",
    ]
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("paged_decode_f16 is used for 1x8192 h16/16 d192 value_head_size 128, ")
    assert "because paged_decode_q8_switched cannot solve it (keys and values" in told


def test_of_the_default_families_those_are_asked_that_have_what_only_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = ("DeepSeek-V2-Lite", "Llama-3.1-8B")
    assert chosen(*both, only=["strategy=packed_f16"]) == [
        "paged_decode_q8",
        "paged_decode_f16 value_head_size",
    ]
    capsys.readouterr()
    # No family over floats has it: the row says why the last that has it does not do.
    assert chosen(*both, only=["strategy=int_dot"]) == [
        "paged_decode_q8",
        "paged_decode_q8_switched value_head_size",
    ]
    assert capsys.readouterr().err == ""
    assert chosen("Llama-3.1-8B", only=["token_lanes=4"]) == ["paged_decode_f16"]
    assert "because paged_decode_q8 has nothing of what --only names" in capsys.readouterr().err
    with pytest.raises(UnknownNameError, match="did you mean matrix"):
        chosen("Llama-3.1-8B", only=["strategy=matrices"])
    with pytest.raises(UnknownNameError, match="did you mean strategy"):
        chosen("Llama-3.1-8B", only=["strategie=matrix"])


def test_a_window_that_no_context_reaches_beyond_is_searched_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert chosen("Gemma-2-9B", context="4096") == ["paged_decode_q8_switched softcap"]
    told, why = capsys.readouterr().err.splitlines()
    assert why.startswith("paged_decode_q8_switched is used for 1x4096 h16/8 d256 softcap 50, ")
    assert told.startswith("1x4096 h16/8 d256 window 4096 softcap 50: left out of paged_decode_q8_")
    assert len(chosen("Gemma-2-9B", context="4097")) == 2
    assert chosen("Gemma-3-27B", context="512") == ["paged_decode_q8"]
    assert chosen("Mistral-7B-v0.1", context="512") == ["paged_decode_q8_switched window"]
    # A family that only has it with the window is asked for that.
    assert chosen("Gemma-3-27B", context="512", families=["paged_decode_q8_switched"])[1:] == [
        "paged_decode_q8_switched window"
    ]
    assert chosen("Gemma-3-27B", context="512", families=["paged_decode_f16"]) == [
        "paged_decode_f16"
    ]


def test_problems_of_other_kinds_are_left_out_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    rows = "kv_append:rows=2,context=3,kv_heads=1,head_size=32"
    choice = options.ProblemChoice(shapes=["8x16k:h32/8:d128", rows])
    for families, pairing in (
        (choosing.default_families(), "first"),
        ([kernels.family(FAMILY)], "asked"),
    ):
        tasks = choosing.paired(families, choice, gpu(), pairing)
        assert [problem for _, problem in tasks] == [PROBLEM]
        (told,) = capsys.readouterr().err.splitlines()
        assert told.startswith("2 rows at 3 kv1 d32: left out, because only other families")
        assert told.endswith(": kv_append_q8")
    choosing.paired(kernels.families(), choice, gpu(), "every")
    assert "left out" not in capsys.readouterr().err


def test_bench_takes_the_family_that_tune_takes_unless_it_is_asked_for_one() -> None:
    choice = options.ProblemChoice(models=["Gemma-3-27B"], sequences="1", context="64")
    taken = bench._tasks(None, choice, gpu())
    assert [family.name for family, _ in taken] == ["paged_decode_q8", "paged_decode_q8_switched"]
    asked = bench._tasks(kernels.family("paged_decode_f32"), choice, gpu())
    assert [family.name for family, _ in asked] == ["paged_decode_f32"] * 2
    nothing_said = bench._tasks(None, options.ProblemChoice(), gpu())
    assert {family.name for family, _ in nothing_said} == {"paged_decode_q8"}


def test_all_families_are_listed_with_the_problems_that_are_named() -> None:
    choice = options.ProblemChoice(models=["gpt-oss-120b"], sequences="1", context="64")
    listed = describe._all_with_problems(choice, gpu())
    names = [family.name for family, _ in listed]
    assert names[:4] == ["paged_decode_q8"] * 2 + ["paged_decode_q8_planar"] * 2
    assert "kv_append_q8" not in names
    nothing_said = describe._all_with_problems(options.ProblemChoice(), gpu())
    assert [family.name for family, _ in nothing_said] == [f.name for f in kernels.families()]


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


@pytest.mark.parametrize(
    ("option", "value"),
    [("sequences", "4"), ("context", "8k"), ("lengths", "uniform:9"), ("block_size", 32)],
)
def test_options_of_models_without_a_model_are_refused(option: str, value: str | int) -> None:
    """They would have no effect."""
    given: dict[str, Any] = {option: value}
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} {value} goes with --model"):
        options.ProblemChoice(shapes=["1x64:h8/2:d64"], **given)
    (problem,) = options.ProblemChoice(models=["Qwen3-4B"], **given).problems(
        kernels.family(FAMILY), gpu()
    )
    assert isinstance(problem, PagedDecodeProblem)
    wanted = 8192 if option == "context" else int(value) if option != "lengths" else value
    assert getattr(problem, option) == wanted


def test_what_cannot_fit_is_known_without_making_operands() -> None:
    info = gpu()
    room = max(heap.size_bytes for heap in info.memory_heaps)
    fits, too_large = decode(1, 64), decode(60_000, 131_072)
    assert misfit(TOY, fits, info) is None
    error = misfit(TOY, too_large, info)
    assert error is not None
    assert error.needed_bytes == TOY.operand_bytes(too_large) > room
    assert error.available_bytes <= room


def test_a_family_solves_problems_of_its_own_kind_alone() -> None:
    lists = "q8_selected:tokens=4096,query_heads=8,kv_heads=2,head_size=64,visible=128"
    dense = "q8_decode:tokens=4096,query_heads=8,kv_heads=2,head_size=64"
    choice = options.ProblemChoice(shapes=[lists, dense])
    for name, kind in (
        ("attn_partials_q8", "q8_decode"),
        ("attn_partials_selected_q8", "q8_selected"),
    ):
        found = choice.problems(kernels.family(name), gpu())
        assert [str(type(each).__struct_config__.tag) for each in found] == [kind]
    with pytest.raises(UsageError, match=r"what was given: attn_partials_selected_q8$"):
        options.ProblemChoice(shapes=[lists]).required(kernels.family("attn_partials_q8"), gpu())


@pytest.mark.parametrize(
    ("reference_ns", "said"),
    [((72e3, 73e3), None), ((72e3, 160e3, 155e3), "155"), ((160e3,), "160"), ((), None)],
)
@pytest.mark.parametrize("side", ["best", "baseline"])
def test_tune_says_what_was_timed_on_a_lower_clock(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    reference_ns: tuple[float, ...],
    said: str | None,
    side: str,
) -> None:
    timed = made_record(PROBLEM, clock_state=ClockState(reference_ns=reference_ns))
    settled = made_record(decode(2, 512), clock_state=ClockState(reference_ns=(72e3,)))
    results = (
        ProblemResult(
            family=kernels.family(FAMILY),
            problem=PROBLEM,
            ended="trials",
            **{"best": settled, side: timed},
        ),
        ProblemResult(
            family=kernels.family(FAMILY),
            problem=settled.problem,
            ended="trials",
            best=settled,
        ),
    )
    ran = summary.Ran(
        info=gpu(),
        result=RunResult(problems=results, interrupted=False, seconds=1.0),
        written=summary.Written(),
        calibration=None,
        folder=tmp_path,
    )
    summary.print_result(ran)
    told = capsys.readouterr().err
    assert ("timed on a lower clock" in told) == (said is not None)
    if said:
        of = "the baseline of " if side == "baseline" else ""
        assert f"reason: {of}{PROBLEM.label} ({said} µs); " in told
    summary.print_result(replace(ran, info=software()))
    assert "timed on a lower clock" not in capsys.readouterr().err


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
