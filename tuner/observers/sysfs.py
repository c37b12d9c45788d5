"""What Linux tells of AMD and Intel devices in files: the hwmon and drm folders of a PCI device.

File names and units are those of the kernel's documentation: hwmon counts microwatts, microjoules,
hertz and millidegrees (`Documentation/hwmon/sysfs-interface`), i915 and xe give MHz.
"""

from __future__ import annotations

from pathlib import Path

from tuner.observers.base import Reading

PCI_DEVICES = Path("/sys/bus/pci/devices")
_DRIVERS = frozenset({"amdgpu", "i915", "xe"})
_CORE_MHZ = (
    "drm/card*/gt/gt0/rps_act_freq_mhz",
    "drm/card*/gt_act_freq_mhz",
    "tile0/gt0/freq0/act_freq",
)
_THROTTLE = ("drm/card*/gt/gt0/throttle_reason_*", "tile0/gt0/freq0/throttle/reason_*")


class Sysfs:
    """Sensors in the folder of a PCI device; see `tuner.observers.base.Observer`.

    Args:
        device: the folder, such as /sys/bus/pci/devices/0000:03:00.0.
        name: the kernel driver's name.
    """

    def __init__(self, device: Path, name: str) -> None:
        self._name = name
        hwmon = next(iter(sorted(device.glob("hwmon/hwmon*"))), device / "hwmon")
        self._power = [hwmon / "power1_average", hwmon / "power1_input"]
        self._energy = [hwmon / "energy1_input"]
        self._core_hz = [hwmon / "freq1_input"]
        self._memory_hz = [hwmon / "freq2_input"]
        self._heat = sorted(hwmon.glob("temp*_input"))[:1]
        self._core_mhz = [path for pattern in _CORE_MHZ for path in sorted(device.glob(pattern))]
        self._throttle = [path for pattern in _THROTTLE for path in sorted(device.glob(pattern))]

    @classmethod
    def find(cls, pci_address: str | None, root: Path = PCI_DEVICES) -> Sysfs | None:
        """The device at a PCI address ("0000:03:00.0"), if its driver is one that is known."""
        if pci_address is None:
            return None
        device = root / pci_address
        try:
            driver = (device / "driver").resolve(strict=True).name
        except OSError:
            return None
        return cls(device, driver) if driver in _DRIVERS else None

    @property
    def name(self) -> str:
        """See `Observer.name`."""
        return self._name

    def read(self) -> Reading:
        """See `Observer.read`."""
        joules, watts = self.power()
        core_hz = _scaled(self._core_hz, 1e-6)
        return Reading(
            power_w=watts,
            core_mhz=_scaled(self._core_mhz, 1.0) if core_hz is None else core_hz,
            memory_mhz=_scaled(self._memory_hz, 1e-6),
            temperature_c=_scaled(self._heat, 1e-3),
            throttle=tuple(
                path.name.removeprefix("throttle_").removeprefix("reason_")
                for path in self._throttle
                if path.name != "throttle_reason_status" and _scaled([path], 1.0)
            ),
            energy_j=joules,
        )

    def power(self) -> tuple[float | None, float | None]:
        """See `Observer.power`."""
        return _scaled(self._energy, 1e-6), _scaled(self._power, 1e-6)

    def close(self) -> None:
        """See `Observer.close`: it holds nothing."""


def _scaled(paths: list[Path], scale: float) -> float | None:
    """The number in the first of these files that can be read, times `scale`."""
    for path in paths:
        try:
            return float(path.read_text(encoding="ascii")) * scale
        except (OSError, ValueError):
            continue
    return None
