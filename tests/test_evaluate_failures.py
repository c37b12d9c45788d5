"""Trials that fail: which failure becomes which state, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.toy_family import (
    TOY,
    ToyCompiler,
    toy_outputs,
    toy_problem,
    toy_render,
    toy_runner,
)
from tests.toy_trials import PLAN, SPLIT, TILED, evaluator
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
from tuner.evaluate import Evaluator, TrialLostDeviceError, measure_again
from tuner.records import FINAL
from tuner.runner.fake import Call, Workload
from tuner.runner.protocol import Job


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


def test_a_variant_that_no_case_can_prove_right_is_never_timed() -> None:
    family = replace(TOY, validation_cases=lambda problem: TOY.validation_cases(problem)[1:])
    runner = toy_runner()
    record = Evaluator(runner, ToyCompiler(), family, toy_problem(4, 4096), render=toy_render).run(
        SPLIT
    )
    assert record.state == "constraints"
    assert record.error == (
        "not legal on any validation case, so never proved right; on zeros because 2 splits of 1 "
        "tokens"
    )
    assert not any(call.method in ("execute", "measure") for call in runner.calls)


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


def test_a_finalist_that_fails_is_recorded_and_the_others_go_on() -> None:
    runner = toy_runner(faults=fail("measure", BROKEN, after=1))
    trials = evaluator(runner)
    prepared = [trials.prepare(trials.draft(v)) for v in (TILED, SPLIT)]
    first, second = measure_again(trials, prepared, plan=PLAN)
    assert (first.state, second.state) == ("correct", "runtime")
    assert (first.note, second.note) == (FINAL, FINAL)
    assert second.samples_ns == ()
    assert len(first.rounds) == 6
