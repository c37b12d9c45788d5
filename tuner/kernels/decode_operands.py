"""Operands of paged decode over the int8 cache: for timing, and to validate every code path.

Buffers (S sequences, H query heads, Hkv KV heads, D head size, BS tokens a block, NB blocks of the
pool, MB table columns):

* `query` float32 [S, q_stride]: H*D elements a row, then padding;
* `key_cache`, `value_cache` uint32 [NB, Hkv, BS, D/4+1], or [NB, Hkv, BS * (D/4+1)] where the
  layout is "planar": see `tuner.quant`;
* `block_table` uint32 [S, MB]: unused entries, and those before a window, are `NO_BLOCK`;
* `context_lens` uint32 [S];
* `sinks`, `slopes` float32 [H]: see `tuner.kernels.decode_switches`;
* output `out` float32 [S, H, D].
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tuner.kernels.base import Operands, ValidationCase
from tuner.kernels.decode_scalars import shared_scalars
from tuner.kernels.decode_switches import switch_inputs, switch_scalars, with_validation_window
from tuner.kernels.decode_values import (
    NO_BLOCK,
    Floats,
    Words,
    blocks_used,
    first_blocks,
    float_pool,
)
from tuner.problems import PagedDecodeProblem
from tuner.quant import pack_cache, planar, quantise_token_vectors, words_per_token

POISON_CODES = 0x80808080
"""Four codes of -128, which no writer makes."""
POISON_SCALE = 0x7FC00000
"""Bits of a float32 NaN."""
QUERY_PADDING = 12
WIDE_CACHE = 4096
"""Numbers a token has in each cache beyond which long validation contexts are halved."""
SLAB_BYTES = 64 * 2**20
"""Timed caches repeat a random slab of this size: drawing all of their numbers takes minutes."""
WIDE_GROUP = 32
"""Query heads per KV head beyond which contexts are shorter too: lavapipe before Mesa 23 ends a
kernel's loops, all together, at 65,535 rounds, and a large group goes round most."""


def make_operands(
    problem: PagedDecodeProblem, inputs: str, seed: int, *, layout: str = "token_major"
) -> Operands:
    """Operands of one launch; the same arguments give the same arrays.

    `inputs` is "timing" (a pool exactly as large as needed, its blocks permuted, uniform codes) or
    one of `VALIDATION_INPUTS`, where all that must not be read is poison: unused blocks and the
    tails of partial blocks hold codes of -128 with NaN scales, unused table entries `NO_BLOCK`, and
    query rows end in NaN.

    Raises:
        UnknownNameError: `inputs` is no such kind.
        UsageError: the head size is not a multiple of 4.
    """
    words_per_token(problem.head_size)
    if inputs == "timing":
        return _timing_operands(problem, np.random.default_rng([seed, 0]), layout)
    pool = float_pool(problem, inputs, seed)
    return _operands(
        problem,
        query=padded_query(pool.query, inputs),
        key_cache=_laid_out(_poisoned_cache(pool.keys, pool.live), layout),
        value_cache=_laid_out(_poisoned_cache(pool.values, pool.live), layout),
        block_table=pool.block_table,
        rng=np.random.default_rng([seed, 99]),
    )


def validation_cases(problem: PagedDecodeProblem) -> tuple[ValidationCase, ...]:
    """Small problems of the given geometry (heads, head size, block size) for every code path.

    They keep the switches, but for a window that is cut so that contexts reach beyond it. Lengths
    include 0, 1, whole blocks, one token more, partial last blocks, and contexts of about 1,000
    tokens, which almost every split policy cuts and every tile loop goes round on.
    """
    problem = with_validation_window(problem)
    block = problem.block_size
    part = -(-block // 2)
    wide = problem.kv_heads * problem.head_size > WIDE_CACHE or problem.group > WIDE_GROUP
    goal = 512 if wide else 1024
    long = goal // block * block + part
    middle = 3 * goal // 4 // block * block + part
    lengths: dict[str, tuple[str, tuple[int, ...]]] = {
        "ragged": ("random", (block + 1, 0, long, 1, block, 5 * block + part)),
        "single": ("random", (middle,)),
        "large_logits": ("large_logits", (4 * block + part, 2 * block, 96)),
        "equal_logits": ("equal_logits", (2 * block - 1, middle, 1, 2 * block + 1)),
        "dominating": ("dominating", (3 * block + 1, 2 * block + part, block, 300, 1)),
        "zeros": ("zeros", (block + part, 2 * block, 3 * block + 1, 0)),
    }
    return tuple(
        ValidationCase(name=name, problem=_resized(problem, tokens), inputs=inputs, seed=seed)
        for seed, (name, (inputs, tokens)) in enumerate(lengths.items())
    )


def _resized(problem: PagedDecodeProblem, tokens: tuple[int, ...]) -> PagedDecodeProblem:
    return msgspec.structs.replace(
        problem,
        sequences=len(tokens),
        context=max(tokens),
        lengths="list:" + ",".join(map(str, tokens)),
    )


def _operands(
    problem: PagedDecodeProblem,
    *,
    query: Floats,
    key_cache: Words,
    value_cache: Words,
    block_table: Words,
    rng: np.random.Generator,
) -> Operands:
    lengths = problem.context_lens()
    out_shape = (problem.sequences, problem.query_heads, problem.head_size)
    return Operands(
        inputs={
            "query": query,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "block_table": block_table,
            "context_lens": lengths,
            **switch_inputs(problem, rng),
        },
        outputs={"out": (out_shape, np.dtype(np.float32))},
        scalars=timing_scalars(problem)
        | {"q_stride": query.shape[1], "max_blocks": block_table.shape[1]},
    )


def padded_query(query: Floats, inputs: str) -> Floats:
    """Queries [S, H, D] as rows of float32 [S, H * D + padding], NaN in all that is not theirs."""
    padding = 0 if inputs == "equal_logits" else QUERY_PADDING
    rows = query.reshape(len(query), -1)
    return np.pad(rows, ((0, 0), (0, padding)), constant_values=np.nan)


def timing_scalars(problem: PagedDecodeProblem) -> dict[str, int | float]:
    """The scalars of `make_operands(problem, "timing", …)`, without the arrays."""
    return shared_scalars(problem) | switch_scalars(problem) | {"num_sequences": problem.sequences}


def permuted_table(problem: PagedDecodeProblem, rng: np.random.Generator) -> tuple[Words, int]:
    """A table [S, MB] for timing, no block used twice, and the number of blocks (at least 1).

    A window leaves the blocks that it reaches into: others would be memory that nothing reads.
    """
    column = np.arange(problem.blocks_per_sequence)
    in_use = (column < blocks_used(problem)[:, None]) & (column >= first_blocks(problem)[:, None])
    blocks = timed_blocks(problem)
    table = np.full(in_use.shape, NO_BLOCK, np.uint32)
    table[in_use] = rng.permutation(blocks)[: int(in_use.sum())]
    return table, blocks


def timed_blocks(problem: PagedDecodeProblem) -> int:
    """Blocks of the pool for timing (at least 1)."""
    return max(1, int((blocks_used(problem) - first_blocks(problem)).sum()))


def timing_bytes(problem: PagedDecodeProblem) -> int:
    """Bytes of `make_operands(problem, "timing", …)`, without the arrays."""
    token = 2 * problem.kv_heads * (problem.head_size + 4)
    return timed_blocks(problem) * problem.block_size * token + step_bytes(problem)


def step_bytes(problem: PagedDecodeProblem) -> int:
    """Bytes beside the caches: queries and outputs, table and lengths, sinks and slopes."""
    vectors = problem.query_heads * (problem.head_size + problem.value_size)
    words = problem.sequences * (vectors + problem.blocks_per_sequence + 1)
    return 4 * (words + 2 * problem.query_heads)


def _laid_out(cache: Words, layout: str) -> Words:
    return planar(cache) if layout == "planar" else cache


def _timing_operands(
    problem: PagedDecodeProblem, rng: np.random.Generator, layout: str
) -> Operands:
    table, blocks = permuted_table(problem, rng)
    row = problem.query_heads * problem.head_size
    return _operands(
        problem,
        query=rng.standard_normal((problem.sequences, row), np.float32),
        key_cache=_random_cache(problem, blocks, rng, layout),
        value_cache=_random_cache(problem, blocks, rng, layout),
        block_table=table,
        rng=rng,
    )


def _random_cache(
    problem: PagedDecodeProblem, blocks: int, rng: np.random.Generator, layout: str
) -> Words:
    """A cache with uniform codes, at the speed of memory."""
    words = words_per_token(problem.head_size)
    block_shape = (problem.kv_heads, problem.block_size, words)
    slab_blocks = min(blocks, max(1, SLAB_BYTES // (4 * int(np.prod(block_shape)))))
    slab = rng.integers(0, 2**32, (slab_blocks, *block_shape), np.uint32)
    codes = slab.view(np.uint8)
    codes[codes == 0x80] = 0x7F
    scales = rng.uniform(0.015, 0.025, slab.shape[:-1]).astype(np.float32)
    slab[..., -1] = scales.view(np.uint32)
    slab = _laid_out(slab, layout)
    return np.resize(slab, (blocks, *slab.shape[1:]))


def _poisoned_cache(vectors: Floats, live: npt.NDArray[np.bool_]) -> Words:
    """Quantise the live tokens of a pool [NB, Hkv, BS, D] and poison the others."""
    cache = pack_cache(*quantise_token_vectors(vectors))
    dead = np.broadcast_to(~live[:, None, :], cache.shape[:-1])
    poison = np.full(cache.shape[-1], POISON_CODES, np.uint32)
    poison[-1] = POISON_SCALE
    cache[dead] = poison
    return cache
