"""The driver's account of a lost device, as a driver that keeps one would give it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.small_kernels import executed, job, operands, outputs, step
from tuner.errors import DeviceLostError

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

ADDRESSES = [(2, 0x7F0012345678, 4096), (0, 0, 0), (6, 0xABC0, 1)]
VENDOR = [("MMU fault on engine GRAPHICS", 0x1F, 0x2A)]
LINES = (
    "the kernel wrote where it must not",
    "invalid write at 0x7f0012345000 to 0x7f0012345fff",
    "instruction pointer of the fault 0xabc0",
    "MMU fault on engine GRAPHICS (code 0x1f, data 0x2a)",
)


def account(_device: object, counts: Any, info: Any) -> int:
    """A vkGetDeviceFaultInfoEXT."""
    assert counts.sType
    if not info:
        counts.addressInfoCount, counts.vendorInfoCount = len(ADDRESSES), len(VENDOR)
        counts.vendorBinarySize = 4096
        return 0
    assert (info.sType != 0, counts.vendorBinarySize, bool(info.pVendorBinaryData)) == (1, 0, 0)
    info.description = LINES[0].encode()
    for each, (kind, address, precision) in zip(info.pAddressInfos[0:3], ADDRESSES, strict=True):
        each.addressType, each.reportedAddress, each.addressPrecision = kind, address, precision
    (vendor,) = info.pVendorInfos[0:1]
    text, vendor.vendorFaultCode, vendor.vendorFaultData = VENDOR[0]
    vendor.description = text.encode()
    return 0


def test_the_account_is_put_into_words(vulkan_selector: str | None) -> None:
    from tuner._device_fault import fault_lines

    assert fault_lines(account, None) == LINES


@pytest.mark.parametrize("failing", ["counts", "info"])
def test_a_driver_without_an_account_says_nothing(
    vulkan_selector: str | None, failing: str
) -> None:
    from tuner._device_fault import fault_lines

    def query(device: object, counts: Any, info: Any) -> int:
        fails = bool(info) == (failing == "info")
        return -3 if fails else account(device, counts, info)

    assert fault_lines(query, None) == ()


@pytest.mark.parametrize("call", ["vkQueueSubmit", "vkWaitForFences"])
def test_a_lost_device_is_told_with_the_drivers_account(
    open_runner: Callable[..., VulkanRunner], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    from tuner import _vk

    runner = open_runner()
    runner.load("w", operands(), outputs())
    scale = job(step("scale"))
    runner.prepare([scale])
    real = _vk.lib
    telling = msgspec.structs.replace(runner.info, device_fault=True)
    monkeypatch.setattr(runner._device, "info", telling)
    monkeypatch.setattr(runner._device, "procedure", {"vkGetDeviceFaultInfoEXT": account}.get)

    class Losing:
        def __getattr__(self, name: str) -> Any:
            return lost if name == call else getattr(real, name)

    def lost(*arguments: Any) -> int:
        if call == "vkWaitForFences":
            # The work ends all the same, so that the runner can be closed afterwards.
            real.vkWaitForFences(*arguments)
        return -4

    monkeypatch.setattr(_vk, "lib", Losing())
    with pytest.raises(DeviceLostError, match="invalid write at 0x7f0012345000") as caught:
        executed(runner, scale)
    monkeypatch.undo()
    assert caught.value.faults == LINES
    assert caught.value.call == call
    assert "the driver gave the device up" in str(caught.value)
