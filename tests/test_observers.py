"""Observers against a pretended NVML and a pretended sysfs, and what is made of their readings."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from tests.toy_device import toy_device
from tuner.observers import (
    Meter,
    Nvml,
    Reading,
    Sysfs,
    Watch,
    find_observer,
    metered,
    nvml,
    summarised,
    watched,
)
from tuner.observers.base import FIRST_LOOK_S
from tuner.records import Energy, Observation

UUID = "2a9e4a2c-0000-1111-2222-333344445555"
PCI = "0000:19:00.0"
NOT_SUPPORTED = 3


class FakeNvml:
    """The library as ctypes would have it: functions that return a code and fill in a pointer."""

    values: ClassVar[dict[str, int]] = {
        "nvmlDeviceGetPowerUsage": 412_500,
        "nvmlDeviceGetTotalEnergyConsumption": 9_876_543_210,
        "nvmlDeviceGetTemperature": 61,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1 | 0x4 | 0x40,
    }
    clocks: ClassVar[dict[int, int]] = {1: 1980, 2: 3201}

    def __init__(self, *, by_uuid: bool = True, without: tuple[str, ...] = ()) -> None:
        self.by_uuid, self.without, self.shutdowns = by_uuid, without, 0

    def __getattr__(self, name: str) -> Any:
        if name not in self.values:
            raise AttributeError(name)

        def read(device: Any, *arguments: Any) -> int:
            assert device.value == 77
            if name in self.without:
                return NOT_SUPPORTED
            arguments[-1]._obj.value = self.values[name]
            return 0

        return read

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, out: Any) -> int:  # noqa: N802 (NVML's name)
        out._obj.value = 77
        return 0 if self.by_uuid and uuid == f"GPU-{UUID}".encode() else 6

    def nvmlDeviceGetHandleByPciBusId_v2(self, address: bytes, out: Any) -> int:  # noqa: N802
        out._obj.value = 77
        return 0 if address == PCI.encode() else 6

    def nvmlDeviceGetClockInfo(self, _device: Any, which: int, out: Any) -> int:  # noqa: N802
        out._obj.value = self.clocks[which]
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.shutdowns += 1
        return 0


def sysfs(root: Path, driver: str, files: dict[str, str]) -> Path:
    """A PCI device at `PCI` whose driver's folder is a link, as in the real one."""
    device = root / PCI
    (root / "drivers" / driver).mkdir(parents=True)
    device.mkdir()
    (device / "driver").symlink_to(root / "drivers" / driver)
    for name, text in files.items():
        path = device / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


# --- NVML ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("by_uuid", "pci"), [(True, None), (False, PCI)])
def test_nvml_reads_every_sensor_in_its_unit(by_uuid: bool, pci: str | None) -> None:
    library = FakeNvml(by_uuid=by_uuid)
    observer = Nvml.find(library, UUID, pci)
    assert observer is not None
    assert observer.read() == Reading(
        power_w=412.5,
        core_mhz=1980.0,
        memory_mhz=3201.0,
        temperature_c=61.0,
        throttle=("software power cap", "hardware thermal slowdown"),
        energy_j=9_876_543.21,
    )
    observer.close()
    observer.close()
    assert library.shutdowns == 1
    assert observer.read() == Reading()


def test_a_device_that_nvml_does_not_know_has_no_observer() -> None:
    assert Nvml.find(FakeNvml(by_uuid=False), UUID, None) is None
    assert Nvml.find(FakeNvml(), "another", "0000:65:00.0") is None


def test_sensors_that_a_device_lacks_are_none() -> None:
    missing = ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetCurrentClocksThrottleReasons")
    observer = Nvml.find(FakeNvml(without=missing), UUID, None)
    assert observer is not None
    reading = observer.read()
    assert (reading.energy_j, reading.throttle, reading.power_w) == (None, (), 412.5)


def test_an_older_library_without_a_function_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {k: v for k, v in FakeNvml.values.items() if "Energy" not in k}
    monkeypatch.setattr(FakeNvml, "values", without)
    observer = Nvml.find(FakeNvml(), UUID, None)
    assert observer is not None
    assert observer.power() == (None, 412.5)


def test_reasons_are_read_by_their_new_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = {name.replace("Throttle", "Event"): v for name, v in FakeNvml.values.items()}
    monkeypatch.setattr(FakeNvml, "values", renamed)
    observer = Nvml.find(FakeNvml(), UUID, None)
    assert observer is not None
    assert observer.read().throttle == ("software power cap", "hardware thermal slowdown")


def test_without_nvml_there_is_no_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", "libno-such-library.so.1")
    assert find_observer(toy_device(vendor_id=0x10DE)) is None


def test_the_vendor_decides_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "load", FakeNvml)
    found = find_observer(toy_device(vendor_id=0x10DE, uuid=UUID))
    assert found is not None
    assert found.name == "nvml"
    assert find_observer(toy_device(vendor_id=0x1002, uuid=UUID)) is None
    assert find_observer(toy_device(vendor_id=0x10DE, uuid=UUID, kind="cpu")) is None


# --- sysfs ---------------------------------------------------------------------------------------


def test_amdgpu(tmp_path: Path) -> None:
    files = {
        "hwmon/hwmon5/power1_average": "213000000",
        "hwmon/hwmon5/freq1_input": "2100000000",
        "hwmon/hwmon5/freq2_input": "1250000000",
        "hwmon/hwmon5/temp1_input": "54000",
        "hwmon/hwmon5/temp2_input": "71000",
    }
    observer = Sysfs.find(PCI, sysfs(tmp_path, "amdgpu", files))
    assert observer is not None
    assert observer.name == "amdgpu"
    expected = Reading(power_w=213.0, core_mhz=2100.0, memory_mhz=1250.0, temperature_c=54.0)
    assert observer.read() == expected


def test_i915_has_a_counter_of_energy_and_reasons(tmp_path: Path) -> None:
    files = {
        "hwmon/hwmon2/energy1_input": "123456789",
        "drm/card1/gt/gt0/rps_act_freq_mhz": "1550",
        "drm/card1/gt/gt0/throttle_reason_status": "1",
        "drm/card1/gt/gt0/throttle_reason_pl1": "1",
        "drm/card1/gt/gt0/throttle_reason_thermal": "0",
    }
    observer = Sysfs.find(PCI, sysfs(tmp_path, "i915", files))
    assert observer is not None
    expected = Reading(core_mhz=1550.0, throttle=("pl1",), energy_j=pytest.approx(123.456789))
    assert observer.read() == expected


def test_xe(tmp_path: Path) -> None:
    files = {
        "tile0/gt0/freq0/act_freq": "2400",
        "tile0/gt0/freq0/throttle/reason_thermal": "1",
        "hwmon/hwmon3/energy1_input": "not a number",
    }
    observer = Sysfs.find(PCI, sysfs(tmp_path, "xe", files))
    assert observer is not None
    assert observer.read() == Reading(core_mhz=2400.0, throttle=("thermal",))


def test_other_drivers_and_devices_are_left_alone(tmp_path: Path) -> None:
    root = sysfs(tmp_path, "nouveau", {})
    assert Sysfs.find(PCI, root) is None
    assert Sysfs.find("0000:99:00.0", root) is None
    assert Sysfs.find(None, root) is None


def test_files_that_vanish_are_none(tmp_path: Path) -> None:
    root = sysfs(tmp_path, "amdgpu", {"hwmon/hwmon5/power1_input": "99000000"})
    observer = Sysfs.find(PCI, root)
    assert observer is not None
    assert observer.read().power_w == 99.0
    (root / PCI / "hwmon/hwmon5/power1_input").unlink()
    assert observer.read() == Reading()


# --- watching and metering -----------------------------------------------------------------------


class Pretended:
    """Sensors that step on with every look; the counter runs at 300 W in steps of `step_s`."""

    name = "pretended"

    def __init__(self, *, step_s: float = 0.02, counter: bool = True) -> None:
        self._step_s, self._counter = step_s, counter
        self.looks = 0

    def read(self) -> Reading:
        self.looks += 1
        return Reading(power_w=100.0 * self.looks, core_mhz=1000.0 + self.looks)

    def power(self) -> tuple[float | None, float | None]:
        stepped = time.perf_counter() // self._step_s * self._step_s
        return (300.0 * stepped if self._counter else None), 310.0

    def close(self) -> None:
        """Nothing to let go of."""


def test_readings_become_one_summary() -> None:
    readings = [
        Reading(power_w=100.0, core_mhz=1980.0, temperature_c=50.0, throttle=("a",)),
        Reading(power_w=300.0, core_mhz=1755.0, temperature_c=61.0, throttle=("b", "a")),
        Reading(core_mhz=1800.0),
    ]
    assert summarised("nvml", readings) == Observation(
        source="nvml",
        looks=3,
        power_w=200.0,
        core_mhz=(1755.0, 1980.0),
        temperature_c=61.0,
        throttled=("a", "b"),
    )
    assert Watch().summary() is None
    assert [Watch(readings=readings[n:]).held_down for n in range(4)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("reasons", "held_down"),
    [
        ((), False),
        (("applications clocks setting", "sync boost"), False),
        (("display clocks setting", "software power cap"), True),
        (("hardware thermal slowdown",), True),
        (("pl1",), True),
    ],
)
def test_only_power_and_heat_hold_a_device_down(reasons: tuple[str, ...], held_down: bool) -> None:
    assert Watch(readings=[Reading(throttle=reasons)]).held_down == held_down
    assert Observation(source="nvml", looks=1, throttled=reasons).held_down == held_down


def test_a_watch_looks_beside_the_block_and_behind_a_short_one() -> None:
    observer = Pretended()
    with watched(observer) as seen:
        time.sleep(0.1)
    summary = seen.summary()
    assert summary is not None
    assert 3 <= summary.looks == observer.looks
    assert summary.core_mhz == (1001.0, 1000.0 + observer.looks)
    for pause_s in (0.0, 3 * FIRST_LOOK_S):
        short = Pretended()
        with watched(short) as seen:
            time.sleep(pause_s)
        summary = seen.summary()
        assert summary is not None
        assert 1 <= summary.looks == short.looks <= 3
    with watched(None) as nothing:
        pass
    assert nothing.summary() is None


def test_a_watch_may_begin_anew() -> None:
    observer = Pretended()
    with watched(observer) as seen:
        time.sleep(0.05)
        before = observer.looks
        seen.begin()
    summary = seen.summary()
    assert summary is not None
    assert summary.looks <= observer.looks - before + 1
    assert summary.core_mhz is not None
    assert summary.core_mhz[0] >= 1000.0 + before


@pytest.mark.parametrize(("counter", "watts"), [(True, 300.0), (False, 310.0)])
def test_a_meter_finds_the_power_of_a_counter_that_steps(counter: bool, watts: float) -> None:
    with metered(Pretended(counter=counter)) as meter:
        begun = time.perf_counter_ns()
        time.sleep(0.3)
        ended = time.perf_counter_ns()
    energy = meter.energy(begun, ended, launches=1000)
    assert energy is not None
    assert energy.method == ("counter" if counter else "mean power")
    # A look may come late on a busy machine, so that a step is dated late.
    assert energy.joules_per_launch * 1000 / energy.seconds == pytest.approx(watts, rel=0.4)


def test_steps_outside_the_launches_do_not_count() -> None:
    looks: list[tuple[int, float | None, float | None]] = [
        (0, 0.0, None),
        (90, 1000.0, None),
        (100, 1000.0, None),
        (200, 1001.0, None),
        (300, 1001.0, None),
        (400, 1003.0, None),
        (600, 9999.0, None),
    ]
    energy = Meter(looks).energy(100, 500, launches=2)
    # 2 J in 200 ns, for 400 ns and 2 launches.
    assert energy == Energy(joules_per_launch=2.0, launches=2, seconds=4e-7, method="counter")
    assert Meter(looks).energy(100, 250, launches=2) is None
    assert Meter().energy(0, 10, launches=1) is None


def test_summaries_survive_the_journey_to_another_process() -> None:
    summary = summarised("nvml", [Reading(power_w=1.0, core_mhz=2.0, throttle=("a",))])
    packed = msgspec.msgpack.encode(summary)
    assert msgspec.msgpack.decode(packed, type=Observation) == summary
