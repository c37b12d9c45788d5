"""Operands of paged attention with log-sum-exp: for timing, and to validate every code path.

Buffers (B sequences, H query heads, Hkv KV heads, Sq query tokens, D head size, BS tokens a block,
NB blocks of the pool, MB table columns), of the problem's element type unless said:

* `query` [B, H, Sq, D];
* `keys`, `values` [NB, BS, Hkv, D];
* `block_table` uint32 [B, MB]: unused entries are `NO_BLOCK`;
* outputs `out` [B, H, Sq, D] and `lse` float32 [B, H, Sq].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from tuner.elements import SMALLEST_NORMAL, STORED, stored
from tuner.errors import UnknownNameError
from tuner.kernels.base import Array, Operands, ValidationCase
from tuner.kernels.decode_values import LARGEST_LOGIT, NO_BLOCK, SPARE_BLOCKS, softmax_scale
from tuner.problems import AttentionProblem

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

SLAB_BYTES = 64 * 2**20
"""Timed pools repeat a random slab of this size, which is larger than a last-level cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionValues:
    """Values before they are stored: query [B, H, Sq, D], pools [NB, BS, Hkv, D], block_table
    [B, MB], live [NB, BS] (tokens that some sequence has)."""

    query: Floats
    keys: Floats
    values: Floats
    block_table: Words
    live: npt.NDArray[np.bool_]


def make_operands(problem: AttentionProblem, inputs: str, seed: int) -> Operands:
    """Operands of one launch; the same arguments give the same arrays.

    `inputs` is "timing" (a pool exactly as large as needed, its blocks permuted) or one of
    `VALIDATION_INPUTS`, where sequences share blocks and all that must not be read is NaN: unused
    blocks and the tails of partial blocks; unused table entries are `NO_BLOCK`.

    Raises:
        UnknownNameError: `inputs` is no such kind.
    """
    if inputs == "timing":
        drawn = timing_inputs(problem, np.random.default_rng([seed, 0]))
    else:
        made = attention_values(problem, inputs, seed)
        drawn = stored_inputs(made, problem.element)
    row = (problem.batch, problem.query_heads, problem.query_tokens)
    return Operands(
        inputs=drawn,
        outputs={
            "out": ((*row, problem.head_size), STORED[problem.element]),
            "lse": (row, np.dtype(np.float32)),
        },
        scalars=scalars(problem) | {"max_blocks": drawn["block_table"].shape[1]},
    )


def scalars(problem: AttentionProblem) -> dict[str, int | float]:
    """What the host passes beside the buffers."""
    return {
        "batch": problem.batch,
        "query_heads": problem.query_heads,
        "kv_heads": problem.kv_heads,
        "query_tokens": problem.query_tokens,
        "context": problem.context,
        "max_blocks": problem.blocks_per_sequence,
        "q_offset": problem.q_offset,
        "softmax_scale": softmax_scale(problem.head_size),
    }


def q_offset_rule(problem: AttentionProblem) -> str:
    """The push constant `q_offset` as an expression, for dispatch rules."""
    ends = {"off": "context", "top_left": "0", "bottom_right": "context - query_tokens"}
    offset = problem.q_offset
    return ends.get(problem.causal, str(offset) if offset >= 0 else f"0 - {-offset}")


def validation_cases(problem: AttentionProblem) -> tuple[ValidationCase, ...]:
    """Small problems of the given geometry (heads, head size, block size) for every code path.

    Which keys a row sees is a matter of lengths and offset, not of the kernel, so every mask is
    tried for every problem: rows that see nothing, one key, all; tiles of rows of which some see
    nothing; contexts of none and one key, of whole and partial blocks, and of many tiles.
    """
    block = problem.block_size
    part = -(-block // 2)
    long = 192 // block * block + part
    sizes: dict[str, tuple[str, int, int, int, str]] = {
        "decode": ("random", 3, 1, long, "off"),
        "prefill": ("random", 1, 45, 48 + part, "bottom_right"),
        "rows see nothing": ("random", 2, 21, block + 1, "bottom_right"),
        "top left": ("shared", 2, 19, 2 * block + part, "top_left"),
        "no keys": ("random", 2, 3, 0, "off"),
        "one key": ("large_logits", 2, 5, 1, "off"),
        "offset": ("large_logits", 2, 7, 5 * block, str(2 * block - 3)),
        "before all keys": ("random", 1, 40, 3 * block, "-33"),
        "equal logits": ("equal_logits", 1, 6, 3 * block + 1, "off"),
        "zeros": ("zeros", 3, 4, 2 * block + part, "off"),
    }
    return tuple(
        ValidationCase(
            name=name,
            problem=msgspec.structs.replace(
                problem, batch=batch, query_tokens=rows, context=keys, causal=causal
            ),
            inputs=inputs,
            seed=seed,
        )
        for seed, (name, (inputs, batch, rows, keys, causal)) in enumerate(sizes.items())
    )


def attention_values(problem: AttentionProblem, inputs: str, seed: int) -> AttentionValues:
    """The values that `make_operands` stores for a kind of validation inputs.

    Raises:
        UnknownNameError: `inputs` is none of `VALIDATION_INPUTS`.
    """
    if inputs not in VALIDATION_INPUTS:
        raise UnknownNameError("kind of inputs", inputs, ("timing", *VALIDATION_INPUTS))
    rng = np.random.default_rng([seed, 1 + list(VALIDATION_INPUTS).index(inputs)])
    table, blocks = _shared_table(problem, rng, everything=inputs == "shared")
    pool = (blocks, problem.block_size, problem.kv_heads, problem.head_size)
    rows = (problem.batch, problem.query_heads, problem.query_tokens, problem.head_size)
    made = AttentionValues(
        query=rng.standard_normal(rows, np.float32),
        keys=rng.standard_normal(pool, np.float32),
        values=rng.standard_normal(pool, np.float32),
        block_table=table,
        live=_live_tokens(problem, table, blocks),
    )
    VALIDATION_INPUTS[inputs](problem, made, rng)
    return made


def stored_inputs(made: AttentionValues, element: str) -> dict[str, Array]:
    """The input buffers that hold the values, dead tokens as NaN.

    Numbers too small for a normal float of the element type become zero, as a device may take them
    for zero.
    """

    def buffer(values: Floats) -> Array:
        small = np.abs(values) < SMALLEST_NORMAL[element]
        return stored(np.where(small, np.float32(0), values), element)

    dead = ~made.live[:, :, None, None]
    return {
        "query": buffer(made.query),
        "keys": buffer(np.where(dead, np.float32(np.nan), made.keys)),
        "values": buffer(np.where(dead, np.float32(np.nan), made.values)),
        "block_table": made.block_table,
    }


def timing_inputs(problem: AttentionProblem, rng: np.random.Generator) -> dict[str, Array]:
    """Input buffers for timing: normal values at the speed of memory, permuted blocks."""
    columns = -(-problem.context // problem.block_size)
    blocks = timed_blocks(problem)
    table = np.full((problem.batch, problem.blocks_per_sequence), NO_BLOCK, np.uint32)
    table[:, :columns] = rng.permutation(blocks)[: problem.batch * columns].reshape(
        problem.batch, columns
    )
    pool = (blocks, problem.block_size, problem.kv_heads, problem.head_size)
    rows = (problem.batch, problem.query_heads, problem.query_tokens, problem.head_size)
    return {
        "query": random_elements(rows, problem.element, rng),
        "keys": random_elements(pool, problem.element, rng),
        "values": random_elements(pool, problem.element, rng),
        "block_table": table,
    }


def timing_bytes(problem: AttentionProblem) -> int:
    """Bytes of `make_operands(problem, "timing", …)`, without the arrays."""
    rows = problem.batch * problem.query_heads * problem.query_tokens
    elements = 2 * (rows * problem.head_size + pool_elements(problem))
    table = problem.batch * problem.blocks_per_sequence
    return elements * problem.element_bytes + 4 * (rows + table)


def pool_elements(problem: AttentionProblem) -> int:
    """Numbers of the keys, or of the values, in the pool for timing."""
    tokens = timed_blocks(problem) * problem.block_size
    return tokens * problem.kv_heads * problem.head_size


def timed_blocks(problem: AttentionProblem) -> int:
    """Blocks of the pool for timing (at least 1)."""
    return max(1, problem.batch * -(-problem.context // problem.block_size))


def random_elements(shape: tuple[int, ...], element: str, rng: np.random.Generator) -> Array:
    """Normal values in a buffer of that shape; large ones repeat a slab of `SLAB_BYTES`."""
    count = int(np.prod(shape, dtype=np.int64))
    slab_size = min(count, SLAB_BYTES // STORED[element].itemsize)
    slab = stored(rng.standard_normal(slab_size, np.float32), element)
    return np.resize(slab, count).reshape(shape)


def _shared_table(
    problem: AttentionProblem, rng: np.random.Generator, *, everything: bool
) -> tuple[Words, int]:
    """A permuted table [B, MB] in which sequences share the first half of their whole blocks.

    `everything`: sequences share all their blocks, the partial one, too, each in another order.
    Returns it with the number of blocks in the pool, `SPARE_BLOCKS` of them unused.
    """
    whole, rest = divmod(problem.context, problem.block_size)
    columns = whole + (rest > 0)
    shared = columns if everything else whole // 2
    blocks = shared + problem.batch * (columns - shared) + SPARE_BLOCKS
    ids = rng.permutation(blocks).astype(np.uint32)
    table = np.full((problem.batch, problem.blocks_per_sequence + 1), NO_BLOCK, np.uint32)
    table[:, :shared] = ids[:shared]
    own = ids[shared : blocks - SPARE_BLOCKS]
    table[:, shared:columns] = own.reshape(problem.batch, columns - shared)
    if everything:
        for row in table:
            row[:whole] = rng.permutation(row[:whole])
    return table, blocks


def _live_tokens(problem: AttentionProblem, table: Words, blocks: int) -> npt.NDArray[np.bool_]:
    """Which tokens [NB, BS] of the pool some sequence has."""
    live = np.zeros((blocks, problem.block_size), np.bool_)
    whole, rest = divmod(problem.context, problem.block_size)
    for row in table:
        live[row[:whole]] = True
        if rest:
            live[row[whole], :rest] = True
    return live


def _random(_problem: AttentionProblem, _made: AttentionValues, _rng: np.random.Generator) -> None:
    """Normal values as they are."""


def _large_logits(
    problem: AttentionProblem, made: AttentionValues, _rng: np.random.Generator
) -> None:
    """Logits up to about `LARGEST_LOGIT` either way, and nearly as large for every token."""
    peak = 4 * np.sqrt(problem.head_size) * softmax_scale(problem.head_size)
    made.query[...] *= np.float32(LARGEST_LOGIT / peak)


def _equal_logits(
    _problem: AttentionProblem, made: AttentionValues, _rng: np.random.Generator
) -> None:
    """All tokens have the same key: weights are equal."""
    made.keys[...] = made.keys[0, 0]


def _zeros(_problem: AttentionProblem, made: AttentionValues, rng: np.random.Generator) -> None:
    """Zero vectors: the first sequence's queries, and a third of all keys and values."""
    made.query[0] = 0
    for pool in (made.keys, made.values):
        pool[...] *= rng.random((*pool.shape[:3], 1)) > 1 / 3


_Shaper = Callable[[AttentionProblem, AttentionValues, np.random.Generator], None]

VALIDATION_INPUTS: dict[str, _Shaper] = {
    "random": _random,
    "shared": _random,
    "large_logits": _large_logits,
    "equal_logits": _equal_logits,
    "zeros": _zeros,
}
"""The kinds of validation inputs, each with the function that shapes normal values in place."""
