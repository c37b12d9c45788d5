"""The runner in a worker process: how one starts and ends, and who may talk to it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.fault_stub import How, Ledger, culprit, worker
from tests.small_kernels import executed, operands, outputs
from tests.small_workers import Start, is_right
from tuner.errors import NoDeviceError, RunTimeoutError, TunerError, WorkerDiedError
from tuner.runner._deadlines import Deadlines
from tuner.runner._worker_gate import Gate
from tuner.runner.worker import WorkerRunner


def test_a_worker_starts_in_under_a_second(
    vulkan_selector: str | None, tell: Callable[[str], None], tmp_path: Path
) -> None:
    """Without the time that it waits for a processor, which is the machine's load, and but for the
    first ever on a device, which probes it."""
    taken: list[float] = []
    while len(taken) < 3 or (min(taken) >= 1.0 and len(taken) < 12):
        begun = time.perf_counter()
        runner = WorkerRunner(vulkan_selector, cache_dir=tmp_path)
        taken.append(time.perf_counter() - begun - _waited_s(runner.pid))
        runner.close()
    name = runner.info.name
    tell(f"start-up of a worker on {name}: {min(taken):.2f} s (best of {len(taken)})")
    assert min(taken) < 1.0


def _waited_s(process: int) -> float:
    """How long the main thread of a process was ready to run and did not."""
    file = Path(f"/proc/{process}/schedstat")
    return int(file.read_text().split()[1]) / 1e9 if file.exists() else 0.0


def test_what_making_the_runner_raises_reaches_the_caller(tmp_path: Path) -> None:
    (tmp_path / "gone").touch()
    with pytest.raises(NoDeviceError, match="reports no device") as caught:
        worker(no_device_if=tmp_path / "gone")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ("exit", WorkerDiedError, "ended with exit status 3 during starting the worker"),
        ("segfault", WorkerDiedError, "SIGSEGV .*it last said: driver: about to read address 8"),
        ("hang", RunTimeoutError, "starting the worker did not end within 1.5 s"),
        ("bug", WorkerDiedError, "exit status 70 .*ZeroDivisionError: a bug in the runner"),
    ],
)
def test_a_worker_that_does_not_start_is_told_and_gone(
    how: How, error: type[TunerError], says: str
) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(error, match=says):
        worker(at_start=how, deadlines=Deadlines(start_s=1.5 if how == "hang" else 60.0))
    assert {child.pid for child in psutil.Process().children()} == before


def test_the_worker_ends_with_the_sockets_of_its_parent(start_small: Start) -> None:
    runner = start_small()
    runner._workers.latest._control.close()
    psutil.Process(runner.pid).wait(timeout=60.0)


def test_an_interrupt_in_a_call_gives_all_calls_up(start_small: Start, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    runner = start_small(deadlines=Deadlines(launch_s=600.0, prepare_s=600.0), ledger=calls)
    bad, other = culprit("hang"), culprit("hang", "prepare")
    runner.load("w", operands(), outputs())
    runner.prepare([bad])
    before = Ledger.count(calls)

    def interrupt() -> None:
        Ledger.wait_for(calls, before + 2)
        os.kill(os.getpid(), signal.SIGINT)

    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        making = pool.submit(runner.prepare, [other])
        pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            executed(runner, bad)
        assert "given up during a launch" in str(making.exception())
    runner.release([bad])
    runner.unload("w")
    assert time.monotonic() - started < 60.0
    assert runner.losses == 1
    assert run_after_load(runner)


def run_after_load(runner: WorkerRunner) -> bool:
    """Whether the runner still works."""
    runner.load("w", operands(), outputs())
    return is_right(runner)


def test_a_runner_that_does_not_close_is_killed(start_small: Start, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    runner = start_small(deadlines=Deadlines(launch_s=600.0, close_s=0.3), ledger=calls)
    bad = culprit("deaf")
    runner.load("w", operands(), outputs())
    runner.prepare([bad])
    before, started = Ledger.count(calls), time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        deaf = pool.submit(executed, runner, bad)
        Ledger.wait_for(calls, before + 1)
        runner.close()
        assert "closed" in str(deaf.exception())
    assert time.monotonic() - started < 60.0


def test_who_enters_alone_is_alone_and_is_not_kept_waiting_by_newcomers() -> None:
    gate, inside, seen, stop = Gate(), [], [], threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            with gate.entered():
                inside.append(1)
                time.sleep(0.002)
                inside.pop()

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        with gate.entered(alone=True):
            seen.append(len(inside))
            time.sleep(0.002)
            seen.append(len(inside))
    stop.set()
    for thread in threads:
        thread.join(5.0)
    assert seen == [0] * 40
