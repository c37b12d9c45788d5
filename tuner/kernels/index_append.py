"""Append to the cache of raw index keys: float32 rows rounded to float16, to nearest even."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tuner.kernels import indexer, limits
from tuner.kernels.base import (
    Candidate,
    Constraint,
    DispatchRule,
    Family,
    Operands,
    Parameter,
    Pass,
    ValidationCase,
)
from tuner.kernels.indexer_operands import (
    projection,
    projection_bytes,
    raw_key_bytes,
    raw_keys,
    steps,
)
from tuner.oracle.indexer_references import append_reference, sampled_append_reference
from tuner.problems import IndexerStepProblem

BASELINE_THREADS = 256

PARAMETERS = (
    Parameter(
        name="strategy",
        values=("baseline", "packed"),
        help="baseline: a flat launch of workgroups of 256, a thread for each word of the cache; "
        "packed: threads that write several",
    ),
    Parameter(
        name="threads",
        values=(32, 64, 128, 256, 512),
        help="threads per workgroup",
        used=lambda values: values["strategy"] == "packed",
    ),
    Parameter(
        name="words",
        values=(1, 2, 4),
        help="words of two elements that one thread writes (4: as one 16-byte store)",
        used=lambda values: values["strategy"] == "packed",
    ),
)


def _words(c: Candidate) -> int:
    return 1 if c["strategy"] == "baseline" else int(c["words"])


def _threads(c: Candidate) -> int:
    return BASELINE_THREADS if c["strategy"] == "baseline" else int(c["threads"])


def _groups(c: Candidate) -> int:
    units = c.problem.rows * c.problem.index_dim // (2 * _words(c))
    return int(-(-units // _threads(c)))


def _check_words(c: Candidate) -> str | None:
    if c.problem.index_dim % (2 * _words(c)):
        return f"{_words(c)} words of two elements do not divide the {c.problem.index_dim} of a key"
    return None


CONSTRAINTS = (
    indexer.KEYS_RULE,
    Constraint(
        needs=("strategy", "threads"), check=lambda c: limits.threads_reason(c.device, _threads(c))
    ),
    Constraint(needs=("strategy", "words"), check=_check_words),
    Constraint(
        needs=("strategy", "threads", "words"),
        check=lambda c: limits.groups_reason(c.device, (_groups(c),)),
    ),
)


def append_pass(c: Candidate, scalars: Mapping[str, int | float]) -> Pass:
    """The one launch: a thread for each few words of the new rows."""
    return Pass(
        name="append",
        constants=indexer.constants(c.problem) | {"threads": _threads(c), "words": _words(c)},
        push=indexer.push(scalars),
        groups=(_groups(c), 1, 1),
        subgroup_size=None,
    )


def _dispatch(c: Candidate) -> DispatchRule:
    elements = 2 * _words(c) * _threads(c)
    groups = (f"ceil_div(rows * index_dim, {elements})", "1", "1")
    return indexer.rule({"append": groups}, f"a workgroup for {elements} elements of the new keys")


def make_operands(problem: IndexerStepProblem, inputs: str, seed: int) -> Operands:
    """Projections, and the cache with keys before `base_pos` and poison behind.

    `inputs`: see `tuner.kernels.indexer_operands.projection`.
    """
    rng = np.random.default_rng([seed, 11])
    keys = raw_keys(problem, filled=problem.base_pos, rng=rng)
    return Operands(
        inputs={"index_projection": projection(problem, inputs, rng), "index_keys": keys},
        outputs={"index_keys": (keys.shape, np.dtype(np.uint16))},
        scalars=indexer.scalars(problem),
    )


def validation_cases(problem: IndexerStepProblem) -> tuple[ValidationCase, ...]:
    """First rows of an empty cache, rows in the middle and at its very end, many rows."""
    return steps(
        problem,
        {
            "first": ("random", 1, 0, 5),
            "middle": ("magnitudes", 3, 2 * problem.ratio + 1, 7),
            "last": ("magnitudes", 4, 21, 0),
            "many": ("random", 19, 10, 3),
            "zeros": ("zeros", 2, 5, 2),
        },
    )


def _bytes_moved(problem: IndexerStepProblem) -> int:
    """One key of each row, read as float32 and written as float16."""
    return problem.rows * problem.index_dim * 6


def _operand_bytes(problem: IndexerStepProblem) -> int:
    """Projections, and the cache going in and coming out."""
    return projection_bytes(problem) + 2 * raw_key_bytes(problem)


INDEX_APPEND = Family(
    name="index_append",
    summary="indexer: raw keys of new rows into the float16 cache",
    template="index_append.comp.jinja",
    problem_type=IndexerStepProblem,
    parameters=PARAMETERS,
    constraints=CONSTRAINTS,
    bindings=tuple(
        indexer.BINDINGS[name]
        for name in ("projection", "projection_quads", "index_key_words", "index_key_quads")
    ),
    push_fields=indexer.PUSH_FIELDS,
    baseline={"strategy": "baseline"},
    starts=(
        {"strategy": "packed", "threads": 64, "words": 4},
        {"strategy": "packed", "threads": 64, "words": 2},
    ),
    arithmetic=lambda _values: "f32",
    passes=lambda c, scalars: (append_pass(c, scalars),),
    operands=make_operands,
    reference=append_reference,
    sampled_reference=sampled_append_reference,
    validation_cases=validation_cases,
    bytes_moved=_bytes_moved,
    operand_bytes=_operand_bytes,
    dispatch=_dispatch,
    scalars=indexer.scalars,
)
