"""Scores of index blocks: every row's queries against the keys of all blocks complete at the row.

The keys are nearly all that crosses memory: the tuned strategies read each once for several rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tuner.kernels import indexer, score_strategies, subgroups
from tuner.kernels.base import (
    ArithmeticClass,
    Candidate,
    DispatchRule,
    Family,
    Operands,
    Pass,
    ValidationCase,
    Values,
)
from tuner.kernels.indexer_operands import (
    Halves,
    Singles,
    block_key_bytes,
    padded_block_keys,
    random_halves,
    steps,
)
from tuner.oracle.indexer_references import sampled_score_reference, score_reference
from tuner.problems import IndexerStepProblem


def score_pass(c: Candidate, scalars: Mapping[str, int | float]) -> Pass:
    """The one launch: by capacity for the baseline, else by the last row's complete blocks."""
    constants = indexer.constants(c.problem)
    return Pass(
        name="score",
        constants=constants | {"score_scale": float(c.problem.index_dim**-0.5)},
        push=indexer.push(scalars),
        groups=score_strategies.groups(c),
        subgroup_size=subgroups.required_size(c),
    )


def arithmetic(values: Values) -> ArithmeticClass:
    """Two float16 terms on matrix units are held to what float32 is held to."""
    if values["strategy"] == "packed_f16":
        return "f16"
    if values["strategy"] == "matrix" and values["query_terms"] == 1:
        return "f16_matrix"
    return "f32"


def _dispatch(c: Candidate) -> DispatchRule:
    counts = score_strategies.counts(c)
    text = "workgroups for all complete blocks; more do no harm, such as for max_blocks"
    if c["strategy"] == "baseline":
        text = "workgroups for all blocks that the cache has room for, for each row"
    return indexer.rule({"score": counts}, text)


# ------------------------------------------------------------------ operands


def make_operands(problem: IndexerStepProblem, inputs: str, seed: int) -> Operands:
    """Queries, and block keys of all complete blocks; poison behind these.

    `inputs`: "random", "timing"; "zeros": two thirds of the blocks score exactly 0 in every row;
    "ties": few different keys; "subnormal": keys too small for float16's exponents.
    """
    rng = np.random.default_rng([seed, 14])
    shape = (problem.rows, problem.index_heads, problem.index_dim)
    query = rng.standard_normal(shape).astype(np.float32)
    if inputs == "zeros":
        query += np.float32(2)
    keys = block_keys(problem, inputs, rng)
    return Operands(
        inputs={
            "index_query": query,
            "block_keys": padded_block_keys(problem, filled=problem.end_block, keys=keys),
        },
        outputs={"scores": ((problem.rows, problem.max_blocks), np.dtype(np.float32))},
        scalars=indexer.scalars(problem),
    )


def block_keys(problem: IndexerStepProblem, inputs: str, rng: np.random.Generator) -> Halves:
    """Keys [NBmax, E] of the kinds that `make_operands` knows."""
    keys = random_halves(problem.max_blocks, problem.index_dim, rng)
    if inputs == "subnormal":
        keys &= 0x83FF
    elif inputs == "ties":
        keys = keys[rng.integers(0, 5, len(keys))]
    elif inputs == "zeros":
        values: Singles = keys.view(np.float16).astype(np.float32)
        values[rng.random(len(keys)) < 2 / 3] -= 8
        keys = values.astype(np.float16).view(np.uint16)
    return keys


def validation_cases(problem: IndexerStepProblem) -> tuple[ValidationCase, ...]:
    """No block yet, a few, many tiles; a block that completes in the midst of the rows, the cache
    just full; zeros, ties, subnormal keys."""
    rows, ratio = problem.rows, problem.ratio
    return steps(
        problem,
        {
            "none": ("random", rows, 0, 60 * ratio),
            "crossing": ("random", rows, 37 * ratio - 2, 3 * ratio),
            "long": ("random", rows, 4500 * ratio + 1, 130),
            "full": ("zeros", 2 * rows, 300 * ratio + ratio // 2, 0),
            "ties": ("ties", rows, 100 * ratio, 0),
            "subnormal": ("subnormal", rows, 64 * ratio, 5),
        },
    )


def _bytes_moved(problem: IndexerStepProblem) -> int:
    """Keys of the complete blocks once, queries, and the scores of every row."""
    keys = 2 * problem.end_block * problem.index_dim
    queries = 4 * problem.rows * problem.index_heads * problem.index_dim
    return keys + queries + 4 * int(problem.complete_blocks().sum())


def _operand_bytes(problem: IndexerStepProblem) -> int:
    """Queries, keys of all blocks there is room for, scores."""
    queries = problem.index_heads * problem.index_dim
    return block_key_bytes(problem) + 4 * problem.rows * (queries + problem.max_blocks)


MATRIX_STARTS: tuple[Values, ...] = tuple(
    {
        "strategy": "matrix",
        "subgroup_size": size,
        "subgroups": 4,
        "row_tile": rows,
        "unroll": unroll,
        "matrix_shape": shape,
        "key_in": key_in,
        "query_terms": 2,
    }
    for size, shape in ((32, "16x8x16"), (32, "16x16x16"), (64, "16x16x16"), (8, "8x8x8"))
    for rows, unroll, key_in in (
        (4, 2, "memory"),
        (4, 1, "shared"),
        (1, 2, "memory"),
        (1, 2, "shared"),
    )
)
LANE_STARTS: tuple[Values, ...] = tuple(
    {
        "strategy": strategy,
        "subgroup_size": size,
        "subgroups": 4,
        "row_tile": rows,
        "unroll": unroll,
        "lanes": lanes,
        "query_in": query_in,
    }
    for strategy in ("scalar_f32", "packed_f16")
    for size in (32, 64, 16, 8)
    for rows, unroll, lanes, query_in in (
        (4, 2, 8, "shared"),
        (2, 2, 8, "registers"),
        (1, 4, 8, "registers"),
        (1, 2, 4, "registers"),
    )
)
PORTABLE: tuple[Values, ...] = tuple(
    {
        "strategy": strategy,
        "subgroup_size": size,
        "subgroups": 2,
        "row_tile": rows,
        "unroll": 2,
        "lanes": lanes,
    }
    for strategy in ("scalar_f32", "packed_f16")
    for size in (32, 64, 16, 8)
    for rows, lanes in ((1, 8), (2, 8), (1, 4))
)

INDEX_SCORE = Family(
    name="index_score",
    summary="indexer: scores of all complete blocks for each row",
    template="index_score.comp.jinja",
    problem_type=IndexerStepProblem,
    parameters=score_strategies.PARAMETERS,
    constraints=score_strategies.CONSTRAINTS,
    bindings=(
        indexer.as_input("index_query"),
        indexer.BINDINGS["index_query_quads"],
        indexer.as_input("block_key_words"),
        indexer.BINDINGS["block_key_quads"],
        indexer.BINDINGS["scores"],
    ),
    push_fields=indexer.PUSH_FIELDS,
    baseline={"strategy": "baseline"},
    starts=(*MATRIX_STARTS, *LANE_STARTS),
    portable=PORTABLE,
    arithmetic=arithmetic,
    passes=lambda c, scalars: (score_pass(c, scalars),),
    operands=make_operands,
    reference=score_reference,
    sampled_reference=sampled_score_reference,
    validation_cases=validation_cases,
    bytes_moved=_bytes_moved,
    operand_bytes=_operand_bytes,
    dispatch=_dispatch,
    scalars=indexer.scalars,
)
