"""Probes which elements of a cooperative matrix each lane holds: the API leaves that open.

Kernels that build fragments in registers need it; they are legal only where the mapping is
separable into a part of the lane and a part of the element (`tuner.device_info.Fragment`).
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import msgspec
import numpy as np

from tuner import templates
from tuner._kept_files import keep, read_kept
from tuner.compile import Compiler
from tuner.device_info import DeviceInfo, Fragment, MatrixLayout, MatrixShape
from tuner.runner.protocol import Array, Job, JobPass, OutputSpec, Runner

TEMPLATE = "matrix_probe.comp.jinja"
SLOTS = 64
"""Elements of one operand a lane may hold; a shape with more of them is not probed."""
_GLSL_TYPES = {"float16": "float16_t", "float32": "float", "int8": "int8_t", "int32": "int"}
_PROBED = {("float16", "float16", "float32", "float32"), ("int8", "int8", "int32", "int32")}


def probe_layouts(runner: Runner, compiler: Compiler) -> tuple[MatrixLayout, ...]:
    """Layouts of the shapes with 16-bit float or 8-bit integer operands and 32-bit accumulators.

    Shapes whose mapping is not separable are left out.

    Raises:
        VulkanError: the device refuses a probe.
    """
    found = []
    for shape in runner.info.cooperative_matrix_shapes:
        types = (shape.a_type, shape.b_type, shape.c_type, shape.result_type)
        if types in _PROBED and shape.scope == "subgroup" and not shape.saturating:
            layout = _probe(runner, compiler, shape)
            if layout and layout not in found:
                found.append(layout)
    return tuple(found)


def find_layouts(
    runner: Runner, compiler: Compiler, folder: Path | None
) -> tuple[MatrixLayout, ...]:
    """What `probe_layouts` finds, or found earlier: kept in `folder` by device, driver and probe.

    A mapping is the driver's choice when it compiles, and another driver is another file.

    Raises:
        VulkanError: the device refuses a probe.
    """
    if folder is None:
        return probe_layouts(runner, compiler)
    info = runner.info
    path = folder / f"matrix-layouts-{info.uuid}-{info.driver_version:x}.json"
    header = b"kvtune matrix layouts " + _identity(info).encode() + b"\n"
    kept = read_kept(path, header)
    if kept is not None:
        with contextlib.suppress(msgspec.DecodeError):  # A version may call the fields otherwise.
            return msgspec.json.decode(kept, type=tuple[MatrixLayout, ...])
    found = probe_layouts(runner, compiler)
    keep(path, header, msgspec.json.encode(found))
    return found


def _identity(info: DeviceInfo) -> str:
    """Changes with whatever a probe's answer may depend on, the probe itself included."""
    asked = (info.driver, info.subgroup_size, SLOTS, info.cooperative_matrix_shapes)
    probe = (Path(__file__), templates.TEMPLATE_DIR / TEMPLATE)
    parts = [msgspec.json.encode(asked), *(each.read_bytes() for each in probe)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _probe(runner: Runner, compiler: Compiler, shape: MatrixShape) -> MatrixLayout | None:
    info: DeviceInfo = runner.info
    lanes = info.subgroup_size
    operands = (
        ("A", _GLSL_TYPES[shape.a_type], shape.m, shape.k),
        ("B", _GLSL_TYPES[shape.b_type], shape.k, shape.n),
        ("Accumulator", _GLSL_TYPES[shape.c_type], shape.m, shape.n),
    )
    context = {"subgroup_size": lanes, "slots": SLOTS, "operands": operands}
    rendered = templates.render(TEMPLATE, context)
    spirv = compiler.compile(rendered, values=context).spirv
    launch = JobPass(
        name="probe",
        spirv=spirv,
        push=b"",
        groups=(1, 1, 1),
        subgroup_size=lanes if info.subgroup_size_control else None,
    )
    job = Job(passes=(launch,), bindings=("elements",), scratch_bytes={})
    output = OutputSpec(shape=(len(operands), 2, 1 + lanes * SLOTS), dtype="float32")
    runner.load("matrix probe", {}, {"elements": output})
    try:
        runner.prepare([job])
        (execution,) = runner.execute([(job, "matrix probe")])
    finally:
        runner.release([job])
        runner.unload("matrix probe")
    fragments = [_separate(operand, lanes) for operand in execution.outputs["elements"]]
    if any(fragment is None for fragment in fragments):
        return None
    a, b, c = (fragment for fragment in fragments if fragment is not None)
    return MatrixLayout(shape=shape, a=a, b=b, c=c)


def _separate(operand: Array, lanes: int) -> Fragment | None:
    """The fragment of one operand, given [rows or columns][1 + lanes * SLOTS] numbers."""
    count = int(operand[0, 0])
    if not 0 < count <= SLOTS:
        return None
    rows, columns = operand[:, 1:].reshape(2, lanes, SLOTS)[:, :, :count].astype(np.int64)
    parts = []
    for numbers in (rows, columns):
        lane, element = numbers[:, 0], numbers[0] - numbers[0, 0]
        if not np.array_equal(numbers, lane[:, None] + element):
            return None
        parts.append((tuple(lane.tolist()), tuple(element.tolist())))
    (lane_row, element_row), (lane_column, element_column) = parts
    return Fragment(
        lane_row=lane_row,
        lane_column=lane_column,
        element_row=element_row,
        element_column=element_column,
    )
