"""Norm and rotary embedding of a step's query and key heads, in place (the third system's).

y = x / sqrt(mean(x^2) + epsilon) * w over a head, then dimension j < rotary/2 rotates with
dimension j + rotary/2 by the row's angle j. Queries have gates between them, which stay.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from tuner.kernels import limits, teams
from tuner.kernels.base import (
    Binding,
    Candidate,
    Constraint,
    DispatchRule,
    Family,
    Operands,
    Parameter,
    Pass,
    PushField,
    ValidationCase,
    push_values,
)
from tuner.kernels.indexer_operands import rope_table, table_bytes
from tuner.kernels.input_kinds import generator_of
from tuner.kernels.subgroups import required_size, tuned
from tuner.oracle.norm_rope import norm_rope_reference, sampled_norm_rope_reference
from tuner.problems import NormRopeProblem
from tuner.records import BufferRole

THETA = 1e7
EPSILON = float(np.float32(1e-6))
POISON = 0xFFC0FFEE
"""Bits of a NaN: some gates hold it, and must still hold it afterwards."""
MAX_LANE_VALUES = 64
BASELINE_TEAMS = 4
FAR = 262_141
"""A position at which a float32 angle would be wrong in its second digit."""

PARAMETERS = (
    Parameter(
        name="strategy",
        values=("baseline", "teams"),
        help="baseline: 32 threads a head through shared memory; teams: heads in registers",
    ),
    Parameter(
        name="launches",
        values=("apart", "joint"),
        help="queries and keys in two dispatches side by side, or in one",
        used=tuned,
    ),
    *teams.PARAMETERS,
    Parameter(name="width", values=(1, 4), help="numbers of one load or store", used=tuned),
)


def _check_width(c: Candidate) -> str | None:
    head_size, rotary = c.problem.head_size, c.problem.rotary
    if c["width"] == 4 and (head_size % 4 or rotary % 8):
        return (
            f"vectors of 4 need a head size that is a multiple of 4 and rotary dimensions that are "
            f"one of 8, not {head_size} and {rotary}"
        )
    return None


def _check_idle_lanes(c: Candidate) -> str | None:
    vectors = c.problem.head_size // c["width"]
    if c["lanes"] > vectors:
        return f"{c['lanes']} lanes for the {vectors} loads of a head leave some without work"
    return None


def _check_registers(c: Candidate) -> str | None:
    held = c.problem.head_size // c["lanes"]
    if tuned(c.values) and held > MAX_LANE_VALUES:
        return f"a lane would hold {held} numbers, the limit is {MAX_LANE_VALUES}: use more lanes"
    return None


def _check_shared_memory(c: Candidate) -> str | None:
    if tuned(c.values):
        return None
    needed = 4 * (BASELINE_TEAMS * c.problem.head_size + teams.BASELINE_THREADS)
    return limits.shared_memory_reason(c.device, needed)


def _check_grid(c: Candidate) -> str | None:
    return teams.grid_reason(c.device, c.problem.rows * c.problem.heads, "heads")


CONSTRAINTS = (
    *teams.CONSTRAINTS,
    Constraint(needs=(), check=_check_grid),
    Constraint(needs=("width",), check=_check_width),
    Constraint(needs=("lanes", "width"), check=_check_idle_lanes),
    Constraint(needs=("strategy", "lanes"), check=_check_registers),
    Constraint(needs=("strategy",), check=_check_shared_memory),
)

_ROLES: dict[str, BufferRole] = {
    "query_gate": "state",
    "key": "state",
    "query_weight": "input",
    "key_weight": "input",
}

BINDINGS = (
    *(
        Binding(name=f"{name}{suffix}", buffer=name, element=element, role=role)
        for suffix, element in (("", "float"), ("_quads", "vec4"))
        for name, role in _ROLES.items()
    ),
    Binding(name="rope_rows", buffer="rope_rows", element="vec2", role="input"),
)

PUSH_FIELDS = (PushField(name="rows", type="uint"), PushField(name="epsilon", type="float"))


def _passes(c: Candidate, scalars: Mapping[str, int | float]) -> tuple[Pass, ...]:
    problem: NormRopeProblem = c.problem
    push = push_values(PUSH_FIELDS, scalars)
    baseline = not tuned(c.values)
    per_group = BASELINE_TEAMS if baseline else teams.teams(c)
    apart = ("query", 0, problem.query_heads), ("key", problem.query_heads, problem.kv_heads)
    shape = {
        "head_size": problem.head_size,
        "rotary": problem.rotary,
        "query_heads": problem.query_heads,
        "kv_heads": problem.kv_heads,
        "one_plus": problem.one_plus,
        **({"threads": teams.BASELINE_THREADS} if baseline else teams.constants(c)),
    }
    return tuple(
        Pass(
            name=name,
            constants={**shape, "first_head": first, "heads": heads},
            push=push,
            groups=teams.linear_grid(-(-problem.rows * heads // per_group), c.device),
            subgroup_size=required_size(c),
            beside=name == "key" and not baseline,
        )
        for name, first, heads in (
            apart if c["launches"] == "apart" else [("both", 0, problem.heads)]
        )
    )


def _dispatch(c: Candidate) -> DispatchRule:
    heads = {"both": "(query_heads + kv_heads)"}
    if c["launches"] == "apart":
        heads = {"query": "query_heads", "key": "kv_heads"}
    per_group = teams.teams(c) if tuned(c.values) else BASELINE_TEAMS
    return DispatchRule(
        policy="none",
        terms=tuple(
            term
            for name, count in heads.items()
            for term in teams.linear_terms(
                f"{name}_heads", f"ceil_div(rows * {count}, {per_group})", c.device
            )
        ),
        groups={name: teams.linear_counts(f"{name}_heads") for name in heads},
        push={"rows": "rows"},
        text=f"a workgroup for {per_group} heads; {teams.LINEAR}",
    )


def make_operands(problem: NormRopeProblem, inputs: str, seed: int) -> Operands:
    """Operands of one launch; the same arguments give the same arrays.

    Buffers: `query_gate` float32 [rows, H, 2 * D] (queries, each with its gate), `key` float32
    [rows, Hkv, D], `query_weight` and `key_weight` float32 [D], `rope_rows` float32
    [rows, rotary/2, 2] (cosine and sine). Row b is at position `base_position` + b. `inputs` is
    "timing" or a key of `VALIDATION_INPUTS`.

    Raises:
        UnknownNameError: `inputs` is no such kind.
    """
    rng = generator_of(inputs, ("timing", *VALIDATION_INPUTS), seed)
    scale, base_position = VALIDATION_INPUTS.get(inputs, (1.0, 0))
    query = rng.standard_normal((problem.rows, problem.query_heads, 2 * problem.head_size))
    query = np.asarray(query, np.float32)
    key = rng.standard_normal((problem.rows, problem.kv_heads, problem.head_size), np.float32)
    query[..., : problem.head_size] *= np.float32(scale)
    query.view(np.uint32)[..., problem.head_size :: 3] = POISON
    key *= np.float32(scale)
    if inputs == "spikes":
        query[:, ::2, problem.rotary - 1] = 3e4
        key[:, :, 0] = -3e4
    weights = rng.uniform(0.5, 1.5, (2, problem.head_size)) - problem.one_plus
    return Operands(
        inputs={
            "query_gate": query,
            "key": key,
            "query_weight": weights[0].astype(np.float32),
            "key_weight": weights[1].astype(np.float32),
            "rope_rows": rope_table(base_position + np.arange(problem.rows), problem.rotary, THETA),
        },
        outputs={
            "query_gate": (query.shape, query.dtype),
            "key": (key.shape, key.dtype),
        },
        scalars={
            **scalars_of(problem),
            "base_position": base_position,
            "theta": THETA,
            "rotary": problem.rotary,
            "one_plus": problem.one_plus,
        },
    )


VALIDATION_INPUTS: Mapping[str, tuple[float, int]] = {
    "random": (1.0, 2050),
    "far": (1.0, FAR),
    "tiny": (1e-3, 7),
    "huge": (1e6, 0),
    "zeros": (0.0, 1),
    "spikes": (0.1, 100),
}
"""By kind of inputs: what the values are multiplied by, and the first row's position. In "tiny"
heads epsilon counts as much as the values."""


def scalars_of(problem: NormRopeProblem) -> dict[str, int | float]:
    """The scalars that push constants need."""
    return {"rows": problem.rows, "epsilon": EPSILON}


def validation_cases(problem: NormRopeProblem) -> tuple[ValidationCase, ...]:
    """One row and a few, at positions near and far; every kind of inputs."""
    rows = {"random": 5, "far": 3, "tiny": 1, "huge": 2, "zeros": 2, "spikes": 7}
    return tuple(
        ValidationCase(
            name=inputs,
            problem=msgspec.structs.replace(problem, rows=rows[inputs]),
            inputs=inputs,
            seed=seed,
        )
        for seed, inputs in enumerate(VALIDATION_INPUTS)
    )


def _bytes_moved(problem: NormRopeProblem) -> int:
    """Heads in and out, weights, angles."""
    heads = 2 * problem.rows * problem.heads * problem.head_size
    return 4 * (heads + 2 * problem.head_size + problem.rows * problem.rotary)


def _operand_bytes(problem: NormRopeProblem) -> int:
    """Heads and gates going in and coming out, weights, angles."""
    heads = 2 * problem.rows * (2 * problem.query_heads + problem.kv_heads) + 2
    return 4 * heads * problem.head_size + table_bytes(problem.rows, problem.rotary)


QK_NORM_ROPE = Family(
    name="qk_norm_rope",
    summary="RMS norm and rotary embedding of query and key heads, in place",
    template="norm_rope.comp.jinja",
    problem_type=NormRopeProblem,
    parameters=PARAMETERS,
    constraints=CONSTRAINTS,
    bindings=BINDINGS,
    push_fields=PUSH_FIELDS,
    baseline={"strategy": "baseline"},
    starts=tuple(
        {
            "strategy": "teams",
            "launches": "joint",
            "subgroup_size": size,
            "subgroups": subgroups,
            "lanes": lanes,
            "width": width,
        }
        for size, lanes in ((32, 32), (64, 32), (32, 16), (16, 16), (8, 8))
        for subgroups, width in ((4, 4), (1, 4), (4, 1))
    ),
    arithmetic=lambda _values: "f32",
    passes=_passes,
    operands=make_operands,
    reference=norm_rope_reference,
    sampled_reference=sampled_norm_rope_reference,
    validation_cases=validation_cases,
    bytes_moved=_bytes_moved,
    operand_bytes=_operand_bytes,
    scalars=scalars_of,
    dispatch=_dispatch,
)
