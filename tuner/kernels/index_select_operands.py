"""Operands of the selection of blocks: scores of every kind that may mislead it."""

from __future__ import annotations

import numpy as np

from tuner.kernels import indexer
from tuner.kernels.base import Operands, ValidationCase
from tuner.kernels.indexer_operands import Singles, steps
from tuner.problems import IndexerStepProblem

MAX_HELD_KEYS = 32_768
"""Keys in the registers of a workgroup: half of what a multiprocessor has."""
LONG_BLOCKS = MAX_HELD_KEYS + 1500
"""More blocks than any variant's workgroup holds, lists or masks at a time."""


def scores(problem: IndexerStepProblem, inputs: str, rng: np.random.Generator) -> Singles:
    """Scores [nb, NBmax], NaN from the row's complete blocks on. `inputs`:

    * "random", "timing": sums of normal numbers above 0, as heads make them;
    * "zeros": all 0, of either sign; "ties": five different scores, a third of them 0;
    * "last_bits": all differ in their last bits only; "falling": the first are the best;
    * "range": every magnitude from the smallest subnormal to the largest number.
    """
    shape = (problem.rows, problem.max_blocks)
    found = np.maximum(rng.standard_normal((4, *shape), np.float32), 0).sum(axis=0)
    if inputs == "zeros":
        found = np.copysign(np.float32(0), rng.standard_normal(shape)).astype(np.float32)
    elif inputs == "ties":
        few = np.array([0, -0.0, 0.25, 1.5, 1.75, 1e-3], np.float32)
        found = few[rng.integers(0, len(few), shape)]
    elif inputs == "last_bits":
        found = (rng.integers(0, 64, shape).astype(np.uint32) + 0x3F9D70A4).view(np.float32)
    elif inputs == "falling":
        found = -np.sort(-found, axis=-1)
    elif inputs == "range":
        found = rng.integers(0, 0x7F7FFFFF, shape, endpoint=True).astype(np.uint32).view(np.float32)
        found[:, ::7] = 0
    behind = np.arange(shape[1]) >= problem.complete_blocks()[:, None]
    return np.where(behind, np.float32(np.nan), found)


def make_operands(problem: IndexerStepProblem, inputs: str, seed: int) -> Operands:
    """Scores of every row; `inputs`: see `scores`."""
    rng = np.random.default_rng([seed, 15])
    rows, words = problem.rows, np.dtype(np.uint32)
    return Operands(
        inputs={"scores": scores(problem, inputs, rng)},
        outputs={
            "visible": ((rows, problem.visible_stride), words),
            "visible_count": ((rows,), words),
            "block_mask": ((rows, problem.mask_words), words),
        },
        scalars=indexer.scalars(problem),
    )


def validation_cases(problem: IndexerStepProblem) -> tuple[ValidationCase, ...]:
    """Rows that select nothing, rows that cross the budget, all but one block, many more blocks
    than are kept, more than are held in registers, ties of every kind."""
    rows, ratio, kept = problem.rows, problem.ratio, problem.kept_blocks
    budget = problem.budget
    return steps(
        problem,
        {
            "dense": ("random", rows, max(0, budget - rows), 40),
            "crossing": ("random", ratio + 3, budget + ratio - 3 if ratio > 2 else budget, 0),
            "all_but_one": ("ties", rows, budget + ratio - 1, 100 * ratio),
            "many": ("random", rows, budget + 700 * ratio + 1, 0),
            "more": ("range", 1, budget + 2500 * ratio, 33 * ratio),
            "ties": ("ties", rows, budget + 130 * ratio + ratio - 1, 5),
            "zeros": ("zeros", 2, budget + 40 * ratio, 64 * ratio),
            "unlisted": ("zeros", 1, budget + LONG_BLOCKS * ratio, 0),
            "long": ("random", 1, budget + LONG_BLOCKS * ratio, ratio),
            "last_bits": ("last_bits", rows, budget + kept // 2 * ratio, 0),
            "falling": ("falling", 1, budget + 90 * ratio, 0),
        },
    )


def operand_bytes(problem: IndexerStepProblem) -> int:
    """Bytes of the operands, without making them: scores, lists, counts and masks of all rows."""
    row = problem.max_blocks + problem.visible_stride + 1 + problem.mask_words
    return 4 * problem.rows * row
