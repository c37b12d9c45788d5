"""Rounding to float16 in a kernel, against NumPy's."""

from __future__ import annotations

import numpy as np

from tests.small_kernels import run, spirv
from tuner.runner.protocol import Array, Job, JobPass, OutputSpec
from tuner.runner.vulkan import VulkanRunner
from tuner.templates import TEMPLATE_DIR

SOURCE = """#version 460
layout(local_size_x = 64) in;
layout(set = 0, binding = 0, std430) readonly buffer A { float a[]; };
layout(set = 0, binding = 1, std430) buffer O { float o[]; };
%s
void main() {
    uint i = gl_GlobalInvocationID.x;
    o[i] = rounded_to_half(a[i]);
}
"""


def inputs() -> Array:
    """Every finite float16, what lies halfway to the next, and a step of float32 to either side."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    steps = np.append(np.diff(halves), 32.0)  # the largest rounds up from 65,520 on
    ties = (halves + steps / 2).astype(np.float32)
    exact = halves.astype(np.float32)
    near = [np.nextafter(each, to) for each in (exact, ties) for to in (-np.inf, np.inf)]
    special = [1e-45, 1e-30, 3e38, np.inf, np.nan, 0.0]
    positive = np.concatenate([exact, ties, *near, special]).astype(np.float32)
    values = np.concatenate([positive, -positive])
    return np.resize(values, -(-values.size // 64) * 64)


def test_every_float16_and_what_lies_between(vulkan_runner: VulkanRunner) -> None:
    values = inputs()
    function = (TEMPLATE_DIR / "indexer" / "rounded_to_half.glsl.jinja").read_text()
    launch = JobPass(
        name="round", spirv=spirv(SOURCE % function), push=b"", groups=(values.size // 64, 1, 1)
    )
    job = Job(passes=(launch,), bindings=("a", "o"), scratch_bytes={})
    spec = OutputSpec(shape=values.shape, dtype="float32")
    vulkan_runner.load("halves", {"a": values}, {"o": spec})
    try:
        found = run(vulkan_runner, job, "halves").outputs["o"]
    finally:
        vulkan_runner.unload("halves")
    with np.errstate(over="ignore"):
        right = values.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(found, right)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(right))
