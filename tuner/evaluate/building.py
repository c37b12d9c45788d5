"""From a candidate to a job: render each pass, compile it, pack the push constants."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from tuner import templates
from tuner.compile import Compiled
from tuner.device_info import DeviceInfo
from tuner.errors import TemplateError
from tuner.kernels.base import Candidate, Family, Pass, Values
from tuner.kernels.space import Rules, canonical
from tuner.problems import Problem
from tuner.runner.protocol import Job, JobPass
from tuner.templates import Rendered

Scalars = Mapping[str, int | float]
Render = Callable[[str, Mapping[str, Any]], Rendered]
"""`tuner.templates.render`, or what stands in for it in a test."""

_PUSH_FORMAT = {"uint": "I", "int": "i", "float": "f"}


class SpirvCompiler(Protocol):
    """What this package needs of `tuner.compile.Compiler`; thread-safe."""

    @property
    def identity(self) -> str:
        """Name and version of the compiler."""
        ...

    def compile(self, rendered: Rendered, *, values: Mapping[str, Any]) -> Compiled:
        """SPIR-V of a kernel. Raises CompileError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPass:
    """One pass of a candidate: as its family declares it, and its GLSL."""

    declared: Pass
    rendered: Rendered


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A job, the GLSL behind its passes, and the seconds that compiling took."""

    job: Job
    passes: tuple[RenderedPass, ...]
    compile_seconds: float


REMEMBERED = 128
"""Sources that a `RenderMemo` keeps: as many as the variants of a problem have in common."""


class RenderMemo:
    """A `Render` that does not render the same again soon: passes that variants, or one variant's
    problems, have in common; for one thread. What a template did not look up is not part of what is
    the same."""

    def __init__(self, render: Render, *, remembered: int = REMEMBERED) -> None:
        self._render, self._remembered = render, remembered
        self._reads: dict[str, set[tuple[str, ...]]] = {}
        self._rendered: dict[object, Rendered] = {}

    def __call__(self, template: str, context: Mapping[str, Any]) -> Rendered:
        """As `tuner.templates.render`."""
        known = {name: repr(value) for name, value in context.items()}
        for reads in self._reads.get(template, ()):
            key = template, reads, tuple(map(known.get, reads))
            if (rendered := self._rendered.pop(key, None)) is not None:
                break
        else:
            rendered = self._render(template, context)
            reads = tuple(sorted(context if rendered.reads is None else rendered.reads))
            self._reads.setdefault(template, set()).add(reads)
            key = template, reads, tuple(map(known.get, reads))
        self._rendered[key] = rendered  # Last, so that the first is what was used longest ago.
        if len(self._rendered) > self._remembered:
            del self._rendered[next(iter(self._rendered))]
        return rendered


class CompileMemo:
    """A compiler that compiles each source once, for one thread."""

    def __init__(self, compiler: SpirvCompiler) -> None:
        self._compiler = compiler
        self._compiled: dict[str, Compiled] = {}

    @property
    def identity(self) -> str:
        """As the compiler's."""
        return self._compiler.identity

    def compile(self, rendered: Rendered, *, values: Mapping[str, Any]) -> Compiled:
        """As the compiler's; a source compiled before costs no time."""
        if rendered.text in self._compiled:
            return self._compiled[rendered.text]
        compiled = self._compiler.compile(rendered, values=values)
        self._compiled[rendered.text] = Compiled(compiled.spirv, 0.0, cached=True)
        return compiled


def render_context(family: Family, values: Values, declared: Pass) -> dict[str, Any]:
    """The names a template sees for a pass.

    These are the variant's parameters and the pass's constants by name, and `family`, `pass_name`,
    `values` (all parameters), `bindings` and `push_fields` as declared.
    """
    return {
        **values,
        **declared.constants,
        "family": family.name,
        "pass_name": declared.name,
        "values": dict(values),
        "bindings": family.bindings,
        "push_fields": family.push_fields,
    }


def render_passes(
    family: Family,
    values: Values,
    problem: Problem,
    device: DeviceInfo,
    *,
    scalars: Scalars | None = None,
    render: Render = templates.render,
) -> tuple[RenderedPass, ...]:
    """The passes of a legal variant with their GLSL, in launch order.

    `scalars` are those of the problem's operands; without them (to look at the GLSL) the push
    constants that depend on operands are missing.

    Raises:
        TemplateError: the template does not render.
    """
    candidate = Candidate(values, problem, device)
    return tuple(
        RenderedPass(
            declared=declared,
            rendered=render(family.template, render_context(family, values, declared)),
        )
        for declared in family.passes(candidate, scalars or {})
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A legal variant, its GLSL and its identity; `broken` is why there is no GLSL."""

    candidate: Candidate
    passes: tuple[RenderedPass, ...]
    key: str
    broken: TemplateError | None = None


def named(
    family: Family,
    values: Values,
    problem: Problem,
    device: DeviceInfo,
    compiler_identity: str,
    *,
    render: Render = templates.render,
    rules: Rules | None = None,
) -> Named:
    """Render a variant for timing on a problem, and name it.

    `rules` are those of the family there, where many variants are asked about.

    Raises:
        IllegalVariantError: it is not legal there; says why.
    """
    (rules or Rules(family, problem, device)).require(values)
    candidate = Candidate(canonical(family, values), problem, device)
    passes: tuple[RenderedPass, ...] = ()
    broken = None
    try:
        scalars = family.timing_scalars(problem)
        passes = render_passes(
            family, candidate.values, problem, device, scalars=scalars, render=render
        )
    except TemplateError as error:
        broken = error
    key = variant_key(family, candidate, passes, compiler_identity)
    return Named(candidate=candidate, passes=passes, key=key, broken=broken)


def build_job(
    family: Family,
    candidate: Candidate,
    scalars: Scalars,
    compiler: SpirvCompiler,
    *,
    render: Render = templates.render,
) -> Built:
    """The job of a legal candidate, given the scalars of its operands.

    Raises:
        TemplateError, CompileError: the variant has no kernel.
    """
    passes = render_passes(
        family,
        candidate.values,
        candidate.problem,
        candidate.device,
        scalars=scalars,
        render=render,
    )
    return compile_passes(family, candidate, passes, compiler)


def compile_passes(
    family: Family,
    candidate: Candidate,
    passes: tuple[RenderedPass, ...],
    compiler: SpirvCompiler,
) -> Built:
    """The job of passes that are rendered already. Raises CompileError."""
    compiled = [compiler.compile(p.rendered, values=candidate.values) for p in passes]
    job = Job(
        passes=tuple(
            JobPass(
                name=p.declared.name,
                spirv=c.spirv,
                push=pack_push(family, p.declared.push),
                groups=p.declared.groups,
                subgroup_size=p.declared.subgroup_size,
                beside=p.declared.beside,
            )
            for p, c in zip(passes, compiled, strict=True)
        ),
        bindings=family.slots,
        scratch_bytes=family.scratch_bytes(candidate),
        counters=tuple(name for name, role in family.buffers.items() if role == "counter"),
    )
    return Built(job=job, passes=passes, compile_seconds=sum(c.seconds for c in compiled))


def pack_push(family: Family, push: Scalars) -> bytes:
    """Push constants as the device reads them: 4 bytes a field, little-endian, as declared.

    Raises:
        KeyError: a field of the family has no value.
    """
    values = (
        float(push[field.name]) if field.type == "float" else int(push[field.name])
        for field in family.push_fields
    )
    return struct.pack(_push_layout(family), *values)


def unpack_push(family: Family, raw: bytes) -> dict[str, int | float]:
    """What `pack_push` made the bytes of."""
    names = [field.name for field in family.push_fields]
    return dict(zip(names, struct.unpack(_push_layout(family), raw), strict=True))


def _push_layout(family: Family) -> str:
    return "<" + "".join(_PUSH_FORMAT[field.type] for field in family.push_fields)


def variant_key(
    family: Family,
    candidate: Candidate,
    passes: tuple[RenderedPass, ...],
    compiler_identity: str,
) -> str:
    """The identity under which nothing is measured twice, 32 hex digits.

    A hash of family, problem, what is launched (rendered sources, workgroup counts, push constants,
    subgroup size), compiler, device and driver: whatever could change the kernel or its speed
    changes the key. Values that come to the same launch are the same variant; where nothing was
    rendered, the values stand for it.
    """
    device = candidate.device
    launches = [
        (
            p.rendered.text,
            p.declared.groups,
            sorted(p.declared.push.items()),
            p.declared.subgroup_size or 0,
            p.declared.name + (" beside" if p.declared.beside else ""),
        )
        for p in passes
    ]
    identity = (
        family.name,
        [] if passes else sorted(canonical(family, candidate.values).items()),
        candidate.problem.key,
        launches,
        compiler_identity,
        device.uuid,
        device.driver,
    )
    return hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:32]
