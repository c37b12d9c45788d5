"""Operands of the indexer's steps: for timing, and to validate every code path.

What must not be read is poison (NaN in float32 and float16), what must not be written too.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tuner.errors import UnknownNameError
from tuner.kernels.base import ValidationCase
from tuner.problems import IndexerStepProblem

Array = npt.NDArray[Any]
Halves = npt.NDArray[np.uint16]
Singles = npt.NDArray[np.float32]

POISON_HALF = 0x7DED
"""Bits of a float16 NaN that no arithmetic makes, so that a NaN written over it shows."""
TIMING_INPUTS = "timing"
SLAB_ROWS = 2**16
"""Timed caches repeat so many random rows."""


def rope_table(positions: Array, rotary: int, theta: float) -> Singles:
    """Cosine and sine [len(positions), rotary/2, 2] of position * theta^(-2j/rotary).

    Angles in float64 from the float32 `theta`, as a host should make them; at least one entry.
    """
    exponents = -2 * np.arange(rotary // 2) / max(1, rotary)
    angles = positions[:, None] * np.float64(np.float32(theta)) ** exponents
    table = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    return table if table.size else np.full((1, 1, 2), np.nan, np.float32)


def row_table(problem: IndexerStepProblem) -> Singles:
    """`rope_rows`: the table of the new rows' positions."""
    return rope_table(problem.positions(), problem.rotary, problem.theta)


def block_table(problem: IndexerStepProblem) -> Singles:
    """`rope_blocks`: the table of the first positions of the blocks that may complete."""
    blocks = problem.first_block + np.arange(-(-problem.rows // problem.ratio))
    return rope_table(blocks * problem.ratio, problem.rotary, problem.theta)


def table_bytes(positions: int, rotary: int) -> int:
    """Bytes of a `rope_table` of so many positions."""
    return 4 * max(2, positions * rotary)


def norm_weight(problem: IndexerStepProblem, rng: np.random.Generator) -> Singles:
    """Norm weights [E], exact in bfloat16 as checkpoints have them, in the problem's convention."""
    weight = (1 + 0.2 * rng.standard_normal(problem.index_dim)).astype(np.float32)
    weight -= np.float32(problem.one_plus)
    return (weight.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def projection(problem: IndexerStepProblem, inputs: str, rng: np.random.Generator) -> Singles:
    """Projections [nb, (I+1)*E]. `inputs`:

    * "random", "timing": normal numbers;
    * "magnitudes": from 1e-9 to 1e5, so that float16 meets subnormals, zeros, its largest and
      infinity, and exact ties of its rounding;
    * "zeros": zeros, a vector of tiny numbers and a vector with one large one.

    Raises:
        UnknownNameError: `inputs` is no such kind.
    """
    shape = (problem.rows, (problem.index_heads + 1) * problem.index_dim)
    x = rng.standard_normal(shape).astype(np.float32)
    if inputs in ("random", TIMING_INPUTS):
        return x
    if inputs == "magnitudes":
        x *= 10.0 ** rng.uniform(-9, 5, shape)
        halves = rng.integers(0, 0x7C00, shape).astype(np.uint16)
        lower = halves.view(np.float16).astype(np.float64)
        upper = (halves + np.uint16(1)).view(np.float16).astype(np.float64)
        ties = rng.random(shape) < 0.5
        between = np.where(np.isinf(upper), 65520.0, (lower + upper) / 2)
        return np.where(ties, np.copysign(between, x), x).astype(np.float32)
    if inputs == "zeros":
        x[0] = 0
        x[-1] *= 1e-6
        x[-1, 0] = 100
        return x
    raise UnknownNameError("kind of inputs", inputs, ("random", "magnitudes", "zeros", "timing"))


def projection_bytes(problem: IndexerStepProblem) -> int:
    """Bytes of a `projection`."""
    return 4 * problem.rows * (problem.index_heads + 1) * problem.index_dim


def random_halves(rows: int, dims: int, rng: np.random.Generator) -> Halves:
    """Rows of normal float16 numbers, at the speed of memory where there are many."""
    slab = rng.standard_normal((min(rows, SLAB_ROWS), dims), np.float32).astype(np.float16)
    return np.resize(slab.view(np.uint16), (rows, dims))


def raw_keys(problem: IndexerStepProblem, *, filled: int, rng: np.random.Generator) -> Halves:
    """`index_keys` [max_t, E]: the first `filled` tokens have keys, the others are poison."""
    keys = np.full((problem.max_tokens, problem.index_dim), POISON_HALF, np.uint16)
    keys[:filled] = random_halves(filled, problem.index_dim, rng)
    return keys


def raw_key_bytes(problem: IndexerStepProblem) -> int:
    """Bytes of `raw_keys`."""
    return 2 * problem.max_tokens * problem.index_dim


def block_key_bytes(problem: IndexerStepProblem) -> int:
    """Bytes of `block_keys` [NBmax, E]."""
    return 2 * problem.max_blocks * problem.index_dim


def padded_block_keys(problem: IndexerStepProblem, *, filled: int, keys: Halves) -> Halves:
    """`block_keys` [NBmax, E]: the given keys of the first `filled` blocks, then poison."""
    padded = np.full((problem.max_blocks, problem.index_dim), POISON_HALF, np.uint16)
    padded[:filled] = keys[:filled]
    return padded


def resized(
    problem: IndexerStepProblem, *, rows: int, context: int, room: int = 0
) -> IndexerStepProblem:
    """The same geometry with other sizes; capacity is `room` tokens more than the context."""
    return msgspec.structs.replace(problem, rows=rows, context=context, capacity=context + room)


def steps(
    problem: IndexerStepProblem, named: dict[str, tuple[str, int, int, int]]
) -> tuple[ValidationCase, ...]:
    """Validation cases from names to (kind of inputs, rows, base position, room)."""
    return tuple(
        ValidationCase(
            name=name,
            problem=resized(problem, rows=rows, context=base + rows, room=room),
            inputs=inputs,
            seed=seed,
        )
        for seed, (name, (inputs, rows, base, room)) in enumerate(named.items())
    )
