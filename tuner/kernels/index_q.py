"""Queries of the indexer: every head of every row normalised, then turned by the row's position."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tuner.kernels import indexer, limits, vector_norm
from tuner.kernels.base import (
    Candidate,
    Constraint,
    DispatchRule,
    Family,
    Operands,
    Pass,
    ValidationCase,
)
from tuner.kernels.indexer_operands import (
    norm_weight,
    projection,
    projection_bytes,
    row_table,
    steps,
    table_bytes,
)
from tuner.oracle.indexer_references import query_reference, sampled_query_reference
from tuner.problems import IndexerStepProblem

PARAMETERS = vector_norm.PARAMETERS


def _heads(problem: IndexerStepProblem) -> int:
    return problem.rows * problem.index_heads


def _check_groups(c: Candidate) -> str | None:
    return limits.groups_reason(c.device, (vector_norm.workgroups(c, _heads(c.problem)),))


CONSTRAINTS = (
    *vector_norm.CONSTRAINTS,
    Constraint(needs=("strategy", "subgroup_size", "subgroups", "lanes"), check=_check_groups),
)


def query_pass(c: Candidate, scalars: Mapping[str, int | float]) -> Pass:
    """The one launch over all heads of all rows."""
    return vector_norm.vector_pass(c, "query", _heads(c.problem), scalars)


def _dispatch(c: Candidate) -> DispatchRule:
    return vector_norm.dispatch(c, "query", "rows * index_heads")


def make_operands(problem: IndexerStepProblem, inputs: str, seed: int) -> Operands:
    """Projections; `inputs`: see `tuner.kernels.indexer_operands.projection`."""
    rng = np.random.default_rng([seed, 13])
    shape = (problem.rows, problem.index_heads, problem.index_dim)
    return Operands(
        inputs={
            "index_projection": projection(problem, inputs, rng),
            "index_query_weight": norm_weight(problem, rng),
            "rope_rows": row_table(problem),
        },
        outputs={"index_query": (shape, np.dtype(np.float32))},
        scalars=indexer.scalars(problem),
    )


def validation_cases(problem: IndexerStepProblem) -> tuple[ValidationCase, ...]:
    """One row and many, near and far, magnitudes far apart, zeros."""
    return steps(
        problem,
        {
            "first": ("random", 1, 0, 3),
            "some": ("random", 4, 2050, 0),
            "many": ("random", 21, 77, 0),
            "far": ("random", 3, 262_141, 0),
            "magnitudes": ("magnitudes", 2, 100, 0),
            "zeros": ("zeros", 2, 9, 0),
        },
    )


def _bytes_moved(problem: IndexerStepProblem) -> int:
    """Projections of the queries and the queries, weights and angles, each once."""
    vectors = 8 * _heads(problem) * problem.index_dim
    return vectors + 4 * problem.index_dim + 4 * problem.rows * problem.rotary


def _operand_bytes(problem: IndexerStepProblem) -> int:
    """Projections, queries, weights, angles."""
    vectors = projection_bytes(problem) + 4 * (_heads(problem) + 1) * problem.index_dim
    return vectors + table_bytes(problem.rows, problem.rotary)


INDEX_Q = Family(
    name="index_q",
    summary="indexer: queries of new rows (norm, rope)",
    template="index_q.comp.jinja",
    problem_type=IndexerStepProblem,
    parameters=PARAMETERS,
    constraints=CONSTRAINTS,
    bindings=tuple(
        indexer.BINDINGS[name]
        for name in ("projection", "index_query_weight", "rope_rows", "index_query")
    ),
    push_fields=indexer.PUSH_FIELDS,
    baseline={"strategy": "baseline"},
    starts=tuple(
        {"strategy": "lanes", "subgroup_size": size, "subgroups": 1, "lanes": size}
        for size in (32, 64, 16, 8)
    ),
    portable=vector_norm.PORTABLE,
    arithmetic=lambda _values: "f32",
    passes=lambda c, scalars: (query_pass(c, scalars),),
    operands=make_operands,
    reference=query_reference,
    sampled_reference=sampled_query_reference,
    validation_cases=validation_cases,
    bytes_moved=_bytes_moved,
    operand_bytes=_operand_bytes,
    dispatch=_dispatch,
    scalars=indexer.scalars,
)
