"""What a driver knows of why its device was lost (VK_EXT_device_fault)."""

from __future__ import annotations

from typing import Any

from tuner import _vk

_MAX_LINES = 8
_ADDRESSES = {
    1: "invalid read at",
    2: "invalid write at",
    3: "invalid execution at",
    4: "instruction pointer (of unknown validity)",
    5: "invalid instruction pointer",
    6: "instruction pointer of the fault",
}
"""By VkDeviceFaultAddressTypeEXT; 0 is none."""


def fault_lines(query: Any, device: Any) -> tuple[str, ...]:
    """The driver's account of a device that is lost, a line each, eight at most.

    `query` is its vkGetDeviceFaultInfoEXT. A driver that fails in this, too, has no account.
    """
    counts = _vk.struct("VkDeviceFaultCountsEXT")
    if query(device, counts, _vk.NULL) != _vk.SUCCESS:
        return ()
    # The vendor's binary dump is for the vendor's tools.
    counts.vendorBinarySize = 0
    addresses = _vk.ffi.new("VkDeviceFaultAddressInfoEXT[]", max(1, counts.addressInfoCount))
    vendor = _vk.ffi.new("VkDeviceFaultVendorInfoEXT[]", max(1, counts.vendorInfoCount))
    info = _vk.struct("VkDeviceFaultInfoEXT", pAddressInfos=addresses, pVendorInfos=vendor)
    if query(device, counts, info) not in (_vk.SUCCESS, _vk.INCOMPLETE):
        return ()
    lines = [_vk.string(info.description)]
    lines += [_address(each) for each in addresses[0 : counts.addressInfoCount] if each.addressType]
    lines += [
        f"{_vk.string(each.description)} (code {each.vendorFaultCode:#x}, data "
        f"{each.vendorFaultData:#x})"
        for each in vendor[0 : counts.vendorInfoCount]
    ]
    return tuple(line for line in lines if line)[:_MAX_LINES]


def _address(fault: Any) -> str:
    """The address is right up to the precision, which is a power of two."""
    kind = _ADDRESSES.get(int(fault.addressType), f"fault of kind {int(fault.addressType)} at")
    precision = max(1, int(fault.addressPrecision))
    low = int(fault.reportedAddress) & ~(precision - 1)
    return f"{kind} {low:#x}" + (f" to {low + precision - 1:#x}" if precision > 1 else "")
