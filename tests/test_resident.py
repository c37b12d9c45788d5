"""What lies on the device: guards, poison, operands in copies, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from tests.small_kernels import COUNT, copying, executed, job, operands, outputs, run, step
from tuner.errors import OutOfMemoryError, UsageError
from tuner.runner.protocol import MeasurePlan, OutputSpec

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner


# --- guards and poison ----------------------------------------------------------------------------


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
    loaded_runner: VulkanRunner, kernels: tuple[str, ...], count: int, broken: tuple[str, ...]
) -> None:
    made = job(*(step(name, count=count) for name in kernels))
    assert run(loaded_runner, made).broken_guards == broken


def test_guards_are_whole_again_at_the_next_launch(loaded_runner: VulkanRunner) -> None:
    assert run(loaded_runner, job(step("scale", count=COUNT + 5))).broken_guards == ("o",)
    assert run(loaded_runner, job(step("scale"))).broken_guards == ()


def test_counters_are_zero_before_a_launch_and_must_be_after_it(
    loaded_runner: VulkanRunner,
) -> None:
    run(loaded_runner, job(step("stage")))  # leaves other numbers where the counter will be
    clean = run(loaded_runner, job(step("tally", factor=0.0), counters=("t",)))
    np.testing.assert_array_equal(clean.outputs["o"], operands()["a"])
    assert (clean.broken_guards, clean.dirty_counters) == ((), ())
    assert run(loaded_runner, job(step("tally"), counters=("t",))).dirty_counters == ("t",)
    assert run(loaded_runner, job(step("tally"))).dirty_counters == ()


def test_state_is_what_was_loaded_before_every_execution(loaded_runner: VulkanRunner) -> None:
    before = {"o": np.full(COUNT, 7.0, np.float32)}
    made = job(step("accumulate"))
    loaded_runner.load("state", operands() | before, outputs(), copies=3)
    loaded_runner.prepare([made])
    wanted = 7.0 + 2.0 * operands()["a"]
    np.testing.assert_array_equal(executed(loaded_runner, made, "state").outputs["o"], wanted)
    plan = MeasurePlan(warmup_ms=0.0, min_samples=7, max_samples=7, settle_ms=0.0)
    assert len(loaded_runner.measure(made, "state", plan).samples_ns) == 7
    again = executed(loaded_runner, made, "state")
    np.testing.assert_array_equal(again.outputs["o"], wanted)
    assert again.broken_guards == ()
    loaded_runner.release([made])
    loaded_runner.unload("state")


def test_state_must_keep_its_size(loaded_runner: VulkanRunner) -> None:
    with pytest.raises(UsageError, match=r"o has 400 bytes going in and 4000 coming out"):
        loaded_runner.load("state", operands() | {"o": np.zeros(100, np.float32)}, outputs())


def test_a_write_into_the_padding_of_an_odd_sized_output_is_seen(
    loaded_runner: VulkanRunner,
) -> None:
    loaded_runner.load("odd", operands(), {"o": OutputSpec(shape=(4 * COUNT - 1,), dtype="uint8")})
    execution = run(loaded_runner, job(step("scale")), "odd")
    loaded_runner.unload("odd")
    assert execution.broken_guards == ("o",)
    assert execution.outputs["o"].nbytes == 4 * COUNT - 1


def test_scratch_is_poisoned_whatever_ran_before(loaded_runner: VulkanRunner) -> None:
    run(loaded_runner, job(step("stage")))
    revealed = run(loaded_runner, job(step("reveal"))).outputs["o"].view(np.uint32)
    assert (revealed == 0xFFFFFFFF).all()


def test_what_lies_behind_an_input_is_nan(loaded_runner: VulkanRunner) -> None:
    loaded_runner.load("longer", operands(), outputs(COUNT + 1))
    output = run(loaded_runner, job(step("scale", count=COUNT + 1)), "longer").outputs["o"]
    loaded_runner.unload("longer")
    assert np.isnan(output[COUNT])


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("word", [0, -1])
@pytest.mark.parametrize("name", ["a", "t", "o"])
def test_every_guard_word_on_both_sides_is_checked(
    loaded_runner: VulkanRunner, name: str, side: int, word: int
) -> None:
    """A stand-in for a launch writes one word of a guard: no kernel can do that safely."""
    from tuner import _vk
    from tuner.runner._commands import TRANSFER_TO_TRANSFER
    from tuner.runner._execution import run_checked

    scale = job(step("scale"))
    loaded_runner.prepare([scale])
    launch, (buffers,) = loaded_runner._launch(scale, loaded_runner._workloads["w"].copies[:1])

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
        staging=loaded_runner._staging,
        commands=loaded_runner._commands,
    )
    launch.close()
    loaded_runner.release([scale])
    assert execution.broken_guards == (name,)


# --- operands -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float16", "uint32", "float32", "int64"])
def test_bytes_arrive_as_they_are(loaded_runner: VulkanRunner, dtype: str) -> None:
    random = np.random.default_rng(1)
    array = random.integers(0, 256, 8 * 33, np.uint8).view(dtype).reshape(3, -1)
    loaded_runner.load("bytes", {"a": array}, {"o": OutputSpec(shape=array.shape, dtype=dtype)})
    copied = run(loaded_runner, copying(array.nbytes // 4), "bytes").outputs["o"]
    loaded_runner.unload("bytes")
    np.testing.assert_array_equal(copied.view(np.uint8), array.view(np.uint8))


def test_strided_and_empty_inputs_are_taken(loaded_runner: VulkanRunner) -> None:
    array = np.arange(2000, dtype=np.uint32)[::2]
    inputs = {"a": array, "nothing": np.zeros((0, 4), np.float32)}
    loaded_runner.load("strided", inputs, {"o": OutputSpec(shape=(1000,), dtype="uint32")})
    copied = run(loaded_runner, copying(1000), "strided").outputs["o"]
    loaded_runner.unload("strided")
    np.testing.assert_array_equal(copied, array)


def test_operands_larger_than_the_staging_ring_survive_the_round_trip(
    loaded_runner: VulkanRunner,
) -> None:
    words = (80 << 20) // 4 + 1
    array = np.random.default_rng(2).integers(0, 2**32, words, np.uint32)
    loaded_runner.load("big", {"a": array}, {"o": OutputSpec(shape=(words,), dtype="uint32")})
    copied = run(loaded_runner, copying(words), "big").outputs["o"]
    loaded_runner.unload("big")
    np.testing.assert_array_equal(copied, array)


def test_each_copy_has_the_operands_at_addresses_of_its_own(loaded_runner: VulkanRunner) -> None:
    from tuner import _vk
    from tuner.runner._commands import COMPUTE_TO_TRANSFER

    scale = job(step("scale"))
    loaded_runner.prepare([scale])
    resident = loaded_runner._workloads["w"]
    handles = {_vk.ffi.cast("uintptr_t", copy["a"].buffer) for copy in resident.copies}
    assert len(set(map(int, handles))) == 3
    launch, copies = loaded_runner._launch(scale, resident.copies)
    for copy, buffers in enumerate(copies):

        def record(recording: Any, copy: int = copy) -> None:
            launch.record(recording, copy)
            COMPUTE_TO_TRANSFER.record(recording)

        (read,) = loaded_runner._staging.read(
            loaded_runner._commands, "", record, [buffers["o"].contents]
        )
        np.testing.assert_array_equal(read.view(np.float32), 2.0 * operands()["a"])
    launch.close()
    loaded_runner.release([scale])


# --- memory ---------------------------------------------------------------------------------------


def test_a_buffer_that_no_kernel_could_bind_is_refused(loaded_runner: VulkanRunner) -> None:
    limit = loaded_runner.info.max_storage_buffer_bytes
    huge = {"o": OutputSpec(shape=(limit + 1,), dtype="uint8")}
    with pytest.raises(OutOfMemoryError, match="buffer 'o'.*a single storage buffer") as caught:
        loaded_runner.load("huge", operands(), huge)
    assert caught.value.available_bytes == limit
    scale = job(step("scale"), scratch=limit // 4 + 1)
    loaded_runner.prepare([scale])
    with pytest.raises(OutOfMemoryError, match="buffer 't'"):
        executed(loaded_runner, scale)
    loaded_runner.release([scale])


def test_scratch_grows_from_job_to_job(loaded_runner: VulkanRunner) -> None:
    for elements in (10, 100_000, 5_000, 300_000):
        made = job(step("stage", count=10), step("finish", count=10), scratch=elements)
        execution = run(loaded_runner, made)
        assert execution.broken_guards == ()
        np.testing.assert_array_equal(execution.outputs["o"][:10], np.arange(19, 0, -2.0))


def test_what_the_driver_refuses_after_all_leaves_nothing_behind(
    loaded_runner: VulkanRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner import _vk

    class Exhausted:
        def vkAllocateMemory(self, *_: object) -> int:  # noqa: N802 - Vulkan's name
            return -2

        def __getattr__(self, name: str) -> Any:
            return getattr(_vk.binding.lib, name)

    before = loaded_runner._memory.available_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(_vk, "lib", Exhausted())
        with pytest.raises(OutOfMemoryError, match="workload 'refused'"):
            loaded_runner.load("refused", operands(), outputs())
    if not loaded_runner.info.memory_budget:
        assert loaded_runner._memory.available_bytes() == before
    with pytest.raises(UsageError):
        run(loaded_runner, job(step("scale")), "refused")


def test_buffers_are_spread_over_allocations_where_one_is_too_small(
    loaded_runner: VulkanRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = msgspec.structs.replace(loaded_runner.info, max_allocation_bytes=1 << 20)
    monkeypatch.setattr(loaded_runner._device, "info", small)
    array = np.arange(50_000, dtype=np.uint32)
    spec = OutputSpec(shape=array.shape, dtype="uint32")
    loaded_runner.load("spread", {"a": array}, {"o": spec}, copies=4)
    assert len(loaded_runner._workloads["spread"]._arena.allocations) == 2
    copied = run(loaded_runner, copying(50_000), "spread").outputs["o"]
    loaded_runner.unload("spread")
    np.testing.assert_array_equal(copied, array)
