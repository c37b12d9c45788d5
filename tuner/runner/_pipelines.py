"""Jobs made ready: SPIR-V to pipelines, in any thread, with the driver's statistics."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner import _vk
from tuner.device import Device
from tuner.errors import UsageError
from tuner.runner._commands import Commands
from tuner.runner.protocol import Job, JobPass, PassStatistics, Prepared

_COMPUTE_STAGE = 0x20
_REQUIRE_FULL_SUBGROUPS = 2
_SPIRV_MAGIC = 0x07230203
_OP_EXECUTION_MODE = 16
_OP_FUNCTION = 54
_MODE_LOCAL_SIZE = 17
_STATISTIC_FIELDS = ("b32", "i64", "u64", "f64")

JobKey = tuple[tuple[JobPass, ...], tuple[str, ...], tuple[tuple[str, int], ...]]


@dataclass(frozen=True, slots=True)
class Step:
    """One pass as handles: what the recording of a dispatch needs."""

    pipeline: Any
    layout: Any
    push: Any
    push_bytes: int
    groups: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ReadyJob:
    """The pipelines of a job, and the layout of its descriptor sets."""

    steps: tuple[Step, ...]
    set_layout: Any
    prepared: Prepared


class Pipelines:
    """All jobs that are prepared, and the layouts and the cache they share. Thread-safe."""

    def __init__(self, device: Device, cache_dir: Path | None = None) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._ready: dict[JobKey, ReadyJob] = {}
        self._users: Counter[JobKey] = Counter()
        self._set_layouts: dict[int, Any] = {}
        self._layouts: dict[tuple[int, int], Any] = {}
        info = device.info
        self._cache_path = (
            cache_dir / f"pipelines-{info.uuid}-{info.driver_version:x}.bin" if cache_dir else None
        )
        self._cache = self._open_cache()

    def prepare(self, job: Job) -> Prepared:
        """Make the job's pipelines unless they are there; each call takes a `release` of its own.

        Raises:
            UsageError: the job breaks a limit of the device that would crash a driver.
            VulkanError: the driver refuses the job.
        """
        key = job_key(job)
        with self._lock:
            known = self._ready.get(key)
            if known is not None:
                self._users[key] += 1
                return known.prepared
        made = self._make(job)
        with self._lock:
            first = self._ready.setdefault(key, made)
            self._users[key] += 1
        if first is not made:
            self._destroy(made)
        return first.prepared

    def ready(self, job: Job) -> ReadyJob:
        """The prepared job.

        Raises:
            UsageError: it is not prepared.
        """
        with self._lock:
            known = self._ready.get(job_key(job))
        if known is None:
            names = ", ".join(p.name for p in job.passes)
            raise UsageError(f"job ({names}) is not prepared: call prepare before running it")
        return known

    def release(self, job: Job, commands: Commands) -> None:
        """Undo one `prepare`; after the last the pipelines go, once `commands` no longer runs them.

        An unknown job is ignored.
        """
        key = job_key(job)
        with self._lock:
            self._users[key] -= 1
            if self._users[key] > 0:
                return
            del self._users[key]
            known = self._ready.pop(key, None)
        if known is not None:
            commands.when_idle(lambda: self._destroy(known))

    def close(self) -> None:
        """Destroy everything and save the cache; the device must be idle."""
        handle, lib = self._device.handle, _vk.lib
        for ready in self._ready.values():
            self._destroy(ready)
        self._ready.clear()
        self._save_cache()
        lib.vkDestroyPipelineCache(handle, self._cache, _vk.NULL)
        for layout in self._layouts.values():
            lib.vkDestroyPipelineLayout(handle, layout, _vk.NULL)
        for layout in self._set_layouts.values():
            lib.vkDestroyDescriptorSetLayout(handle, layout, _vk.NULL)

    def _make(self, job: Job) -> ReadyJob:
        for each in job.passes:
            self._check(each)
        started = time.perf_counter()
        steps: list[Step] = []
        with contextlib.ExitStack() as undo:
            for each in job.passes:
                steps.append(self._step(each, len(job.bindings)))
                undo.callback(self._destroy_steps, steps[-1:])
            undo.pop_all()
        seconds = time.perf_counter() - started
        statistics = tuple(
            PassStatistics(name=each.name, statistics=self._statistics(step.pipeline))
            for each, step in zip(job.passes, steps, strict=True)
        )
        prepared = Prepared(
            pipeline_seconds=seconds,
            statistics=statistics if self._device.info.pipeline_executable_properties else (),
        )
        return ReadyJob(tuple(steps), self._set_layout(len(job.bindings)), prepared)

    def _check(self, each: JobPass) -> None:
        info = self._device.info
        if len(each.spirv) % 4 or each.spirv[:4] != struct.pack("<I", _SPIRV_MAGIC):
            raise UsageError(f"pass {each.name!r}: {len(each.spirv)} bytes that are no SPIR-V")
        if len(each.push) > info.max_push_constant_bytes or len(each.push) % 4:
            raise UsageError(
                f"pass {each.name!r}: {len(each.push)} bytes of push constants, must be a multiple "
                f"of 4 up to {info.max_push_constant_bytes}"
            )
        if any(n > top for n, top in zip(each.groups, info.max_workgroup_count, strict=True)):
            raise UsageError(
                f"pass {each.name!r}: {each.groups} workgroups, the device takes "
                f"{info.max_workgroup_count}"
            )
        size = each.subgroup_size
        if size is not None and not (
            info.subgroup_size_control and info.min_subgroup_size <= size <= info.max_subgroup_size
        ):
            raise UsageError(
                f"pass {each.name!r}: subgroup size {size}, the device offers "
                f"{info.min_subgroup_size} to {info.max_subgroup_size}"
                + ("" if info.subgroup_size_control else " without control over it")
            )

    def _step(self, each: JobPass, bindings: int) -> Step:
        handle = self._device.handle
        code = _vk.ffi.new("uint32_t[]", len(each.spirv) // 4)
        _vk.ffi.memmove(code, each.spirv, len(each.spirv))
        module_info = _vk.struct("VkShaderModuleCreateInfo", codeSize=len(each.spirv), pCode=code)
        module = _vk.create("vkCreateShaderModule", "VkShaderModule", handle, module_info, _vk.NULL)
        layout = self._layout(bindings, len(each.push))
        try:
            pipeline = self._pipeline(each, module, layout)
        finally:
            _vk.lib.vkDestroyShaderModule(handle, module, _vk.NULL)
        push = _vk.ffi.new("unsigned char[]", each.push) if each.push else _vk.NULL
        return Step(pipeline, layout, push, len(each.push), each.groups)

    def _pipeline(self, each: JobPass, module: Any, layout: Any) -> Any:
        info, vk = self._device.info, _vk.binding
        stage_flags, following = 0, _vk.NULL
        if each.subgroup_size is not None:
            following = _vk.struct(
                "VkPipelineShaderStageRequiredSubgroupSizeCreateInfo",
                requiredSubgroupSize=each.subgroup_size,
            )
            if info.compute_full_subgroups and local_size_x(each.spirv) % each.subgroup_size == 0:
                stage_flags = _REQUIRE_FULL_SUBGROUPS
        stage = _vk.struct(
            "VkPipelineShaderStageCreateInfo",
            pNext=following,
            flags=stage_flags,
            stage=_COMPUTE_STAGE,
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
            *(self._device.handle, self._cache, 1, create_info, _vk.NULL),
        )

    def _statistics(self, pipeline: Any) -> dict[str, int | float | str | bool]:
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

    def _set_layout(self, bindings: int) -> Any:
        with self._lock:
            if bindings not in self._set_layouts:
                self._set_layouts[bindings] = self._make_set_layout(bindings)
            return self._set_layouts[bindings]

    def _make_set_layout(self, bindings: int) -> Any:
        each = [
            _vk.struct(
                "VkDescriptorSetLayoutBinding",
                binding=number,
                descriptorType=_vk.binding.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
                descriptorCount=1,
                stageFlags=_COMPUTE_STAGE,
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
        set_layout = self._set_layout(bindings)
        with self._lock:
            if (bindings, push_bytes) not in self._layouts:
                push = _vk.struct(
                    "VkPushConstantRange", stageFlags=_COMPUTE_STAGE, offset=0, size=push_bytes
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

    def _destroy(self, ready: ReadyJob) -> None:
        self._destroy_steps(ready.steps)

    def _destroy_steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            _vk.lib.vkDestroyPipeline(self._device.handle, step.pipeline, _vk.NULL)

    def _open_cache(self) -> Any:
        data = b""
        if self._cache_path is not None:
            with contextlib.suppress(OSError):
                data = self._cache_path.read_bytes()
        info = _vk.struct(
            "VkPipelineCacheCreateInfo",
            initialDataSize=len(data),
            pInitialData=_vk.ffi.new("char[]", data) if data else _vk.NULL,
        )
        return _vk.create(
            "vkCreatePipelineCache", "VkPipelineCache", self._device.handle, info, _vk.NULL
        )

    def _save_cache(self) -> None:
        """The cache only saves time: a folder that cannot be written is no reason to fail."""
        if self._cache_path is None:
            return
        size = _vk.ffi.new("size_t *")
        arguments = (self._device.handle, self._cache, size)
        _vk.call("vkGetPipelineCacheData", *arguments, _vk.NULL)
        data = _vk.ffi.new("char[]", size[0])
        _vk.call("vkGetPipelineCacheData", *arguments, data, allow=(_vk.INCOMPLETE,))
        part = self._cache_path.with_suffix(f".{os.getpid()}.part")
        with contextlib.suppress(OSError):
            self._cache_path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(_vk.ffi.buffer(data, size[0])[:])
            part.replace(self._cache_path)


def job_key(job: Job) -> JobKey:
    """What makes two jobs the same."""
    return job.passes, job.bindings, tuple(sorted(job.scratch_bytes.items()))


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
