"""A worker that takes a lost one's place: what it must have again, and when there is none."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.fault_stub import Fault, Ledger, culprit, kill_worker, wait_for
from tests.small_kernels import executed, job, operands, outputs, run, step
from tests.small_workers import GOOD, PLAN, Start
from tuner.errors import NoWorkerError, UnknownNameError, UsageError, WorkerDiedError
from tuner.runner._deadlines import Deadlines
from tuner.runner.protocol import Prepared


def test_nobody_is_to_blame_for_a_worker_that_dies_while_idle(start_small: Start) -> None:
    runner = start_small()
    runner.load("w", operands(), outputs())
    runner.load("v", {"a": operands()["a"] + 1.0}, outputs(), copies=3)
    runner.prepare([GOOD])
    runner.prepare([GOOD])
    for losses in (1, 2):
        kill_worker(runner)
        assert runner.losses == losses
        np.testing.assert_array_equal(
            executed(runner, GOOD, "v").outputs["o"], 3.0 * (operands()["a"] + 1.0)
        )
        assert runner.measure(GOOD, "v", PLAN).copies == 3
        assert runner.losses == losses
    runner.release([GOOD])
    executed(runner, GOOD)
    runner.release([GOOD])
    with pytest.raises(UsageError, match="not prepared"):
        executed(runner, GOOD)


def test_freeing_things_starts_no_worker(start_small: Start) -> None:
    runner = start_small()
    runner.load("w", operands(), outputs())
    runner.prepare([GOOD])
    kill_worker(runner)
    runner.release([GOOD])
    runner.unload("w")
    assert runner.messages == ()
    assert not runner._workers.latest.alive
    with pytest.raises(UnknownNameError, match="'w'"):
        run(runner, GOOD)


def test_what_is_unloaded_or_replaced_does_not_come_back(start_small: Start) -> None:
    runner = start_small()
    runner.load("w", operands(), outputs())
    runner.load("w", {"a": operands()["a"] + 2.0}, outputs())
    runner.load("v", operands(), outputs())
    runner.unload("v")
    kill_worker(runner)
    np.testing.assert_array_equal(run(runner, GOOD).outputs["o"], 3.0 * (operands()["a"] + 2.0))
    assert runner._workers.latest.loaded == {"w"}


def test_who_writes_out_of_bounds_costs_the_worker_but_no_one_else(start_small: Start) -> None:
    """What it wrote over is whatever lies there: operands of all that comes after it."""
    runner, bad = start_small(), culprit("out of bounds")
    runner.load("w", operands(), outputs())
    runner.prepare([bad])
    runner.prepare([GOOD])
    first = runner.pid
    assert executed(runner, bad).broken_guards == ("o",)
    np.testing.assert_array_equal(executed(runner, GOOD).outputs["o"], 3.0 * operands()["a"])
    assert runner.pid != first
    assert runner.losses == 0


def test_nothing_is_launched_behind_a_write_out_of_bounds(
    start_small: Start, tmp_path: Path
) -> None:
    runner, bad = start_small(ledger=tmp_path / "calls"), culprit("out of bounds")
    runner.load("w", operands(), outputs())
    runner.prepare([GOOD, bad])
    taken = list(runner.execute([(GOOD, "w"), (bad, "w"), (GOOD, "w")]))
    assert [each.broken_guards for each in taken] == [(), ("o",)]
    assert [method for method, _ in Ledger.read(tmp_path / "calls")].count("e") == 2
    np.testing.assert_array_equal(executed(runner, GOOD).outputs["o"], 3.0 * operands()["a"])


def test_loads_that_lose_the_worker_are_made_again(start_small: Start, tmp_path: Path) -> None:
    fault = Fault(how="segfault", method="load", at=(0, 1))
    runner = start_small(fault, factory="toy", ledger=tmp_path / "ledger")
    runner.load("w", operands(), outputs())
    assert runner.losses == 2


def test_a_load_that_always_loses_the_worker_is_the_end(start_small: Start) -> None:
    runner = start_small(Fault(how="segfault", method="load"), factory="toy")
    with pytest.raises(NoWorkerError, match="loading workload 'w' lost the worker 3 times"):
        runner.load("w", operands(), outputs())


def test_a_device_that_does_not_come_back_is_said(start_small: Start, tmp_path: Path) -> None:
    runner = start_small(factory="toy", no_device_if=tmp_path / "gone")
    (tmp_path / "gone").touch()
    kill_worker(runner)
    with pytest.raises(NoWorkerError, match="no other one starts .Vulkan reports no device"):
        runner.prepare([GOOD])
    (tmp_path / "gone").unlink()
    with pytest.raises(NoWorkerError, match="no other one starts"):
        runner.prepare([GOOD])


def test_another_device_in_its_place_is_refused(start_small: Start, tmp_path: Path) -> None:
    runner = start_small(factory="toy", other_device_if=tmp_path / "other")
    (tmp_path / "other").touch()
    kill_worker(runner)
    with pytest.raises(NoWorkerError, match="answers in place of Toy GPU"):
        runner.prepare([GOOD])


@pytest.mark.parametrize("kills", [1, 2, 3])
def test_a_process_that_is_killed_from_outside_costs_nobody_at_first(
    start_small: Start, tmp_path: Path, kills: int
) -> None:
    calls, hold = tmp_path / "calls", tmp_path / "hold"
    runner = start_small(deadlines=Deadlines(), ledger=calls, hold_if=hold)
    hold.touch()

    def kill_in_each_call() -> None:
        for number in range(1, kills + 1):
            Ledger.wait_for(calls, number)
            os.kill(runner.pid, signal.SIGKILL)
        hold.unlink()

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_in_each_call)
        if kills < 3:
            runner.prepare([GOOD])
        else:
            with pytest.raises(WorkerDiedError, match="killed by SIGKILL .* during making"):
                runner.prepare([GOOD])
        killing.result()
    assert runner.losses == kills


def test_a_process_that_died_before_it_read_a_request_did_not_die_of_it(start_small: Start) -> None:
    runner = start_small()
    runner.prepare([GOOD])
    process = psutil.Process(runner.pid)
    process.suspend()
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(runner.prepare, [job(step("scale", factor=9.0))])
        wait_for(lambda: runner._workers.latest._calls)
        time.sleep(0.1)
        process.send_signal(signal.SIGSEGV)
        process.resume()
        assert [type(each) for each in asked.result()] == [Prepared]
    assert runner.losses == 1


def test_a_release_is_for_the_worker_that_had_the_job_prepared(start_small: Start) -> None:
    runner = start_small()
    runner.load("w", operands(), outputs())
    runner.prepare([GOOD])
    with ThreadPoolExecutor(1) as pool, runner._gate.entered(alone=True):
        released = pool.submit(runner.release, [GOOD])
        wait_for(lambda: not runner._users)
        kill_worker(runner)
        # Meanwhile another one has the same job prepared, in the successor.
        runner._prepare(runner._workers.living(), [GOOD])
        runner._users[GOOD.key] = 1
    released.result()
    np.testing.assert_array_equal(executed(runner, GOOD).outputs["o"], 3.0 * operands()["a"])
