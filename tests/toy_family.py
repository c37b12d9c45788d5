"""A tiny family for tests of space, evaluation and search: out = factor * x, no GPU needed.

`width` and `unroll` change nothing but the pretended speed; `split` adds a second pass; `tile`
means something only with mode "tiled". Its kernels are never compiled: `toy_render` and
`ToyCompiler` stand in for the template engine and the GLSL compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.toy_device import toy_device, toy_outputs, toy_time_ns
from tuner.compile import Compiled
from tuner.errors import CompileError
from tuner.kernels.base import (
    Binding,
    Candidate,
    Constraint,
    Family,
    Operands,
    Parameter,
    Pass,
    PushField,
    Reference,
    ValidationCase,
)
from tuner.problems import PagedDecodeProblem
from tuner.runner.fake import FakeRunner
from tuner.templates import Origin, Rendered

FACTOR = 2.5


def toy_problem(sequences: int = 2, context: int = 64, **changes: Any) -> PagedDecodeProblem:
    """A small problem; only `sequences`, `context` and `head_size` mean anything to the toy."""
    fields = {"query_heads": 2, "kv_heads": 1, "head_size": 4, **changes}
    return PagedDecodeProblem(sequences=sequences, context=context, **fields)


def _operands(problem: PagedDecodeProblem, inputs: str, seed: int) -> Operands:
    rng = np.random.default_rng(seed)
    shape = (problem.sequences, problem.query_heads, problem.head_size)
    x = rng.standard_normal(shape).astype(np.float32)
    if inputs == "zeros":
        x[:] = 0
    pool = np.zeros((problem.sequences * max(1, problem.context),), np.float32)
    return Operands(
        inputs={"x": x, "pool": pool},
        outputs={"out": (shape, np.dtype(np.float32))},
        scalars={"rows": shape[0] * shape[1], "factor": FACTOR},
    )


def _operand_bytes(problem: PagedDecodeProblem) -> int:
    vectors = 2 * problem.query_heads * problem.head_size
    return 4 * problem.sequences * (vectors + max(1, problem.context))


def _bounds(shape: tuple[int, ...]) -> Any:
    return lambda arithmetic: {"out": np.full(shape, 1e-5 if arithmetic == "f32" else 1e-2)}


def _reference(operands: Operands) -> Reference:
    out = operands.inputs["x"].astype(np.float64) * operands.scalars["factor"]
    return Reference(outputs={"out": out}, bounds=_bounds(out.shape[:-1]))


def _sampled(operands: Operands, groups: int) -> Reference:
    x = operands.inputs["x"]
    flat = x.reshape(-1, x.shape[-1]).astype(np.float64)
    indices = np.arange(min(groups, len(flat)))
    out = flat[indices] * operands.scalars["factor"]
    return Reference(
        outputs={"out": out},
        bounds=_bounds(out.shape[:-1]),
        seen=lambda outputs: {"out": outputs["out"].reshape(-1, x.shape[-1])[indices]},
        names={"out": indices},
    )


def _passes(candidate: Candidate, scalars: Mapping[str, int | float]) -> tuple[Pass, ...]:
    push = {"rows": scalars["rows"], "factor": scalars["factor"]}
    width = int(candidate["width"])
    main = Pass(
        name="main",
        constants={"WIDTH": width},
        push=push,
        groups=(candidate.problem.sequences, 1, 1),
        subgroup_size=None,
    )
    if candidate["split"] == 1:
        return (main,)
    join = Pass(name="join", constants={}, push=push, groups=(1, 1, 1), subgroup_size=None)
    return (main, join)


def _too_wide(candidate: Candidate) -> str | None:
    threads = candidate["width"] * candidate["unroll"]
    limit = candidate.device.max_workgroup_invocations
    return f"{threads} threads, the device has {limit}" if threads > limit else None


def _no_room(candidate: Candidate) -> str | None:
    split, context = candidate["split"], candidate.problem.context
    return f"{split} splits of {context} tokens" if split > max(1, context) else None


TOY = Family(
    name="toy",
    summary="out = factor * x",
    template="toy.comp.jinja",
    problem_type=PagedDecodeProblem,
    parameters=(
        Parameter(name="mode", values=("plain", "tiled", "half"), help="structure"),
        Parameter(name="width", values=(32, 64, 128), help="threads"),
        Parameter(name="unroll", values=(1, 2, 4), help="rows a thread"),
        Parameter(
            name="tile",
            values=(1, 8, 16),
            help="rows staged",
            used=lambda values: values["mode"] == "tiled",
        ),
        Parameter(name="split", values=(1, 2), help="splits"),
    ),
    constraints=(
        Constraint(needs=("width", "unroll"), check=_too_wide),
        Constraint(needs=("split",), check=_no_room),
    ),
    bindings=(
        Binding(name="X", buffer="x", element="float", role="input"),
        Binding(name="Pool", buffer="pool", element="float", role="input"),
        Binding(name="Out", buffer="out", element="float", role="output"),
        Binding(name="Partial", buffer="partial", element="float", role="scratch"),
    ),
    push_fields=(PushField(name="rows", type="uint"), PushField(name="factor", type="float")),
    baseline={"mode": "plain", "width": 32, "unroll": 1, "tile": 1, "split": 1},
    starts=({"mode": "tiled", "width": 64, "unroll": 2, "tile": 8, "split": 1},),
    arithmetic=lambda values: "f16" if values["mode"] == "half" else "f32",
    passes=_passes,
    scratch_bytes=lambda candidate: {"partial": 4 * candidate["split"]},
    operands=_operands,
    reference=_reference,
    sampled_reference=_sampled,
    validation_cases=lambda problem: (
        ValidationCase(name="random", problem=toy_problem(3, 5), inputs="random"),
        ValidationCase(name="zeros", problem=toy_problem(1, 1), inputs="zeros"),
    ),
    bytes_moved=lambda problem: 4 * problem.sequences * problem.context,
    operand_bytes=_operand_bytes,
)


def toy_render(template: str, context: Mapping[str, Any]) -> Rendered:
    """The context as text, so that equal variants have equal sources."""
    shown = {key: value for key, value in sorted(context.items()) if isinstance(value, int | str)}
    return Rendered(template, f"// {template} {shown}\n", (Origin(template, 1),))


@dataclass
class ToyCompiler:
    """Source text as "SPIR-V"; refuses sources that contain one of `refuse`."""

    identity: str = "toycc 1"
    refuse: tuple[str, ...] = ()
    compiled: list[str] = field(default_factory=list)

    def compile(self, rendered: Rendered, *, values: Mapping[str, Any]) -> Compiled:
        self.compiled.append(rendered.text)
        if any(word in rendered.text for word in self.refuse):
            raise CompileError(
                template=rendered.template, values=dict(values), line=7, message="no such function"
            )
        return Compiled(rendered.text.encode(), 0.001, cached=False)


def toy_runner(**changes: Any) -> FakeRunner:
    """A fake runner that answers and takes time as the toy does."""
    device = changes.pop("info", None) or toy_device()
    return FakeRunner(device, **{"outputs": toy_outputs, "times": toy_time_ns, **changes})
