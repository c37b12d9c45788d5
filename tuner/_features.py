"""Which device features the tuner knows, and of these the ones a physical device has.

One table says all: a feature struct, where it comes from, and the fields wanted of it. What is
there is enabled; nothing else is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner import _vk

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class FeatureBlock:
    """One feature struct: its name in the binding, or its structure type where that lacks it.

    `fields` are the features wanted. For a struct that the binding lacks they must be *all* its
    fields in order. The block needs `extension`, or core Vulkan `since`.
    """

    struct: str | int
    fields: tuple[str, ...]
    extension: str | None = None
    since: Version = (1, 1)


BLOCKS = (
    FeatureBlock(
        "VkPhysicalDeviceVulkan11Features",
        ("storageBuffer16BitAccess", "uniformAndStorageBuffer16BitAccess"),
        since=(1, 2),
    ),
    FeatureBlock(
        "VkPhysicalDeviceVulkan12Features",
        (
            "storageBuffer8BitAccess",
            "uniformAndStorageBuffer8BitAccess",
            "shaderFloat16",
            "shaderInt8",
            "scalarBlockLayout",
            "shaderSubgroupExtendedTypes",
            "vulkanMemoryModel",
            "vulkanMemoryModelDeviceScope",
            "bufferDeviceAddress",
            "timelineSemaphore",
            "hostQueryReset",
        ),
        since=(1, 2),
    ),
    FeatureBlock(
        "VkPhysicalDeviceVulkan13Features",
        (
            "subgroupSizeControl",
            "computeFullSubgroups",
            "synchronization2",
            "shaderIntegerDotProduct",
            "shaderZeroInitializeWorkgroupMemory",
            "maintenance4",
        ),
        since=(1, 3),
    ),
    FeatureBlock(
        "VkPhysicalDeviceCooperativeMatrixFeaturesKHR",
        ("cooperativeMatrix",),
        "VK_KHR_cooperative_matrix",
    ),
    FeatureBlock(
        1000593000,  # VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_2_FEATURES_NV
        (
            "cooperativeMatrixWorkgroupScope",
            "cooperativeMatrixFlexibleDimensions",
            "cooperativeMatrixReductions",
            "cooperativeMatrixConversions",
            "cooperativeMatrixPerElementOperations",
            "cooperativeMatrixTensorAddressing",
            "cooperativeMatrixBlockLoads",
        ),
        "VK_NV_cooperative_matrix2",
    ),
    FeatureBlock(
        1000141000,  # VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_BFLOAT16_FEATURES_KHR
        ("shaderBFloat16Type", "shaderBFloat16DotProduct", "shaderBFloat16CooperativeMatrix"),
        "VK_KHR_shader_bfloat16",
    ),
    FeatureBlock(
        "VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR",
        ("pipelineExecutableInfo",),
        "VK_KHR_pipeline_executable_properties",
    ),
    FeatureBlock(
        "VkPhysicalDeviceShaderClockFeaturesKHR",
        ("shaderSubgroupClock", "shaderDeviceClock"),
        "VK_KHR_shader_clock",
    ),
    FeatureBlock(
        "VkPhysicalDeviceShaderAtomicFloatFeaturesEXT",
        (
            "shaderBufferFloat32Atomics",
            "shaderBufferFloat32AtomicAdd",
            "shaderSharedFloat32Atomics",
            "shaderSharedFloat32AtomicAdd",
        ),
        "VK_EXT_shader_atomic_float",
    ),
    FeatureBlock(
        "VkPhysicalDeviceWorkgroupMemoryExplicitLayoutFeaturesKHR",
        (
            "workgroupMemoryExplicitLayout",
            "workgroupMemoryExplicitLayoutScalarBlockLayout",
            "workgroupMemoryExplicitLayout8BitAccess",
            "workgroupMemoryExplicitLayout16BitAccess",
        ),
        "VK_KHR_workgroup_memory_explicit_layout",
    ),
    FeatureBlock("VkPhysicalDeviceFaultFeaturesEXT", ("deviceFault",), "VK_EXT_device_fault"),
    FeatureBlock(
        "VkPhysicalDevicePipelineRobustnessFeaturesEXT",
        ("pipelineRobustness",),
        "VK_EXT_pipeline_robustness",
    ),
)

CORE_FIELDS = ("shaderInt16", "shaderInt64")

PLAIN_EXTENSIONS = (
    "VK_EXT_memory_budget",
    "VK_KHR_calibrated_timestamps",
    "VK_EXT_calibrated_timestamps",
    "VK_KHR_portability_subset",
)
"""Extensions that need no feature struct. A device with the last one demands that it be enabled."""


@dataclass(frozen=True, slots=True)
class Features:
    """What a physical device has of the table: fields by name, and the extensions they need."""

    fields: Mapping[str, bool]
    extensions: tuple[str, ...]

    def __getitem__(self, field: str) -> bool:
        return self.fields.get(field, False)

    def enabling(self) -> list[Any]:
        """The structs that enable all of it; the first is a VkPhysicalDeviceFeatures2."""
        core = _vk.struct("VkPhysicalDeviceFeatures2")
        for field in CORE_FIELDS:
            setattr(core.features, field, self[field])
        structs = [core]
        for block in BLOCKS:
            if not any(self[field] for field in block.fields):
                continue
            values = [self[field] for field in block.fields]
            if isinstance(block.struct, int):
                structs.append(_vk.flags_struct(block.struct, values))
            else:
                structs.append(
                    _vk.struct(block.struct, **dict(zip(block.fields, values, strict=True)))
                )
        _vk.chain(structs)
        return structs


def supported(physical: Any, api: Version, extensions: frozenset[str]) -> Features:
    """Ask a physical device of API version `api` which features of the table it has."""
    blocks = [
        block
        for block in BLOCKS
        if (block.extension in extensions if block.extension else api >= block.since)
    ]
    core = _vk.struct("VkPhysicalDeviceFeatures2")
    structs = [
        _vk.flags_struct(block.struct, [False] * len(block.fields))
        if isinstance(block.struct, int)
        else _vk.struct(block.struct)
        for block in blocks
    ]
    _vk.chain([core, *structs])
    _vk.lib.vkGetPhysicalDeviceFeatures2(physical, core)
    fields = {field: bool(getattr(core.features, field)) for field in CORE_FIELDS}
    needed = [name for name in PLAIN_EXTENSIONS if name in extensions]
    for block, answer in zip(blocks, structs, strict=True):
        if isinstance(block.struct, int):
            values = _vk.flags(answer, len(block.fields))
        else:
            values = tuple(bool(getattr(answer, field)) for field in block.fields)
        fields.update(zip(block.fields, values, strict=True))
        if block.extension and any(values):
            needed.append(block.extension)
    return Features(fields, tuple(needed))
