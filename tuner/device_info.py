"""A frozen, plain-data snapshot of one Vulkan device: what constraints read and tests fake.

Needs no Vulkan: `tuner.device` fills it in from a physical device, tests write it by hand.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

DeviceKind = Literal["discrete", "integrated", "virtual", "cpu", "other"]
SubgroupOperation = Literal[
    "basic", "vote", "arithmetic", "ballot", "shuffle", "shuffle_relative", "clustered", "quad"
]


class MemoryHeap(msgspec.Struct, frozen=True, kw_only=True):
    """One memory heap. `budget_bytes` is what this process may use now, where the driver says."""

    size_bytes: int
    device_local: bool
    budget_bytes: int | None = None


class MatrixShape(msgspec.Struct, frozen=True, kw_only=True):
    """One cooperative-matrix shape C[m,n] += A[m,k] B[k,n]; types like "float16" and "int8"."""

    m: int
    n: int
    k: int
    a_type: str
    b_type: str
    c_type: str
    result_type: str
    scope: Literal["subgroup", "workgroup", "device", "queue_family"] = "subgroup"
    saturating: bool = False


class Fragment(msgspec.Struct, frozen=True, kw_only=True):
    """Which elements of a matrix a lane holds: element e of lane l is at row `lane_row[l] +
    element_row[e]` and column `lane_column[l] + element_column[e]`."""

    lane_row: tuple[int, ...]
    lane_column: tuple[int, ...]
    element_row: tuple[int, ...]
    element_column: tuple[int, ...]


class MatrixLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The probed element mapping of one cooperative-matrix shape (see `tuner.runner`)."""

    shape: MatrixShape
    a: Fragment
    b: Fragment
    c: Fragment


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Identity, limits and features of a device, as far as any variant may depend on them.

    Sizes are in bytes, counts in units. A feature is True only if the device has it *and*
    `tuner.device` enables it. `compute_units` (streaming multiprocessors, compute units, shader
    cores) is None where no extension tells.
    """

    # identity
    name: str
    kind: DeviceKind
    vendor_id: int
    device_id: int
    uuid: str
    driver_name: str
    driver_info: str
    driver_version: int
    api_version: str
    pci_address: str | None = None
    """Domain, bus, device and function as the system writes them: "0000:19:00.0"."""

    # limits
    max_workgroup_invocations: int
    max_workgroup_size: tuple[int, int, int]
    max_workgroup_count: tuple[int, int, int]
    max_shared_memory_bytes: int
    max_storage_buffer_bytes: int
    max_push_constant_bytes: int
    max_storage_buffers: int
    max_allocation_bytes: int
    storage_buffer_alignment: int
    compute_units: int | None = None

    # subgroups
    subgroup_size: int
    min_subgroup_size: int
    max_subgroup_size: int
    max_workgroup_subgroups: int
    subgroup_operations: tuple[SubgroupOperation, ...] = ()
    subgroup_size_control: bool = False
    compute_full_subgroups: bool = False
    pipeline_robustness: bool = False
    """Pipelines may be made without the bounds checks that a driver adds by itself."""

    # arithmetic and storage
    storage_8bit: bool = False
    storage_16bit: bool = False
    float16: bool = False
    int8: bool = False
    int16: bool = False
    int64: bool = False
    bfloat16: bool = False
    integer_dot_product: bool = False
    integer_dot_product_accelerated: bool = False
    vulkan_memory_model: bool = False
    shared_memory_views: bool = False
    """Shared memory may be seen as arrays of several types, of 8 and 16 bits too."""
    atomic_float_add: bool = False

    # cooperative matrices
    cooperative_matrix: bool = False
    cooperative_matrix_shapes: tuple[MatrixShape, ...] = ()
    matrix_layouts: tuple[MatrixLayout, ...] = ()
    """Shapes whose element mapping was probed and is separable; filled in by the runner."""
    cooperative_matrix2: tuple[str, ...] = ()
    """NV cooperative-matrix-2 features by name: "workgroup_scope", "flexible_dimensions",
    "reductions", "conversions", "per_element_operations", "tensor_addressing", "block_loads"."""

    # timing and introspection
    timestamp_valid_bits: int
    timestamp_period_ns: float
    calibrated_timestamps: bool = False
    shader_clock: bool = False
    pipeline_executable_properties: bool = False
    memory_budget: bool = False
    device_fault: bool = False

    memory_heaps: tuple[MemoryHeap, ...] = ()
    extensions: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """Folder name of this device's results: the name in lower case, words joined by '-'."""
        name = re.sub(r"\(.*?\)", "", self.name)
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "device"

    @property
    def driver(self) -> str:
        """Driver name and version as one line, the form in which records carry it."""
        return f"{self.driver_name} {self.driver_info}".strip()

    @property
    def has_timestamps(self) -> bool:
        """Whether the device's queue can stamp times, in a unit that the driver tells."""
        return self.timestamp_valid_bits > 0 and self.timestamp_period_ns > 0

    @property
    def is_cpu(self) -> bool:
        """True for software drivers, whose figures prove function and never speed."""
        return self.kind == "cpu"
