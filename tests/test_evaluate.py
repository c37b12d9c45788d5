"""Trials on the fake runner: what a record holds, what is done once, what a kernel is given."""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.toy_family import (
    FACTOR,
    TOY,
    ToyCompiler,
    toy_device,
    toy_problem,
    toy_render,
    toy_runner,
)
from tests.toy_trials import SPLIT, TILED, evaluator
from tuner.device_info import MemoryHeap
from tuner.errors import OutOfMemoryError
from tuner.evaluate import Evaluator, ResidentCases, build_job, copies_for, pack_push, render_passes
from tuner.evaluate.building import RenderMemo
from tuner.kernels.base import ArithmeticClass, Candidate, Reference
from tuner.templates import Rendered


def test_a_correct_trial_leaves_a_full_record() -> None:
    runner = toy_runner()
    record = evaluator(runner).run(TILED)
    assert record.state == "correct"
    assert record.error is None
    assert record.values == TILED
    assert (record.family, record.session, record.sampler) == ("toy", "s1", "tpe")
    assert (record.device, record.driver, record.compiler) == ("Toy GPU", "toy 1.0", "toycc 1")
    assert record.check is not None
    assert record.check.cases == 3
    assert record.check.error <= record.check.bound
    assert 5 <= len(record.samples_ns) <= 9
    assert record.low_ns <= record.median_ns <= record.high_ns  # type: ignore[operator]
    assert record.bytes_moved == 4 * 4 * 4096
    assert record.utilisation == pytest.approx(record.bytes_moved / record.median_ns / 1000)  # type: ignore[operator]
    assert [s.name for s in record.statistics] == ["main"]
    assert record.time.endswith("Z")
    assert runner.jobs == []


def test_workloads_are_loaded_once_and_serve_all_variants() -> None:
    runner = toy_runner()
    trials = evaluator(runner)
    trials.run(TILED)
    trials.run(SPLIT)
    loads = [call.workload for call in runner.calls if call.method == "load"]
    assert len(loads) == len(set(loads)) == 3
    trials.close()
    assert runner.workloads == {}


def test_shared_cases_outlive_an_evaluator_and_serve_the_next() -> None:
    runner = toy_runner()
    cases = ResidentCases(runner, TOY)
    for context in (64, 128):
        trials = evaluator(runner, problem=toy_problem(2, context), cases=cases)
        trials.run(TILED)
        trials.close()
        assert len(runner.workloads) == 2
    assert sum(call.method == "load" for call in runner.calls) == 4
    cases.close()
    assert runner.workloads == {}


def test_cases_of_another_geometry_replace_the_resident_ones() -> None:
    runner = toy_runner()
    cases = ResidentCases(runner, TOY)
    cases.use(TOY.validation_cases(toy_problem()))
    cases.use(TOY.validation_cases(toy_problem())[:1])
    assert [name.split("/")[1] for name in runner.workloads] == ["random"]


def test_too_good_a_time_is_validated_and_measured_again() -> None:
    runner = toy_runner(times=lambda job, workload: 10.0)
    record = evaluator(runner).run(TILED)
    assert record.state == "correct"
    assert record.note.startswith("suspicious: measured at 655")
    assert sum(call.method == "measure" for call in runner.calls) == 2
    assert sum(call.method == "execute" for call in runner.calls) == 4


def test_one_lucky_time_is_forgotten() -> None:
    times = iter([10.0, 1e6])
    record = evaluator(toy_runner(times=lambda job, workload: next(times))).run(TILED)
    assert record.median_ns == pytest.approx(1e6, rel=0.05)


def test_slow_variants_are_given_up() -> None:
    trials = evaluator()
    prepared = trials.prepare(trials.draft(TILED))
    record = trials.finish(prepared, give_up_ns=1.0)
    assert record.state == "correct"
    assert record.ended_by == "gave_up"
    assert len(record.samples_ns) == 3


@pytest.mark.parametrize(("seconds", "calls"), [(0.0, 6), (60.0, 3)])
def test_an_idle_device_is_told_of_while_answers_are_judged(
    monkeypatch: pytest.MonkeyPatch, seconds: float, calls: int
) -> None:
    """After the three uploads in any case; after each of the three answers once these take time."""
    monkeypatch.setattr("tuner.evaluate.evaluator.IDLE_SECONDS", seconds)
    idled: list[None] = []
    assert evaluator(idled=lambda: idled.append(None)).run(TILED).state == "correct"
    assert len(idled) == calls


def test_right_answers_are_made_once_though_many_threads_ask() -> None:
    made: list[str] = []

    def slowly(what: str, of: Reference) -> Reference:
        def bounds(arithmetic: ArithmeticClass) -> Any:
            made.append(f"{what} bounds {arithmetic}")
            time.sleep(0.01)
            return of.bounds(arithmetic)

        made.append(what)
        return replace(of, bounds=bounds)

    family = replace(
        TOY,
        reference=lambda operands: slowly("case", TOY.reference(operands)),
        sampled_reference=lambda o, groups: slowly("timed", TOY.sampled_reference(o, groups)),
    )
    trials = Evaluator(toy_runner(), ToyCompiler(), family, toy_problem(4, 4096), render=toy_render)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(trials.foresee, [[TILED], [SPLIT], [TILED, SPLIT]] * 5))
    foreseen = Counter(made)
    of_case = {"case": 2, "case bounds f32": 2, "case bounds f16": 2}
    assert foreseen == of_case | {"timed": 1, "timed bounds f32": 1, "timed bounds f16": 1}
    assert {trials.run(values).state for values in (TILED, SPLIT)} == {"correct"}
    assert Counter(made) == foreseen, "and whoever judges finds them"


def test_equal_sources_are_rendered_and_compiled_once() -> None:
    compiler = ToyCompiler()
    trials = evaluator(compiler=compiler)
    trials.run(SPLIT)
    assert len(compiler.compiled) == len(set(compiler.compiled)) == 2


def test_what_a_template_does_not_read_does_not_make_it_be_rendered_again() -> None:
    rendered: list[Mapping[str, Any]] = []

    def render(template: str, context: Mapping[str, Any]) -> Rendered:
        """Reads b only where a is 1."""
        rendered.append(context)
        read = {"a", "b"} if context["a"] == 1 else {"a"}
        text = " ".join(f"{name}={context.get(name)}" for name in sorted(read))
        return Rendered(template, text, (), frozenset(read))

    memo = RenderMemo(render, remembered=5)
    contexts: list[dict[str, Any]] = [
        *({"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 1}, {"a": 1}, {"a": 2, "b": 1}),
        {"a": 1, "b": True},
    ]
    texts = [memo("t", context).text for context in contexts]
    assert texts == ["a=1 b=1", "a=1 b=2", "a=1 b=None", "a=2", "a=1 b=True"]
    assert [memo("t", {**context, "c": 3}).text for context in contexts] == texts
    assert rendered == contexts
    memo("u", {"a": 2})
    memo("t", contexts[0])
    assert len(rendered) == len(contexts) + 2, "the one used longest ago was forgotten"


def test_cases_are_run_as_the_family_says() -> None:
    """Split in two, the toy is not legal on the case of one token: whole, it is."""
    runner = toy_runner()
    assert len(evaluator(runner).prepare(evaluator(runner).draft(SPLIT)).case_jobs) == 1
    whole = replace(TOY, validated_as=lambda candidate, case: {**candidate.values, "split": 1})
    trials = Evaluator(runner, ToyCompiler(), whole, toy_problem(4, 4096), render=toy_render)
    prepared = trials.prepare(trials.draft(SPLIT))
    assert prepared.job is not None
    assert [each.name for each in prepared.job.passes] == ["main", "join"]
    assert len(prepared.case_jobs) == 2
    assert {each.name for _, made in prepared.case_jobs for each in made.passes} == {"main"}
    assert prepared.draft.values == SPLIT


def test_the_key_changes_with_whatever_could_change_the_result() -> None:
    base = evaluator().draft(TILED).key
    assert base == evaluator().draft(TILED).key
    others = {
        evaluator().draft({**TILED, "tile": 16}).key,
        evaluator(problem=toy_problem(5, 4096)).draft(TILED).key,
        evaluator(compiler=ToyCompiler(identity="toycc 2")).draft(TILED).key,
        evaluator(toy_runner(info=toy_device(uuid="other"))).draft(TILED).key,
        evaluator(toy_runner(info=toy_device(driver_info="1.1"))).draft(TILED).key,
        Evaluator(
            toy_runner(),
            ToyCompiler(),
            replace(TOY, template="other.jinja"),
            toy_problem(4, 4096),
            render=toy_render,
        )
        .draft(TILED)
        .key,
    }
    assert len(others | {base}) == 7


def test_build_job_packs_what_the_family_declares() -> None:
    candidate = Candidate(SPLIT, toy_problem(), toy_device())
    scalars = {"rows": 4, "factor": FACTOR}
    built = build_job(TOY, candidate, scalars, ToyCompiler(), render=toy_render)
    assert [p.name for p in built.job.passes] == ["main", "join"]
    assert built.job.bindings == ("x", "pool", "out", "partial")
    assert built.job.scratch_bytes == {"partial": 8}
    assert built.job.passes[0].push == struct.pack("<If", 4, FACTOR)
    assert built.job.passes[0].groups == (2, 1, 1)
    assert built.compile_seconds == pytest.approx(0.002)
    with pytest.raises(KeyError, match="factor"):
        pack_push(TOY, {"rows": 1})


def test_templates_see_parameters_constants_and_declarations() -> None:
    seen: list[dict[str, Any]] = []

    def render(template: str, context: Any) -> Any:
        seen.append(context)
        return toy_render(template, context)

    scalars = {"rows": 4, "factor": FACTOR}
    shown = render_passes(TOY, SPLIT, toy_problem(), toy_device(), scalars=scalars, render=render)
    assert [p.declared.name for p in shown] == ["main", "join"]
    assert seen[0]["WIDTH"] == seen[0]["width"] == 32
    assert (seen[1]["family"], seen[1]["pass_name"]) == ("toy", "join")
    assert seen[0]["bindings"] == TOY.bindings
    assert seen[0]["push_fields"] == TOY.push_fields


def test_what_all_copies_read_fills_the_footprint_within_the_memory() -> None:
    gpu, cpu = toy_device(), toy_device(kind="cpu")
    mib = 2**20
    assert copies_for(mib, gpu, mib) == 512
    assert copies_for(768 * mib, gpu, 768 * mib) == 1
    assert copies_for(100 * mib, gpu, 64 * mib) == 8
    roomy = toy_device(memory_heaps=(MemoryHeap(size_bytes=2**37, device_local=True),))
    assert copies_for(64 * mib, roomy, 4096) == 128
    assert copies_for(mib, cpu, mib // 8) == 64
    assert copies_for(mib, gpu, mib, footprint_bytes=4 * mib) == 4
    heap = MemoryHeap(size_bytes=2**30, device_local=True, budget_bytes=10 * mib)
    assert copies_for(mib, toy_device(memory_heaps=(heap,)), mib // 8) == 8
    assert copies_for(2**40, gpu, 2**40) == 1
    assert copies_for(4096, gpu, 4096) == 1024


def test_a_problem_that_does_not_fit_is_refused_with_sizes() -> None:
    heap = MemoryHeap(size_bytes=2**21, device_local=True)
    problem = toy_problem(4, 2**20)
    trials = evaluator(toy_runner(info=toy_device(memory_heaps=(heap,))), problem=problem)
    with pytest.raises(OutOfMemoryError) as caught:
        trials.run(TILED)
    assert str(caught.value) == (
        f"{problem.label} needs 16 MiB, the device has 2 MiB to give: {problem.way_smaller}"
    )


def test_a_validation_case_that_does_not_fit_is_no_fault_of_the_problem() -> None:
    heap = MemoryHeap(size_bytes=100, device_local=True)
    trials = evaluator(toy_runner(info=toy_device(memory_heaps=(heap,))))
    with pytest.raises(OutOfMemoryError, match="^validation case .* see what else holds memory"):
        trials.run(TILED)
