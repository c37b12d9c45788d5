"""Operands of paged decode over caches of floats: for timing, and to validate every code path.

Buffers (S sequences, H query heads, Hkv KV heads, D elements of a key, Dv of a value, BS tokens a
block, NB blocks of the pool, MB table columns, x elements of a packet):

* `query` float32 [S, q_stride]: H*D elements a row, then padding;
* `key_cache` [NB, Hkv, D/x, BS, x] and `value_cache` [NB, Hkv, Dv, BS], both of the cache's type;
* `block_table` uint32 [S, MB]: unused entries, and those before a window, are `NO_BLOCK`;
* `context_lens` uint32 [S];
* `sinks`, `slopes` float32 [H]: see `tuner.kernels.decode_switches`;
* output `out` float32 [S, H, Dv].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tuner.errors import UsageError
from tuner.kernels.base import Operands
from tuner.kernels.decode_operands import (
    SLAB_BYTES,
    padded_query,
    permuted_table,
    step_bytes,
    timed_blocks,
)
from tuner.kernels.decode_scalars import shared_scalars
from tuner.kernels.decode_switches import switch_inputs, switch_scalars
from tuner.kernels.decode_values import Floats, Words, float_pool
from tuner.problems import PagedDecodeProblem

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """A type of cached numbers; a packet is the 16 bytes of a key that lie side by side."""

    name: Literal["f32", "f16"]
    dtype: np.dtype[Any]

    @property
    def packet(self) -> int:
        """Elements of 16 bytes: x of the layout, and what one load of a lane brings."""
        return 16 // self.dtype.itemsize


F32 = CacheFormat(name="f32", dtype=np.dtype(np.float32))
F16 = CacheFormat(name="f16", dtype=np.dtype(np.float16))


def pack_keys(keys: Array, packet: int) -> Array:
    """Keys [NB, Hkv, BS, D] as [NB, Hkv, D/x, BS, x], x being the elements of a packet.

    Raises:
        UsageError: D is no multiple of x.
    """
    *outer, tokens, head_size = keys.shape
    if head_size % packet:
        raise UsageError(
            f"head size {head_size} does not fill whole packets of {packet} elements: "
            f"use a multiple of {packet}"
        )
    packed = keys.reshape(*outer, tokens, head_size // packet, packet)
    return np.ascontiguousarray(np.moveaxis(packed, -2, -3))


def make_operands(
    problem: PagedDecodeProblem, inputs: str, seed: int, cache: CacheFormat
) -> Operands:
    """Operands of one launch; the same arguments give the same arrays.

    `inputs` is "timing" (a pool exactly as large as needed, its blocks permuted) or one of
    `VALIDATION_INPUTS`, where all that must not be read is NaN.

    Raises:
        UnknownNameError: `inputs` is no such kind.
        UsageError: the head size is not a multiple of the packet.
    """
    if inputs == "timing":
        return _timing_operands(problem, np.random.default_rng([seed, 0]), cache)
    pool = float_pool(problem, inputs, seed)
    dead = np.broadcast_to(~pool.live[:, None, :], pool.keys.shape[:-1])
    for vectors in (pool.keys, pool.values):
        # A device may read what is no normal number of the cache's type as zero.
        vectors[np.abs(vectors) < np.finfo(cache.dtype).smallest_normal] = 0
        vectors[dead] = np.nan
    return _operands(
        problem,
        query=padded_query(pool.query, inputs),
        key_cache=pack_keys(pool.keys.astype(cache.dtype), cache.packet),
        value_cache=np.ascontiguousarray(pool.values.astype(cache.dtype).swapaxes(-1, -2)),
        block_table=pool.block_table,
        rng=np.random.default_rng([seed, 99]),
    )


def timing_scalars(problem: PagedDecodeProblem, cache: CacheFormat) -> dict[str, int | float]:
    """The scalars of `make_operands(problem, "timing", …)`, without the arrays."""
    return shared_scalars(problem) | switch_scalars(problem) | {"packet": cache.packet}


def timing_bytes(problem: PagedDecodeProblem, cache: CacheFormat) -> int:
    """Bytes of `make_operands(problem, "timing", …)`, without the arrays."""
    tokens = timed_blocks(problem) * problem.block_size
    vectors = problem.kv_heads * (problem.head_size + problem.value_size)
    return tokens * vectors * cache.dtype.itemsize + step_bytes(problem)


def _operands(
    problem: PagedDecodeProblem,
    *,
    query: Floats,
    key_cache: Array,
    value_cache: Array,
    block_table: Words,
    rng: np.random.Generator,
) -> Operands:
    packet = key_cache.shape[-1]
    cache = F32 if key_cache.dtype == F32.dtype else F16
    out_shape = (problem.sequences, problem.query_heads, problem.value_size)
    return Operands(
        inputs={
            "query": query,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "block_table": block_table,
            "context_lens": problem.context_lens(),
            **switch_inputs(problem, rng),
        },
        outputs={"out": (out_shape, np.dtype(np.float32))},
        scalars=timing_scalars(problem, cache)
        | {"q_stride": query.shape[1], "max_blocks": block_table.shape[1], "packet": packet},
    )


def _timing_operands(
    problem: PagedDecodeProblem, rng: np.random.Generator, cache: CacheFormat
) -> Operands:
    table, blocks = permuted_table(problem, rng)
    row = problem.query_heads * problem.head_size
    keys = (problem.head_size // cache.packet, problem.block_size, cache.packet)
    values = (problem.value_size, problem.block_size)
    return _operands(
        problem,
        query=rng.standard_normal((problem.sequences, row), np.float32),
        key_cache=_random_cache((blocks, problem.kv_heads, *keys), rng, cache),
        value_cache=_random_cache((blocks, problem.kv_heads, *values), rng, cache),
        block_table=table,
        rng=rng,
    )


def _random_cache(shape: tuple[int, ...], rng: np.random.Generator, cache: CacheFormat) -> Array:
    """Numbers between -1 and 1 in a slab that is repeated, at the speed of memory."""
    row_bytes = cache.dtype.itemsize * int(np.prod(shape[1:]))
    slab_blocks = min(shape[0], max(1, SLAB_BYTES // row_bytes))
    drawn = 2 * rng.random((slab_blocks, *shape[1:]), np.float32) - 1
    return np.resize(drawn.astype(cache.dtype), shape)
