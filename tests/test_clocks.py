"""Both clocks of a launch on pretended and real devices: narrow counters, periods, none at all."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import pytest

from tests.small_kernels import executed, job, operands, outputs, slow_step, step
from tests.toy_device import toy_device
from tuner.device_info import DeviceInfo
from tuner.errors import RunTimeoutError, VulkanError
from tuner.observers import Reading
from tuner.runner.protocol import MeasurePlan

if TYPE_CHECKING:
    from tuner.runner._clocks import DeviceClock
    from tuner.runner.vulkan import VulkanRunner

QUICK = MeasurePlan(warmup_ms=1.0, precision=0.0, min_samples=3, max_samples=5, budget_ms=1.0)
_GRAPHICS, _COMPUTE = 1, 2
LAUNCH_TICKS, REFERENCE_TICKS, FILL_TICKS, GAP_TICKS = 900, 70, 310, 11


@dataclass
class PretendedDevice:
    """Records what a clock records, and stamps it with a counter of `valid_bits` bits.

    Above these it has whatever was there before, as the specification allows.
    """

    info: DeviceInfo
    counter: int
    stamps: list[int] = field(default_factory=list)
    broken: bool = False

    def stamp(self, _recording: object, query: int) -> None:
        assert query == len(self.stamps)
        rubbish = 0xA5 << self.info.timestamp_valid_bits
        now = 5 if self.broken else self.counter % (1 << self.info.timestamp_valid_bits)
        self.stamps.append((rubbish | now) & (2**64 - 1))
        self.counter += GAP_TICKS

    def read(self, count: int) -> list[int]:
        stamps, self.stamps = self.stamps, []
        assert len(stamps) == count
        return stamps


def pretended_clock(
    monkeypatch: pytest.MonkeyPatch, bits: int, period_ns: float, start: int
) -> tuple[DeviceClock, PretendedDevice]:
    """A `DeviceClock` on a device that only counts."""
    from tuner.runner import _clocks

    info = toy_device(timestamp_valid_bits=bits, timestamp_period_ns=period_ns)
    device = PretendedDevice(info, start)

    class Counted:
        def __init__(self, ticks: int) -> None:
            self.ticks = ticks

        def record(self, *_: object) -> None:
            device.counter += self.ticks

    class Commands:
        begin = submit = wait = staticmethod(lambda *_: None)

    class Queries:
        pool = None

        def __init__(self) -> None:
            self.device, self.read = device, device.read

    monkeypatch.setattr(_clocks._vk, "lib", _NoVulkan())
    monkeypatch.setattr(_clocks, "COMPUTE_TO_COMPUTE", Counted(0))
    monkeypatch.setattr(_clocks, "TRANSFER_TO_COMPUTE", Counted(0))
    parts: tuple[Any, ...] = (Queries(), Commands(), Counted(LAUNCH_TICKS))
    reference = SimpleNamespace(launch=Counted(REFERENCE_TICKS), fill=Counted(FILL_TICKS))
    clock = _clocks.DeviceClock(*parts, cast(Any, reference))
    monkeypatch.setattr(clock, "_stamp", device.stamp)
    return clock, device


class _NoVulkan:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


# --- timestamps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [36, 40, 63, 64])
@pytest.mark.parametrize("period_ns", [1.0, 10.0, 83.333])
@pytest.mark.parametrize("before_wrap", [0, 1, 950, 5000])
def test_stamps_of_any_width_and_period_give_the_same_times(
    monkeypatch: pytest.MonkeyPatch, bits: int, period_ns: float, before_wrap: int
) -> None:
    from tuner.runner._sampling import Submission

    clock, _ = pretended_clock(monkeypatch, bits, period_ns, 2**bits - before_wrap)
    timed = clock.run(Submission(fill=5, load=3, samples=4, launches=2, references=2))
    assert timed.fill_ns == pytest.approx((5 * FILL_TICKS + GAP_TICKS) * period_ns)
    assert timed.load_ns == pytest.approx((3 * LAUNCH_TICKS + GAP_TICKS) * period_ns)
    each_ns = (2 * LAUNCH_TICKS + GAP_TICKS) / 2 * period_ns
    assert timed.samples_ns == pytest.approx((each_ns,) * 4)
    assert timed.references_ns == pytest.approx(((REFERENCE_TICKS + GAP_TICKS) * period_ns,) * 2)


def test_the_counters_step_is_what_divides_all_differences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tuner.runner._sampling import Submission

    monkeypatch.setattr("tests.test_clocks.GAP_TICKS", 32)
    monkeypatch.setattr("tests.test_clocks.LAUNCH_TICKS", 960)
    monkeypatch.setattr("tests.test_clocks.REFERENCE_TICKS", 64)
    clock, _ = pretended_clock(monkeypatch, 64, 2.0, 1000)
    clock.run(Submission(samples=5, references=1))
    assert clock.step_ns == 64.0


def test_a_counter_that_stands_still_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner.runner._sampling import Submission

    clock, device = pretended_clock(monkeypatch, 64, 1.0, 0)
    device.broken = True
    with pytest.raises(VulkanError, match="all read the same"):
        clock.run(Submission(samples=3, references=1))


@pytest.mark.parametrize(
    ("bits", "period_ns", "usable"), [(64, 1.0, True), (0, 1.0, False), (36, 0.0, False)]
)
def test_timestamps_need_bits_and_a_period(bits: int, period_ns: float, usable: bool) -> None:
    info = toy_device(timestamp_valid_bits=bits, timestamp_period_ns=period_ns)
    assert info.has_timestamps == usable


# --- on a device ---------------------------------------------------------------------------------


@pytest.fixture
def loop(loaded_runner: VulkanRunner) -> Iterator[Any]:
    """A job of some hundred microseconds, prepared."""
    made = job(step("loop", count=512, factor=3000.0))
    loaded_runner.prepare([made])
    yield made
    loaded_runner.release([made])


@pytest.mark.parametrize(
    "change", [{"timestamp_valid_bits": 0}, {"timestamp_period_ns": 0.0}], ids=["bits", "period"]
)
@pytest.mark.parametrize("measure", ["isolated", "batched"])
def test_without_timestamps_the_hosts_clock_is_read(
    loaded_runner: VulkanRunner,
    loop: Any,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, float],
    measure: Any,
) -> None:
    blind = msgspec.structs.replace(loaded_runner.info, **change)
    monkeypatch.setattr(loaded_runner._device, "info", blind)
    plan = msgspec.structs.replace(QUICK, measure=measure)
    measurement = loaded_runner.measure(loop, "w", plan)
    assert measurement.clock == "host"
    assert len(measurement.samples_ns) >= 3
    assert min(measurement.samples_ns) > 1.0


@pytest.mark.parametrize(
    ("stamp", "trouble"),
    [
        (lambda number: 7, "timestamps all read the same"),
        (lambda number: 1000 - number, "timestamps run backwards"),
    ],
    ids=["still", "backwards"],
)
def test_broken_timestamps_are_found_out_and_the_hosts_clock_is_read(
    loop: Any,
    loaded_runner: VulkanRunner,
    monkeypatch: pytest.MonkeyPatch,
    stamp: Callable[[int], int],
    trouble: str,
) -> None:
    from tuner.runner._clocks import Timestamps
    from tuner.runner._measuring import Measuring

    def read(_: Timestamps, count: int) -> list[int]:
        return [stamp(number) for number in range(count)]

    measuring = loaded_runner._measuring
    fresh = Measuring(measuring._memory, measuring._staging, measuring._commands, None)
    monkeypatch.setattr(loaded_runner, "_measuring", fresh)
    monkeypatch.setattr(Timestamps, "read", read)
    try:
        measurement = loaded_runner.measure(loop, "w", QUICK)
    finally:
        fresh.close()
    assert (measurement.clock, measurement.clock_trouble) == ("host", trouble)
    assert len(measurement.samples_ns) >= 3
    assert min(measurement.samples_ns) > 1.0


def test_good_timestamps_give_no_trouble(loop: Any, loaded_runner: VulkanRunner) -> None:
    measurement = loaded_runner.measure(loop, "w", QUICK)
    assert (measurement.clock, measurement.clock_trouble) == ("gpu_timestamps", "")


def test_both_clocks_and_both_measures_find_about_the_same(
    loaded_runner: VulkanRunner, loop: Any
) -> None:
    plan = MeasurePlan(
        batch_launches=30, warmup_ms=5.0, precision=0.0, min_samples=4, max_samples=8
    )
    least = {}
    for clock in ("device", "host"):
        for measure in ("isolated", "batched"):
            chosen = msgspec.structs.replace(plan, clock=clock, measure=measure)
            measured = loaded_runner.measure(loop, "w", chosen)
            assert measured.measure == measure
            assert (measured.clock == "host") == (clock == "host")
            least[clock, measure] = min(measured.samples_ns)
    # A busy machine is no place for close comparisons; 30 launches taken for one would show.
    assert max(least.values()) < 8 * min(least.values())


def test_batches_have_as_many_launches_as_asked_for(loaded_runner: VulkanRunner) -> None:
    scale = job(step("scale"))
    loaded_runner.prepare([scale])
    plan = msgspec.structs.replace(QUICK, measure="batched", batch_launches=7)
    measured = loaded_runner.measure(scale, "w", plan)
    loaded_runner.release([scale])
    assert measured.launches == 7
    assert measured.warmup_launches >= 1


def test_the_reference_kernel_is_timed_with_every_measurement(
    loaded_runner: VulkanRunner, loop: Any
) -> None:
    plan = msgspec.structs.replace(QUICK, settle="always", settle_ms=10.0, settle_max_ms=40.0)
    settled = loaded_runner.measure(loop, "w", plan).clock_state
    unsettled = loaded_runner.measure(loop, "w", QUICK).clock_state
    assert settled is not None
    assert unsettled is not None
    assert settled.settled_ms >= 10.0
    assert unsettled.settled_ms == (0.0 if loaded_runner.info.is_cpu else unsettled.settled_ms)
    assert all(ns > 0 for ns in (*settled.reference_ns, *unsettled.reference_ns))


def test_empty_launches_cost_more_with_more_passes(loaded_runner: VulkanRunner) -> None:
    floors = [loaded_runner.empty_launches(passes) for passes in (1, 8)]
    assert [floor.passes for floor in floors] == [1, 8]
    batched = [statistics.median(floor.batched.samples_ns) for floor in floors]
    assert batched[1] > 1.5 * batched[0] > 0
    assert min(floors[0].submission_ns) > 0


def test_a_stream_that_outlasts_its_deadline_leaves_the_runner_usable(
    open_runner: Callable[..., VulkanRunner],
) -> None:
    runner = open_runner(timeout_s=0.05)
    runner.load("w", operands(), outputs())
    slow = job(slow_step(runner.info))
    runner.prepare([slow])
    plan = MeasurePlan(measure="batched", batch_launches=2, clock="host", max_submission_ms=1e6)
    with pytest.raises(RunTimeoutError):
        runner.measure(slow, "w", plan)
    runner.release([slow])
    runner.unload("w")
    scale = job(step("scale"))
    runner.prepare([scale])
    deadline = time.monotonic() + 60.0
    output = None
    while output is None:
        assert time.monotonic() < deadline
        with contextlib.suppress(RunTimeoutError):
            runner.load("again", operands(), outputs())
            output = executed(runner, scale, "again").outputs["o"]
    np.testing.assert_array_equal(output, 2.0 * operands()["a"])


class Meterish:
    """Sensors that tell of 250 W, and no counter."""

    name = "pretended"

    def read(self) -> Reading:
        return Reading(power_w=250.0, core_mhz=1980.0)

    def power(self) -> tuple[float | None, float | None]:
        return None, 250.0

    def close(self) -> None:
        """Nothing to let go of."""


def test_energy_is_metered_over_launches_back_to_back(
    loaded_runner: VulkanRunner, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_runner._measuring, "_observer", Meterish())
    # Long enough for the thread that reads the meter to get its turn on a busy machine.
    plan = msgspec.structs.replace(QUICK, energy_ms=500.0)
    measured = loaded_runner.measure(loop, "w", plan)
    energy, observed = measured.energy, measured.observed
    assert observed is not None
    assert observed.core_mhz == (1980.0, 1980.0)
    assert energy is not None
    assert energy.method == "mean power"
    assert energy.seconds > 0.0
    watts = energy.joules_per_launch * energy.launches / energy.seconds
    assert watts == pytest.approx(250.0)
    assert loaded_runner.measure(loop, "w", QUICK).energy is None


def test_no_submission_of_the_metered_load_is_longer_than_allowed(
    loaded_runner: VulkanRunner, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner.runner._back_to_back import BackToBack

    asked: list[tuple[int, int, int]] = []
    real = BackToBack.run

    def run(self: BackToBack, rotation: Any, load: int, launches: int, submissions: int) -> Any:
        asked.append((load, launches, submissions))
        return real(self, rotation, load, launches, submissions)

    monkeypatch.setattr(BackToBack, "run", run)
    monkeypatch.setattr(loaded_runner._measuring, "_observer", Meterish())
    plan = msgspec.structs.replace(QUICK, energy_ms=300.0, max_submission_ms=10.0)
    measured = loaded_runner.measure(loop, "w", plan)
    ((load, launches, submissions),) = asked
    each_ms = statistics.median(measured.samples_ns) / 1e6
    assert load == launches
    assert launches == 1 or launches * each_ms <= 1.01 * 10.0
    assert launches * submissions * each_ms >= 0.99 * 300.0


@pytest.mark.parametrize(
    ("families", "chosen"),
    [
        ([(_GRAPHICS, 64), (_COMPUTE, 0), (_COMPUTE, 36)], (2, 36)),
        ([(_COMPUTE, 0)], (0, 0)),
        ([(_GRAPHICS | _COMPUTE, 64), (_COMPUTE, 64)], (0, 64)),
        ([(_GRAPHICS, 64)], None),
    ],
)
def test_a_queue_with_timestamps_is_preferred(
    monkeypatch: pytest.MonkeyPatch,
    families: list[tuple[int, int]],
    chosen: tuple[int, int] | None,
) -> None:
    from tuner import device

    listed = [SimpleNamespace(queueFlags=f, timestampValidBits=bits) for f, bits in families]
    monkeypatch.setattr(device._vk, "listed", lambda *_: listed)
    assert device._compute_queue(None) == chosen
