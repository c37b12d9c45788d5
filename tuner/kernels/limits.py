"""What a device's limits say to a launch: reasons with their numbers, None where it fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tuner.device_info import DeviceInfo


def subgroup_size_reason(device: DeviceInfo, size: int) -> str | None:
    """Why a pipeline cannot have subgroups of `size` lanes."""
    if not device.subgroup_size_control:
        return _uncontrolled_size_reason(device, size)
    if not device.min_subgroup_size <= size <= device.max_subgroup_size:
        return (
            f"subgroup size {size} is outside the device's {device.min_subgroup_size} to "
            f"{device.max_subgroup_size}"
        )
    return None


def _uncontrolled_size_reason(device: DeviceInfo, size: int) -> str | None:
    """Why subgroups cannot be known to have `size` lanes where no pipeline can ask for a size.

    Of SPIR-V from 1.6 on, as all kernels are, the sizes may then be any from the least to the most
    (the built-in variable SubgroupSize in the Vulkan specification).
    """
    least, most = device.min_subgroup_size, device.max_subgroup_size
    if least < most:
        return f"the device's subgroups have {least} to {most} lanes and no size control"
    if size != device.subgroup_size:
        return f"the device's subgroups have {device.subgroup_size} lanes and no size control"
    return None


def operations_reason(device: DeviceInfo, needed: Iterable[str]) -> str | None:
    """Which kinds of subgroup operations are missing."""
    missing = set(needed) - set(device.subgroup_operations)
    if missing:
        return f"the device has no subgroup operations of kind {', '.join(sorted(missing))}"
    return None


def threads_reason(device: DeviceInfo, threads: int) -> str | None:
    """Why a workgroup of so many threads in x is too large."""
    limit = min(device.max_workgroup_invocations, device.max_workgroup_size[0])
    return f"{threads} threads a workgroup, the device allows {limit}" if threads > limit else None


def shared_memory_reason(device: DeviceInfo, nbytes: int, purpose: str = "") -> str | None:
    """Why a workgroup cannot have so many bytes of shared memory; `purpose` says what for."""
    limit = device.max_shared_memory_bytes
    if nbytes <= limit:
        return None
    return f"needs {nbytes} bytes of shared memory{purpose}, the device has {limit}"


def groups_reason(device: DeviceInfo, groups: Iterable[int]) -> str | None:
    """Why a launch of so many workgroups, in x and perhaps y and z, is too large."""
    for axis, wanted, limit in zip("xyz", groups, device.max_workgroup_count, strict=False):
        if wanted > limit:
            return f"{wanted} workgroups in {axis}, the device allows {limit}"
    return None


def launches_reason(device: DeviceInfo, passes: Mapping[str, tuple[int, int, int]]) -> str | None:
    """Why a pass is launched too large; `passes` gives the workgroup counts of each by its name."""
    for name, groups in passes.items():
        if reason := groups_reason(device, groups):
            return f"{name}: {reason}"
    return None


def buffer_reason(device: DeviceInfo, name: str, nbytes: int) -> str | None:
    """Why a buffer of so many bytes cannot be bound."""
    limit = device.max_storage_buffer_bytes
    return f"{name} takes {nbytes} bytes, the device allows {limit}" if nbytes > limit else None


def buffers_reason(device: DeviceInfo, count: int) -> str | None:
    """Why a pipeline cannot have so many storage buffers."""
    limit = device.max_storage_buffers
    return f"{count} storage buffers, the device allows {limit}" if count > limit else None


def subgroups_reason(device: DeviceInfo, count: int) -> str | None:
    """Why a workgroup cannot have so many subgroups."""
    limit = device.max_workgroup_subgroups
    return f"{count} subgroups a workgroup, the device allows {limit}" if count > limit else None
