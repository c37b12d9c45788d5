"""One command buffer with its fence, and the barriers that go between commands."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tuner import _vk
from tuner.device import Device
from tuner.errors import RunTimeoutError, VulkanError
from tuner.runner._deadlines import Patience

STARVED_LOOK_S = 1.0
"""So often it is looked how much time of the processors a late submission has got."""

_STAGES = {
    "compute": _vk.binding.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT,
    "transfer": _vk.binding.VK_PIPELINE_STAGE_TRANSFER_BIT,
    "host": _vk.binding.VK_PIPELINE_STAGE_HOST_BIT,
}
_WRITES = {
    "compute": _vk.binding.VK_ACCESS_SHADER_WRITE_BIT,
    "transfer": _vk.binding.VK_ACCESS_TRANSFER_WRITE_BIT,
}
_ACCESSES = {
    "compute": _vk.binding.VK_ACCESS_SHADER_READ_BIT | _vk.binding.VK_ACCESS_SHADER_WRITE_BIT,
    "transfer": _vk.binding.VK_ACCESS_TRANSFER_READ_BIT | _vk.binding.VK_ACCESS_TRANSFER_WRITE_BIT,
    "host": _vk.binding.VK_ACCESS_HOST_READ_BIT,
}


class Barrier:
    """A full memory barrier from one kind of work to another, ready to be recorded."""

    __slots__ = ("_arguments",)

    def __init__(self, before: str, after: str) -> None:
        memory = _vk.struct(
            "VkMemoryBarrier", srcAccessMask=_WRITES[before], dstAccessMask=_ACCESSES[after]
        )
        self._arguments = (
            _STAGES[before],
            _STAGES[after],
            *(0, 1, memory, 0, _vk.NULL, 0, _vk.NULL),
        )

    def record(self, commands: Any) -> None:
        """Record it into a command buffer."""
        _vk.lib.vkCmdPipelineBarrier(commands, *self._arguments)


COMPUTE_TO_COMPUTE = Barrier("compute", "compute")
COMPUTE_TO_TRANSFER = Barrier("compute", "transfer")
TRANSFER_TO_COMPUTE = Barrier("transfer", "compute")
TRANSFER_TO_TRANSFER = Barrier("transfer", "transfer")
TRANSFER_TO_HOST = Barrier("transfer", "host")


class Commands:
    """A command buffer that is recorded, submitted and waited for, over and over.

    `begin` returns the raw command buffer; `submit` ends and submits it; `wait` waits for it. A
    submission that outlasts its deadline leaves the object *busy*: the device may still use
    whatever it was given, so what `when_idle` was asked to destroy is kept until it ends.
    """

    def __init__(self, device: Device, patience: Patience) -> None:
        self._device = device
        self.patience = patience
        self.busy = False
        self._lock = threading.Lock()  # between a launch that ends and what is released meanwhile
        self._pending: list[Callable[[], None]] = []
        pool_info = _vk.struct("VkCommandPoolCreateInfo", queueFamilyIndex=device.queue_family)
        self._pool = _vk.create(
            "vkCreateCommandPool", "VkCommandPool", device.handle, pool_info, _vk.NULL
        )
        buffer_info = _vk.struct(
            "VkCommandBufferAllocateInfo", commandPool=self._pool, commandBufferCount=1
        )
        self._buffer = _vk.create(
            "vkAllocateCommandBuffers", "VkCommandBuffer", device.handle, buffer_info
        )
        fence_info = _vk.struct("VkFenceCreateInfo")
        self._fence = _vk.create("vkCreateFence", "VkFence", device.handle, fence_info, _vk.NULL)
        self._fences = _vk.array("VkFence", [self._fence])
        self._begin_info = _vk.struct(
            "VkCommandBufferBeginInfo",
            flags=_vk.binding.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT,
        )
        self._submit_info = _vk.struct(
            "VkSubmitInfo",
            commandBufferCount=1,
            pCommandBuffers=_vk.array("VkCommandBuffer", [self._buffer]),
        )

    def begin(self) -> Any:
        """Start recording; waits first if the last submission is still running.

        Raises:
            RunTimeoutError: it still does not end.
        """
        self.wait("earlier work on the device")
        _vk.call("vkResetCommandPool", self._device.handle, self._pool, 0)
        _vk.call("vkBeginCommandBuffer", self._buffer, self._begin_info)
        return self._buffer

    def submit(self) -> None:
        """End recording and submit."""
        _vk.call("vkEndCommandBuffer", self._buffer)
        code = _vk.lib.vkQueueSubmit(self._device.queue, 1, self._submit_info, self._fence)
        self._device.check("vkQueueSubmit", code)
        self.busy = True

    def wait(self, what: str) -> None:
        """Wait for the submission, if there is one.

        Raises:
            RunTimeoutError: patience is at its end; it may be waited for again.
            DeviceLostError: the device gave up.
        """
        if not self.busy:
            return
        patience, spent = self.patience, 0.0
        if patience.starved_seconds > patience.seconds:
            # Nowhere else: to be told takes most of a millisecond on some systems.
            spent = time.process_time()
        code, waited_s = self._fence_within(patience.seconds), patience.seconds
        while code == _vk.TIMEOUT and waited_s < patience.starved_seconds:
            if time.process_time() - spent >= patience.seconds:
                break
            code, waited_s = self._fence_within(STARVED_LOOK_S), waited_s + STARVED_LOOK_S
        if code == _vk.TIMEOUT:
            raise RunTimeoutError(what, waited_s)
        self._idle()
        self._device.check("vkWaitForFences", code)
        _vk.call("vkResetFences", self._device.handle, 1, self._fences)

    def run(self, what: str, record: Callable[[Any], None]) -> None:
        """Record, submit and wait."""
        record(self.begin())
        self.submit()
        self.wait(what)

    def when_idle(self, destroy: Callable[[], None]) -> None:
        """Call `destroy` now, or as soon as the device no longer uses what was submitted.

        May be called from any thread.
        """
        with self._lock:
            if self.busy:
                self._pending.append(destroy)
                return
        destroy()

    def settle(self) -> bool:
        """Wait once more for what is running; False if the device still does not answer."""
        try:
            self.wait("earlier work on the device")
        except RunTimeoutError:
            return False
        except VulkanError:
            self._idle()
        return True

    def close(self) -> None:
        """Destroy everything; the device must be idle."""
        _vk.lib.vkDestroyFence(self._device.handle, self._fence, _vk.NULL)
        _vk.lib.vkDestroyCommandPool(self._device.handle, self._pool, _vk.NULL)

    def _fence_within(self, seconds: float) -> int:
        code = _vk.lib.vkWaitForFences(self._device.handle, 1, self._fences, 1, int(seconds * 1e9))
        return int(code)

    def _idle(self) -> None:
        with self._lock:
            self.busy = False
            pending, self._pending = self._pending, []
        for destroy in pending:
            destroy()
