"""A prepared job bound to the copies of a workload: what gets recorded for one launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tuner import _vk
from tuner.device import Device
from tuner.errors import UsageError
from tuner.runner._commands import COMPUTE_TO_COMPUTE
from tuner.runner._pipelines import ReadyJob
from tuner.runner._resident import Guarded

_COMPUTE = 1
_COMPUTE_STAGE = 0x20


class Launch:
    """One descriptor set for each copy of the operands, and the passes over it.

    `record` is the hot path of timing: it makes no struct and calls the binding's raw functions.
    """

    def __init__(
        self,
        device: Device,
        ready: ReadyJob,
        bindings: Sequence[str],
        copies: Sequence[Mapping[str, Guarded]],
    ) -> None:
        """Raises UsageError if a binding names no buffer."""
        for name in bindings:
            if name not in copies[0]:
                raise UsageError(
                    f"binding {name!r} is neither an operand of the workload nor scratch: "
                    f"there are {', '.join(sorted(copies[0]))}"
                )
        self._device = device
        self._steps = ready.steps
        self.copies = len(copies)
        self._pool = self._make_pool(len(bindings), len(copies))
        handles = self._make_sets(ready.set_layout, len(copies))
        self._sets = [_vk.array("VkDescriptorSet", [handle]) for handle in handles]
        self._bind(handles, [[buffers[name] for name in bindings] for buffers in copies])

    @property
    def dispatches(self) -> int:
        """Passes of the job."""
        return len(self._steps)

    @property
    def intervals(self) -> int:
        """Stretches between barriers."""
        return 1 + sum(not step.beside for step in self._steps[1:])

    def record(self, commands: Any, copy: int, between: Callable[[], None] | None = None) -> None:
        """Record every pass on one copy, with barriers between passes.

        `between` is called where one stretch has been recorded and before its barrier.
        """
        lib, null = _vk.lib, _vk.NULL
        bound, first = self._sets[copy], True
        for step in self._steps:
            if not (first or step.beside):
                if between is not None:
                    between()
                COMPUTE_TO_COMPUTE.record(commands)
            first = False
            lib.vkCmdBindPipeline(commands, _COMPUTE, step.pipeline)
            lib.vkCmdBindDescriptorSets(commands, _COMPUTE, step.layout, 0, 1, bound, 0, null)
            if step.push_bytes:
                lib.vkCmdPushConstants(
                    commands, step.layout, _COMPUTE_STAGE, 0, step.push_bytes, step.push
                )
            lib.vkCmdDispatch(commands, *step.groups)

    def close(self) -> None:
        """Free the descriptor sets; the device must not use them any more."""
        _vk.lib.vkDestroyDescriptorPool(self._device.handle, self._pool, _vk.NULL)

    def _make_pool(self, bindings: int, copies: int) -> Any:
        size = _vk.struct(
            "VkDescriptorPoolSize",
            type=_vk.binding.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
            descriptorCount=max(1, bindings * copies),
        )
        info = _vk.struct(
            "VkDescriptorPoolCreateInfo", maxSets=copies, poolSizeCount=1, pPoolSizes=size
        )
        return _vk.create(
            "vkCreateDescriptorPool", "VkDescriptorPool", self._device.handle, info, _vk.NULL
        )

    def _make_sets(self, layout: Any, copies: int) -> list[Any]:
        info = _vk.struct(
            "VkDescriptorSetAllocateInfo",
            descriptorPool=self._pool,
            descriptorSetCount=copies,
            pSetLayouts=_vk.array("VkDescriptorSetLayout", [layout] * copies),
        )
        out = _vk.ffi.new("VkDescriptorSet[]", copies)
        try:
            _vk.call("vkAllocateDescriptorSets", self._device.handle, info, out)
        except BaseException:
            self.close()
            raise
        return list(out)

    def _bind(self, handles: Sequence[Any], copies: Sequence[Sequence[Guarded]]) -> None:
        """Point each set at the buffers of its copy.

        Written into two plain arrays: operands in a hundred copies have a thousand bindings, and
        the device waits for them.
        """
        limit = self._device.info.max_storage_buffer_bytes
        count = sum(map(len, copies))
        views = _vk.ffi.new("VkDescriptorBufferInfo[]", count)
        writes = _vk.ffi.new("VkWriteDescriptorSet[]", count)
        kind = _vk.binding.VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET
        storage = _vk.binding.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
        at = 0
        for handle, buffers in zip(handles, copies, strict=True):
            for number, buffer in enumerate(buffers):
                view, write = views[at], writes[at]
                view.buffer, view.offset = buffer.buffer, buffer.payload
                view.range = min(buffer.bound_bytes, limit)
                write.sType, write.descriptorType, write.descriptorCount = kind, storage, 1
                write.dstSet, write.dstBinding, write.pBufferInfo = handle, number, views + at
                at += 1
        _vk.lib.vkUpdateDescriptorSets(self._device.handle, count, writes, 0, _vk.NULL)
