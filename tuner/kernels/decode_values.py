"""Values for validating paged decode: what is drawn, before it is quantised and poisoned.

Each kind of inputs shapes normal values so that some error of a kernel shows: logits are large or
equal, one token outweighs all others, vectors are zero. All share blocks between sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.errors import UnknownNameError
from tuner.problems import PagedDecodeProblem

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

NO_BLOCK = 0xFFFFFFFF
"""Table entry that names no block."""
SPARE_BLOCKS = 3
LARGEST_LOGIT = 150.0
DOMINATING_GAP = 14.0
"""Nats by which the dominating token leads a token whose key is orthogonal to the query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatPool:
    """Validation values before quantisation, laid out as the pool is.

    query [S, H, D]; keys [NB, Hkv, BS, D] and values [NB, Hkv, BS, Dv], arbitrary where not `live`;
    block_table [S, MB]; live [NB, BS]: tokens that some sequence sees.
    """

    query: Floats
    keys: Floats
    values: Floats
    block_table: Words
    live: npt.NDArray[np.bool_]


def float_pool(problem: PagedDecodeProblem, inputs: str, seed: int) -> FloatPool:
    """The values that `make_operands` quantises for a kind of validation inputs.

    Raises:
        UnknownNameError: `inputs` is none of `VALIDATION_INPUTS`.
    """
    if inputs not in VALIDATION_INPUTS:
        raise UnknownNameError("kind of inputs", inputs, ("timing", *VALIDATION_INPUTS))
    rng = np.random.default_rng([seed, 1 + list(VALIDATION_INPUTS).index(inputs)])
    table, blocks = _shared_table(problem, rng)
    tokens = (blocks, problem.kv_heads, problem.block_size)
    pool = FloatPool(
        query=rng.standard_normal(
            (problem.sequences, problem.query_heads, problem.head_size), np.float32
        ),
        keys=rng.standard_normal((*tokens, problem.head_size), np.float32),
        values=rng.standard_normal((*tokens, problem.value_size), np.float32),
        block_table=table,
        live=_live_tokens(problem, table, blocks),
    )
    VALIDATION_INPUTS[inputs](problem, pool, rng)
    _forget_blocks_before_the_window(problem, table)
    return pool


def softmax_scale(head_size: int) -> float:
    """head_size ** -0.5 rounded to float32, as the device gets it."""
    return float(np.float32(head_size**-0.5))


def blocks_used(problem: PagedDecodeProblem) -> npt.NDArray[np.int64]:
    """Blocks that each sequence [S] needs."""
    return -(-problem.context_lens().astype(np.int64) // problem.block_size)


def first_blocks(problem: PagedDecodeProblem) -> npt.NDArray[np.int64]:
    """The first block of each sequence [S] that its window reaches into."""
    unseen = problem.context_lens().astype(np.int64) - problem.visible_tokens()
    return unseen // problem.block_size


def _shared_table(problem: PagedDecodeProblem, rng: np.random.Generator) -> tuple[Words, int]:
    """A permuted table [S, MB] in which half of each sequence's full blocks are the longest one's.

    Returns it with the number of blocks in the pool, `SPARE_BLOCKS` of them unused. The last block
    of a sequence is never shared.
    """
    lengths = problem.context_lens().astype(np.int64)
    used, longest = blocks_used(problem), int(lengths.argmax())
    shared = lengths // problem.block_size // 2
    shared[longest] = 0
    blocks = int((used - shared).sum()) + SPARE_BLOCKS
    ids = rng.permutation(blocks)
    table = np.full((problem.sequences, problem.blocks_per_sequence), NO_BLOCK, np.uint32)
    column = np.arange(table.shape[1])
    own = (column < used[:, None]) & (column >= shared[:, None])
    table[own] = ids[: int(own.sum())]
    borrowed = column < shared[:, None]
    table[borrowed] = np.broadcast_to(table[longest], table.shape)[borrowed]
    return table, blocks


def _live_tokens(problem: PagedDecodeProblem, table: Words, blocks: int) -> npt.NDArray[np.bool_]:
    """Which tokens [NB, BS] of the pool some sequence sees."""
    live = np.zeros((blocks, problem.block_size), np.bool_)
    seen = problem.visible_tokens()
    for row, tokens, visible in zip(table, problem.context_lens(), seen.tolist(), strict=True):
        token = np.arange(int(tokens) - visible, int(tokens))
        live[row[token // problem.block_size], token % problem.block_size] = True
    return live


def _forget_blocks_before_the_window(problem: PagedDecodeProblem, table: Words) -> None:
    """An engine may have given them to another sequence: nothing may look them up."""
    table[np.arange(table.shape[1]) < first_blocks(problem)[:, None]] = NO_BLOCK


def _random(_problem: PagedDecodeProblem, _pool: FloatPool, _rng: np.random.Generator) -> None:
    """Normal values, as drawn."""


def _large_logits(problem: PagedDecodeProblem, pool: FloatPool, _rng: np.random.Generator) -> None:
    """Queries scaled so that the largest |logit| over the live pool is `LARGEST_LOGIT`."""
    grouped = pool.query.reshape(
        problem.sequences, problem.kv_heads, problem.group, problem.head_size
    )
    logits = np.einsum("sghd,bgtd->sghbt", grouped, pool.keys, optimize=True)
    largest = np.abs(logits * pool.live).max() * softmax_scale(problem.head_size)
    if largest:
        pool.query[...] *= np.float32(LARGEST_LOGIT / largest)


def _equal_logits(_problem: PagedDecodeProblem, pool: FloatPool, _rng: np.random.Generator) -> None:
    """One key for all tokens of a KV head: every token weighs the same."""
    pool.keys[...] = pool.keys[:1, :, :1]


def _dominating(problem: PagedDecodeProblem, pool: FloatPool, rng: np.random.Generator) -> None:
    """One token outweighs all others: the last one, or in turn the first of the last block.

    The heads of a group point roughly one way (the token's key), so that all of them see it.
    """
    shape = (problem.sequences, problem.kv_heads, problem.head_size)
    direction = rng.standard_normal(shape, np.float32)
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    length = np.float32(np.sqrt(DOMINATING_GAP / softmax_scale(problem.head_size)))
    per_head = np.repeat(direction, problem.group, axis=1)
    pool.query[...] = pool.query * np.float32(0.1) + length * per_head
    for sequence, tokens in enumerate(problem.context_lens().tolist()):
        if tokens:
            column, offset = divmod(tokens - 1, problem.block_size)
            block = pool.block_table[sequence, column]
            pool.keys[block, :, 0 if sequence % 2 else offset] = length * direction[sequence]


def _zeros(problem: PagedDecodeProblem, pool: FloatPool, rng: np.random.Generator) -> None:
    """Zero vectors: in turn all queries, all values, and a third of the keys and values."""
    columns = blocks_used(problem)
    for sequence, row in enumerate(pool.block_table):
        blocks = row[: columns[sequence]]
        if sequence % 3 == 0:
            pool.query[sequence] = 0
        elif sequence % 3 == 1:
            pool.values[blocks] = 0
        else:
            pool.keys[blocks] *= rng.random((len(blocks), *pool.keys.shape[1:3], 1)) > 1 / 3
            pool.values[blocks] *= rng.random((len(blocks), *pool.keys.shape[1:3], 1)) > 1 / 3


_Shaper = Callable[[PagedDecodeProblem, FloatPool, np.random.Generator], None]

VALIDATION_INPUTS: dict[str, _Shaper] = {
    "random": _random,
    "large_logits": _large_logits,
    "equal_logits": _equal_logits,
    "dominating": _dominating,
    "zeros": _zeros,
}
"""The kinds of validation inputs, each with the function that shapes normal values in place."""
