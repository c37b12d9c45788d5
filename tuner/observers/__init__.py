"""Sensors beside Vulkan: power, clocks, temperature, reasons for throttling. Optional, never fatal.

An observer is found by the device's vendor: NVML for NVIDIA, the kernel's files for AMD and Intel.
"""

from __future__ import annotations

from tuner.device_info import DeviceInfo
from tuner.observers import nvml
from tuner.observers.base import Meter, Observer, Reading, Watch, metered, summarised, watched
from tuner.observers.nvml import Nvml
from tuner.observers.sysfs import Sysfs

__all__ = [
    "Meter",
    "Nvml",
    "Observer",
    "Reading",
    "Sysfs",
    "Watch",
    "find_observer",
    "metered",
    "summarised",
    "watched",
]

_NVIDIA = 0x10DE


def find_observer(info: DeviceInfo) -> Observer | None:
    """What can observe a device; None for CPU drivers, and where nothing is installed."""
    if info.is_cpu:
        return None
    if info.vendor_id == _NVIDIA:
        library = nvml.load()
        return None if library is None else Nvml.find(library, info.uuid, info.pci_address)
    return Sysfs.find(info.pci_address)
