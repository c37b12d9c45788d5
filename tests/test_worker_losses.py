"""One call to a worker, and what is lost with it: that call alone."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from tests.fault_stub import FAULT_LINE, How, culprit, worker
from tests.small_kernels import executed, job, operands, outputs, run, step
from tests.small_workers import GOOD, SHORT, Start, is_right, measured
from tests.toy_device import toy_device
from tuner.errors import (
    DeviceLostError,
    OutOfMemoryError,
    RunTimeoutError,
    TunerError,
    UsageError,
    VulkanError,
    WorkerDiedError,
)
from tuner.runner._worker_jobs import Jobs
from tuner.runner._worker_main import _prepared
from tuner.runner.fake import Call, FakeRunner, Method
from tuner.runner.worker import WorkerRunner


@pytest.fixture(scope="module")
def kept() -> Iterator[WorkerRunner]:
    """The worker runner that tests share which leave it in order."""
    runner = worker(factory="small", deadlines=SHORT)
    yield runner
    runner.close()


@pytest.fixture
def runner(kept: WorkerRunner) -> Iterator[WorkerRunner]:
    """A worker runner with the workload "w", in order before and after the test."""
    kept.load("w", operands(), outputs(), copies=3)
    yield kept
    assert is_right(kept)
    kept.unload("w")


def test_ctrl_c_on_the_terminal_is_not_for_the_worker(runner: WorkerRunner) -> None:
    losses = runner.losses
    assert os.getpgid(runner.pid) == runner.pid != os.getpgid(0)
    os.kill(runner.pid, signal.SIGINT)
    assert is_right(runner)
    assert runner.losses == losses


@pytest.mark.parametrize(
    ("how", "method", "error", "says"),
    [
        (
            "segfault",
            "execute",
            WorkerDiedError,
            "was killed by SIGSEGV .* during a launch of exec",
        ),
        ("segfault", "prepare", WorkerDiedError, "SIGSEGV .* during making the pipelines of prep"),
        ("segfault", "measure", WorkerDiedError, "SIGSEGV .* during measuring measure"),
        ("abort", "execute", WorkerDiedError, "was killed by SIGABRT"),
        ("exit", "execute", WorkerDiedError, "ended with exit status 3"),
        ("bug", "execute", WorkerDiedError, "ZeroDivisionError: a bug in the runner"),
        ("host out of memory", "execute", WorkerDiedError, "MemoryError"),
        ("lost", "execute", DeviceLostError, FAULT_LINE),
        ("lost", "prepare", DeviceLostError, FAULT_LINE),
        ("lost", "measure", DeviceLostError, FAULT_LINE),
    ],
)
def test_a_lost_worker_costs_the_call_that_lost_it(
    runner: WorkerRunner, how: How, method: Method, error: type[TunerError], says: str
) -> None:
    _lose(runner, how, method, error, says)


def test_calls_that_hang_are_ended_by_their_deadlines(start_small: Start) -> None:
    """Each in a worker of its own, all at once, as they take so long."""
    hanging: list[tuple[How, Method, str]] = [
        ("hang", "execute", "a launch of execute: hang on 'w' did not end within"),
        ("deaf", "execute", "a launch of execute: deaf on 'w' did not end within"),
        ("hang", "prepare", "making the pipelines of prepare: hang did not end within"),
        ("hang", "measure", "measuring measure: hang on 'w' did not end within"),
    ]
    runners = [start_small() for _ in hanging]
    for runner in runners:
        runner.load("w", operands(), outputs())
    with ThreadPoolExecutor(len(hanging)) as pool:
        futures = [
            pool.submit(_lose, runner, how, method, RunTimeoutError, says)
            for runner, (how, method, says) in zip(runners, hanging, strict=True)
        ]
        for future in futures:
            future.result()


def _lose(
    runner: WorkerRunner, how: How, method: Method, error: type[TunerError], says: str
) -> None:
    """Have a call lose the worker, and see that this is all that is lost."""
    first, losses = runner.pid, runner.losses
    made = culprit(how, method)
    if method == "prepare":
        with pytest.raises(error, match=says):
            runner.prepare([made])
    else:
        runner.prepare([made])
        call = executed if method == "execute" else measured
        with pytest.raises(error, match=says):
            call(runner, made, "w")
        runner.release([made])
    assert runner.losses == losses + 1
    assert is_right(runner)
    assert runner.losses == losses + 1
    assert not psutil.pid_exists(first)
    assert runner.pid != first


@pytest.mark.parametrize(
    ("how", "error"), [("out of memory", OutOfMemoryError), ("refused", VulkanError)]
)
def test_other_errors_leave_the_worker_alive(
    runner: WorkerRunner, how: How, error: type[TunerError]
) -> None:
    first, losses = runner.pid, runner.losses
    with pytest.raises(error):
        run(runner, culprit(how))
    assert is_right(runner)
    assert (runner.pid, runner.losses) == (first, losses)


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ("segfault", WorkerDiedError, "SIGSEGV .* during a launch of execute: segfault on 'w'"),
        ("hang", RunTimeoutError, "a launch of execute: hang on 'w' did not end within 2.5 s"),
        ("lost", DeviceLostError, FAULT_LINE),
        ("refused", VulkanError, "VK_ERROR_UNKNOWN"),
    ],
)
def test_of_several_launches_the_one_that_fails_is_told_behind_those_before_it(
    runner: WorkerRunner, how: How, error: type[TunerError], says: str
) -> None:
    bad, losses = culprit(how), runner.losses
    runner.prepare([GOOD, bad])
    executions = runner.execute([(GOOD, "w"), (GOOD, "w"), (bad, "w"), (GOOD, "w")])
    for execution in (next(executions), next(executions)):
        np.testing.assert_array_equal(execution.outputs["o"], 3.0 * operands()["a"])
    with pytest.raises(error, match=says):
        next(executions)
    assert runner.losses - losses == (how != "refused")
    runner.release([GOOD, bad])


@pytest.mark.parametrize("how", ["refused", "segfault"])
def test_of_several_jobs_all_are_prepared_or_none(runner: WorkerRunner, how: How) -> None:
    error = VulkanError if how == "refused" else WorkerDiedError
    with pytest.raises(error):
        runner.prepare([GOOD, culprit(how, "prepare"), job(step("scale", factor=5.0))])
    with pytest.raises(UsageError, match="not prepared"):
        executed(runner, GOOD)


def test_the_worker_gives_back_what_it_prepared_before_one_that_failed() -> None:
    def refuse(call: Call) -> TunerError | None:
        return VulkanError("vkCreateComputePipelines", "VK_ERROR_UNKNOWN", -13) if wrong else None

    wrong, runner, jobs = False, FakeRunner(toy_device(), faults=refuse), Jobs()
    answers = _prepared(runner, jobs, [GOOD, GOOD, job(step("idle"))])
    assert next(answers).number == next(answers).number
    assert len(runner.jobs) == 2
    wrong = True
    with pytest.raises(VulkanError):
        next(answers)
    assert runner.jobs == []
    with pytest.raises(KeyError):
        jobs.find(0)


def test_each_of_several_jobs_has_its_own_time(start_small: Start) -> None:
    runner = start_small(prepare_seconds=0.3, deadlines=dataclasses.replace(SHORT, prepare_s=1.2))
    runner.prepare([job(step("scale", factor=float(n))) for n in range(5)])
    assert runner.losses == 0


def test_what_the_worker_says_is_bounded(runner: WorkerRunner) -> None:
    said = runner._workers.latest._said
    os.write(said, b"noise\n" * 400_000)
    run(runner, GOOD)
    assert os.fstat(said).st_size == 0
    os.write(said, b"a last word\n")
    with pytest.raises(WorkerDiedError, match="it last said: a last word$"):
        run(runner, culprit("exit"))
