"""The device of the toy family, what its kernels answer there, and how fast.

Apart from `tests.toy_family`, so that worker processes import no more than they need.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np

from tuner.device_info import DeviceInfo, MemoryHeap
from tuner.runner.fake import Workload
from tuner.runner.protocol import Job


def toy_device(**changes: Any) -> DeviceInfo:
    """A pretended discrete GPU with 8 GiB; `changes` replace fields."""
    fields: dict[str, Any] = {
        "name": "Toy GPU",
        "kind": "discrete",
        "vendor_id": 1,
        "device_id": 2,
        "uuid": "00000000-0000-0000-0000-0000000000aa",
        "driver_name": "toy",
        "driver_info": "1.0",
        "driver_version": 1,
        "api_version": "1.3.0",
        "max_workgroup_invocations": 256,
        "max_workgroup_size": (256, 256, 64),
        "max_workgroup_count": (65535, 65535, 65535),
        "max_shared_memory_bytes": 32768,
        "max_storage_buffer_bytes": 2**31,
        "max_push_constant_bytes": 128,
        "max_storage_buffers": 64,
        "max_allocation_bytes": 2**32,
        "storage_buffer_alignment": 16,
        "subgroup_size": 32,
        "min_subgroup_size": 32,
        "max_subgroup_size": 32,
        "max_workgroup_subgroups": 8,
        "timestamp_valid_bits": 64,
        "timestamp_period_ns": 1.0,
        "memory_heaps": (MemoryHeap(size_bytes=2**33, device_local=True),),
    }
    return DeviceInfo(**{**fields, **changes})


def toy_outputs(job: Job, workload: Workload) -> dict[str, Any]:
    """What a right kernel answers; the factor comes from the push constants."""
    _, factor = struct.unpack("<If", job.passes[0].push)
    return {"out": (workload.inputs["x"] * np.float32(factor)).astype(np.float32)}


def toy_time_ns(job: Job, workload: Workload) -> float:
    """A made-up speed: 1 to 5 times 100 GB/s, by the source's digest."""
    digest = hashlib.sha256(b"".join(p.spirv for p in job.passes)).digest()
    return 1000.0 + workload.nbytes / 100.0 * (1 + digest[0] / 64)
