"""What goes between a runner and its worker: errors, arrays, jobs, and how few messages."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.small_kernels import executed, job, operands, outputs, run, step
from tests.small_workers import GOOD, PLAN, Start
from tests.toy_family import TOY, ToyCompiler, toy_problem, toy_render
from tuner.errors import (
    DeviceLostError,
    OutOfMemoryError,
    RunTimeoutError,
    TunerError,
    UnknownNameError,
    UsageError,
    VulkanError,
)
from tuner.evaluate import Evaluator, Session
from tuner.runner._worker_arrays import INLINE_BYTES, pack, unpack
from tuner.runner._worker_channel import Channel, ClosedError
from tuner.runner._worker_jobs import Jobs
from tuner.runner._worker_messages import Raised, Reply, encode, raised, raised_error
from tuner.runner.protocol import OutputSpec


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


def test_operands_and_outputs_beyond_a_message_go_through_shared_memory(start_small: Start) -> None:
    count = 3 * INLINE_BYTES
    runner = start_small(factory="toy")
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


def test_a_trial_is_five_requests(start_small: Start, sent: list[object]) -> None:
    """However many cases validate it: each request waits for the worker to wake up."""
    trials = Evaluator(
        start_small(factory="toy"),
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


def test_a_job_travels_once(start_small: Start, sent: list[object]) -> None:
    runner = start_small()
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
