"""What a kernel family declares: parameters, constraints, operands, ABI, launches.

Adding a family is one declaration of this kind, one template and one oracle. Everything here is
plain data and pure functions: Vulkan is not needed to enumerate a space, render or check a variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tuner.device_info import DeviceInfo
from tuner.errors import UnknownNameError
from tuner.problems import Problem
from tuner.records import BufferRole

Value = int | str
Values = Mapping[str, Value]
Array = npt.NDArray[Any]
Terms = tuple[tuple[str, str], ...]
"""Names and their expressions, in an order in which each may use those before it."""

ArithmeticClass = Literal[
    "f32",
    "f16",
    "int8_one_term",
    "int8_two_terms",
    "f16_matrix",
    "f16_matrix_scaled",
    "int8_matrix",
]
"""How a variant computes, as far as its rounding errors go; `tuner.oracle` derives a bound each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One tunable choice: its legal values in order and what it means.

    `used` tells whether the parameter means anything beside the other values; where it does not, it
    must hold its neutral value `values[0]`, so that one kernel has one name.
    """

    name: str
    values: tuple[Value, ...]
    help: str
    used: Callable[[Values], bool] | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A choice of parameter values for one problem on one device, legal or not."""

    values: Values
    problem: Any
    """Of the family's `problem_type`, which one declaration of all families' rules cannot name."""
    device: DeviceInfo

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A rule between parameters, problem and device.

    `check` returns None if the candidate obeys, else the reason with the numbers in it. It is asked
    as soon as the parameters named in `needs` are known, which prunes the enumeration early.
    """

    needs: tuple[str, ...]
    check: Callable[[Candidate], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """One storage-buffer binding; its number is its place in `Family.bindings`, or `number`.

    Several bindings may view one `buffer` with different element types (`uint` and `uvec4`), and
    may then have one number, where a device has too few for each view to have its own.
    `role` says who fills the buffer: "input" the host, "output" and "scratch" the kernel; "state"
    comes from the host and is written too; "counter" is scratch that is all zero before a launch,
    and that the kernel leaves all zero.
    """

    name: str
    buffer: str
    element: str
    role: BufferRole
    number: int | None = None

    @property
    def access(self) -> str:
        """The GLSL memory qualifier."""
        return {"input": "readonly", "scratch": "coherent", "counter": "coherent"}.get(
            self.role, ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PushField:
    """One 4-byte push constant."""

    name: str
    type: Literal["uint", "int", "float"]


def push_values(
    fields: Iterable[PushField], scalars: Mapping[str, int | float]
) -> dict[str, int | float]:
    """Values of the fields that bear the name of a scalar; a pass adds those of the others."""
    return {each.name: scalars[each.name] for each in fields if each.name in scalars}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One dispatch of a variant: which part of the template, with which constants, how often.

    `subgroup_size` is the size the pipeline must require (None: any the driver likes).
    `push` gives a value for every push-constant field of the family. `beside`: it needs nothing of
    the pass before it, and may run beside it.
    """

    name: str
    constants: Mapping[str, Any]
    push: Mapping[str, int | float]
    groups: tuple[int, int, int]
    subgroup_size: int | None
    beside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRule:
    """How an engine launches a variant on other sizes of the same geometry.

    All but `policy`, `facts` and `text` are expressions (`tuner.expressions`) of the problem's
    whole numbers and `counts`, of the `facts`, and of `terms`. `groups` has, for each pass of the
    candidate, the workgroup counts in x, y and z; `push` the push constants that sizes change;
    `scratch` the bytes of each scratch and counter buffer. The rule holds where no expression in
    `at_most` is larger than its number. `policy` is what cuts the work, in a form that programs
    read ("count:8"); `text` says it all in words.
    """

    policy: str
    facts: Mapping[str, int] = field(default_factory=dict)
    terms: Terms = ()
    groups: Mapping[str, tuple[str, str, str]]
    push: Mapping[str, str] = field(default_factory=dict)
    scratch: Mapping[str, str] = field(default_factory=dict)
    at_most: Mapping[str, int] = field(default_factory=dict)
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """What one launch reads and writes: arrays as the device sees them, and the host's scalars.

    `inputs` by buffer name; `outputs` by buffer name as (shape, dtype); a buffer of role "state" is
    in both, with what it holds before a launch. `scalars` are what the host passes beside them
    (strides, softmax scale …) and what the oracle needs too.
    """

    inputs: dict[str, Array]
    outputs: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
    scalars: dict[str, int | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The oracle's answer for one set of operands, float64.

    `outputs` by name. `bounds` by name and arithmetic class: what error norm each group of elements
    may have (shape of the output without its last axis); see `tuner.oracle`. What must be equal has
    a bound of 0; where each element has a bound of its own, the last axis has length 1.

    `seen` makes, from the output buffers as the device left them, the arrays that are compared:
    codes out of packed words, a few rows of a large output. `names` are what messages call the
    groups of each output, where that is not their index. A group wanted all zero must be zero,
    unless its output is in `zero_may_differ`.
    """

    outputs: dict[str, Array]
    bounds: Callable[[ArithmeticClass], dict[str, Array]]
    seen: Callable[[Mapping[str, Array]], Mapping[str, Array]] = dict
    names: Mapping[str, Array] = field(default_factory=dict)
    zero_may_differ: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationCase:
    """One small problem that a variant must answer rightly before it is timed.

    `inputs` names the kind of values the operands hold ("random", "large_logits" …).
    """

    name: str
    problem: Problem
    inputs: str
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kernel family: one declaration, one template, one oracle.

    Functions that take a `Candidate` may assume that it is legal. `baseline`, `starts` and
    `portable` are declared by the values that matter; the family has them with all others neutral.
    """

    name: str
    summary: str
    template: str
    problem_type: type[Problem]
    parameters: tuple[Parameter, ...]
    constraints: tuple[Constraint, ...]
    bindings: tuple[Binding, ...]
    push_fields: tuple[PushField, ...]
    baseline: Values
    """What users have today: the upstream structure, measured beside every tuned variant."""
    starts: tuple[Values, ...]
    """Known-good variants that a search tries first, where they are legal."""
    arithmetic: Callable[[Values], ArithmeticClass]
    passes: Callable[[Candidate, Mapping[str, int | float]], tuple[Pass, ...]]
    """The launches of a candidate, in order, given the operands' scalars."""
    operands: Callable[[Any, str, int], Operands]
    """Operands for (problem, kind of inputs, seed); the same arguments give the same arrays."""
    reference: Callable[[Operands], Reference]
    sampled_reference: Callable[[Operands, int], Reference]
    """The oracle on a few groups of a large problem: (operands, how many)."""
    validation_cases: Callable[[Any], tuple[ValidationCase, ...]]
    """Small problems of the same geometry as the given one that exercise every code path."""
    bytes_moved: Callable[[Any], int]
    """Bytes that must cross device memory once, whatever the kernel."""
    operand_bytes: Callable[[Any], int]
    """Bytes of the operands of kind "timing", inputs and outputs, without making these: often far
    more than a launch reads."""
    scratch_bytes: Callable[[Candidate], dict[str, int]] = lambda _candidate: {}
    """Bytes the candidate needs of each scratch and counter buffer (at least 4)."""
    dispatch: Callable[[Candidate], DispatchRule] | None = None
    """How a candidate is launched on other sizes, for exports; None: only as it was measured."""
    portable: tuple[Values, ...] = ()
    """Tuned variants of modest needs: no number of compute units, workgroups of 128 threads or
    less, 16 KiB of shared memory, subgroups of any size. See `tuner.kernels.space.starts`."""
    scalars: Callable[[Any], dict[str, int | float]] | None = None
    """The scalars of a problem's operands for timing, without making these; None: make them."""
    validated_as: Callable[[Candidate, ValidationCase], Values] | None = None
    """The values under which a candidate is launched on a validation case: the very same kernels,
    where its own values would choose others for problems that small. None: its own."""

    def __post_init__(self) -> None:
        neutral = {parameter.name: parameter.values[0] for parameter in self.parameters}
        object.__setattr__(self, "baseline", {**neutral, **self.baseline})
        for name in ("starts", "portable"):
            whole = tuple({**neutral, **start} for start in getattr(self, name))
            object.__setattr__(self, name, whole)

    @property
    def kind(self) -> str:
        """The kind of its problems, as records, shape texts and workload files name it."""
        return str(self.problem_type.__struct_config__.tag)

    def timing_scalars(self, problem: Problem) -> dict[str, int | float]:
        """The scalars of the operands of kind "timing"."""
        if self.scalars is not None:
            return self.scalars(problem)
        return self.operands(problem, "timing", 0).scalars

    def validation_values(self, candidate: Candidate, case: ValidationCase) -> Values:
        """The values under which a legal candidate is launched on a validation case."""
        return candidate.values if self.validated_as is None else self.validated_as(candidate, case)

    def parameter(self, name: str) -> Parameter:
        """The parameter of that name.

        Raises:
            UnknownNameError: the family has none.
        """
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        raise UnknownNameError(f"parameter of {self.name}", name, [p.name for p in self.parameters])

    def meaningful(self, values: Values) -> Values:
        """The parameters of a canonical variant that tell it from others.

        Left out are those that mean nothing beside the others, and those with a single value. Of a
        variant from before a parameter came or went, all is told that may mean something.
        """
        declared = {parameter.name: parameter for parameter in self.parameters}
        return {
            name: value
            for name, value in values.items()
            if name not in declared or _tells(declared[name], values)
        }

    @property
    def slots(self) -> tuple[str, ...]:
        """The buffer behind each binding number."""
        numbered = {
            place if binding.number is None else binding.number: binding.buffer
            for place, binding in enumerate(self.bindings)
        }
        return tuple(numbered[number] for number in range(len(numbered)))

    @property
    def buffers(self) -> dict[str, BufferRole]:
        """Every buffer of the family once, with its role, in binding order."""
        return {binding.buffer: binding.role for binding in self.bindings}


def _tells(parameter: Parameter, values: Values) -> bool:
    if len(parameter.values) == 1:
        return False
    try:
        return parameter.used is None or parameter.used(values)
    except KeyError:
        return True  # It asks for a parameter that has come since.
