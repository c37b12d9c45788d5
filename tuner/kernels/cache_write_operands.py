"""Operands of the cache writers (T tokens, Hkv KV heads, D head size, BS block size, NB blocks):

* `key` float32 [T, key_stride], `value` float32 [T, value_stride]: Hkv * D numbers a row, then
  padding;
* `slots` uint32 [T]: block * BS + offset, or `tuner.quant.PADDING_SLOT`;
* `key_cache`, `value_cache` (state): uint32 [NB, Hkv, BS, D/4+1] for int8; float32
  [NB, Hkv, D/x, BS, x] and [NB, Hkv, D, BS] for floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tuner.kernels.base import Operands, ValidationCase
from tuner.kernels.input_kinds import generator_of
from tuner.problems import CacheWriteProblem
from tuner.quant import PADDING_SLOT, words_per_token

Array = npt.NDArray[Any]
Shapes = tuple[tuple[int, ...], tuple[int, ...]]

SPARE_BLOCKS = 2
KEY_PADDING, VALUE_PADDING = 4, 12
"""Numbers behind a row in validation, different ones, so that the strides cannot be mixed up."""


def q8_operands(problem: CacheWriteProblem, inputs: str, seed: int) -> Operands:
    """Operands of the int8 writer; the same arguments give the same arrays.

    `inputs` is "timing" (all tokens are written, caches are zero) or a key of `VALIDATION_INPUTS`
    (some slots are padding, caches hold random bits, rows end in NaN).

    Raises:
        UnknownNameError: `inputs` is no such kind.
        UsageError: the head size is not a multiple of 4.
    """
    words = words_per_token(problem.head_size)

    def shapes(blocks: int) -> Shapes:
        shape = (blocks, problem.kv_heads, problem.block_size, words)
        return shape, shape

    return _operands(problem, inputs, seed, shapes, np.dtype(np.uint32))


def f32_operands(problem: CacheWriteProblem, inputs: str, seed: int) -> Operands:
    """Operands of the float writer, as `q8_operands` makes them; it has "bits" as well.

    Raises:
        UnknownNameError: `inputs` is no such kind.
    """

    def shapes(blocks: int) -> Shapes:
        heads, dims, size = problem.kv_heads, problem.head_size, problem.block_size
        keys = (blocks, heads, dims // problem.pack, size, problem.pack)
        return keys, (blocks, heads, dims, size)

    return _operands(problem, inputs, seed, shapes, np.dtype(np.float32))


def _operands(
    problem: CacheWriteProblem,
    inputs: str,
    seed: int,
    shapes: Callable[[int], Shapes],
    dtype: np.dtype[Any],
) -> Operands:
    rng = generator_of(inputs, ("timing", "bits", *VALIDATION_INPUTS), seed)
    slots, blocks = _slots(problem, rng)
    arrays: dict[str, Array] = {"slots": slots}
    for side, stride, shape in zip(("key", "value"), problem.strides, shapes(blocks), strict=True):
        rows = np.full((problem.tokens, stride), np.nan, np.float32)
        rows[:, : problem.row] = rng.standard_normal((problem.tokens, problem.row), np.float32)
        cache = np.zeros(shape, np.uint32)
        if inputs != "timing":
            cache[...] = rng.integers(0, 2**32, shape, np.uint32)
        if inputs == "bits":
            rows.view(np.uint32)[...] = rng.integers(0, 2**32, rows.shape, np.uint32)
        elif inputs != "timing":
            vectors = rows[:, : problem.row].reshape(-1, problem.head_size)
            VALIDATION_INPUTS[inputs](vectors)
            rows[:, : problem.row] = vectors.reshape(problem.tokens, -1)
        arrays |= {side: rows, f"{side}_cache": cache.view(dtype)}
    if inputs != "timing":
        slots[rng.random(problem.tokens) < 0.2] = PADDING_SLOT
    return Operands(
        inputs=arrays,
        outputs={
            name: (arrays[name].shape, arrays[name].dtype) for name in ("key_cache", "value_cache")
        },
        scalars=scalars_of(problem),
    )


def scalars_of(problem: CacheWriteProblem) -> dict[str, int | float]:
    """What the host passes beside the buffers."""
    key_stride, value_stride = problem.strides
    return {"tokens": problem.tokens, "key_stride": key_stride, "value_stride": value_stride}


def _slots(problem: CacheWriteProblem, rng: np.random.Generator) -> tuple[Array, int]:
    """Slots [T] of runs of tokens in permuted blocks, one run a sequence from a random offset on,
    and the number of blocks in the pool."""
    run = problem.tokens // problem.sequences
    offsets = rng.integers(0, problem.block_size, (problem.sequences, 1))
    positions = offsets + np.arange(run)
    held, blocks = _blocks_held(problem), _blocks(problem)
    table = rng.permutation(blocks)[: problem.sequences * held].reshape(problem.sequences, held)
    block = np.take_along_axis(table, positions // problem.block_size, axis=1)
    slots = block * problem.block_size + positions % problem.block_size
    return slots.reshape(-1).astype(np.uint32), blocks


def _blocks_held(problem: CacheWriteProblem) -> int:
    """Blocks of a sequence, whichever offset its run begins at."""
    run = problem.tokens // problem.sequences
    return -(-(problem.block_size - 1 + run) // problem.block_size)


def _blocks(problem: CacheWriteProblem) -> int:
    return problem.sequences * _blocks_held(problem) + SPARE_BLOCKS


def operand_bytes(problem: CacheWriteProblem, *, vector_bytes: int) -> int:
    """Bytes of the operands, going in and coming out, without making them; a cached vector of one
    side takes `vector_bytes`."""
    given = 4 * problem.tokens * (sum(problem.strides) + 1)
    cached = _blocks(problem) * problem.block_size * problem.kv_heads
    return given + 4 * cached * vector_bytes


def _random(_vectors: Array) -> None:
    """Normal values, as drawn."""


def _magnitudes(vectors: Array) -> None:
    """Peaks from 1e-6 to 1e6, some of them of one element far out."""
    vectors *= np.logspace(-6, 6, len(vectors), dtype=np.float32)[:, None]
    vectors[::3, -1] *= 60


def _ties(vectors: Array) -> None:
    """Halves that a peak of 127 times a power of two leaves exact: they go away from zero. The
    number before 0.5 does not."""
    dims = vectors.shape[1]
    vectors[...] = (np.arange(dims, dtype=np.float32) * 3 - np.float32(0.5)) % 125 - 62
    vectors[:, 1::4] = np.float32(0.49999997)
    vectors[:, 0] = -127
    vectors *= (2.0 ** (np.arange(len(vectors)) % 9 - 4)).astype(np.float32)[:, None]


def _zeros(vectors: Array) -> None:
    """Vectors of zeros between others."""
    vectors[::2] = 0


VALIDATION_INPUTS: dict[str, Callable[[Array], None]] = {
    "random": _random,
    "magnitudes": _magnitudes,
    "ties": _ties,
    "zeros": _zeros,
}
"""What makes vectors [n, D] of normal values those of a kind of inputs, in place."""


def validation_cases(
    problem: CacheWriteProblem, kinds: tuple[str, ...]
) -> tuple[ValidationCase, ...]:
    """Runs of tokens and single tokens, among them one token alone; padded rows in all but one."""
    sizes = ((39, 3), (1, 1), (26, 1), (15, 15))
    return tuple(
        ValidationCase(
            name=inputs,
            problem=msgspec.structs.replace(
                problem,
                tokens=tokens,
                sequences=sequences,
                key_stride=problem.strides[0] + (KEY_PADDING if seed != 1 else 0),
                value_stride=problem.strides[1] + (VALUE_PADDING if seed != 1 else 0),
            ),
            inputs=inputs,
            seed=seed,
        )
        for seed, (inputs, (tokens, sequences)) in enumerate(zip(kinds, sizes, strict=True))
    )
