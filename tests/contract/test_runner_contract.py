"""What every `Runner` must do, whatever it runs on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from tests.fault_stub import worker
from tests.small_kernels import COUNT, emulate, executed, job, operands, outputs, step
from tests.toy_family import toy_device
from tuner.device_info import DeviceInfo
from tuner.errors import OutOfMemoryError, UsageError
from tuner.records import Transfer
from tuner.runner.fake import FakeRunner
from tuner.runner.protocol import MeasurePlan, OutputSpec, Runner
from tuner.runner.worker import WorkerRunner

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

KINDS = [
    "fake",
    "fake_worker",
    pytest.param("vulkan_runner", marks=pytest.mark.vulkan),
    pytest.param("vulkan_worker", marks=pytest.mark.vulkan),
]
QUICK = MeasurePlan(warmup_ms=1.0, min_samples=3, max_samples=8, budget_ms=5.0)


def fake() -> FakeRunner:
    return FakeRunner(toy_device(), outputs=emulate)


@pytest.fixture(scope="module")
def fake_worker() -> Iterator[WorkerRunner]:
    """A fake runner in a worker process."""
    made = worker(factory="small")
    yield made
    made.close()


@pytest.fixture(scope="module")
def vulkan_worker(vulkan_selector: str | None, validation: bool) -> Iterator[WorkerRunner]:
    """A runner on the device under test in a worker process, validated if the layer is there."""
    made = WorkerRunner(vulkan_selector, validation)
    yield made
    assert (made.messages, made.losses) == ((), 0)
    made.close()


@pytest.fixture(params=KINDS)
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """A runner with the workload "w" loaded, as good as new."""
    made: Runner = fake() if request.param == "fake" else request.getfixturevalue(request.param)
    made.load("w", operands(), outputs(), copies=3)
    yield made
    made.unload("w")


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Callable[[], Runner]:
    """Makes runners that the test may close."""
    if request.param == "fake":
        return fake
    if request.param == "fake_worker":
        return lambda: worker(factory="small")
    shared: VulkanRunner | WorkerRunner = request.getfixturevalue(request.param)
    return lambda: type(shared)(shared.info.uuid)


def test_it_has_the_devices_snapshot(runner: Runner) -> None:
    assert isinstance(runner.info, DeviceInfo)


def test_a_job_answers_on_the_resident_operands(runner: Runner) -> None:
    scale = job(step("scale", factor=3.0))
    runner.prepare([scale])
    execution = executed(runner, scale)
    runner.release([scale])
    assert set(execution.outputs) == {"o"}
    assert execution.outputs["o"].dtype == np.float32
    np.testing.assert_array_equal(execution.outputs["o"], 3.0 * operands()["a"])
    assert execution.broken_guards == ()


def test_a_pass_sees_all_that_the_pass_before_it_wrote(runner: Runner) -> None:
    two = job(step("stage", factor=2.0), step("finish"))
    runner.prepare([two])
    execution = executed(runner, two)
    runner.release([two])
    np.testing.assert_array_equal(execution.outputs["o"], 2.0 * operands()["a"][::-1] + 1.0)


def test_what_a_job_does_not_write_is_poison(runner: Runner) -> None:
    scale, idle = job(step("scale")), job(step("idle"))
    for each in (scale, idle):
        runner.prepare([each])
    executed(runner, scale)
    left = executed(runner, idle).outputs["o"]
    for each in (scale, idle):
        runner.release([each])
    assert (left.view(np.uint32) == 0xFFFFFFFF).all()


def test_outputs_have_their_shape_and_type(runner: Runner) -> None:
    idle = job(step("idle"))
    specs = {"o": OutputSpec(shape=(2, 3, 5), dtype="float16")}
    runner.prepare([idle])
    runner.load("shaped", operands(), specs)
    output = executed(runner, idle, "shaped").outputs["o"]
    runner.unload("shaped")
    runner.release([idle])
    assert (output.shape, output.dtype) == ((2, 3, 5), np.float16)
    assert np.isnan(output).all()


def test_loading_a_name_again_replaces_it(runner: Runner) -> None:
    scale = job(step("scale", factor=1.0))
    runner.prepare([scale])
    runner.load("w", {"a": operands()["a"] + 5.0}, outputs())
    output = executed(runner, scale).outputs["o"]
    runner.release([scale])
    np.testing.assert_array_equal(output, operands()["a"] + 5.0)


def test_unknown_names_and_jobs_are_no_error_when_freed(runner: Runner) -> None:
    runner.unload("nothing of that name")
    runner.release([job(step("scale", factor=99.0))])


def test_a_workload_that_is_not_loaded_is_named(runner: Runner) -> None:
    scale = job(step("scale"))
    runner.prepare([scale])
    with pytest.raises(UsageError, match="'elsewhere'"):
        executed(runner, scale, "elsewhere")
    with pytest.raises(UsageError, match="'elsewhere'"):
        runner.measure(scale, "elsewhere", QUICK)
    runner.release([scale])


def test_a_job_lives_from_prepare_to_release(runner: Runner) -> None:
    scale = job(step("scale", factor=4.0))
    with pytest.raises(UsageError, match="not prepared"):
        executed(runner, scale)
    runner.prepare([scale])
    executed(runner, scale)
    runner.release([scale])
    with pytest.raises(UsageError, match="not prepared"):
        executed(runner, scale)


def test_equal_jobs_share_pipelines_until_the_last_release(runner: Runner) -> None:
    runner.prepare([job(step("scale", factor=6.0))])
    again = job(step("scale", factor=6.0))
    runner.prepare([again])
    runner.release([again])
    executed(runner, again)
    runner.release([again])
    with pytest.raises(UsageError, match="not prepared"):
        executed(runner, job(step("scale", factor=6.0)), "w")


def test_prepare_works_in_several_threads_beside_execute(runner: Runner) -> None:
    first = job(step("scale"))
    runner.prepare([first])
    others = [job(step("scale", factor=float(n % 7))) for n in range(21)]
    start = threading.Barrier(4)

    def prepare(part: int) -> None:
        start.wait()
        for each in others[part::3]:
            runner.prepare([each])

    with ThreadPoolExecutor(3) as pool:
        done = [pool.submit(prepare, part) for part in range(3)]
        start.wait()
        for _ in range(20):
            output = executed(runner, first).outputs["o"]
            np.testing.assert_array_equal(output, 2.0 * operands()["a"])
        for each in done:
            each.result()
    for factor in range(7):
        output = executed(runner, others[factor]).outputs["o"]
        np.testing.assert_array_equal(output, np.float32(factor) * operands()["a"])
    for each in (first, *others):
        runner.release([each])


def test_several_jobs_are_launched_in_turn_each_on_its_workload(runner: Runner) -> None:
    runner.load("v", {"a": operands()["a"] + 1.0}, outputs())
    scale, two = job(step("scale", factor=3.0)), job(step("stage", factor=2.0), step("finish"))
    assert len(runner.prepare([scale, two])) == 2
    taken = list(runner.execute([(scale, "w"), (two, "w"), (scale, "v")]))
    runner.release([scale, two])
    a = operands()["a"]
    answers = (3.0 * a, 2.0 * a[::-1] + 1.0, 3.0 * (a + 1.0))
    for execution, wanted in zip(taken, answers, strict=True):
        np.testing.assert_array_equal(execution.outputs["o"], wanted)
    runner.unload("v")
    with pytest.raises(UsageError, match="not prepared"):
        executed(runner, two)


def test_a_launch_that_fails_raises_behind_those_before_it(runner: Runner) -> None:
    scale = job(step("scale", factor=3.0))
    runner.prepare([scale])
    executions = iter(runner.execute([(scale, "w"), (scale, "elsewhere"), (scale, "w")]))
    np.testing.assert_array_equal(next(executions).outputs["o"], 3.0 * operands()["a"])
    with pytest.raises(UsageError, match="'elsewhere'"):
        next(executions)
    runner.release([scale])


def test_nothing_to_do_is_done_at_once(runner: Runner) -> None:
    assert (runner.prepare([]), list(runner.execute([]))) == ((), [])
    runner.release([])


def test_statistics_are_by_pass_where_there_are_any(runner: Runner) -> None:
    two = job(step("stage", factor=8.0), step("finish"))
    (prepared,) = runner.prepare([two])
    runner.release([two])
    assert [s.name for s in prepared.statistics] in ([], ["stage", "finish"])


@pytest.mark.parametrize(
    ("plan", "ended_by", "fewest", "most"),
    [
        (MeasurePlan(warmup_ms=1.0, max_samples=7, budget_ms=1e6), "max_samples", 7, 7),
        (MeasurePlan(warmup_ms=1.0, min_samples=4, max_samples=9, budget_ms=0.0), "budget", 4, 9),
        (
            MeasurePlan(warmup_ms=1.0, max_samples=50, budget_ms=1e6, give_up_ns=1e-3),
            "gave_up",
            3,
            10,
        ),
    ],
)
def test_sampling_ends_by_the_plans_rules(
    runner: Runner, plan: MeasurePlan, ended_by: str, fewest: int, most: int
) -> None:
    scale = job(step("scale"))
    runner.prepare([scale])
    measurement = runner.measure(scale, "w", plan)
    runner.release([scale])
    assert measurement.ended_by == ended_by
    assert fewest <= len(measurement.samples_ns) <= most
    assert min(measurement.samples_ns) > 0.0
    assert measurement.copies == 3
    assert measurement.warmup_launches >= 1


def test_a_workload_too_large_is_refused_with_sizes_and_the_old_one_stays(runner: Runner) -> None:
    big = {"a": np.broadcast_to(np.float32(0.0), (25_000_000,))}
    with pytest.raises(OutOfMemoryError, match="MiB") as caught:
        runner.load("w", big, outputs(), copies=100_000)
    assert caught.value.needed_bytes >= 100_000 * big["a"].nbytes
    assert caught.value.available_bytes < caught.value.needed_bytes
    scale = job(step("scale"))
    runner.prepare([scale])
    output = executed(runner, scale).outputs["o"]
    runner.release([scale])
    np.testing.assert_array_equal(output, 2.0 * operands(COUNT)["a"])


def test_read_bandwidth_says_what_it_read(runner: Runner) -> None:
    bandwidth = runner.read_bandwidth(1 << 20, samples=5)
    assert 0 < bandwidth.bytes_read <= 1 << 20
    assert len(bandwidth.samples_ns) == 5
    assert min(bandwidth.samples_ns) > 0.0
    assert bandwidth.detail


@pytest.mark.parametrize("transfer", ["read", "write", "copy"])
def test_a_curve_has_the_sizes_that_fit_in_order(runner: Runner, transfer: Transfer) -> None:
    points = runner.bandwidth_curve(transfer, (1 << 20, 1 << 18))
    assert [point.nbytes for point in points] == [1 << 18, 1 << 20]
    assert all(point.moved_bytes >= point.nbytes for point in points)
    assert all(min(point.samples_ns) > 0.0 for point in points)


def test_empty_launches_are_timed_in_both_measures(runner: Runner) -> None:
    floor = runner.empty_launches(2)
    assert floor.passes == 2
    assert (floor.isolated.measure, floor.isolated.launches) == ("isolated", 1)
    assert floor.batched.measure == "batched"
    assert floor.batched.launches > 1
    assert min(floor.submission_ns) > 0.0


def test_sensors_may_be_missing(runner: Runner) -> None:
    observed = runner.observe()
    assert observed is None or observed.looks == 1


def test_a_batched_measurement_says_how_many_launches_a_sample_has(runner: Runner) -> None:
    scale = job(step("scale"))
    runner.prepare([scale])
    plan = MeasurePlan(
        measure="batched", batch_launches=5, warmup_ms=1.0, min_samples=3, budget_ms=1.0
    )
    measurement = runner.measure(scale, "w", plan)
    runner.release([scale])
    assert (measurement.measure, measurement.launches) == ("batched", 5)


def test_a_closed_runner_says_so(make: Callable[[], Runner]) -> None:
    runner = make()
    runner.load("w", operands(), outputs())
    scale = job(step("scale"))
    runner.prepare([scale])
    runner.close()
    runner.close()
    runner.unload("w")
    runner.release([scale])
    for call in (
        lambda: runner.load("w", operands(), outputs()),
        lambda: runner.prepare([scale]),
        lambda: executed(runner, scale),
        lambda: runner.measure(scale, "w", QUICK),
        lambda: runner.read_bandwidth(1 << 20),
        lambda: runner.bandwidth_curve("read", (1 << 20,)),
        lambda: runner.empty_launches(1),
        runner.observe,
    ):
        with pytest.raises(UsageError, match="closed"):
            call()


def test_a_launch_of_several_passes_is_broken_down_at_its_barriers(runner: Runner) -> None:
    two = job(step("stage"), step("finish"))
    plan = msgspec.structs.replace(QUICK, breakdown_samples=5)
    runner.prepare([two])
    measured, plain = runner.measure(two, "w", plan), runner.measure(two, "w", QUICK)
    runner.release([two])
    assert [each.passes for each in measured.breakdown] == [("stage",), ("finish",)]
    assert all(len(each.samples_ns) == 5 for each in measured.breakdown)
    assert all(ns >= 0 for each in measured.breakdown for ns in each.samples_ns)
    assert plain.breakdown == ()


def test_passes_beside_each_other_are_one_stretch(runner: Runner) -> None:
    beside = job(step("stage"), step("idle", beside=True), step("finish"), step("idle"))
    plan = msgspec.structs.replace(QUICK, breakdown_samples=2)
    runner.prepare([beside])
    execution = executed(runner, beside)
    measured = runner.measure(beside, "w", plan)
    runner.release([beside])
    np.testing.assert_array_equal(execution.outputs["o"], 2.0 * operands()["a"][::-1] + 1.0)
    stretches = [each.passes for each in measured.breakdown]
    assert stretches == [("stage", "idle"), ("finish",), ("idle",)]


def test_one_pass_has_no_breakdown(runner: Runner) -> None:
    scale = job(step("scale"))
    runner.prepare([scale])
    plan = msgspec.structs.replace(QUICK, breakdown_samples=2)
    assert runner.measure(scale, "w", plan).breakdown == ()
    runner.release([scale])


def test_a_device_is_kept_warm_at_any_time(runner: Runner) -> None:
    runner.keep_warm(1.0)
    made = job(step("scale"))
    runner.prepare([made])
    runner.measure(made, "w", MeasurePlan(warmup_ms=0.1, min_samples=3, max_samples=3))
    runner.keep_warm(1.0)
    assert len(runner.measure(made, "w", MeasurePlan(max_samples=3)).samples_ns) == 3
    runner.release([made])
