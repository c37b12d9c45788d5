"""Small GLSL kernels for testing runners, each with what it computes in NumPy.

All work on 1024 elements or fewer: `a` is the input, `t` scratch, `o` the output, float32 unless a
kernel says otherwise. `FakeRunner(outputs=emulate)` answers as the kernels do.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping

import numpy as np

from tuner.device_info import DeviceInfo
from tuner.runner.fake import Workload
from tuner.runner.protocol import Array, Execution, Job, JobPass, OutputSpec, Runner

COUNT = 1000
_GLSL = """#version 460
#extension GL_EXT_shader_8bit_storage : enable
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : enable
layout(local_size_x = 64) in;
layout(push_constant) uniform Push { uint count; float factor; } push;
layout(set = 0, binding = 0, std430) readonly buffer A { float a[]; };
layout(set = 0, binding = 1, std430) coherent buffer T { float t[]; };
layout(set = 0, binding = 2, std430) buffer O { float o[]; };
layout(set = 0, binding = 2, std430) buffer OWords { uint words[]; };
void main() {
    uint i = gl_GlobalInvocationID.x;
    if (i >= push.count) { return; }
    %s
}
"""
_COPY_ROW = 65536
_COPY = """#version 460
layout(local_size_x = 64) in;
layout(push_constant) uniform Push { uint words; uint row; } push;
layout(set = 0, binding = 0, std430) readonly buffer A { uint a[]; };
layout(set = 0, binding = 1, std430) buffer O { uint o[]; };
void main() {
    uint i = gl_GlobalInvocationID.y * push.row + gl_GlobalInvocationID.x;
    if (i < push.words) { o[i] = a[i]; }
}
"""
_BODIES = {
    "scale": "o[i] = a[i] * push.factor;",
    "stage": "t[i] = a[i] * push.factor;",
    "finish": "o[i] = t[push.count - 1 - i] + 1.0;",
    "reveal": "words[i] = floatBitsToUint(t[i]);",
    "tally": "o[i] = t[i] + a[i]; t[i] = push.factor;",
    "accumulate": "o[i] = o[i] + a[i] * push.factor;",
    "idle": "if (push.factor == 12345.0) { o[i] = 0.0; }",
    "before": "o[i - 1] = 7.0;",
    "loop": """uint x = i;
    for (uint j = 0u; j < uint(push.factor); j++) { x = x * 1664525u + 1013904223u; }
    words[i] = x;""",
    "slow": """uint x = i;
    for (uint j = 0u; j < uint(push.factor); j++) {
        for (uint k = 0u; k < 60000u; k++) { x = x * 1664525u + 1013904223u; }
    }
    words[i] = x;""",
}


def spirv(source: str) -> bytes:
    """SPIR-V of a GLSL text."""
    # Here, as worker processes emulate kernels and never compile one.
    from tuner.compile import Compiler
    from tuner.templates import Origin, Rendered

    lines = tuple(Origin("test", n + 1) for n in range(source.count("\n") + 1))
    return Compiler().compile(Rendered("test", source, lines), values={}).spirv


@functools.cache
def kernel(name: str) -> bytes:
    """SPIR-V of the kernel of that name."""
    return spirv(_GLSL % _BODIES[name])


def step(name: str, *, count: int = COUNT, factor: float = 2.0, **fields: object) -> JobPass:
    """A pass over `count` elements."""
    geometry = {"groups": (-(-count // 64), 1, 1)} | fields
    push = struct.pack("<If", count, factor)
    return JobPass(name=name, spirv=kernel(name), push=push, **geometry)  # type: ignore[arg-type]


def slow_step(info: DeviceInfo) -> JobPass:
    """A pass that takes tenths of a second: many workgroups on a CPU, long loops on a GPU."""
    return step("slow", count=64, groups=(1, 200, 1), factor=1.0 if info.is_cpu else 1000.0)


def job(*steps: JobPass, scratch: int = COUNT, counters: tuple[str, ...] = ()) -> Job:
    """A job of these passes with `scratch` scratch elements."""
    sizes = {"t": 4 * scratch}
    return Job(passes=steps, bindings=("a", "t", "o"), scratch_bytes=sizes, counters=counters)


def copying(words: int) -> Job:
    """A job that copies `words` 32-bit words from `a` to `o`, without scratch."""
    push = struct.pack("<2I", words, _COPY_ROW)
    groups = (_COPY_ROW // 64, -(-words // _COPY_ROW), 1)
    copy = JobPass(name="copy", spirv=spirv(_COPY), push=push, groups=groups)
    return Job(passes=(copy,), bindings=("a", "o"), scratch_bytes={})


def run(runner: Runner, made: Job, workload: str = "w") -> Execution:
    """Prepare, execute, release."""
    runner.prepare([made])
    try:
        return executed(runner, made, workload)
    finally:
        runner.release([made])


def executed(runner: Runner, made: Job, workload: str = "w") -> Execution:
    """One launch of a prepared job."""
    (execution,) = runner.execute([(made, workload)])
    return execution


def operands(count: int = COUNT) -> dict[str, Array]:
    """The input: 0, 1, 2 …"""
    return {"a": np.arange(count, dtype=np.float32)}


def outputs(count: int = COUNT) -> dict[str, OutputSpec]:
    """The output: `count` float32."""
    return {"o": OutputSpec(shape=(count,), dtype="float32")}


def emulate(made: Job, workload: Workload) -> Mapping[str, Array]:
    """What a job of these kernels leaves in `o`."""
    state = {"a": workload.inputs["a"], "t": np.full(COUNT, np.nan, np.float32)}
    for each in made.passes:
        _, factor = struct.unpack("<If", each.push)
        state |= _EMULATIONS[each.name](state, factor)
    return {"o": state["o"]} if "o" in state else {}


_State = Mapping[str, Array]
_EMULATIONS: dict[str, Callable[[_State, float], dict[str, Array]]] = {
    "scale": lambda state, factor: {"o": state["a"] * np.float32(factor)},
    "stage": lambda state, factor: {"t": state["a"] * np.float32(factor)},
    "finish": lambda state, _: {"o": state["t"][::-1] + np.float32(1.0)},
    "idle": lambda _state, _factor: {},
}
