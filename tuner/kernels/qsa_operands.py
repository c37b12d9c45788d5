"""Operands of a whole decode step: projections, weights, and the caches as earlier steps left them.

Buffers are those of the families that the steps are taken from (`tuner.kernels.indexer`,
`norm_rope`, `kv_append`, `q8_operands`); `row_tokens` holds what the host counts. Of a dense step
the indexer's buffers are there, but have one element each.
"""

from __future__ import annotations

import msgspec
import numpy as np

from tuner.errors import UnknownNameError
from tuner.kernels import indexer
from tuner.kernels.base import Array, Operands, ValidationCase
from tuner.kernels.indexer_operands import (
    POISON_HALF,
    block_key_bytes,
    block_table,
    norm_weight,
    projection_bytes,
    random_halves,
    raw_key_bytes,
    rope_table,
    table_bytes,
)
from tuner.kernels.q8_operands import base2_scale, random_side
from tuner.planar import PlanarLayout
from tuner.problems import QsaStepProblem

KINDS = ("timing", "random", "ties", "rewind")
KEPT_KEYS = 5
"""Different block keys where ties are wanted."""
SPARE_TOKENS = 9


def scalars_of(problem: QsaStepProblem) -> dict[str, int | float]:
    """What the host passes to all steps together, and what the oracle needs to know."""
    layout = PlanarLayout(problem.max_tokens, problem.kv_heads * problem.head_size)
    return {
        **indexer.scalars(problem.indexer),
        "budget": problem.budget,
        "epsilon": problem.eps,
        "base_position": problem.base_pos,
        "first_row": problem.base_pos,
        "capacity": problem.max_tokens,
        "scale_offset": layout.scale_offset,
        "scale_word": layout.scale_offset // 4,
        "num_heads": problem.query_heads,
        "num_kv_heads": problem.kv_heads,
        "visible_stride": problem.indexer.visible_stride,
        "base2_scale": base2_scale(problem.head_size),
    }


def make_operands(problem: QsaStepProblem, inputs: str, seed: int) -> Operands:
    """Operands of one launch; the same arguments give the same arrays.

    `inputs`: "timing"; "random": all that lies behind the tokens before the step is poison; "ties":
    few different block keys, and queries that score many of them 0; "rewind": behind these tokens
    lie what rejected drafts left, which looks as good as anything.

    Raises:
        UnknownNameError: `inputs` is no such kind.
    """
    if inputs not in KINDS:
        raise UnknownNameError("kind of inputs", inputs, KINDS)
    rng = np.random.default_rng([seed, 21 + KINDS.index(inputs)])
    state = _caches(problem, inputs, rng) | _index_caches(problem, inputs, rng)
    index = problem.indexer
    rows, heads, size = problem.rows, problem.query_heads, problem.head_size
    vectors = {
        "query_gate": (rows, heads, 2 * size),
        "key": (rows, problem.kv_heads, size),
        "value": (rows, problem.kv_heads, size),
        "index_projection": (rows, (index.index_heads + 1) * index.index_dim),
    }
    drawn = {name: rng.standard_normal(shape, np.float32) for name, shape in vectors.items()}
    weights = rng.uniform(0.5, 1.5, (2, size)).astype(np.float32) - np.float32(problem.one_plus)
    given = {
        **drawn,
        "query_weight": weights[0],
        "key_weight": weights[1],
        "index_query_weight": norm_weight(index, rng),
        "index_key_weight": norm_weight(index, rng),
        "rope_rows": rope_table(index.positions(), problem.rotary, problem.theta),
        "rope_blocks": block_table(index),
        "row_tokens": problem.row_tokens(),
    }
    made: dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]] = {
        name: (state[name].shape, state[name].dtype) for name in state
    }
    for name in ("query_gate", "key"):
        made[name] = (drawn[name].shape, drawn[name].dtype)
    blocks = index.max_blocks if problem.budget else 1
    sizes = {
        "index_query": ((rows, index.index_heads, index.index_dim), np.float32),
        "scores": ((rows, blocks), np.float32),
        "visible": ((rows, index.visible_stride), np.uint32),
        "visible_count": ((rows,), np.uint32),
        "block_mask": ((rows, -(-blocks // 32)), np.uint32),
        "out": ((rows, heads, size), np.float32),
    }
    made |= {name: (shape, np.dtype(kind)) for name, (shape, kind) in sizes.items()}
    return Operands(inputs=given | state, outputs=made, scalars=scalars_of(problem))


def operand_bytes(problem: QsaStepProblem) -> int:
    """Bytes of `make_operands`, without the arrays; what steps write in place goes in and comes
    out."""
    index, rows = problem.indexer, problem.rows
    layout = PlanarLayout(problem.max_tokens, problem.kv_heads * problem.head_size)
    blocks = index.max_blocks if problem.budget else 1
    keys = raw_key_bytes(index) + block_key_bytes(index) if problem.budget else 2 * 4
    heads = 5 * problem.query_heads + 3 * problem.kv_heads
    indexed = index.index_heads * index.index_dim + blocks + index.visible_stride + -(-blocks // 32)
    words = rows * (heads * problem.head_size + indexed + 2)
    weights = 2 * (problem.head_size + index.index_dim)
    angles = table_bytes(rows, problem.rotary) + table_bytes(
        -(-rows // problem.ratio), problem.rotary
    )
    return 4 * layout.nbytes + 2 * keys + projection_bytes(index) + 4 * (words + weights) + angles


def validation_cases(problem: QsaStepProblem) -> tuple[ValidationCase, ...]:
    """Steps of the given geometry around all that changes their course: the first tokens, a block
    that completes, the budget crossed by some rows, a row that does not see itself, ties, drafts
    that were rejected; all with as many rows as the problem has, and one with four."""
    ratio, budget, rows = problem.ratio, problem.budget, problem.rows
    if budget == 0:
        sizes = {
            "start": ("random", rows, 0),
            "dense": ("random", rows, 131),
            "far": ("rewind", 4, 230),
        }
    else:
        edge = budget + ratio
        sizes = {
            "start": ("random", rows, 0),
            "dense": ("random", rows, budget // 2 // ratio * ratio + ratio - 1),
            "crossing": ("random", 4, edge - 2),
            "sees itself not": ("rewind", rows, edge + 3 * ratio - rows),
            "ties": ("ties", rows, 2 * edge + 1),
            "rewind": ("rewind", rows, edge + 9 * ratio - 1),
        }
    return tuple(
        ValidationCase(
            name=name,
            problem=msgspec.structs.replace(
                problem,
                rows=count,
                context=base + count,
                capacity=base + count + SPARE_TOKENS,
            ),
            inputs=inputs,
            seed=seed,
        )
        for seed, (name, (inputs, count, base)) in enumerate(sizes.items())
    )


def _caches(problem: QsaStepProblem, inputs: str, rng: np.random.Generator) -> dict[str, Array]:
    """Both sides of the planar cache: codes before the step, poison or old drafts behind."""
    layout = PlanarLayout(problem.max_tokens, problem.kv_heads * problem.head_size)
    found: dict[str, Array] = {}
    for name in ("key_cache", "value_cache"):
        words = random_side(layout, rng)
        codes, scales = layout.planes(words)
        if inputs in ("random", "ties"):
            codes[problem.base_pos :], scales[problem.base_pos :] = -128, np.nan
        found[name] = words
    return found


def _index_caches(
    problem: QsaStepProblem, inputs: str, rng: np.random.Generator
) -> dict[str, Array]:
    """Raw index keys and block keys: before the step, then poison or what old drafts left."""
    index = problem.indexer
    if problem.budget == 0:
        nothing = np.full((1, 2), POISON_HALF, np.uint16)
        return {"index_keys": nothing, "block_keys": nothing.copy()}
    keys = random_halves(problem.max_tokens, index.index_dim, rng)
    blocks = random_halves(index.max_blocks, index.index_dim, rng)
    if inputs == "ties":
        blocks = blocks[rng.integers(0, KEPT_KEYS, len(blocks))]
    if inputs in ("random", "ties"):
        keys[problem.base_pos :] = POISON_HALF
        blocks[index.first_block :] = POISON_HALF
    return {"index_keys": keys, "block_keys": blocks}
