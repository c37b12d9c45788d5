"""The reference kernel, whose time tells how the device's clock stands."""

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
_SINK = "sink"
_FACTOR, _SUMMAND = 0.999, 0.5


class Reference:
    """The kernel, ready to be recorded as `launch`, with pipeline and memory of its own.

    Raises:
        OutOfMemoryError, VulkanError: it cannot be made.
    """

    def __init__(self, memory: Memory, staging: Staging, commands: Commands) -> None:
        device = memory.device
        rounds = CPU_ROUNDS if device.info.is_cpu else GPU_ROUNDS
        with contextlib.ExitStack() as undo:
            pipelines = Pipelines(device)
            undo.callback(pipelines.close)
            job = reference_job(rounds)
            pipelines.prepare(job)
            spec = OutputSpec(shape=(32,), dtype="float32")
            workload = Workload("reference clock", {}, {_SINK: spec}, 1)
            undo.callback(workload.close)
            workload.allocate(memory)
            workload.upload(staging, commands, {})
            ready = pipelines.ready(job)
            self.launch = Launch(device, ready, job.bindings, workload.copies)
            undo.callback(self.launch.close)
            self._close = undo.pop_all()

    def close(self) -> None:
        """Destroy everything; the device must be idle."""
        self._close.close()


def reference_job(rounds: int) -> Job:
    """The kernel as a job: `rounds` of `UNROLL` steps, each of which waits for the one before."""
    values = {"unroll": UNROLL}
    step = JobPass(
        name="reference",
        spirv=Compiler().compile(render(TEMPLATE, values), values=values).spirv,
        push=struct.pack("<Iff", rounds, _FACTOR, _SUMMAND),
        groups=(1, 1, 1),
    )
    return Job(passes=(step,), bindings=(_SINK,), scratch_bytes={})
