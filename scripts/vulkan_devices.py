"""Say what the Vulkan loader offers, with nothing but the standard library and the loader itself.

Prints one line a device ("cpu llvmpipe (…)") and one a layer ("layer VK_LAYER_…"). Exit status 3
if there is no loader. The set-up asks before any package is installed.
"""

from __future__ import annotations

import ctypes
import sys

KINDS = ("other", "integrated", "discrete", "virtual", "cpu")
INSTANCE_CREATE_INFO = 1
# Offsets in VkPhysicalDeviceProperties of deviceType and deviceName, and more than its size.
TYPE_OFFSET, NAME_OFFSET, NAME_SIZE, PROPERTIES_SIZE = 16, 20, 256, 4096


class LayerProperties(ctypes.Structure):
    """VkLayerProperties."""

    _fields_ = (
        ("name", ctypes.c_char * 256),
        ("spec_version", ctypes.c_uint32),
        ("implementation_version", ctypes.c_uint32),
        ("description", ctypes.c_char * 256),
    )


class InstanceCreateInfo(ctypes.Structure):
    """VkInstanceCreateInfo, of which only the first word is needed."""

    _fields_ = (("structure_type", ctypes.c_uint32), ("rest", ctypes.c_uint64 * 7))


def layers(vulkan: ctypes.CDLL) -> list[str]:
    """Names of the instance layers."""
    count = ctypes.c_uint32(0)
    if vulkan.vkEnumerateInstanceLayerProperties(ctypes.byref(count), None) or not count.value:
        return []
    found = (LayerProperties * count.value)()
    vulkan.vkEnumerateInstanceLayerProperties(ctypes.byref(count), found)
    return [layer.name.decode(errors="replace") for layer in found[: count.value]]


def devices(vulkan: ctypes.CDLL) -> list[str]:
    """Kind and name of each physical device."""
    info, instance = InstanceCreateInfo(INSTANCE_CREATE_INFO), ctypes.c_void_p()
    if vulkan.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance)):
        return []
    count = ctypes.c_uint32(0)
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
    handles = (ctypes.c_void_p * max(count.value, 1))()
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles)
    lines = []
    for handle in handles[: count.value]:
        raw = ctypes.create_string_buffer(PROPERTIES_SIZE)
        vulkan.vkGetPhysicalDeviceProperties(ctypes.c_void_p(handle), raw)
        kind = int.from_bytes(raw.raw[TYPE_OFFSET:NAME_OFFSET], sys.byteorder)
        name = raw.raw[NAME_OFFSET : NAME_OFFSET + NAME_SIZE].split(b"\0")[0]
        lines.append(f"{KINDS[kind % len(KINDS)]} {name.decode(errors='replace')}")
    vulkan.vkDestroyInstance(instance, None)
    return lines


def main() -> int:
    """Print devices and layers."""
    try:
        vulkan = ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return 3
    for line in (*devices(vulkan), *(f"layer {name}" for name in layers(vulkan))):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
