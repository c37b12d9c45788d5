"""Joining the partial results of split-T attention, with the sigmoid gate of the third system."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.kernels import limits
from tuner.kernels.base import (
    Binding,
    Candidate,
    Constraint,
    DispatchRule,
    Family,
    Parameter,
    Pass,
    PushField,
    push_values,
)
from tuner.kernels.q8_operands import combine_bytes, combine_cases, make_combine_operands
from tuner.kernels.subgroups import tuned
from tuner.oracle.q8_decode import combine_reference, sampled_combine_reference
from tuner.problems import GatedCombineProblem

BASELINE_THREADS = 256

PARAMETERS = (
    Parameter(
        name="strategy",
        values=("baseline", "sliced"),
        help="baseline: one workgroup of 256 per query head, each thread walks all parts. sliced: "
        "parts dealt out to slices of a workgroup, which are joined in shared memory",
    ),
    Parameter(name="combine_dims", values=(2, 4, 8), help="dimensions of one thread", used=tuned),
    Parameter(
        name="combine_groups",
        values=(1, 2, 4, 8),
        help="workgroups that share the dimensions of a head",
        used=tuned,
    ),
    Parameter(
        name="combine_slices",
        values=(1, 2, 4, 8, 16, 32),
        help="slices of a workgroup to which the parts are dealt out",
        used=tuned,
    ),
)


def _columns(c: Candidate) -> int:
    return int(c.problem.head_size // (c["combine_dims"] * c["combine_groups"]))


def _check_head_size(c: Candidate) -> str | None:
    if c.problem.head_size % 2:
        return f"head size {c.problem.head_size} is odd, partial results are read in pairs"
    return None


def _check_device(c: Candidate) -> str | None:
    groups = c["combine_groups"] if tuned(c.values) else 1
    return limits.groups_reason(c.device, (c.problem.query_heads * groups, c.problem.rows))


def _check_dims(c: Candidate) -> str | None:
    if not tuned(c.values):
        return None
    share = c["combine_dims"] * c["combine_groups"]
    if c.problem.head_size % share:
        return (
            f"{c['combine_groups']} workgroups with {c['combine_dims']} dimensions a thread do not "
            f"divide a head size of {c.problem.head_size}"
        )
    return None


def _check_threads(c: Candidate) -> str | None:
    threads = _columns(c) * c["combine_slices"] if tuned(c.values) else BASELINE_THREADS
    return limits.threads_reason(c.device, threads)


def _check_shared_memory(c: Candidate) -> str | None:
    if not tuned(c.values) or c["combine_slices"] == 1:
        return None
    sums = _columns(c) * c["combine_dims"]
    return limits.shared_memory_reason(c.device, 4 * c["combine_slices"] * (sums + 2))


_SHAPE = ("strategy", "combine_dims", "combine_groups")
CONSTRAINTS = (
    Constraint(needs=("strategy",), check=_check_head_size),
    Constraint(needs=("strategy", "combine_groups"), check=_check_device),
    Constraint(needs=_SHAPE, check=_check_dims),
    Constraint(needs=(*_SHAPE, "combine_slices"), check=_check_threads),
    Constraint(needs=(*_SHAPE, "combine_slices"), check=_check_shared_memory),
)

BINDINGS = (
    Binding(name="partials", buffer="partials", element="vec2", role="input"),
    Binding(name="query_gate", buffer="query_gate", element="float", role="input"),
    Binding(name="row_tokens", buffer="row_tokens", element="uint", role="input"),
    Binding(name="attention", buffer="out", element="float", role="output"),
)

PUSH_FIELDS = (
    PushField(name="num_heads", type="uint"),
    PushField(name="max_parts", type="uint"),
    PushField(name="num_parts", type="uint"),
)


def combine_pass(c: Candidate, push: Mapping[str, int | float]) -> Pass:
    """The one pass of the family."""
    groups = int(c["combine_groups"]) if tuned(c.values) else 1
    shape: dict[str, object] = {
        "head_size": c.problem.head_size,
        "combine": c["strategy"],
        "threads": BASELINE_THREADS,
    }
    if tuned(c.values):
        shape |= {name: c[name] for name in ("combine_dims", "combine_groups", "combine_slices")}
    return Pass(
        name="combine",
        constants=shape,
        push=push,
        groups=(c.problem.query_heads * groups, c.problem.rows, 1),
        subgroup_size=None,
    )


def _passes(c: Candidate, scalars: Mapping[str, int | float]) -> tuple[Pass, ...]:
    push = push_values(PUSH_FIELDS, scalars)
    return (combine_pass(c, push),)


def _scalars(problem: GatedCombineProblem) -> dict[str, int | float]:
    return {
        "num_heads": problem.query_heads,
        "max_parts": problem.parts,
        "num_parts": problem.parts,
    }


def _bytes_moved(problem: GatedCombineProblem) -> int:
    """All partial results that have tokens, gates and outputs once."""
    parts = sum(max(1, problem.parts - row) for row in range(problem.rows))
    vectors = 2 * problem.rows * problem.query_heads * problem.head_size
    return 4 * (parts * problem.query_heads * (problem.head_size + 2) + vectors + problem.rows)


def _dispatch(c: Candidate) -> DispatchRule:
    groups = int(c["combine_groups"]) if tuned(c.values) else 1
    return DispatchRule(
        policy="none",
        groups={"combine": (f"query_heads * {groups}", "rows", "1")},
        push={"max_parts": "parts", "num_parts": "parts"},
        text=f"workgroups for each query head of each row: {groups}",
    )


GATED_COMBINE = Family(
    name="gated_combine",
    summary="joins split-T partial results and applies the sigmoid gate",
    template="gated_combine.comp.jinja",
    problem_type=GatedCombineProblem,
    parameters=PARAMETERS,
    constraints=CONSTRAINTS,
    bindings=BINDINGS,
    push_fields=PUSH_FIELDS,
    baseline={"strategy": "baseline"},
    starts=tuple(
        {
            "strategy": "sliced",
            "combine_dims": dims,
            "combine_groups": groups,
            "combine_slices": slices,
        }
        for dims, groups, slices in ((2, 4, 32), (4, 8, 32), (2, 4, 8), (2, 2, 8), (4, 1, 8))
    ),
    portable=tuple(
        {
            "strategy": "sliced",
            "combine_dims": 2,
            "combine_groups": groups,
            "combine_slices": slices,
        }
        for groups, slices in ((4, 4), (4, 2), (2, 2), (1, 1), (1, 4))
    ),
    arithmetic=lambda _values: "f32",
    passes=_passes,
    operands=make_combine_operands,
    reference=combine_reference,
    sampled_reference=sampled_combine_reference,
    validation_cases=combine_cases,
    bytes_moved=_bytes_moved,
    operand_bytes=combine_bytes,
    scalars=_scalars,
    dispatch=_dispatch,
)
