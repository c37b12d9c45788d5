"""The kernels that calibrate a device: how much they move, in how many copies, in which shapes.

The ceiling is a read of `nbytes` once a launch, 16 bytes a load, 256 threads a workgroup. Launches
rotate over copies until these add up to more than any cache holds, so that every sample reads
device memory. A curve's kernels go through one buffer again and again, so that caches do show.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tuner.compile import Compiler
from tuner.device_info import DeviceInfo
from tuner.errors import OutOfMemoryError, UsageError
from tuner.records import Transfer
from tuner.runner._resident import Workload, guarded_bytes
from tuner.runner._staging import Bytes
from tuner.runner.protocol import Job, JobPass, MeasurePlan, OutputSpec
from tuner.templates import render

TEMPLATE = "bandwidth.comp.jinja"
EMPTY_TEMPLATE = "empty.comp.jinja"
_SOURCE, _SINK = "source", "sink"
_SINK_BYTES = 16
UNROLLS = (1, 4, 8)
"""Vectors of a thread, one launch shape each."""

_THREADS = 256
_VECTOR_BYTES = 16
GRANULE_BYTES = _THREADS * _VECTOR_BYTES * max(UNROLLS)
"""What is moved is a multiple of this, so that every shape divides it."""
_ROTATION_BYTES = 512 << 20
_CPU_ROTATION_BYTES = 64 << 20
_GPU_CURVE_BYTES, _CPU_CURVE_BYTES = 512 << 20, 8 << 20
"""What a launch of a curve goes over at least: some 100 µs, against a launch floor of a few."""
_NEVER = 0x9E3779B9
_NOISE_BYTES = 8 << 20

SCOUT = MeasurePlan(warmup_ms=30.0, precision=0.0, min_samples=3, max_samples=10, budget_ms=20.0)
"""How each shape is timed to find the fastest."""
CURVE_SCOUT = MeasurePlan(
    measure="batched",
    batch_launches=2,
    warmup_ms=2.0,
    precision=0.0,
    min_samples=3,
    max_samples=3,
)
CURVE_PLAN = MeasurePlan(
    measure="batched",
    batch_launches=4,
    warmup_ms=5.0,
    precision=0.0,
    min_samples=5,
    max_samples=15,
    budget_ms=15.0,
)
FLOOR_PLANS = (
    MeasurePlan(precision=0.0, max_samples=50),
    MeasurePlan(measure="batched", precision=0.0, max_samples=20),
)
"""How empty launches are timed: isolated and batched."""


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """`nbytes` a launch, in `copies` copies."""

    nbytes: int
    copies: int


def plan_reads(info: DeviceInfo, wanted_bytes: int, available_bytes: int) -> TransferPlan:
    """How much is read in truth: clipped to what the device can bind, allocate and hold.

    Raises:
        UsageError: less than one granule was asked for.
        OutOfMemoryError: not even one granule fits.
    """
    if wanted_bytes < GRANULE_BYTES:
        raise UsageError(f"a read of {wanted_bytes} bytes: must be at least {GRANULE_BYTES}")
    spare = guarded_bytes(_SINK_BYTES) + guarded_bytes(0)
    most = min(info.max_storage_buffer_bytes, info.max_allocation_bytes, available_bytes) - spare
    nbytes = min(wanted_bytes, most) // GRANULE_BYTES * GRANULE_BYTES
    if nbytes < GRANULE_BYTES:
        raise OutOfMemoryError("a read kernel", GRANULE_BYTES + spare, available_bytes)
    rotation = _CPU_ROTATION_BYTES if info.is_cpu else _ROTATION_BYTES
    copies = min(-(-rotation // nbytes), available_bytes // (nbytes + spare))
    return TransferPlan(nbytes, max(1, copies))


def fitting_sizes(info: DeviceInfo, sizes: tuple[int, ...], available_bytes: int) -> list[int]:
    """The sizes that one buffer can have, in whole granules, ascending."""
    most = min(info.max_storage_buffer_bytes, info.max_allocation_bytes, available_bytes)
    whole = {nbytes // GRANULE_BYTES * GRANULE_BYTES for nbytes in sizes}
    return sorted(n for n in whole if 0 < n <= most - guarded_bytes(0) - guarded_bytes(_SINK_BYTES))


def moved_bytes(info: DeviceInfo, nbytes: int) -> int:
    """What a launch of a curve goes over: the buffer once, or several times if it is small."""
    least = _CPU_CURVE_BYTES if info.is_cpu else _GPU_CURVE_BYTES
    return nbytes * max(1, least // nbytes)


def workload(name: str, transfer: Transfer, plan: TransferPlan) -> Workload:
    """The buffers of a transfer: where it does not read or write, one of 16 bytes stands in."""
    source = np.broadcast_to(np.uint8(0), (_SINK_BYTES if transfer == "write" else plan.nbytes,))
    sink = OutputSpec(shape=(_SINK_BYTES if transfer == "read" else plan.nbytes,), dtype="uint8")
    return Workload(name, {_SOURCE: source}, {_SINK: sink}, plan.copies)


def sampling_plan(samples: int) -> MeasurePlan:
    """How the fastest shape is timed: exactly `samples` samples, unless the device is very slow."""
    return MeasurePlan(
        warmup_ms=30.0,
        precision=0.0,
        min_samples=samples,
        max_samples=samples,
        budget_ms=100.0 * samples,
    )


def jobs(
    info: DeviceInfo, transfer: Transfer, nbytes: int, *, moved: int | None = None
) -> Iterator[tuple[str, Job]]:
    """Each launch shape with a name; `moved` is what is gone over in all, in a buffer of `nbytes`.

    Raises:
        CompileError, TemplateError: the package's own template is broken.
    """
    compiler = Compiler()
    for unroll in UNROLLS:
        values = {"unroll": unroll, "transfer": transfer, "wrapped": moved is not None}
        spirv = compiler.compile(render(TEMPLATE, values), values=values).spirv
        chunk = _THREADS * _VECTOR_BYTES * unroll
        groups = (moved or nbytes) // chunk
        across = min(groups, info.max_workgroup_count[0])
        step = JobPass(
            name=transfer,
            spirv=spirv,
            push=struct.pack("<3I", groups, nbytes // chunk, _NEVER),
            groups=(across, -(-groups // across), 1),
        )
        name = f"{_THREADS} threads, {unroll} x {_VECTOR_BYTES} bytes a thread"
        yield name, Job(passes=(step,), bindings=(_SOURCE, _SINK), scratch_bytes={})


def empty_job(passes: int) -> Job:
    """A job of so many dispatches that do nothing.

    Raises:
        UsageError: none at all.
    """
    if passes < 1:
        raise UsageError(f"{passes} passes: must be at least 1")
    spirv = Compiler().compile(render(EMPTY_TEMPLATE, {}), values={}).spirv
    step = JobPass(name="empty", spirv=spirv, push=b"", groups=(1, 1, 1))
    return Job(passes=(step,) * passes, bindings=(_SOURCE, _SINK), scratch_bytes={})


def noise() -> Bytes:
    """Bytes to read: random, so that nothing in the memory system can compress them."""
    return np.random.default_rng(0).integers(0, 256, _NOISE_BYTES, np.uint8)
