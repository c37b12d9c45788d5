"""NVIDIA's sensors, through the driver's own library: no package is needed.

Function names, structures and constants are those of NVML's public interface (`nvml.h`).
"""

from __future__ import annotations

import ctypes
from typing import Any

from tuner.observers.base import Reading

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_TEMPERATURE_GPU = 0
_THROTTLE = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
"""The same by its new and its old name."""
_THROTTLE_REASONS = {
    0x2: "applications clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks setting",
}


def load() -> Any | None:
    """The library, initialised; None where it is missing or does not start."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return library if library.nvmlInit_v2() == _SUCCESS else None


class Nvml:
    """An NVIDIA device's sensors; see `tuner.observers.base.Observer`.

    Args:
        library: NVML as ctypes has it, initialised (see `load`).
        uuid, pci_address: of the device as Vulkan tells them; either will find it.
    """

    name = "nvml"

    def __init__(self, library: Any, device: ctypes.c_void_p) -> None:
        self._library: Any = library
        self._device = device

    @classmethod
    def find(cls, library: Any, uuid: str, pci_address: str | None) -> Nvml | None:
        """The device of that UUID, else the one at that PCI address ("0000:19:00.0"), or None."""
        device = ctypes.c_void_p()
        wanted = f"GPU-{uuid}".encode()
        if library.nvmlDeviceGetHandleByUUID(wanted, ctypes.byref(device)) == _SUCCESS:
            return cls(library, device)
        if pci_address is not None:
            function = library.nvmlDeviceGetHandleByPciBusId_v2
            if function(pci_address.encode(), ctypes.byref(device)) == _SUCCESS:
                return cls(library, device)
        return None

    def read(self) -> Reading:
        """See `Observer.read`."""
        joules, watts = self.power()
        told = (self._number(ctypes.c_ulonglong, name) for name in _THROTTLE)
        reasons = next((each for each in told if each is not None), 0.0)
        return Reading(
            power_w=watts,
            core_mhz=self._number(ctypes.c_uint, "nvmlDeviceGetClockInfo", _CLOCK_SM),
            memory_mhz=self._number(ctypes.c_uint, "nvmlDeviceGetClockInfo", _CLOCK_MEMORY),
            temperature_c=self._number(ctypes.c_uint, "nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
            throttle=tuple(name for bit, name in _THROTTLE_REASONS.items() if int(reasons) & bit),
            energy_j=joules,
        )

    def power(self) -> tuple[float | None, float | None]:
        """See `Observer.power`. The counter counts millijoules since the driver was loaded."""
        joules = self._number(ctypes.c_ulonglong, "nvmlDeviceGetTotalEnergyConsumption")
        watts = self._number(ctypes.c_uint, "nvmlDeviceGetPowerUsage")
        return (
            None if joules is None else joules / 1000,
            None if watts is None else watts / 1000,
        )

    def close(self) -> None:
        """See `Observer.close`."""
        if self._library is not None:
            self._library.nvmlShutdown()
            self._library = None

    def _number(self, kind: Any, function: str, *arguments: int) -> float | None:
        """What a function gives by its last argument; None where the device has no such sensor."""
        if self._library is None:
            return None
        out = kind()
        call = getattr(self._library, function, None)
        if call is None or call(self._device, *arguments, ctypes.byref(out)) != _SUCCESS:
            return None
        return float(out.value)
