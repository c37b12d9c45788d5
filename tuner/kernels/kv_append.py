"""Appending keys and values to the planar int8 cache (the third system's): groups of 32 codes with
a float16 scale, all codes in one plane and all scales in another.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from tuner.kernels import teams
from tuner.kernels.base import (
    Array,
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
from tuner.kernels.input_kinds import generator_of
from tuner.kernels.subgroups import required_size, tuned
from tuner.oracle.kv_append import kv_append_reference, sampled_kv_append_reference
from tuner.planar import SCALE_OFFSET
from tuner.problems import GROUP_CODES, KvAppendProblem
from tuner.quant import planar_layout

SPARE_ROWS = 2
"""Rows of the inputs beyond those appended: not-a-numbers that no kernel may read."""
BASELINE_TEAMS = 4

PARAMETERS = (
    Parameter(
        name="strategy",
        values=("baseline", "teams"),
        help="baseline: a thread a number through shared memory; teams: groups in registers",
    ),
    *teams.PARAMETERS,
    Parameter(
        name="halves",
        values=(1, 2),
        help="whether a team takes the two groups of a scale word in turn, or half of it each",
        used=tuned,
    ),
)


def _check_group_lanes(c: Candidate) -> str | None:
    share, halves = divmod(c["lanes"], c["halves"])
    if halves or not 1 <= share <= GROUP_CODES // 4:
        return (
            f"{c['lanes']} lanes in {c['halves']} halves cannot share the {GROUP_CODES // 4} words "
            "of a group"
        )
    return None


def _workgroups(c: Candidate) -> int:
    problem: KvAppendProblem = c.problem
    first, end = problem.context * problem.groups, (problem.context + problem.rows) * problem.groups
    if not tuned(c.values):
        return 2 * -(-(end - first // 2 * 2) // BASELINE_TEAMS)
    pairs = (end + 1) // 2 - first // 2
    return -(-2 * pairs // teams.teams(c))


def _check_grid(c: Candidate) -> str | None:
    return teams.grid_reason(c.device, 2 * c.problem.rows * c.problem.groups, "groups")


CONSTRAINTS = (
    *teams.CONSTRAINTS,
    Constraint(needs=(), check=_check_grid),
    Constraint(needs=("lanes", "halves"), check=_check_group_lanes),
)

BINDINGS = (
    Binding(name="key", buffer="key", element="float", role="input"),
    Binding(name="value", buffer="value", element="float", role="input"),
    Binding(name="key_cache", buffer="key_cache", element="uint", role="state"),
    Binding(name="value_cache", buffer="value_cache", element="uint", role="state"),
    Binding(name="key_quads", buffer="key", element="vec4", role="input"),
    Binding(name="value_quads", buffer="value", element="vec4", role="input"),
)

PUSH_FIELDS = (
    PushField(name="first_row", type="uint"),
    PushField(name="rows", type="uint"),
    PushField(name="scale_offset", type="uint"),
)


def _passes(c: Candidate, scalars: Mapping[str, int | float]) -> tuple[Pass, ...]:
    baseline = not tuned(c.values)
    more = {"threads": teams.BASELINE_THREADS} if baseline else teams.constants(c)
    return (
        Pass(
            name="append",
            constants={"groups": c.problem.groups, **more},
            push=push_values(PUSH_FIELDS, scalars),
            groups=teams.linear_grid(_workgroups(c), c.device),
            subgroup_size=required_size(c),
        ),
    )


def _dispatch(c: Candidate) -> DispatchRule:
    problem: KvAppendProblem = c.problem
    first, end = f"context * {problem.groups}", f"(context + rows) * {problem.groups}"
    if tuned(c.values):
        pairs = f"ceil_div({end}, 2) - floor_div({first}, 2)"
        workgroups = f"ceil_div(2 * ({pairs}), {teams.teams(c)})"
    else:
        workgroups = f"2 * ceil_div({end} - 2 * floor_div({first}, 2), {BASELINE_TEAMS})"
    return DispatchRule(
        policy="none",
        terms=(
            ("max_tokens", "context + rows + 1"),
            *teams.linear_terms("append", workgroups, c.device),
        ),
        groups={"append": teams.linear_counts("append")},
        push={"first_row": "context", "rows": "rows", "scale_offset": SCALE_OFFSET},
        text="context is the position of the first new token; teams of a workgroup take the words "
        f"of two scales that are touched; {teams.LINEAR}",
    )


def make_operands(problem: KvAppendProblem, inputs: str, seed: int) -> Operands:
    """Operands of one launch; the same arguments give the same arrays.

    Buffers: `key` and `value` float32 [rows + spare, Hkv * D] (for validation the spare ones are
    NaN), `key_cache` and `value_cache` uint32 (`tuner.quant.planar_layout`). `inputs` is "timing"
    or a key of `VALIDATION_INPUTS`.

    Raises:
        UnknownNameError: `inputs` is no such kind.
    """
    rng = generator_of(inputs, ("timing", *VALIDATION_INPUTS), seed)
    spare = 0 if inputs == "timing" else SPARE_ROWS
    vectors = {}
    for side in ("key", "value"):
        made = np.full((problem.rows + spare, problem.row), np.nan, np.float32)
        made[: problem.rows] = rng.standard_normal((problem.rows, problem.row), np.float32)
        groups = made[: problem.rows].reshape(-1, GROUP_CODES)
        if inputs in VALIDATION_INPUTS:
            VALIDATION_INPUTS[inputs](groups)
        vectors[side] = made
    words = planar_layout(problem.capacity, problem.row)[1] // 4
    if inputs == "timing":
        caches = {f"{side}_cache": np.zeros(words, np.uint32) for side in vectors}
    else:
        # Random, so that a word which ends up in the wrong place or side shows.
        caches = {f"{side}_cache": rng.integers(0, 2**32, words, np.uint32) for side in vectors}
    return Operands(
        inputs=vectors | caches,
        outputs={name: (cache.shape, cache.dtype) for name, cache in caches.items()},
        scalars=scalars_of(problem),
    )


def _random(_groups: Array) -> None:
    """Normal values, as drawn."""


def _magnitudes(groups: Array) -> None:
    """Peaks from 2e-9, whose scale rounds to zero, through subnormal scales to infinite ones."""
    groups *= np.logspace(-9, 7, len(groups), dtype=np.float32)[:, None]


def _ties(groups: Array) -> None:
    """Halves that a peak of 127 times a power of two leaves exact: they go to the even code."""
    halves = np.arange(GROUP_CODES, dtype=np.float32) * 4 - np.float32(62.5)
    groups[...] = halves
    groups[:, 0] = 127
    groups *= (2.0 ** (np.arange(len(groups)) % 9 - 4)).astype(np.float32)[:, None]


def _zeros(groups: Array) -> None:
    """Groups of zeros between others."""
    groups[::2] = 0


VALIDATION_INPUTS = {
    "random": _random,
    "magnitudes": _magnitudes,
    "ties": _ties,
    "zeros": _zeros,
}
"""What makes groups [n, 32] of normal values those of a kind of inputs, in place."""


def scalars_of(problem: KvAppendProblem) -> dict[str, int | float]:
    """What the host passes beside the buffers."""
    return {
        "first_row": problem.context,
        "rows": problem.rows,
        "scale_offset": planar_layout(problem.capacity, problem.row)[0],
    }


def validation_cases(problem: KvAppendProblem) -> tuple[ValidationCase, ...]:
    """Rows at even and odd positions, alone and several, so that scale words are shared with rows
    before and after."""
    sizes = {"random": (5, 7), "magnitudes": (8, 0), "ties": (2, 3), "zeros": (1, 5)}
    return tuple(
        ValidationCase(
            name=inputs,
            problem=msgspec.structs.replace(problem, rows=rows, context=context),
            inputs=inputs,
            seed=seed,
        )
        for seed, (inputs, (rows, context)) in enumerate(sizes.items())
    )


def _bytes_moved(problem: KvAppendProblem) -> int:
    """Numbers in, codes and scales out, for keys and values."""
    return 2 * problem.rows * (problem.row * 5 + problem.groups * 2)


def _operand_bytes(problem: KvAppendProblem) -> int:
    """Numbers in, and the whole cache going in and coming out, for keys and values."""
    return 2 * (
        4 * problem.rows * problem.row + 2 * planar_layout(problem.capacity, problem.row)[1]
    )


KV_APPEND_Q8 = Family(
    name="kv_append_q8",
    summary="appends keys and values to a planar int8 cache (groups of 32, float16 scales)",
    template="kv_append.comp.jinja",
    problem_type=KvAppendProblem,
    parameters=PARAMETERS,
    constraints=CONSTRAINTS,
    bindings=BINDINGS,
    push_fields=PUSH_FIELDS,
    baseline={"strategy": "baseline"},
    starts=tuple(
        {
            "strategy": "teams",
            "subgroup_size": size,
            "subgroups": n,
            "lanes": lanes,
            "halves": halves,
        }
        for size in (32, 64, 16, 8)
        for lanes, halves in ((8, 1), (16, 2))
        for n in (4, 1)
    ),
    arithmetic=lambda _values: "f32",
    passes=_passes,
    operands=make_operands,
    reference=kv_append_reference,
    sampled_reference=sampled_kv_append_reference,
    validation_cases=validation_cases,
    bytes_moved=_bytes_moved,
    operand_bytes=_operand_bytes,
    scalars=scalars_of,
    dispatch=_dispatch,
)
