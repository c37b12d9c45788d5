"""Several calls at once to a worker that is lost: which of them is to blame, which are repeated."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fault_stub import How, Ledger, culprit, worker
from tests.small_kernels import executed, job, operands, outputs, step
from tests.small_workers import GOOD, SHORT, Start, is_right, measured
from tuner.errors import DeviceLostError, RunTimeoutError, TunerError, WorkerDiedError
from tuner.runner.protocol import Execution, Prepared
from tuner.runner.worker import WorkerRunner


def test_pipelines_are_made_side_by_side(start_small: Start) -> None:
    runner = start_small(factory="toy", prepare_seconds=0.25)
    jobs = [job(step("scale", factor=float(n))) for n in range(12)]
    started = time.monotonic()
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(runner.prepare, [[each] for each in jobs]))
    assert time.monotonic() - started < 12 * 0.25


@pytest.fixture(scope="module")
def slow() -> Iterator[WorkerRunner]:
    """A worker runner whose pipelines and measurements take a while, with the workload "w"."""
    runner = worker(factory="small", deadlines=SHORT, prepare_seconds=0.15, measure_seconds=0.2)
    runner.load("w", operands(), outputs())
    yield runner
    runner.close()


def side_by_side(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returns or raises, all begun at once."""
    start = threading.Barrier(len(calls))

    def one(call: Callable[[], Any]) -> Any:
        start.wait()
        try:
            return call()
        except TunerError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(one, call) for call in calls]]


however_it_is_lost = pytest.mark.parametrize(
    ("how", "error"),
    [("segfault", WorkerDiedError), ("hang", RunTimeoutError), ("lost", DeviceLostError)],
)


@however_it_is_lost
def test_of_pipelines_made_side_by_side_only_the_culprit_fails(
    slow: WorkerRunner, how: How, error: type[TunerError]
) -> None:
    losses = slow.losses
    good = [job(step("scale", factor=float(n))) for n in range(4)]
    calls: list[Callable[[], Any]] = [functools.partial(slow.prepare, [made]) for made in good]
    bad = functools.partial(slow.prepare, [culprit(how, "prepare")])
    results = side_by_side(*calls[:2], bad, *calls[2:])
    assert type(results.pop(2)) is error
    assert [r for r in results if isinstance(r, TunerError)] == []
    assert 1 <= slow.losses - losses <= 2
    for factor, made in enumerate(good):
        output = executed(slow, made).outputs["o"]
        np.testing.assert_array_equal(output, np.float32(factor) * operands()["a"])
        slow.release([made])


@however_it_is_lost
def test_a_launch_that_loses_the_device_does_not_blame_pipelines_being_made(
    slow: WorkerRunner, how: How, error: type[TunerError]
) -> None:
    bad = culprit(how)
    slow.prepare([bad])
    good = [job(step("scale", factor=float(n))) for n in range(3)]
    calls: list[Callable[[], Any]] = [functools.partial(slow.prepare, [made]) for made in good]
    results = side_by_side(functools.partial(executed, slow, bad), *calls)
    assert type(results[0]) is error
    assert [r for r in results[1:] if isinstance(r, TunerError)] == []
    for made in (bad, *good):
        slow.release([made])


def test_a_measurement_survives_pipelines_that_hang(slow: WorkerRunner) -> None:
    losses = slow.losses
    slow.prepare([GOOD])
    results = side_by_side(
        functools.partial(slow.prepare, [culprit("hang", "prepare")]),
        lambda: [measured(slow, GOOD, "w") for _ in range(4)],
    )
    slow.release([GOOD])
    assert type(results[0]) is RunTimeoutError
    assert [len(m.samples_ns) for m in results[1]] == [5] * 4
    assert slow.losses == losses + 1


def test_who_only_waits_for_a_worker_that_is_deaf_is_not_to_blame(
    start_small: Start, tmp_path: Path
) -> None:
    """A call stops the whole process; another one, begun a little later, is late first."""
    longer = dataclasses.replace(SHORT, prepare_s=6.0)
    prepare = start_small(ledger=tmp_path / "prepare", deadlines=longer)
    execute = start_small(ledger=tmp_path / "execute")
    prepare.load("w", operands(), outputs())
    execute.load("w", operands(), outputs())
    deaf = culprit("deaf"), culprit("deaf", "prepare")
    execute.prepare([deaf[0]])
    prepare.prepare([GOOD])
    begun = Ledger.count(tmp_path / "execute"), Ledger.count(tmp_path / "prepare")

    def make_pipelines() -> tuple[Prepared, ...]:
        Ledger.wait_for(tmp_path / "execute", begun[0] + 1)
        return execute.prepare([GOOD])

    def launch() -> Execution:
        Ledger.wait_for(tmp_path / "prepare", begun[1] + 1)
        return executed(prepare, GOOD)

    results = side_by_side(
        lambda: executed(execute, deaf[0]),
        make_pipelines,
        lambda: prepare.prepare([deaf[1]]),
        launch,
    )
    kinds = [RunTimeoutError, tuple, RunTimeoutError, Execution]
    assert [type(each) for each in results] == kinds


def test_a_release_that_crashes_is_nobodys_fault(start_small: Start, tmp_path: Path) -> None:
    """Neither that of the call beside it, nor of the variant whose pipelines were released."""
    calls, hold = tmp_path / "calls", tmp_path / "hold"
    runner, bad = start_small(ledger=calls, hold_if=hold), culprit("segfault", "release")
    runner.prepare([bad])
    hold.touch()
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(runner.prepare, [GOOD])
        Ledger.wait_for(calls, 2)
        runner.release([bad])
        hold.unlink()
        assert [type(each) for each in beside.result()] == [Prepared]
    assert runner.losses == 1


def test_pipelines_that_crash_do_not_keep_a_workload_from_being_loaded(start_small: Start) -> None:
    runner = start_small()
    bad = [culprit("segfault", "prepare", count=n) for n in range(1, 9)]
    calls = [functools.partial(runner.prepare, [each]) for each in bad]
    results = side_by_side(*calls, lambda: runner.load("w", operands(), outputs()))
    assert [type(each) for each in results] == [WorkerDiedError] * len(bad) + [type(None)]
    assert is_right(runner)
