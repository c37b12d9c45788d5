"""Trials on the fake runner: what a record holds, and which failure becomes which state."""

from __future__ import annotations

import struct
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.toy_family import (
    FACTOR,
    TOY,
    ToyCompiler,
    toy_device,
    toy_outputs,
    toy_problem,
    toy_render,
    toy_runner,
)
from tuner.device_info import MemoryHeap
from tuner.errors import (
    DeviceLostError,
    IllegalVariantError,
    OutOfMemoryError,
    RunTimeoutError,
    TemplateError,
    TunerError,
    UsageError,
    VulkanError,
    WorkerDiedError,
)
from tuner.evaluate import (
    FINAL,
    Evaluator,
    ResidentCases,
    Session,
    TrialLostDeviceError,
    build_job,
    copies_for,
    measure_again,
    pack_push,
    render_passes,
)
from tuner.kernels.base import ArithmeticClass, Candidate, Reference, Values
from tuner.problems import Problem
from tuner.runner.fake import Call, FakeRunner, Workload
from tuner.runner.protocol import Job, MeasurePlan

TILED: Values = {"mode": "tiled", "width": 64, "unroll": 2, "tile": 8, "split": 1}
SPLIT: Values = {"mode": "half", "width": 32, "unroll": 1, "tile": 1, "split": 2}
PLAN = MeasurePlan(min_samples=5, max_samples=9, budget_ms=0.01)


def evaluator(
    runner: FakeRunner | None = None,
    compiler: ToyCompiler | None = None,
    problem: Problem | None = None,
    **options: Any,
) -> Evaluator:
    return Evaluator(
        runner or toy_runner(),
        compiler or ToyCompiler(),
        TOY,
        problem or toy_problem(4, 4096),
        session=Session(name="s1", plan=PLAN, read_gb_s=1000.0, sampler="tpe"),
        render=toy_render,
        **options,
    )


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


def fail(method: str, error: TunerError, *, after: int = 0) -> Any:
    """Faults: the call number `after` of a method fails."""

    def fault(call: Call) -> TunerError | None:
        return error if (call.method, call.number) == (method, after) else None

    return fault


LOST = DeviceLostError("vkWaitForFences", "VK_ERROR_DEVICE_LOST", -4)
BROKEN = VulkanError("vkQueueSubmit", "VK_ERROR_UNKNOWN", -13)


@pytest.mark.parametrize(
    ("method", "error", "state", "says"),
    [
        ("prepare", BROKEN, "compile", "VK_ERROR_UNKNOWN"),
        ("prepare", UsageError("70,000 workgroups"), "constraints", "70,000 workgroups"),
        ("prepare", RunTimeoutError("pipeline", 9.0), "timeout", "9.0 s"),
        ("prepare", WorkerDiedError("signal 11"), "runtime", "signal 11"),
        ("execute", BROKEN, "runtime", "vkQueueSubmit"),
        ("execute", RunTimeoutError("launch", 2.0), "timeout", "2.0 s"),
        ("execute", OutOfMemoryError("scratch", 2**30, 2**20), "runtime", "1,024 MiB"),
        ("execute", WorkerDiedError("signal 11"), "runtime", "signal 11"),
        ("measure", BROKEN, "runtime", "vkQueueSubmit"),
        ("measure", RunTimeoutError("launch", 2.0), "timeout", "2.0 s"),
    ],
)
def test_a_runners_error_costs_one_variant(
    method: str, error: TunerError, state: str, says: str
) -> None:
    runner = toy_runner(faults=fail(method, error))
    trials = evaluator(runner)
    record = trials.run(TILED)
    assert record.state == state
    assert says in (record.error or "")
    assert record.samples_ns == ()
    assert record.median_ns is None
    assert runner.jobs == []
    assert trials.run(SPLIT).state == "correct"


def test_the_last_of_several_pipelines_failing_leaves_none_behind() -> None:
    runner = toy_runner(faults=fail("prepare", BROKEN, after=2))
    record = evaluator(runner).run(TILED)
    assert record.state == "compile"
    assert runner.jobs == []


def test_a_refused_source_is_a_compile_failure_with_its_place() -> None:
    record = evaluator(compiler=ToyCompiler(refuse=("'mode': 'tiled'",))).run(TILED)
    assert record.state == "compile"
    assert "toy.comp.jinja:7" in (record.error or "")


def test_a_template_that_does_not_render_is_a_compile_failure() -> None:
    def refuse(template: str, context: object) -> Any:
        raise TemplateError(template, "'depth' is undefined", 3)

    trials = Evaluator(toy_runner(), ToyCompiler(), TOY, toy_problem(4, 4096), render=refuse)
    record = trials.run(TILED)
    assert record.state == "compile"
    assert record.error == "toy.comp.jinja:3: 'depth' is undefined"


def test_a_template_that_does_not_render_for_a_case_is_a_compile_failure() -> None:
    trials = evaluator()
    draft = trials.draft(TILED)

    def refuse(template: str, context: object) -> Any:
        raise TemplateError(template, "undefined", 3)

    prepared = trials.prepare(replace(draft, render=refuse))  # type: ignore[arg-type]
    assert prepared.failure is not None
    assert prepared.failure.state == "compile"


@pytest.mark.parametrize("method", ["prepare", "execute", "measure"])
def test_a_lost_device_is_recorded_and_raised(method: str) -> None:
    runner = toy_runner(faults=fail(method, LOST))
    with pytest.raises(TrialLostDeviceError) as caught:
        evaluator(runner).run(TILED)
    record = caught.value.record
    assert record.state == "runtime"
    assert "device lost" in (record.error or "")
    assert record.values == TILED
    assert caught.value.code == -4


def test_a_lost_device_that_the_runner_replaces_costs_one_variant() -> None:
    runner = toy_runner(faults=fail("execute", LOST))
    runner.losses = 0
    trials = evaluator(runner)
    record = trials.run(TILED)
    assert record.state == "runtime"
    assert "device lost" in (record.error or "")
    assert trials.run(SPLIT).state == "correct"


def wrong_in(workload_part: str) -> Any:
    """Outputs: right but for one element of workloads whose name has that part."""

    def outputs(job: Job, workload: Workload) -> dict[str, Any]:
        answer = toy_outputs(job, workload)
        if workload.inputs["x"].shape[0] == {"random": 3, "timing": 4}[workload_part]:
            answer["out"][0, 0, 2] += 1
        return answer

    return outputs


def test_a_wrong_answer_is_not_timed() -> None:
    runner = toy_runner(outputs=wrong_in("random"))
    record = evaluator(runner).run(TILED)
    assert record.state == "correctness"
    assert "case random: out[0, 0]" in (record.error or "")
    assert "[0, 0, 2]" in (record.error or "")
    assert record.check is not None
    assert record.check.error > record.check.bound
    assert not any(call.method == "measure" for call in runner.calls)


def test_a_wrong_answer_on_the_timed_operands_alone_is_found_too() -> None:
    record = evaluator(toy_runner(outputs=wrong_in("timing"))).run(TILED)
    assert record.state == "correctness"
    assert "timed operands" in (record.error or "")


def test_an_answer_that_is_not_written_is_wrong() -> None:
    record = evaluator(toy_runner(outputs=lambda job, workload: {})).run(TILED)
    assert record.state == "correctness"


def test_the_arithmetic_class_decides_the_bound() -> None:
    def rough(job: Job, workload: Workload) -> dict[str, Any]:
        return {"out": toy_outputs(job, workload)["out"] * np.float32(1.0001)}

    trials = evaluator(toy_runner(outputs=rough))
    assert trials.run(TILED).state == "correctness"
    assert trials.run({**SPLIT, "split": 1}).state == "correct"


def test_a_write_past_a_buffer_is_wrong() -> None:
    record = evaluator(toy_runner(broken_guards=("out", "partial"))).run(TILED)
    assert record.state == "correctness"
    assert "past the end of out, partial" in (record.error or "")


def test_times_that_cannot_be_are_a_runtime_failure() -> None:
    record = evaluator(toy_runner(times=lambda job, workload: -1.0)).run(TILED)
    assert record.state == "runtime"
    assert "must be above 0" in (record.error or "")


def test_an_illegal_variant_is_refused_with_reasons() -> None:
    with pytest.raises(IllegalVariantError, match="512 threads"):
        evaluator().run({**TILED, "width": 128, "unroll": 4})


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


def test_a_problem_that_does_not_fit_is_refused_with_sizes() -> None:
    heap = MemoryHeap(size_bytes=1000, device_local=True)
    trials = evaluator(toy_runner(info=toy_device(memory_heaps=(heap,))))
    with pytest.raises(OutOfMemoryError, match="timing"):
        trials.run(TILED)


def test_a_finalist_that_fails_is_recorded_and_the_others_go_on() -> None:
    runner = toy_runner(faults=fail("measure", BROKEN, after=1))
    trials = evaluator(runner)
    prepared = [trials.prepare(trials.draft(v)) for v in (TILED, SPLIT)]
    first, second = measure_again(trials, prepared, plan=PLAN)
    assert (first.state, second.state) == ("correct", "runtime")
    assert (first.note, second.note) == (FINAL, FINAL)
    assert second.samples_ns == ()
    assert len(first.rounds) == 6
