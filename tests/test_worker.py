"""The runner in a worker process: what is lost with a worker, what is not, whose fault it was."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.fault_stub import (
    FAULT_LINE,
    Fault,
    How,
    Ledger,
    culprit,
    kill_worker,
    wait_for,
    worker,
)
from tests.small_kernels import executed, job, operands, outputs, run, step
from tests.toy_device import toy_device
from tests.toy_family import TOY, ToyCompiler, toy_problem, toy_render
from tuner.errors import (
    DeviceLostError,
    NoDeviceError,
    NoWorkerError,
    OutOfMemoryError,
    RunTimeoutError,
    TunerError,
    UnknownNameError,
    UsageError,
    VulkanError,
    WorkerDiedError,
)
from tuner.evaluate import Evaluator, Session
from tuner.runner._deadlines import Deadlines
from tuner.runner._worker_arrays import INLINE_BYTES, pack, unpack
from tuner.runner._worker_channel import Channel, ClosedError
from tuner.runner._worker_gate import Gate
from tuner.runner._worker_jobs import Jobs
from tuner.runner._worker_main import _prepared
from tuner.runner._worker_messages import Reply, encode, raised, raised_error
from tuner.runner.fake import Call, FakeRunner, Method
from tuner.runner.protocol import (
    Execution,
    Job,
    Measurement,
    MeasurePlan,
    OutputSpec,
    Prepared,
)
from tuner.runner.worker import WorkerRunner

SHORT = Deadlines(start_s=60.0, launch_s=1.0, prepare_s=2.0, close_s=20.0, spare_s=0.5)
"""Short for what hangs on purpose, and a thousand times what anything else takes."""
PLAN = MeasurePlan(
    warmup_ms=1.0, min_samples=3, max_samples=5, budget_ms=1.0, max_submission_ms=1.0
)
GOOD = job(step("scale", factor=3.0))

Make = Callable[..., WorkerRunner]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes worker runners over `tests.fault_stub.small` and closes them."""
    made: list[WorkerRunner] = []

    def make_one(*faults: Fault, **options: Any) -> WorkerRunner:
        options = {"factory": "small", "deadlines": SHORT, **options}
        made.append(worker(*faults, **options))
        return made[-1]

    yield make_one
    for runner in made:
        runner.close()
        assert not psutil.pid_exists(runner.pid)


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


def is_right(runner: WorkerRunner) -> bool:
    """Whether a job that does no harm still gets its answer."""
    answer = run(runner, GOOD).outputs["o"]
    return bool((answer == 3.0 * operands()["a"]).all())


# --- starting -------------------------------------------------------------------------------------


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


def test_ctrl_c_on_the_terminal_is_not_for_the_worker(runner: WorkerRunner) -> None:
    losses = runner.losses
    assert os.getpgid(runner.pid) == runner.pid != os.getpgid(0)
    os.kill(runner.pid, signal.SIGINT)
    assert is_right(runner)
    assert runner.losses == losses


def test_the_worker_ends_with_the_sockets_of_its_parent(make: Make) -> None:
    runner = make()
    runner._workers.latest._control.close()
    psutil.Process(runner.pid).wait(timeout=60.0)


# --- what goes through ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        TunerError("plain"),
        UsageError("bad"),
        UnknownNameError("workload", "x", ["w", "v"]),
        OutOfMemoryError("workload 'w'", 2**40, 2**30),
        VulkanError("vkQueueSubmit", "VK_ERROR_UNKNOWN", -13, "a hint"),
        DeviceLostError("vkWaitForFences", "VK_ERROR_DEVICE_LOST", -4, "hint", faults=["write"]),
        RunTimeoutError("one launch", 2.5),
    ],
)
def test_errors_survive_the_journey(error: TunerError) -> None:
    import msgspec

    from tuner.runner._worker_messages import Raised, encode

    sent = encode(raised(error))
    came = raised_error(msgspec.msgpack.decode(sent, type=Raised))
    assert type(came) is type(error)
    assert str(came) == str(error)
    assert {k: list(v) if isinstance(v, tuple) else v for k, v in error.__dict__.items()} == {
        k: list(v) if isinstance(v, tuple) else v for k, v in came.__dict__.items()
    }


def test_an_error_from_elsewhere_travels_as_its_nearest_base() -> None:
    class OwnError(UsageError):
        """Known to one process alone."""

    assert type(raised_error(raised(OwnError("x")))) is UsageError


@given(
    st.dictionaries(
        st.text(max_size=5),
        hnp.arrays(
            st.sampled_from(["u1", "<u4", "<f2", "<f4", "<f8", "<i8"]),
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9),
        ),
        max_size=4,
    )
)
@settings(max_examples=50, deadline=None)
def test_small_arrays_are_the_same_on_the_other_side(arrays: dict[str, Any]) -> None:
    packed, descriptor = pack("them", arrays)
    assert descriptor is None
    came = unpack(packed, None)
    assert list(came) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(came[name], array)
        assert came[name].dtype == array.dtype
        assert came[name].flags.writeable


@pytest.mark.parametrize("size", [INLINE_BYTES - 64, INLINE_BYTES + 64, 3 * INLINE_BYTES + 1])
def test_large_arrays_share_memory_and_arrive(size: int) -> None:
    random = np.random.default_rng(size)
    flat = random.integers(0, 256, size, np.uint8)
    arrays = {
        "flat": flat[: size // 2],
        "strided": np.repeat(flat, 2)[::2][size // 2 :],
        "one": np.broadcast_to(np.float32(7.0), (3, 5)),
        "none": np.zeros((0, 4), np.float16),
    }
    packed, descriptor = pack("them", arrays)
    assert (descriptor is not None) == (packed.nbytes > INLINE_BYTES)
    came = unpack(packed, descriptor)
    for name, array in arrays.items():
        np.testing.assert_array_equal(came[name], array)
    came["flat"][0] ^= 0xFF
    assert descriptor is None or not Path(f"/proc/self/fd/{descriptor}").exists()


def test_operands_and_outputs_beyond_a_message_go_through_shared_memory(make: Make) -> None:
    count = 3 * INLINE_BYTES
    runner = make(factory="toy")
    rows = count // 4
    x = np.arange(rows, dtype=np.float32).reshape(-1, 1)
    spec = OutputSpec(shape=x.shape, dtype="float32")
    runner.load("big", {"x": x, "pool": np.zeros(1, np.float32)}, {"out": spec})
    made = job(step("scale", factor=2.5))
    out = run(runner, made, "big").outputs["out"]
    np.testing.assert_array_equal(out, 2.5 * x)
    assert out.flags.writeable
    handles = psutil.Process().num_fds()
    for _ in range(20):
        run(runner, made, "big")
        runner.load("big", {"x": x, "pool": np.zeros(1, np.float32)}, {"out": spec})
    assert psutil.Process().num_fds() == handles


def test_pipelines_are_made_side_by_side(make: Make) -> None:
    runner = make(factory="toy", prepare_seconds=0.25)
    jobs = [job(step("scale", factor=float(n))) for n in range(12)]
    started = time.monotonic()
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(runner.prepare, [[each] for each in jobs]))
    assert time.monotonic() - started < 12 * 0.25


# --- one call, one loss ---------------------------------------------------------------------------


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


def test_calls_that_hang_are_ended_by_their_deadlines(make: Make) -> None:
    """Each in a worker of its own, all at once, as they take so long."""
    hanging: list[tuple[How, Method, str]] = [
        ("hang", "execute", "a launch of execute: hang on 'w' did not end within"),
        ("deaf", "execute", "a launch of execute: deaf on 'w' did not end within"),
        ("hang", "prepare", "making the pipelines of prepare: hang did not end within"),
        ("hang", "measure", "measuring measure: hang on 'w' did not end within"),
    ]
    runners = [make() for _ in hanging]
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
        call = executed if method == "execute" else _measure
        with pytest.raises(error, match=says):
            call(runner, made, "w")
        runner.release([made])
    assert runner.losses == losses + 1
    assert is_right(runner)
    assert runner.losses == losses + 1
    assert not psutil.pid_exists(first)
    assert runner.pid != first


def _measure(runner: WorkerRunner, made: Job, workload: str) -> Measurement:
    return runner.measure(made, workload, PLAN)


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


def test_each_of_several_jobs_has_its_own_time(make: Make) -> None:
    runner = make(prepare_seconds=0.3, deadlines=dataclasses.replace(SHORT, prepare_s=1.2))
    runner.prepare([job(step("scale", factor=float(n))) for n in range(5)])
    assert runner.losses == 0


def test_nobody_is_to_blame_for_a_worker_that_dies_while_idle(make: Make) -> None:
    runner = make()
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


def test_freeing_things_starts_no_worker(make: Make) -> None:
    runner = make()
    runner.load("w", operands(), outputs())
    runner.prepare([GOOD])
    kill_worker(runner)
    runner.release([GOOD])
    runner.unload("w")
    assert runner.messages == ()
    assert not runner._workers.latest.alive
    with pytest.raises(UnknownNameError, match="'w'"):
        run(runner, GOOD)


def test_what_is_unloaded_or_replaced_does_not_come_back(make: Make) -> None:
    runner = make()
    runner.load("w", operands(), outputs())
    runner.load("w", {"a": operands()["a"] + 2.0}, outputs())
    runner.load("v", operands(), outputs())
    runner.unload("v")
    kill_worker(runner)
    np.testing.assert_array_equal(run(runner, GOOD).outputs["o"], 3.0 * (operands()["a"] + 2.0))
    assert runner._workers.latest.loaded == {"w"}


def test_who_writes_out_of_bounds_costs_the_worker_but_no_one_else(make: Make) -> None:
    """What it wrote over is whatever lies there: operands of all that comes after it."""
    runner, bad = make(), culprit("out of bounds")
    runner.load("w", operands(), outputs())
    runner.prepare([bad])
    runner.prepare([GOOD])
    first = runner.pid
    assert executed(runner, bad).broken_guards == ("o",)
    np.testing.assert_array_equal(executed(runner, GOOD).outputs["o"], 3.0 * operands()["a"])
    assert runner.pid != first
    assert runner.losses == 0


def test_nothing_is_launched_behind_a_write_out_of_bounds(make: Make, tmp_path: Path) -> None:
    runner, bad = make(ledger=tmp_path / "calls"), culprit("out of bounds")
    runner.load("w", operands(), outputs())
    runner.prepare([GOOD, bad])
    taken = list(runner.execute([(GOOD, "w"), (bad, "w"), (GOOD, "w")]))
    assert [each.broken_guards for each in taken] == [(), ("o",)]
    assert [method for method, _ in Ledger.read(tmp_path / "calls")].count("e") == 2
    np.testing.assert_array_equal(executed(runner, GOOD).outputs["o"], 3.0 * operands()["a"])


def test_loads_that_lose_the_worker_are_made_again(make: Make, tmp_path: Path) -> None:
    fault = Fault(how="segfault", method="load", at=(0, 1))
    runner = make(fault, factory="toy", ledger=tmp_path / "ledger")
    runner.load("w", operands(), outputs())
    assert runner.losses == 2


def test_a_load_that_always_loses_the_worker_is_the_end(make: Make) -> None:
    runner = make(Fault(how="segfault", method="load"), factory="toy")
    with pytest.raises(NoWorkerError, match="loading workload 'w' lost the worker 3 times"):
        runner.load("w", operands(), outputs())


def test_a_device_that_does_not_come_back_is_said(make: Make, tmp_path: Path) -> None:
    runner = make(factory="toy", no_device_if=tmp_path / "gone")
    (tmp_path / "gone").touch()
    kill_worker(runner)
    with pytest.raises(NoWorkerError, match="no other one starts .Vulkan reports no device"):
        runner.prepare([GOOD])
    (tmp_path / "gone").unlink()
    with pytest.raises(NoWorkerError, match="no other one starts"):
        runner.prepare([GOOD])


def test_another_device_in_its_place_is_refused(make: Make, tmp_path: Path) -> None:
    runner = make(factory="toy", other_device_if=tmp_path / "other")
    (tmp_path / "other").touch()
    kill_worker(runner)
    with pytest.raises(NoWorkerError, match="answers in place of Toy GPU"):
        runner.prepare([GOOD])


def test_what_the_worker_says_is_bounded(runner: WorkerRunner) -> None:
    said = runner._workers.latest._said
    os.write(said, b"noise\n" * 400_000)
    run(runner, GOOD)
    assert os.fstat(said).st_size == 0
    os.write(said, b"a last word\n")
    with pytest.raises(WorkerDiedError, match="it last said: a last word$"):
        run(runner, culprit("exit"))


# --- several calls, one loss ----------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("how", "error"),
    [("segfault", WorkerDiedError), ("hang", RunTimeoutError), ("lost", DeviceLostError)],
)
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


@pytest.mark.parametrize(
    ("how", "error"),
    [("segfault", WorkerDiedError), ("hang", RunTimeoutError), ("lost", DeviceLostError)],
)
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
        lambda: [_measure(slow, GOOD, "w") for _ in range(4)],
    )
    slow.release([GOOD])
    assert type(results[0]) is RunTimeoutError
    assert [len(m.samples_ns) for m in results[1]] == [5] * 4
    assert slow.losses == losses + 1


def test_who_only_waits_for_a_worker_that_is_deaf_is_not_to_blame(
    make: Make, tmp_path: Path
) -> None:
    """A call stops the whole process; another one, begun a little later, is late first."""
    longer = dataclasses.replace(SHORT, prepare_s=6.0)
    prepare = make(ledger=tmp_path / "prepare", deadlines=longer)
    execute = make(ledger=tmp_path / "execute")
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


def test_a_release_that_crashes_is_nobodys_fault(make: Make, tmp_path: Path) -> None:
    """Neither that of the call beside it, nor of the variant whose pipelines were released."""
    calls, hold = tmp_path / "calls", tmp_path / "hold"
    runner, bad = make(ledger=calls, hold_if=hold), culprit("segfault", "release")
    runner.prepare([bad])
    hold.touch()
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(runner.prepare, [GOOD])
        Ledger.wait_for(calls, 2)
        runner.release([bad])
        hold.unlink()
        assert [type(each) for each in beside.result()] == [Prepared]
    assert runner.losses == 1


def test_pipelines_that_crash_do_not_keep_a_workload_from_being_loaded(make: Make) -> None:
    runner = make()
    bad = [culprit("segfault", "prepare", count=n) for n in range(1, 9)]
    calls = [functools.partial(runner.prepare, [each]) for each in bad]
    results = side_by_side(*calls, lambda: runner.load("w", operands(), outputs()))
    assert [type(each) for each in results] == [WorkerDiedError] * len(bad) + [type(None)]
    assert is_right(runner)


@pytest.mark.parametrize("kills", [1, 2, 3])
def test_a_process_that_is_killed_from_outside_costs_nobody_at_first(
    make: Make, tmp_path: Path, kills: int
) -> None:
    calls, hold = tmp_path / "calls", tmp_path / "hold"
    runner = make(deadlines=Deadlines(), ledger=calls, hold_if=hold)
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


def test_a_process_that_died_before_it_read_a_request_did_not_die_of_it(make: Make) -> None:
    runner = make()
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


def test_a_reply_counts_though_it_is_looked_at_late() -> None:
    """As by a process that was stopped meanwhile."""
    ours, theirs = (Channel(end) for end in socket.socketpair())
    with ours, theirs:
        theirs.send(Reply())
        assert ours.receive(Reply, deadline=time.monotonic() - 100.0) == (Reply(), None)
        with pytest.raises(TimeoutError):
            ours.receive(Reply, deadline=time.monotonic() - 100.0)


@pytest.mark.parametrize("read", [True, False])
def test_a_closed_channel_tells_whether_all_was_read(read: bool) -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    with ours:
        ours.send(Reply())
        if read:
            theirs.receive(Reply)
        theirs.close()
        with pytest.raises(ClosedError) as caught:
            ours.receive(Reply)
        assert caught.value.unread is not read
        with pytest.raises(ClosedError) as caught:
            ours.send(Reply())
        assert caught.value.unread


def test_a_release_is_for_the_worker_that_had_the_job_prepared(make: Make) -> None:
    runner = make()
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


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """All that this process says to its workers."""
    said: list[object] = []
    send = Channel.send

    def note(channel: Channel, message: object, **options: Any) -> None:
        said.append(message)
        send(channel, message, **options)

    monkeypatch.setattr(Channel, "send", note)
    return said


def test_a_trial_is_five_requests(make: Make, sent: list[object]) -> None:
    """However many cases validate it: each request waits for the worker to wake up."""
    trials = Evaluator(
        make(factory="toy"),
        ToyCompiler(),
        TOY,
        toy_problem(4, 4096),
        session=Session(plan=PLAN),
        render=toy_render,
    )
    trials.load()
    assert trials.run(TOY.baseline).state == "correct"
    sent.clear()
    assert trials.run(TOY.baseline).check.cases > 2  # type: ignore[union-attr]
    said = [type(message).__name__ for message in sent]
    assert said == ["Prepare", "Execute", "Execute", "Measure", "Release"]


def test_a_job_travels_once(make: Make, sent: list[object]) -> None:
    runner = make()
    runner.load("w", operands(), outputs())
    runner.prepare([GOOD])
    executed(runner, GOOD)
    runner.measure(GOOD, "w", PLAN)
    runner.release([GOOD])
    spirv = GOOD.passes[0].spirv
    assert [type(message).__name__ for message in sent if spirv in encode(message)] == ["Prepare"]
    with pytest.raises(UsageError, match="not prepared"):
        executed(runner, GOOD)


def test_a_job_keeps_its_number_until_nobody_uses_it() -> None:
    jobs, other = Jobs(), job(step("scale", factor=2.0))
    number = jobs.enter(GOOD)
    assert jobs.enter(GOOD) == number != jobs.enter(other)
    assert jobs.leave(number, 1) is jobs.find(number) is jobs.find(GOOD) is GOOD
    assert jobs.leave(number, 1) is GOOD
    with pytest.raises(KeyError):
        jobs.find(number)
    assert jobs.enter(GOOD) not in (number, jobs.enter(other))


def test_an_interrupt_in_a_call_gives_all_calls_up(make: Make, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    runner = make(deadlines=Deadlines(launch_s=600.0, prepare_s=600.0), ledger=calls)
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


def test_a_runner_that_does_not_close_is_killed(make: Make, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    runner = make(deadlines=Deadlines(launch_s=600.0, close_s=0.3), ledger=calls)
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


# --- the gate -------------------------------------------------------------------------------------


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
