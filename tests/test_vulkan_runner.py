"""The Vulkan runner beyond the contract: measuring, hangs, validation, leaks."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import psutil
import pytest

from tests.small_kernels import executed, job, operands, outputs, run, slow_step, spirv, step
from tuner.errors import OutOfMemoryError, RunTimeoutError, UsageError
from tuner.runner.protocol import JobPass, MeasurePlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.runner.vulkan import VulkanRunner

_CONSTANT = b"\xef\xbe\xad\xde"
QUICK = MeasurePlan(warmup_ms=1.0, min_samples=3, max_samples=5, budget_ms=1.0)


# --- measuring ------------------------------------------------------------------------------------


def test_samples_and_warm_up_rotate_over_the_copies_without_starting_over(
    loaded_runner: VulkanRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner.runner._launch import Launch

    order: list[int] = []
    real = Launch.record

    def record(self: Launch, commands: Any, copy: int) -> None:
        if self.copies == 3:  # and not the reference kernel's
            order.append(copy)
        real(self, commands, copy)

    monkeypatch.setattr(Launch, "record", record)
    scale = job(step("scale"))
    loaded_runner.prepare([scale])
    loaded_runner.measure(scale, "w", QUICK)
    loaded_runner.release([scale])
    assert len(order) > 6
    assert order == [n % 3 for n in range(len(order))]


def test_a_longer_launch_takes_longer(loaded_runner: VulkanRunner) -> None:
    plan = MeasurePlan(warmup_ms=2.0, min_samples=3, max_samples=5, budget_ms=5.0)
    medians = []
    for iterations in (500, 20_000):
        made = job(step("loop", count=512, factor=float(iterations)))
        loaded_runner.prepare([made])
        medians.append(float(np.median(loaded_runner.measure(made, "w", plan).samples_ns)))
        loaded_runner.release([made])
    assert medians[1] > 2.0 * medians[0]


def test_reads_are_clipped_to_what_the_device_can_bind(loaded_runner: VulkanRunner) -> None:
    from tuner.runner._bandwidth import GRANULE_BYTES, plan_reads

    small = msgspec.structs.replace(loaded_runner.info, max_storage_buffer_bytes=10 << 20)
    plan = plan_reads(small, 1 << 40, 1 << 30)
    assert 9 << 20 < plan.nbytes < 10 << 20
    assert plan.nbytes % GRANULE_BYTES == 0
    assert plan.copies * plan.nbytes >= (64 << 20 if small.is_cpu else 512 << 20)
    assert plan_reads(small, 1 << 40, 40 << 20).copies == 4
    with pytest.raises(OutOfMemoryError):
        plan_reads(small, 1 << 40, 1000)
    with pytest.raises(UsageError, match="at least"):
        plan_reads(small, 100, 1 << 30)


def test_what_an_earlier_runner_found_on_the_device_is_not_probed_again(
    loaded_runner: VulkanRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tuner.device_info import Fragment, MatrixLayout, MatrixShape
    from tuner.runner import matrix_probe

    def layout(m: int) -> MatrixLayout:
        part = Fragment(lane_row=(0,), lane_column=(0,), element_row=(0,), element_column=(0,))
        types = dict.fromkeys(("a_type", "b_type", "c_type", "result_type"), "float16")
        return MatrixLayout(shape=MatrixShape(m=m, n=8, k=8, **types), a=part, b=part, c=part)

    def probes(m: int) -> None:
        monkeypatch.setattr(matrix_probe, "probe_layouts", lambda *_: (layout(m),))

    probes(1)
    plain = msgspec.structs.replace(loaded_runner.info, cooperative_matrix=False)
    able = msgspec.structs.replace(plain, cooperative_matrix=True, matrix_layouts=())
    known = msgspec.structs.replace(able, matrix_layouts=(layout(2),))
    other = msgspec.structs.replace(known, driver_info="another")
    monkeypatch.setattr(loaded_runner._device, "info", plain)
    assert loaded_runner._probed(known, None) is plain
    monkeypatch.setattr(loaded_runner._device, "info", able)
    found = [loaded_runner._probed(each, None).matrix_layouts for each in (None, known, other)]
    assert found == [(layout(1),), (layout(2),), (layout(1),)]

    def kept() -> tuple[MatrixLayout, ...]:
        return loaded_runner._probed(None, tmp_path).matrix_layouts

    assert kept() == (layout(1),)
    probes(3)
    assert kept() == (layout(1),), "the file of the process before answers"
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:-1], whole.replace(b'"m":1', b'"m":5')):
        file.write_bytes(damaged)
        assert kept() == (layout(3),)
    monkeypatch.setattr(matrix_probe, "SLOTS", 32)
    probes(4)
    assert kept() == (layout(4),), "another probe asks anew"


# --- hangs, validation, teardown ------------------------------------------------------------------


def test_work_that_outlasts_its_deadline_is_reported_and_survived(
    open_runner: Callable[..., VulkanRunner],
) -> None:
    runner = open_runner(timeout_s=0.02)
    runner.load("w", operands(), outputs())
    slow, scale = job(slow_step(runner.info)), job(step("scale"))
    runner.prepare([slow])
    runner.prepare([scale])
    with pytest.raises(RunTimeoutError, match="one launch did not end"):
        executed(runner, slow)
    runner.release([slow])
    runner.unload("w")
    deadline = time.monotonic() + 60.0
    output = None
    while output is None:
        assert time.monotonic() < deadline
        with contextlib.suppress(RunTimeoutError):
            runner.load("again", operands(), outputs())
            output = executed(runner, scale, "again").outputs["o"]
    np.testing.assert_array_equal(output, 2.0 * operands()["a"])


def test_memory_that_an_upload_may_still_write_is_not_given_back(
    loaded_runner: VulkanRunner,
) -> None:
    upload = loaded_runner._staging._slots[1].commands
    workload = loaded_runner._workloads["w"]
    upload.busy = True
    loaded_runner.unload("w")
    kept = workload.copies
    upload._idle()
    assert kept
    assert not workload.copies


def test_closing_does_not_wait_for_a_device_that_hangs(
    open_runner: Callable[..., VulkanRunner],
) -> None:
    runner = open_runner(timeout_s=0.02)
    runner.load("w", operands(), outputs())
    slow = job(slow_step(runner.info))
    runner.prepare([slow])
    before = set(threading.enumerate())
    with pytest.raises(RunTimeoutError):
        executed(runner, slow)
    runner.close()
    (late,) = set(threading.enumerate()) - before
    late.join(60.0)
    assert not late.is_alive()


def test_a_missing_barrier_is_heard_of(
    open_runner: Callable[..., VulkanRunner], validation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not validation:
        pytest.skip("the validation layer is not installed")
    from tuner.runner import _launch

    class NoBarrier:
        @staticmethod
        def record(commands: object) -> None:
            """Record nothing."""

    monkeypatch.setattr(_launch, "COMPUTE_TO_COMPUTE", NoBarrier)
    runner = open_runner()
    runner.load("w", operands(), outputs())
    run(runner, job(step("stage"), step("finish")))
    assert any("SYNC-HAZARD" in message for message in runner.messages)
    runner.messages.clear()


def test_a_thousand_variants_leave_no_memory_behind(loaded_runner: VulkanRunner) -> None:
    process = psutil.Process()

    def variants(first: int, count: int) -> int:
        for number in range(first, first + count):
            output = run(loaded_runner, job(_numbered(number))).outputs["o"]
            assert output.view(np.uint32)[0] == number
        gc.collect()
        return int(process.memory_info().rss)

    warm = variants(0, 200)
    grown = variants(200, 800) - warm
    assert loaded_runner._pipelines._ready == {}
    assert len(loaded_runner._pipelines.programs) == 0
    assert grown < 8 << 20


def _numbered(number: int) -> JobPass:
    """A kernel of its own for each number, which takes the place of a constant in the SPIR-V."""
    numbered = _constant_kernel().replace(_CONSTANT, number.to_bytes(4, "little"))
    return JobPass(name="numbered", spirv=numbered, push=b"", groups=(1, 1, 1))


@functools.cache
def _constant_kernel() -> bytes:
    source = f"""#version 460
    layout(local_size_x = 64) in;
    layout(set = 0, binding = 2, std430) buffer O {{ uint o[]; }};
    void main() {{ o[gl_LocalInvocationID.x] = {int.from_bytes(_CONSTANT, "little")}u; }}
    """
    code = spirv(source)
    assert code.count(_CONSTANT) == 1
    return code
