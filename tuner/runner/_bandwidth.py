"""The read kernel that calibrates a device: how much, in how many copies, in which shapes.

`nbytes` are read once a launch, 16 bytes a load, 256 threads a workgroup. Launches rotate over
copies until these add up to more than any cache holds, so that every sample reads device memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tuner.compile import Compiler
from tuner.device_info import DeviceInfo
from tuner.errors import OutOfMemoryError, UsageError
from tuner.runner._resident import Workload, guarded_bytes
from tuner.runner._staging import Bytes
from tuner.runner.protocol import Job, JobPass, MeasurePlan, OutputSpec
from tuner.templates import render

TEMPLATE = "read_bandwidth.comp.jinja"
_SOURCE, _SINK = "source", "sink"
_SINK_SPEC = OutputSpec(shape=(4,), dtype="uint32")
UNROLLS = (1, 4, 8)
"""Loads of a thread, one launch shape each."""

_THREADS = 256
_VECTOR_BYTES = 16
GRANULE_BYTES = _THREADS * _VECTOR_BYTES * max(UNROLLS)
"""What is read is a multiple of this, so that every shape divides it."""
_ROTATION_BYTES = 512 << 20
_CPU_ROTATION_BYTES = 64 << 20
_NEVER = 0x9E3779B9
_NOISE_BYTES = 8 << 20

SCOUT = MeasurePlan(warmup_ms=30.0, min_samples=3, max_samples=10, budget_ms=20.0)
"""How each shape is timed to find the fastest."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """`nbytes` a launch, in `copies` copies."""

    nbytes: int
    copies: int


def plan_reads(info: DeviceInfo, wanted_bytes: int, available_bytes: int) -> ReadPlan:
    """How much is read in truth: clipped to what the device can bind, allocate and hold.

    Raises:
        UsageError: less than one granule was asked for.
        OutOfMemoryError: not even one granule fits.
    """
    if wanted_bytes < GRANULE_BYTES:
        raise UsageError(f"a read of {wanted_bytes} bytes: must be at least {GRANULE_BYTES}")
    spare = guarded_bytes(_SINK_SPEC.nbytes) + guarded_bytes(0)
    most = min(info.max_storage_buffer_bytes, info.max_allocation_bytes, available_bytes) - spare
    nbytes = min(wanted_bytes, most) // GRANULE_BYTES * GRANULE_BYTES
    if nbytes < GRANULE_BYTES:
        raise OutOfMemoryError("a read kernel", GRANULE_BYTES + spare, available_bytes)
    rotation = _CPU_ROTATION_BYTES if info.is_cpu else _ROTATION_BYTES
    copies = min(-(-rotation // nbytes), available_bytes // (nbytes + spare))
    return ReadPlan(nbytes, max(1, copies))


def workload(name: str, plan: ReadPlan) -> Workload:
    """The buffers of the read kernel."""
    source = np.broadcast_to(np.uint8(0), (plan.nbytes,))
    return Workload(name, {_SOURCE: source}, {_SINK: _SINK_SPEC}, plan.copies)


def sampling_plan(samples: int) -> MeasurePlan:
    """How the fastest shape is timed: exactly `samples` samples, unless the device is very slow."""
    return MeasurePlan(
        warmup_ms=30.0, min_samples=samples, max_samples=samples, budget_ms=100.0 * samples
    )


def jobs(info: DeviceInfo, nbytes: int) -> Iterator[tuple[str, Job]]:
    """Each launch shape with a name.

    Raises:
        CompileError, TemplateError: the package's own template is broken.
    """
    compiler = Compiler()
    vectors = nbytes // _VECTOR_BYTES
    for unroll in UNROLLS:
        values = {"unroll": unroll}
        spirv = compiler.compile(render(TEMPLATE, values), values=values).spirv
        groups = vectors // (_THREADS * unroll)
        across = min(groups, info.max_workgroup_count[0])
        step = JobPass(
            name="read",
            spirv=spirv,
            push=struct.pack("<2I", vectors, _NEVER),
            groups=(across, -(-groups // across), 1),
        )
        name = f"{_THREADS} threads, {unroll} x {_VECTOR_BYTES} bytes a thread"
        yield name, Job(passes=(step,), bindings=(_SOURCE, _SINK), scratch_bytes={})


def noise() -> Bytes:
    """Bytes to read: random, so that nothing in the memory system can compress them."""
    return np.random.default_rng(0).integers(0, 256, _NOISE_BYTES, np.uint8)
