"""Keys of the blocks that a step completes: raw keys pooled, then normalised, then turned."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tuner.kernels import indexer, limits, subgroups, vector_norm
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
    POISON_HALF,
    block_key_bytes,
    block_table,
    norm_weight,
    raw_key_bytes,
    raw_keys,
    steps,
    table_bytes,
)
from tuner.oracle.indexer_references import blocks_reference, sampled_blocks_reference
from tuner.problems import IndexerStepProblem

PARAMETERS = (
    *vector_norm.PARAMETERS,
    Parameter(
        name="widening",
        values=("hardware", "integer"),
        help="how float16 becomes float32: by the unpack instruction, which a device may let flush "
        "subnormals, or by integers",
        used=subgroups.tuned,
    ),
)


def _blocks(problem: IndexerStepProblem) -> int:
    """Blocks that so many rows may complete, wherever they begin."""
    return -(-problem.rows // problem.ratio)


def _check_groups(c: Candidate) -> str | None:
    return limits.groups_reason(c.device, (vector_norm.workgroups(c, _blocks(c.problem)),))


CONSTRAINTS = (
    indexer.KEYS_RULE,
    *vector_norm.CONSTRAINTS,
    Constraint(
        needs=("strategy", "subgroup_size", "subgroups", "lanes"),
        check=_check_groups,
    ),
)


def blocks_pass(c: Candidate, scalars: Mapping[str, int | float]) -> Pass:
    """The one launch, sized by the rows alone: what does not complete does nothing."""
    return vector_norm.vector_pass(c, "blocks", _blocks(c.problem), scalars)


def _dispatch(c: Candidate) -> DispatchRule:
    return vector_norm.dispatch(c, "blocks", "ceil_div(rows, ratio)")


def make_operands(problem: IndexerStepProblem, inputs: str, seed: int) -> Operands:
    """Raw keys of all tokens, block keys that are anything before the step, poison behind.

    `inputs`: "random", "timing"; "subnormal": raw keys so small that float16 has no exponent for
    them; "zeros": all zero but in one dimension of the last token.
    """
    rng = np.random.default_rng([seed, 12])
    keys = raw_keys(problem, filled=problem.context, rng=rng)
    if inputs == "subnormal":
        keys[: problem.context] &= 0x83FF
    if inputs == "zeros":
        keys[: problem.context] = 0
        keys[problem.context - 1, 0] = 0x3C00
    block_keys = rng.integers(0, 2**16, (problem.max_blocks, problem.index_dim)).astype(np.uint16)
    block_keys[problem.first_block :] = POISON_HALF
    return Operands(
        inputs={
            "index_keys": keys,
            "index_key_weight": norm_weight(problem, rng),
            "rope_blocks": block_table(problem),
            "block_keys": block_keys,
        },
        outputs={"block_keys": (block_keys.shape, np.dtype(np.uint16))},
        scalars=indexer.scalars(problem),
    )


def validation_cases(problem: IndexerStepProblem) -> tuple[ValidationCase, ...]:
    """No block, one begun before the step, whole ones, one at the very end, many, far away."""
    ratio = problem.ratio
    return steps(
        problem,
        {
            "none": ("random", 1, 3 * ratio, 2) if ratio > 1 else ("random", 1, 3, 2),
            "begun": ("random", 2, 8 * ratio - 1, 5),
            "whole": ("random", 2 * ratio, 2 * ratio, 0),
            "many": ("random", 7 * ratio + 1, ratio // 2, 3),
            "far": ("random", ratio, 5000 // ratio * ratio + 1, 9),
            "subnormal": ("subnormal", ratio, ratio, 1),
            "zeros": ("zeros", ratio + 1, 5 * ratio - 1, 1),
        },
    )


def _bytes_moved(problem: IndexerStepProblem) -> int:
    """Raw keys of the blocks that complete, once, their keys, the weights and the angles."""
    dims = problem.index_dim
    blocks = problem.end_block - problem.first_block
    return blocks * (2 * dims * (problem.ratio + 1) + 4 * problem.rotary) + 4 * dims


def _operand_bytes(problem: IndexerStepProblem) -> int:
    """Raw keys, block keys going in and coming out, weights, angles."""
    keys = raw_key_bytes(problem) + 2 * block_key_bytes(problem)
    return keys + 4 * problem.index_dim + table_bytes(_blocks(problem), problem.rotary)


INDEX_BLOCKS = Family(
    name="index_blocks",
    summary="indexer: keys of the blocks that a step completes (pool, norm, rope)",
    template="index_blocks.comp.jinja",
    problem_type=IndexerStepProblem,
    parameters=PARAMETERS,
    constraints=CONSTRAINTS,
    bindings=(
        indexer.as_input("index_key_words"),
        indexer.BINDINGS["index_key_weight"],
        indexer.BINDINGS["rope_blocks"],
        indexer.BINDINGS["block_key_words"],
    ),
    push_fields=indexer.PUSH_FIELDS,
    baseline={"strategy": "baseline"},
    starts=tuple(
        {"strategy": "lanes", "subgroup_size": size, "subgroups": 1, "lanes": size}
        for size in (32, 64, 16, 8)
    ),
    portable=vector_norm.PORTABLE,
    arithmetic=lambda _values: "f32",
    passes=lambda c, scalars: (blocks_pass(c, scalars),),
    operands=make_operands,
    reference=blocks_reference,
    sampled_reference=sampled_blocks_reference,
    validation_cases=validation_cases,
    bytes_moved=_bytes_moved,
    operand_bytes=_operand_bytes,
    dispatch=_dispatch,
    scalars=indexer.scalars,
)
