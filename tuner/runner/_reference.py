"""The reference kernel: its time tells how the device's clock stands, and it fills pauses."""

from __future__ import annotations

import contextlib
import struct

from tuner._memory import Memory
from tuner.compile import Compiler
from tuner.runner._commands import Commands
from tuner.runner._launch import Launch
from tuner.runner._pipelines import Pipelines
from tuner.runner._resident import Workload
from tuner.runner._staging import Staging
from tuner.runner.protocol import Job, JobPass, OutputSpec
from tuner.templates import render

TEMPLATE = "reference_clock.comp.jinja"
UNROLL = 16
GPU_ROUNDS, CPU_ROUNDS = 2048, 256
"""Of 16 dependent steps: some 65 µs at 2 GHz and 4 cycles a step, long against a timer's step."""
FILL_WORKGROUPS = 4
"""Of a launch that fills, for each compute unit: a device of which only one is at work clocks down.
Each has a scheduler to itself on the GPUs of today, so they take no longer than one."""
UNKNOWN_UNITS = 64
_SINK = "sink"
_THREADS = 32
_FACTOR, _SUMMAND = 0.999, 0.5


class Reference:
    """The kernel, ready to be recorded, with pipelines and memory of its own.

    Attributes:
        launch: one workgroup, to be timed.
        fill: as many as keep the whole device at work, for as long.

    Raises:
        OutOfMemoryError, VulkanError: it cannot be made.
    """

    def __init__(self, memory: Memory, staging: Staging, commands: Commands) -> None:
        device = memory.device
        rounds = CPU_ROUNDS if device.info.is_cpu else GPU_ROUNDS
        with contextlib.ExitStack() as undo:
            pipelines = Pipelines(device)
            undo.callback(pipelines.close)
            units = 1 if device.info.is_cpu else device.info.compute_units or UNKNOWN_UNITS
            workgroups = FILL_WORKGROUPS * units
            spec = OutputSpec(shape=(_THREADS * workgroups,), dtype="float32")
            workload = Workload("reference clock", {}, {_SINK: spec}, 1)
            undo.callback(workload.close)
            workload.allocate(memory)
            workload.upload(staging, commands, {})
            launches = []
            for groups in (1, workgroups):
                job = reference_job(rounds, groups)
                pipelines.prepare(job)
                launch = Launch(device, pipelines.ready(job), job.bindings, workload.copies)
                undo.callback(launch.close)
                launches.append(launch)
            self.launch, self.fill = launches
            self._close = undo.pop_all()

    def close(self) -> None:
        """Destroy everything; the device must be idle."""
        self._close.close()


def reference_job(rounds: int, workgroups: int) -> Job:
    """The kernel as a job: `rounds` of `UNROLL` steps, each of which waits for the one before."""
    values = {"unroll": UNROLL}
    step = JobPass(
        name="reference",
        spirv=Compiler().compile(render(TEMPLATE, values), values=values).spirv,
        push=struct.pack("<Iff", rounds, _FACTOR, _SUMMAND),
        groups=(workgroups, 1, 1),
    )
    return Job(passes=(step,), bindings=(_SINK,), scratch_bytes={})
