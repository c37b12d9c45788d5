"""The Vulkan runner beyond the contract: guards, staging, memory, clocks, hangs, leaks."""

from __future__ import annotations

import contextlib
import gc
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import psutil
import pytest

from tests.small_kernels import COUNT, job, kernel, operands, outputs, slow_step, spirv, step
from tuner.errors import OutOfMemoryError, RunTimeoutError, UsageError
from tuner.runner.protocol import Job, JobPass, MeasurePlan, OutputSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tuner.runner.vulkan import VulkanRunner

QUICK = MeasurePlan(warmup_ms=1.0, min_samples=3, max_samples=5, budget_ms=1.0)
COPY = """#version 460
layout(local_size_x = 64) in;
layout(push_constant) uniform Push { uint words; uint row; } push;
layout(set = 0, binding = 0, std430) readonly buffer A { uint a[]; };
layout(set = 0, binding = 1, std430) buffer O { uint o[]; };
void main() {
    uint i = gl_GlobalInvocationID.y * push.row + gl_GlobalInvocationID.x;
    if (i < push.words) { o[i] = a[i]; }
}
"""


@pytest.fixture
def runner(vulkan_runner: VulkanRunner) -> Iterator[VulkanRunner]:
    """The shared runner with the workload "w" of 1000 elements loaded."""
    vulkan_runner.load("w", operands(), outputs(), copies=3)
    yield vulkan_runner
    vulkan_runner.unload("w")


def copying(words: int) -> Job:
    rows = -(-words // 65536)
    push = struct.pack("<2I", words, 65536)
    copy = JobPass(name="copy", spirv=spirv(COPY), push=push, groups=(1024, rows, 1))
    return Job(passes=(copy,), bindings=("a", "o"), scratch_bytes={})


def run(runner: VulkanRunner, made: Job, workload: str = "w") -> Any:
    runner.prepare(made)
    try:
        return runner.execute(made, workload)
    finally:
        runner.release(made)


# --- guards and poison -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernels", "count", "broken"),
    [
        (("scale",), COUNT + 1, ("o",)),
        (("stage",), COUNT + 1, ("t",)),
        (("stage", "finish"), COUNT + 1, ("o", "t")),
        (("scale",), COUNT, ()),
    ],
)
def test_a_write_outside_a_buffer_breaks_its_guard(
    runner: VulkanRunner, kernels: tuple[str, ...], count: int, broken: tuple[str, ...]
) -> None:
    made = job(*(step(name, count=count) for name in kernels))
    assert run(runner, made).broken_guards == broken


def test_guards_are_whole_again_at_the_next_launch(runner: VulkanRunner) -> None:
    assert run(runner, job(step("scale", count=COUNT + 5))).broken_guards == ("o",)
    assert run(runner, job(step("scale"))).broken_guards == ()


def test_a_write_into_the_padding_of_an_odd_sized_output_is_seen(runner: VulkanRunner) -> None:
    runner.load("odd", operands(), {"o": OutputSpec(shape=(4 * COUNT - 1,), dtype="uint8")})
    execution = run(runner, job(step("scale")), "odd")
    runner.unload("odd")
    assert execution.broken_guards == ("o",)
    assert execution.outputs["o"].nbytes == 4 * COUNT - 1


def test_scratch_is_poisoned_whatever_ran_before(runner: VulkanRunner) -> None:
    run(runner, job(step("stage")))
    revealed = run(runner, job(step("reveal"))).outputs["o"].view(np.uint32)
    assert (revealed == 0xFFFFFFFF).all()


def test_what_lies_behind_an_input_is_nan(runner: VulkanRunner) -> None:
    runner.load("longer", operands(), outputs(COUNT + 1))
    output = run(runner, job(step("scale", count=COUNT + 1)), "longer").outputs["o"]
    runner.unload("longer")
    assert np.isnan(output[COUNT])


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("word", [0, -1])
@pytest.mark.parametrize("name", ["a", "t", "o"])
def test_every_guard_word_on_both_sides_is_checked(
    runner: VulkanRunner, name: str, side: int, word: int
) -> None:
    """A stand-in for a launch writes one word of a guard: no kernel can do that safely."""
    from tuner import _vk
    from tuner.runner._commands import TRANSFER_TO_TRANSFER
    from tuner.runner._execution import run_checked

    scale = job(step("scale"))
    runner.prepare(scale)
    launch, (buffers,) = runner._launch(scale, runner._workloads["w"].copies[:1])

    class Vandal:
        @staticmethod
        def record(recording: Any, _copy: int) -> None:
            buffer, offset, nbytes = buffers[name].guards[side]
            TRANSFER_TO_TRANSFER.record(recording)
            _vk.lib.vkCmdFillBuffer(recording, buffer, offset + 4 * word % nbytes, 4, 7)
            TRANSFER_TO_TRANSFER.record(recording)

    execution = run_checked(
        Vandal(),  # type: ignore[arg-type]
        buffers,
        outputs(),
        staging=runner._staging,
        commands=runner._commands,
    )
    launch.close()
    runner.release(scale)
    assert execution.broken_guards == (name,)


# --- operands ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float16", "uint32", "float32", "int64"])
def test_bytes_arrive_as_they_are(runner: VulkanRunner, dtype: str) -> None:
    random = np.random.default_rng(1)
    array = random.integers(0, 256, 8 * 33, np.uint8).view(dtype).reshape(3, -1)
    runner.load("bytes", {"a": array}, {"o": OutputSpec(shape=array.shape, dtype=dtype)})
    copied = run(runner, copying(array.nbytes // 4), "bytes").outputs["o"]
    runner.unload("bytes")
    np.testing.assert_array_equal(copied.view(np.uint8), array.view(np.uint8))


def test_strided_and_empty_inputs_are_taken(runner: VulkanRunner) -> None:
    array = np.arange(2000, dtype=np.uint32)[::2]
    inputs = {"a": array, "nothing": np.zeros((0, 4), np.float32)}
    runner.load("strided", inputs, {"o": OutputSpec(shape=(1000,), dtype="uint32")})
    copied = run(runner, copying(1000), "strided").outputs["o"]
    runner.unload("strided")
    np.testing.assert_array_equal(copied, array)


def test_operands_larger_than_the_staging_ring_survive_the_round_trip(
    runner: VulkanRunner,
) -> None:
    words = (80 << 20) // 4 + 1
    array = np.random.default_rng(2).integers(0, 2**32, words, np.uint32)
    runner.load("big", {"a": array}, {"o": OutputSpec(shape=(words,), dtype="uint32")})
    copied = run(runner, copying(words), "big").outputs["o"]
    runner.unload("big")
    np.testing.assert_array_equal(copied, array)


def test_each_copy_has_the_operands_at_addresses_of_its_own(runner: VulkanRunner) -> None:
    from tuner import _vk
    from tuner.runner._commands import COMPUTE_TO_TRANSFER

    scale = job(step("scale"))
    runner.prepare(scale)
    resident = runner._workloads["w"]
    handles = {_vk.ffi.cast("uintptr_t", copy["a"].buffer) for copy in resident.copies}
    assert len(set(map(int, handles))) == 3
    launch, copies = runner._launch(scale, resident.copies)
    for copy, buffers in enumerate(copies):

        def record(recording: Any, copy: int = copy) -> None:
            launch.record(recording, copy)
            COMPUTE_TO_TRANSFER.record(recording)

        (read,) = runner._staging.read(runner._commands, "", record, [buffers["o"].contents])
        np.testing.assert_array_equal(read.view(np.float32), 2.0 * operands()["a"])
    launch.close()
    runner.release(scale)


# --- jobs the device cannot take ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"subgroup_size": 4096}, "subgroup size 4096, the device offers"),
        ({"groups": (1, 2**31 + 1, 1)}, "workgroups, the device takes"),
    ],
)
def test_what_breaks_a_limit_is_refused_with_the_limit(
    runner: VulkanRunner, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        runner.prepare(job(step("scale", **fields)))


@pytest.mark.parametrize("code", [b"", b"not SPIR-V at all!!", b"\x03\x02\x23\x07x"])
def test_bytes_that_are_no_spirv_never_reach_the_driver(runner: VulkanRunner, code: bytes) -> None:
    made = JobPass(name="junk", spirv=code, push=b"", groups=(1, 1, 1))
    with pytest.raises(UsageError, match="no SPIR-V"):
        runner.prepare(Job(passes=(made,), bindings=("a",), scratch_bytes={}))


def test_a_binding_without_a_buffer_is_named(runner: VulkanRunner) -> None:
    made = msgspec.structs.replace(job(step("scale")), bindings=("a", "t", "elsewhere"))
    runner.prepare(made)
    with pytest.raises(UsageError, match="'elsewhere'"):
        runner.execute(made, "w")
    runner.release(made)


def test_a_required_subgroup_size_reaches_the_kernel(runner: VulkanRunner) -> None:
    if not runner.info.subgroup_size_control:
        pytest.skip("this device has no control over the subgroup size")
    source = """#version 460
    #extension GL_KHR_shader_subgroup_basic : require
    layout(local_size_x = 64) in;
    layout(set = 0, binding = 0, std430) buffer O { uint o[]; };
    void main() { o[gl_GlobalInvocationID.x] = gl_SubgroupSize; }
    """
    runner.load("sizes", {}, {"o": OutputSpec(shape=(64,), dtype="uint32")})
    for size in {runner.info.min_subgroup_size, runner.info.max_subgroup_size}:
        asking = JobPass(
            name="ask", spirv=spirv(source), push=b"", groups=(1, 1, 1), subgroup_size=size
        )
        made = Job(passes=(asking,), bindings=("o",), scratch_bytes={})
        assert (run(runner, made, "sizes").outputs["o"] == size).all()
    runner.unload("sizes")


def test_the_width_of_a_workgroup_is_read_from_spirv() -> None:
    from tuner.runner._pipelines import local_size_x

    assert local_size_x(kernel("scale")) == 64
    assert local_size_x(kernel("scale")[:20]) == 1


def test_the_drivers_statistics_are_kept(runner: VulkanRunner) -> None:
    if not runner.info.pipeline_executable_properties:
        pytest.skip("this driver has no statistics")
    scale = job(step("scale"))
    (statistics,) = runner.prepare(scale).statistics
    runner.release(scale)
    assert statistics.name == "scale"
    assert statistics.statistics


# --- memory ------------------------------------------------------------------------------------


def test_a_buffer_that_no_kernel_could_bind_is_refused(runner: VulkanRunner) -> None:
    limit = runner.info.max_storage_buffer_bytes
    huge = {"o": OutputSpec(shape=(limit + 1,), dtype="uint8")}
    with pytest.raises(OutOfMemoryError, match="buffer 'o'") as caught:
        runner.load("huge", operands(), huge)
    assert caught.value.available_bytes == limit
    scale = job(step("scale"), scratch=limit // 4 + 1)
    runner.prepare(scale)
    with pytest.raises(OutOfMemoryError, match="buffer 't'"):
        runner.execute(scale, "w")
    runner.release(scale)


def test_scratch_grows_from_job_to_job(runner: VulkanRunner) -> None:
    for elements in (10, 100_000, 5_000, 300_000):
        made = job(step("stage", count=10), step("finish", count=10), scratch=elements)
        execution = run(runner, made)
        assert execution.broken_guards == ()
        np.testing.assert_array_equal(execution.outputs["o"][:10], np.arange(19, 0, -2.0))


def test_what_the_driver_refuses_after_all_leaves_nothing_behind(
    runner: VulkanRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner import _vk

    class Exhausted:
        def vkAllocateMemory(self, *_: object) -> int:  # noqa: N802 - Vulkan's name
            return -2

        def __getattr__(self, name: str) -> Any:
            return getattr(_vk.binding.lib, name)

    before = runner._memory.available_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(_vk, "lib", Exhausted())
        with pytest.raises(OutOfMemoryError, match="workload 'refused'"):
            runner.load("refused", operands(), outputs())
    if not runner.info.memory_budget:
        assert runner._memory.available_bytes() == before
    with pytest.raises(UsageError):
        run(runner, job(step("scale")), "refused")


def test_buffers_are_spread_over_allocations_where_one_is_too_small(
    runner: VulkanRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = msgspec.structs.replace(runner.info, max_allocation_bytes=1 << 20)
    monkeypatch.setattr(runner._device, "info", small)
    array = np.arange(50_000, dtype=np.uint32)
    spec = OutputSpec(shape=array.shape, dtype="uint32")
    runner.load("spread", {"a": array}, {"o": spec}, copies=4)
    assert len(runner._workloads["spread"]._arena.allocations) == 2
    copied = run(runner, copying(50_000), "spread").outputs["o"]
    runner.unload("spread")
    np.testing.assert_array_equal(copied, array)


# --- measuring ---------------------------------------------------------------------------------


def test_samples_and_warm_up_rotate_over_the_copies_without_starting_over(
    runner: VulkanRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner.runner._launch import Launch

    order: list[int] = []
    real = Launch.record

    def record(self: Launch, commands: Any, copy: int) -> None:
        order.append(copy)
        real(self, commands, copy)

    monkeypatch.setattr(Launch, "record", record)
    scale = job(step("scale"))
    runner.prepare(scale)
    runner.measure(scale, "w", QUICK)
    runner.release(scale)
    assert len(order) > 6
    assert order == [n % 3 for n in range(len(order))]


def test_a_launch_twice_as_long_takes_longer(runner: VulkanRunner) -> None:
    medians = []
    for groups in (40, 400):
        made = job(_looping(groups))
        runner.prepare(made)
        plan = MeasurePlan(warmup_ms=2.0, min_samples=3, max_samples=5, budget_ms=5.0)
        medians.append(float(np.median(runner.measure(made, "w", plan).samples_ns)))
        runner.release(made)
    assert medians[1] > 2.0 * medians[0]


def _looping(groups: int) -> JobPass:
    source = """#version 460
    layout(local_size_x = 64) in;
    layout(set = 0, binding = 2, std430) buffer O { uint o[]; };
    void main() {
        uint x = gl_LocalInvocationID.x;
        for (uint j = 0u; j < 1000u; j++) { x = x * 1664525u + 1013904223u; }
        o[gl_LocalInvocationID.x] = x;
    }
    """
    return JobPass(name="loop", spirv=spirv(source), push=b"", groups=(groups, 1, 1))


def test_without_timestamps_the_hosts_clock_is_read(
    runner: VulkanRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    blind = msgspec.structs.replace(runner.info, timestamp_valid_bits=0)
    monkeypatch.setattr(runner._device, "info", blind)
    scale = job(step("scale"))
    runner.prepare(scale)
    measurement = runner.measure(scale, "w", QUICK)
    runner.release(scale)
    assert measurement.clock == "host"
    assert len(measurement.samples_ns) >= 3
    assert min(measurement.samples_ns) >= 1.0


def test_reads_are_clipped_to_what_the_device_can_bind(runner: VulkanRunner) -> None:
    from tuner.runner._bandwidth import GRANULE_BYTES, plan_reads

    small = msgspec.structs.replace(runner.info, max_storage_buffer_bytes=10 << 20)
    plan = plan_reads(small, 1 << 40, 1 << 30)
    assert 9 << 20 < plan.nbytes < 10 << 20
    assert plan.nbytes % GRANULE_BYTES == 0
    assert plan.copies * plan.nbytes >= (64 << 20 if small.is_cpu else 512 << 20)
    assert plan_reads(small, 1 << 40, 40 << 20).copies == 4
    with pytest.raises(OutOfMemoryError):
        plan_reads(small, 1 << 40, 1000)
    with pytest.raises(UsageError, match="at least"):
        plan_reads(small, 100, 1 << 30)


# --- hangs, validation, teardown ---------------------------------------------------------------


def test_work_that_outlasts_its_deadline_is_reported_and_survived(
    open_runner: Callable[..., VulkanRunner],
) -> None:
    runner = open_runner(timeout_s=0.02)
    runner.load("w", operands(), outputs())
    slow, scale = job(slow_step()), job(step("scale"))
    runner.prepare(slow)
    runner.prepare(scale)
    with pytest.raises(RunTimeoutError, match="one launch did not end"):
        runner.execute(slow, "w")
    runner.release(slow)
    runner.unload("w")
    deadline = time.monotonic() + 60.0
    output = None
    while output is None:
        assert time.monotonic() < deadline
        with contextlib.suppress(RunTimeoutError):
            runner.load("again", operands(), outputs())
            output = runner.execute(scale, "again").outputs["o"]
    np.testing.assert_array_equal(output, 2.0 * operands()["a"])


def test_closing_does_not_wait_for_a_device_that_hangs(
    open_runner: Callable[..., VulkanRunner],
) -> None:
    runner = open_runner(timeout_s=0.02)
    runner.load("w", operands(), outputs())
    slow = job(slow_step())
    runner.prepare(slow)
    before = set(threading.enumerate())
    with pytest.raises(RunTimeoutError):
        runner.execute(slow, "w")
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


def test_pipelines_are_kept_for_the_next_process(
    open_runner: Callable[..., VulkanRunner], tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    for _ in range(2):
        runner = open_runner(cache_dir=folder)
        runner.load("w", operands(), outputs())
        output = run(runner, job(step("scale"))).outputs["o"]
        np.testing.assert_array_equal(output, 2.0 * operands()["a"])
        runner.close()
        (kept,) = folder.iterdir()
        assert kept.stat().st_size > 16


def test_a_damaged_or_unwritable_cache_does_no_harm(
    open_runner: Callable[..., VulkanRunner], tmp_path: Path
) -> None:
    open_runner(cache_dir=tmp_path).close()
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:20] + b"junk")
    runner = open_runner(cache_dir=tmp_path)
    runner.prepare(job(step("scale")))
    runner.close()
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")
    open_runner(cache_dir=blocked).close()


@pytest.mark.slow
def test_a_thousand_variants_leave_no_memory_behind(runner: VulkanRunner) -> None:
    process = psutil.Process()

    def variants(first: int, count: int) -> int:
        for number in range(first, first + count):
            output = run(runner, job(_numbered(number))).outputs["o"]
            assert output.view(np.uint32)[0] == number
        gc.collect()
        return int(process.memory_info().rss)

    warm = variants(0, 200)
    grown = variants(200, 800) - warm
    assert runner._pipelines._ready == {}
    assert grown < 8 << 20


def _numbered(number: int) -> JobPass:
    source = f"""#version 460
    layout(local_size_x = 64) in;
    layout(set = 0, binding = 2, std430) buffer O {{ uint o[]; }};
    void main() {{ o[gl_LocalInvocationID.x] = {number}u; }}
    """
    return JobPass(name="numbered", spirv=spirv(source), push=b"", groups=(1, 1, 1))
