"""Device memory: which type for what, how much is left, and buffers laid into few allocations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tuner import _vk
from tuner.device import Device
from tuner.errors import OutOfMemoryError, VulkanError

_DEVICE_LOCAL = 1
_HOST_VISIBLE = 2
_HOST_COHERENT = 4
_HOST_CACHED = 8
_USAGE = (
    _vk.binding.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
    | _vk.binding.VK_BUFFER_USAGE_TRANSFER_SRC_BIT
    | _vk.binding.VK_BUFFER_USAGE_TRANSFER_DST_BIT
)


class Memory:
    """The memory of one open device: allocates from it and keeps account of each heap."""

    def __init__(self, device: Device) -> None:
        self.device = device
        properties = _vk.struct("VkPhysicalDeviceMemoryProperties")
        _vk.lib.vkGetPhysicalDeviceMemoryProperties(device.physical, properties)
        self._types = tuple(
            (int(kind.propertyFlags), int(kind.heapIndex))
            for kind in properties.memoryTypes[0 : properties.memoryTypeCount]
        )
        self._allocated = [0] * properties.memoryHeapCount

    def available_bytes(self) -> int:
        """Bytes of device-local memory that this process may still allocate."""
        _, heap = self._types[self._choose(~0, host=False)]
        left = self.device.free_bytes(heap)
        if left is not None:
            return left
        return self.device.info.memory_heaps[heap].size_bytes - self._allocated[heap]

    def require(self, what: str, needed_bytes: int, freed_bytes: int = 0) -> None:
        """Refuse beforehand what does not fit into device memory.

        Raises:
            OutOfMemoryError: `needed_bytes` are not available, nor will be once `freed_bytes` are.
        """
        available = self.available_bytes() + freed_bytes
        if needed_bytes > available:
            raise OutOfMemoryError(what, needed_bytes, available)

    def allocate(self, what: str, nbytes: int, type_bits: int, *, host: bool) -> Allocation:
        """Allocate device memory, or mapped host memory.

        Raises:
            OutOfMemoryError: the driver has no more.
        """
        index = self._choose(type_bits, host=host)
        heap = self._types[index][1]
        info = _vk.struct("VkMemoryAllocateInfo", allocationSize=nbytes, memoryTypeIndex=index)
        out = _vk.ffi.new("VkDeviceMemory *")
        code = _vk.lib.vkAllocateMemory(self.device.handle, info, _vk.NULL, out)
        if code in _vk.OUT_OF_MEMORY:
            raise OutOfMemoryError(what, nbytes, max(0, self.available_bytes()))
        _vk.check("vkAllocateMemory", code)
        self._allocated[heap] += nbytes
        return Allocation(self, out[0], nbytes, heap)

    def free(self, allocation: Allocation) -> None:
        """Give an allocation back (it unmaps itself)."""
        _vk.lib.vkFreeMemory(self.device.handle, allocation.handle, _vk.NULL)
        self._allocated[allocation.heap] -= allocation.nbytes

    def _choose(self, type_bits: int, *, host: bool) -> int:
        """Device memory avoids the small host-visible window, host memory prefers to be cached."""
        need = _HOST_VISIBLE | _HOST_COHERENT if host else _DEVICE_LOCAL
        like, avoid = (_HOST_CACHED, _DEVICE_LOCAL) if host else (0, _HOST_VISIBLE)
        fitting = [
            (bool(flags & like) - bool(flags & avoid), -index)
            for index, (flags, _) in enumerate(self._types)
            if type_bits >> index & 1 and flags & need == need
        ]
        if not fitting:
            kind = "host-visible" if host else "device-local"
            raise VulkanError("vkAllocateMemory", f"no {kind} memory type", 0, f"{type_bits:#x}")
        return -max(fitting)[1]


class Allocation:
    """One piece of memory from the driver."""

    __slots__ = ("_memory", "handle", "heap", "nbytes")

    def __init__(self, memory: Memory, handle: Any, nbytes: int, heap: int) -> None:
        self._memory = memory
        self.handle = handle
        self.nbytes = nbytes
        self.heap = heap

    def map(self) -> Any:
        """A writable buffer object over the whole allocation, valid until it is freed."""
        out = _vk.ffi.new("void **")
        device = self._memory.device.handle
        _vk.call("vkMapMemory", device, self.handle, 0, self.nbytes, 0, out)
        return _vk.ffi.buffer(out[0], self.nbytes)

    def free(self) -> None:
        """Give it back to the driver."""
        self._memory.free(self)


class Arena:
    """Buffers that live and die together, laid into as few allocations as the driver allows.

    Attributes:
        buffers: the Vulkan buffers, one for each of the sizes asked for.
    """

    def __init__(
        self, memory: Memory, what: str, sizes: Sequence[int], *, host: bool = False
    ) -> None:
        """Raises OutOfMemoryError if the sizes, in bytes, do not fit; then nothing is left."""
        self._device = memory.device.handle
        self.buffers: list[Any] = []
        self.allocations: list[Allocation] = []
        limit = memory.device.info.max_allocation_bytes
        if max(sizes) > limit:
            holder = "a single allocation of this device"
            raise OutOfMemoryError(f"{what}: one buffer", max(sizes), limit, holder=holder)
        try:
            for size in sizes:
                self.buffers.append(self._buffer(size))
            for first, count, nbytes, bits in self._chunks(limit):
                self._bind(first, count, memory.allocate(what, nbytes, bits, host=host))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Destroy the buffers and free their memory. Idempotent."""
        for buffer in self.buffers:
            _vk.lib.vkDestroyBuffer(self._device, buffer, _vk.NULL)
        for allocation in self.allocations:
            allocation.free()
        self.buffers, self.allocations = [], []

    def _buffer(self, size: int) -> Any:
        info = _vk.struct("VkBufferCreateInfo", size=size, usage=_USAGE)
        return _vk.create("vkCreateBuffer", "VkBuffer", self._device, info, _vk.NULL)

    def _chunks(self, limit: int) -> list[tuple[int, int, int, int]]:
        """(first buffer, how many, bytes, memory-type bits) of each allocation."""
        chunks: list[tuple[int, int, int, int]] = []
        first, used, bits = 0, 0, ~0
        for index, (size, alignment, own_bits) in enumerate(map(self._needs, self.buffers)):
            start = -(-used // alignment) * alignment
            if index > first and start + size > limit:
                chunks.append((first, index - first, used, bits))
                first, start, bits = index, 0, ~0
            used, bits = start + size, bits & own_bits
        chunks.append((first, len(self.buffers) - first, used, bits))
        return chunks

    def _bind(self, first: int, count: int, allocation: Allocation) -> None:
        self.allocations.append(allocation)
        offset = 0
        for buffer in self.buffers[first : first + count]:
            size, alignment, _ = self._needs(buffer)
            offset = -(-offset // alignment) * alignment
            _vk.call("vkBindBufferMemory", self._device, buffer, allocation.handle, offset)
            offset += size

    def _needs(self, buffer: Any) -> tuple[int, int, int]:
        needs = _vk.struct("VkMemoryRequirements")
        _vk.lib.vkGetBufferMemoryRequirements(self._device, buffer, needs)
        return needs.size, needs.alignment, needs.memoryTypeBits
