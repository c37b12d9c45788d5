"""Fill in a `DeviceInfo` from a physical device."""

from __future__ import annotations

import os
import uuid
from typing import Any, Literal, get_args

from tuner import _vk
from tuner._features import Features, Version
from tuner.device_info import (
    DeviceInfo,
    DeviceKind,
    MatrixShape,
    MemoryHeap,
    SubgroupOperation,
)

_COMPUTE_STAGE = 0x20
_KINDS: dict[int, DeviceKind] = {1: "integrated", 2: "discrete", 3: "virtual", 4: "cpu"}
_COMPONENT_TYPES = {
    0: "float16",
    1: "float32",
    2: "float64",
    3: "int8",
    4: "int16",
    5: "int32",
    6: "int64",
    7: "uint8",
    8: "uint16",
    9: "uint32",
    10: "uint64",
    1000141000: "bfloat16",
    1000491002: "float8_e4m3",
    1000491003: "float8_e5m2",
}
_SCOPES: dict[int, Literal["device", "workgroup", "subgroup", "queue_family"]] = {
    1: "device",
    2: "workgroup",
    3: "subgroup",
    5: "queue_family",
}
_PCI = "VkPhysicalDevicePCIBusInfoPropertiesEXT"
_MATRIX2_FEATURES = {
    "workgroup_scope": "cooperativeMatrixWorkgroupScope",
    "flexible_dimensions": "cooperativeMatrixFlexibleDimensions",
    "reductions": "cooperativeMatrixReductions",
    "conversions": "cooperativeMatrixConversions",
    "per_element_operations": "cooperativeMatrixPerElementOperations",
    "tensor_addressing": "cooperativeMatrixTensorAddressing",
    "block_loads": "cooperativeMatrixBlockLoads",
}


def snapshot(
    instance: Any,
    physical: Any,
    *,
    features: Features,
    extensions: frozenset[str],
    timestamp_valid_bits: int,
) -> DeviceInfo:
    """Every limit and feature of `DeviceInfo`; features are those that opening would enable."""
    blocks = _properties(physical, extensions)
    calibrated = {"VK_KHR_calibrated_timestamps", "VK_EXT_calibrated_timestamps"}
    return DeviceInfo(
        **_identity(blocks),
        pci_address=_pci_address(blocks[_PCI]) if "VK_EXT_pci_bus_info" in extensions else None,
        **_limits(blocks),
        **_subgroups(blocks, features),
        **_arithmetic(blocks, features),
        **_matrices(instance, physical, features, blocks),
        timestamp_valid_bits=timestamp_valid_bits,
        calibrated_timestamps=not extensions.isdisjoint(calibrated),
        shader_clock=features["shaderSubgroupClock"],
        pipeline_executable_properties=features["pipelineExecutableInfo"],
        memory_budget="VK_EXT_memory_budget" in extensions,
        device_fault=features["deviceFault"],
        memory_heaps=memory_heaps(physical, budgets="VK_EXT_memory_budget" in extensions),
        extensions=tuple(sorted(extensions)),
    )


def memory_heaps(physical: Any, *, budgets: bool) -> tuple[MemoryHeap, ...]:
    """The heaps; `budget_bytes` is what is left for this process at this moment."""
    answer = _vk.struct("VkPhysicalDeviceMemoryProperties2")
    budget = _vk.struct("VkPhysicalDeviceMemoryBudgetPropertiesEXT")
    if budgets:
        _vk.chain([answer, budget])
    _vk.lib.vkGetPhysicalDeviceMemoryProperties2(physical, answer)
    memory = answer.memoryProperties
    return tuple(
        MemoryHeap(
            size_bytes=memory.memoryHeaps[i].size,
            device_local=bool(memory.memoryHeaps[i].flags & 1),
            budget_bytes=max(0, budget.heapBudget[i] - budget.heapUsage[i]) if budgets else None,
        )
        for i in range(memory.memoryHeapCount)
    )


def api_version(physical: Any) -> Version:
    """Major and minor version of Vulkan that the device offers."""
    core = _vk.struct("VkPhysicalDeviceProperties")
    _vk.lib.vkGetPhysicalDeviceProperties(physical, core)
    major, minor, _ = _vk.version(core.apiVersion)
    return major, minor


def _properties(physical: Any, extensions: frozenset[str]) -> dict[str, Any]:
    api = api_version(physical)
    names = [
        ("VkPhysicalDeviceProperties2", True),
        ("VkPhysicalDeviceVulkan11Properties", api >= (1, 2)),
        ("VkPhysicalDeviceVulkan12Properties", api >= (1, 2)),
        ("VkPhysicalDeviceVulkan13Properties", api >= (1, 3)),
        ("VkPhysicalDeviceSubgroupProperties", api < (1, 2)),
        (
            "VkPhysicalDeviceCooperativeMatrixPropertiesKHR",
            "VK_KHR_cooperative_matrix" in extensions,
        ),
        ("VkPhysicalDeviceShaderSMBuiltinsPropertiesNV", "VK_NV_shader_sm_builtins" in extensions),
        (
            "VkPhysicalDeviceShaderCoreProperties2AMD",
            "VK_AMD_shader_core_properties2" in extensions,
        ),
        ("VkPhysicalDeviceShaderCorePropertiesAMD", "VK_AMD_shader_core_properties" in extensions),
        (
            "VkPhysicalDeviceShaderCoreBuiltinsPropertiesARM",
            "VK_ARM_shader_core_builtins" in extensions,
        ),
        (_PCI, "VK_EXT_pci_bus_info" in extensions),
    ]
    blocks = {name: _vk.struct(name) for name, _ in names}
    _vk.chain([blocks[name] for name, present in names if present])
    _vk.lib.vkGetPhysicalDeviceProperties2(physical, blocks["VkPhysicalDeviceProperties2"])
    return blocks


def _identity(blocks: dict[str, Any]) -> dict[str, Any]:
    core = blocks["VkPhysicalDeviceProperties2"].properties
    v11 = blocks["VkPhysicalDeviceVulkan11Properties"]
    v12 = blocks["VkPhysicalDeviceVulkan12Properties"]
    kind = _KINDS.get(core.deviceType, "other")
    return {
        "name": _vk.string(core.deviceName),
        "kind": kind,
        "vendor_id": core.vendorID,
        "device_id": core.deviceID,
        "uuid": str(uuid.UUID(bytes=bytes(v11.deviceUUID))),
        "driver_name": _vk.string(v12.driverName),
        "driver_info": _vk.string(v12.driverInfo),
        "driver_version": core.driverVersion,
        "api_version": ".".join(map(str, _vk.version(core.apiVersion))),
        "compute_units": _compute_units(blocks, kind),
    }


def _pci_address(pci: Any) -> str:
    return f"{pci.pciDomain:04x}:{pci.pciBus:02x}:{pci.pciDevice:02x}.{pci.pciFunction:x}"


def _limits(blocks: dict[str, Any]) -> dict[str, Any]:
    limits = blocks["VkPhysicalDeviceProperties2"].properties.limits
    v11 = blocks["VkPhysicalDeviceVulkan11Properties"]
    return {
        "max_workgroup_invocations": limits.maxComputeWorkGroupInvocations,
        "max_workgroup_size": _triple(limits.maxComputeWorkGroupSize),
        "max_workgroup_count": _triple(limits.maxComputeWorkGroupCount),
        "max_shared_memory_bytes": limits.maxComputeSharedMemorySize,
        "max_storage_buffer_bytes": limits.maxStorageBufferRange,
        "max_push_constant_bytes": limits.maxPushConstantsSize,
        "max_storage_buffers": limits.maxPerStageDescriptorStorageBuffers,
        "max_allocation_bytes": v11.maxMemoryAllocationSize,
        "storage_buffer_alignment": limits.minStorageBufferOffsetAlignment,
        "timestamp_period_ns": limits.timestampPeriod,
    }


def _compute_units(blocks: dict[str, Any], kind: DeviceKind) -> int | None:
    """Structs that were not asked for are still zero."""
    amd = blocks["VkPhysicalDeviceShaderCorePropertiesAMD"]
    found = (
        blocks["VkPhysicalDeviceShaderSMBuiltinsPropertiesNV"].shaderSMCount
        or blocks["VkPhysicalDeviceShaderCoreProperties2AMD"].activeComputeUnitCount
        or amd.shaderEngineCount * amd.shaderArraysPerEngineCount * amd.computeUnitsPerShaderArray
        or blocks["VkPhysicalDeviceShaderCoreBuiltinsPropertiesARM"].shaderCoreCount
    )
    if found:
        return int(found)
    return os.cpu_count() if kind == "cpu" else None


def _subgroups(blocks: dict[str, Any], features: Features) -> dict[str, Any]:
    v11 = blocks["VkPhysicalDeviceVulkan11Properties"]
    v13 = blocks["VkPhysicalDeviceVulkan13Properties"]
    size = v11.subgroupSize or blocks["VkPhysicalDeviceSubgroupProperties"].subgroupSize
    usable = v11.subgroupSupportedStages & _COMPUTE_STAGE
    operations = get_args(SubgroupOperation)
    control = features["subgroupSizeControl"] and bool(
        v13.requiredSubgroupSizeStages & _COMPUTE_STAGE
    )
    return {
        "subgroup_size": size,
        "min_subgroup_size": v13.minSubgroupSize or size,
        "max_subgroup_size": v13.maxSubgroupSize or size,
        "max_workgroup_subgroups": v13.maxComputeWorkgroupSubgroups,
        "subgroup_operations": tuple(
            name
            for bit, name in enumerate(operations)
            if usable and v11.subgroupSupportedOperations >> bit & 1
        ),
        "subgroup_size_control": control,
        "compute_full_subgroups": features["computeFullSubgroups"],
        "pipeline_robustness": features["pipelineRobustness"],
    }


def _arithmetic(blocks: dict[str, Any], features: Features) -> dict[str, Any]:
    v13 = blocks["VkPhysicalDeviceVulkan13Properties"]
    dot = features["shaderIntegerDotProduct"]
    return {
        "storage_8bit": features["storageBuffer8BitAccess"],
        "storage_16bit": features["storageBuffer16BitAccess"],
        "float16": features["shaderFloat16"],
        "int8": features["shaderInt8"],
        "int16": features["shaderInt16"],
        "int64": features["shaderInt64"],
        "bfloat16": features["shaderBFloat16Type"],
        "integer_dot_product": dot,
        "integer_dot_product_accelerated": dot
        and bool(v13.integerDotProduct4x8BitPackedSignedAccelerated),
        "vulkan_memory_model": features["vulkanMemoryModel"],
        "shared_memory_views": features["workgroupMemoryExplicitLayout"]
        and features["workgroupMemoryExplicitLayout16BitAccess"]
        and features["workgroupMemoryExplicitLayout8BitAccess"],
        "atomic_float_add": features["shaderBufferFloat32AtomicAdd"],
    }


def _matrices(
    instance: Any, physical: Any, features: Features, blocks: dict[str, Any]
) -> dict[str, Any]:
    stages = blocks["VkPhysicalDeviceCooperativeMatrixPropertiesKHR"]
    present = features["cooperativeMatrix"] and bool(
        stages.cooperativeMatrixSupportedStages & _COMPUTE_STAGE
    )
    return {
        "cooperative_matrix": present,
        "cooperative_matrix_shapes": _matrix_shapes(instance, physical) if present else (),
        "cooperative_matrix2": tuple(
            name for name, field in _MATRIX2_FEATURES.items() if present and features[field]
        ),
    }


def _matrix_shapes(instance: Any, physical: Any) -> tuple[MatrixShape, ...]:
    function = _vk.procedure(instance, "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR")
    shapes = _vk.listed(function, "VkCooperativeMatrixPropertiesKHR", physical)
    return tuple(
        MatrixShape(
            m=shape.MSize,
            n=shape.NSize,
            k=shape.KSize,
            a_type=_component(shape.AType),
            b_type=_component(shape.BType),
            c_type=_component(shape.CType),
            result_type=_component(shape.ResultType),
            scope=_SCOPES[shape.scope],
            saturating=bool(shape.saturatingAccumulation),
        )
        for shape in shapes
        if shape.scope in _SCOPES
    )


def _component(code: int) -> str:
    return _COMPONENT_TYPES.get(code, f"type{code}")


def _triple(values: Any) -> tuple[int, int, int]:
    return values[0], values[1], values[2]
