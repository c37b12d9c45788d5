"""Programs: SPIR-V made executable, one pipeline for all jobs that launch the same code.

A driver takes up to seconds over a pipeline, and what a launch pushes or how many workgroups it has
does not enter into it: variants that differ only there, and a variant's launches on problems of
different sizes, share one.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner import _vk
from tuner.device import Device
from tuner.runner._pipeline_cache import PipelineCache

COMPUTE_STAGE = 0x20
_REQUIRE_FULL_SUBGROUPS = 2
_OP_EXECUTION_MODE = 16
_OP_FUNCTION = 54
_MODE_LOCAL_SIZE = 17
_STATISTIC_FIELDS = ("b32", "i64", "u64", "f64")

Statistics = dict[str, int | float | str | bool]
WhenIdle = Callable[[Callable[[], None]], None]
"""Calls what it is given once the device no longer uses what was submitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramKey:
    """All that a pipeline depends on."""

    spirv: bytes
    subgroup_size: int | None
    bindings: int
    push_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A pipeline, its layout, and what the driver says of it."""

    key: ProgramKey
    pipeline: Any
    layout: Any
    statistics: Statistics


class Programs:
    """All programs in use, the layouts and the driver's cache that they share. Thread-safe."""

    def __init__(self, device: Device, cache_dir: Path | None = None) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._programs: dict[ProgramKey, Program] = {}
        self._users: Counter[ProgramKey] = Counter()
        self._set_layouts: dict[int, Any] = {}
        self._layouts: dict[tuple[int, int], Any] = {}
        self._cache = PipelineCache(device, cache_dir)

    def __len__(self) -> int:
        return len(self._programs)

    def use(self, key: ProgramKey) -> Program:
        """The program, made unless it is there; each use takes a `release` of its own.

        Raises:
            VulkanError: the driver refuses it.
        """
        with self._lock:
            if key in self._programs:
                self._users[key] += 1
                return self._programs[key]
        # Outside the lock: other threads go on while the driver compiles.
        made = self._make(key)
        with self._lock:
            first = self._programs.setdefault(key, made)
            self._users[key] += 1
        if first is not made:
            self._destroy(made)
        return first

    def release(self, program: Program, when_idle: WhenIdle) -> None:
        """Undo one `use`; the last hands the program's destruction to `when_idle`."""
        with self._lock:
            self._users[program.key] -= 1
            if self._users[program.key] > 0:
                return
            del self._users[program.key], self._programs[program.key]
        when_idle(lambda: self._destroy(program))

    def set_layout(self, bindings: int) -> Any:
        """The layout of a descriptor set of `bindings` storage buffers."""
        with self._lock:
            if bindings not in self._set_layouts:
                self._set_layouts[bindings] = self._make_set_layout(bindings)
            return self._set_layouts[bindings]

    def close(self) -> None:
        """Destroy everything and save the cache; the device must be idle."""
        handle, lib = self._device.handle, _vk.lib
        for program in self._programs.values():
            self._destroy(program)
        self._programs.clear()
        self._cache.close()
        for layout in self._layouts.values():
            lib.vkDestroyPipelineLayout(handle, layout, _vk.NULL)
        for layout in self._set_layouts.values():
            lib.vkDestroyDescriptorSetLayout(handle, layout, _vk.NULL)

    def _make(self, key: ProgramKey) -> Program:
        handle = self._device.handle
        code = _vk.ffi.new("uint32_t[]", len(key.spirv) // 4)
        _vk.ffi.memmove(code, key.spirv, len(key.spirv))
        module_info = _vk.struct("VkShaderModuleCreateInfo", codeSize=len(key.spirv), pCode=code)
        module = _vk.create("vkCreateShaderModule", "VkShaderModule", handle, module_info, _vk.NULL)
        try:
            layout = self._layout(key.bindings, key.push_bytes)
            pipeline = self._make_pipeline(key, module, layout)
        finally:
            _vk.lib.vkDestroyShaderModule(handle, module, _vk.NULL)
        return Program(
            key=key, pipeline=pipeline, layout=layout, statistics=self._statistics(pipeline)
        )

    def _make_pipeline(self, key: ProgramKey, module: Any, layout: Any) -> Any:
        info, vk = self._device.info, _vk.binding
        stage_flags, following = 0, []
        if info.pipeline_robustness:
            # Some drivers check every access though no robust access was asked for.
            off = vk.VK_PIPELINE_ROBUSTNESS_BUFFER_BEHAVIOR_DISABLED_EXT
            following.append(
                _vk.struct(
                    "VkPipelineRobustnessCreateInfoEXT", storageBuffers=off, uniformBuffers=off
                )
            )
        if key.subgroup_size is not None:
            following.append(
                _vk.struct(
                    "VkPipelineShaderStageRequiredSubgroupSizeCreateInfo",
                    requiredSubgroupSize=key.subgroup_size,
                )
            )
            if info.compute_full_subgroups and local_size_x(key.spirv) % key.subgroup_size == 0:
                stage_flags = _REQUIRE_FULL_SUBGROUPS
        stage = _vk.struct(
            "VkPipelineShaderStageCreateInfo",
            pNext=_vk.chain(following),
            flags=stage_flags,
            stage=COMPUTE_STAGE,
            module=module,
            pName=_vk.text("main"),
        )
        create_info = _vk.struct(
            "VkComputePipelineCreateInfo",
            flags=vk.VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR
            if info.pipeline_executable_properties
            else 0,
            stage=stage,
            layout=layout,
        )
        return _vk.create(
            "vkCreateComputePipelines",
            "VkPipeline",
            *(self._device.handle, self._cache.handle, 1, create_info, _vk.NULL),
        )

    def _statistics(self, pipeline: Any) -> Statistics:
        """Statistics of a pipeline by name; the first executable's, if a driver makes several."""
        if not self._device.info.pipeline_executable_properties:
            return {}
        function = self._device.procedure("vkGetPipelineExecutableStatisticsKHR")
        info = _vk.struct("VkPipelineExecutableInfoKHR", pipeline=pipeline, executableIndex=0)
        return {
            _vk.string(item.name): getattr(item.value, _STATISTIC_FIELDS[item.format])
            for item in _vk.listed(
                function, "VkPipelineExecutableStatisticKHR", self._device.handle, info
            )
        }

    def _make_set_layout(self, bindings: int) -> Any:
        each = [
            _vk.struct(
                "VkDescriptorSetLayoutBinding",
                binding=number,
                descriptorType=_vk.binding.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
                descriptorCount=1,
                stageFlags=COMPUTE_STAGE,
            )
            for number in range(bindings)
        ]
        info = _vk.struct(
            "VkDescriptorSetLayoutCreateInfo",
            bindingCount=bindings,
            pBindings=_vk.array("VkDescriptorSetLayoutBinding", each),
        )
        return _vk.create(
            "vkCreateDescriptorSetLayout",
            *("VkDescriptorSetLayout", self._device.handle, info, _vk.NULL),
        )

    def _layout(self, bindings: int, push_bytes: int) -> Any:
        set_layout = self.set_layout(bindings)
        with self._lock:
            if (bindings, push_bytes) not in self._layouts:
                push = _vk.struct(
                    "VkPushConstantRange", stageFlags=COMPUTE_STAGE, offset=0, size=push_bytes
                )
                info = _vk.struct(
                    "VkPipelineLayoutCreateInfo",
                    setLayoutCount=1,
                    pSetLayouts=_vk.array("VkDescriptorSetLayout", [set_layout]),
                    pushConstantRangeCount=1 if push_bytes else 0,
                    pPushConstantRanges=push if push_bytes else _vk.NULL,
                )
                self._layouts[bindings, push_bytes] = _vk.create(
                    "vkCreatePipelineLayout",
                    *("VkPipelineLayout", self._device.handle, info, _vk.NULL),
                )
            return self._layouts[bindings, push_bytes]

    def _destroy(self, program: Program) -> None:
        _vk.lib.vkDestroyPipeline(self._device.handle, program.pipeline, _vk.NULL)


def local_size_x(spirv: bytes) -> int:
    """Width of the workgroup that a SPIR-V module declares; 1 if it declares none as a literal."""
    words = memoryview(spirv).cast("I")
    at = 5
    while at < len(words):
        count, operation = words[at] >> 16, words[at] & 0xFFFF
        if operation == _OP_EXECUTION_MODE and words[at + 2] == _MODE_LOCAL_SIZE:
            return words[at + 3]
        if operation == _OP_FUNCTION or count == 0:
            break
        at += count
    return 1
