"""Operands of decode over the planar q8 cache: for timing, and to validate every code path.

Buffers (R rows, H query heads, Hkv KV heads, D head size, T cached tokens, P `max_parts`):

* `query_gate` float32 [R, H, 2 D]: of each head the query after norm and rope, then its gate;
* `key_cache`, `value_cache` uint32: one side each, see `tuner.planar`;
* `row_tokens` uint32 [R]: tokens that each row sees;
* `visible` uint32 [R, stride], for lists only: ascending tokens, then padding of 0xFFFFFFFF;
* output `partials` float32 [R, H, P, D + 2]: m in base 2, s, o, not normalised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from tuner.errors import UnknownNameError
from tuner.kernels.base import Operands, ValidationCase
from tuner.planar import PlanarLayout, write_rows
from tuner.problems import GatedCombineProblem, Q8DecodeProblem, Q8SelectedProblem

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

NO_TOKEN = 0xFFFFFFFF
LEAST_MAX_PARTS = 256
TOKENS_OF_A_PART = 512
"""From this many tokens a part on, the buffer of partials grows with the capacity."""
LARGEST_LOGIT = 150.0
DOMINATING_LOGIT = 14.0
OCTAVES = (-16, 4)
"""Powers of two that tokens of different magnitudes are multiplied with."""
SLAB_BYTES = 64 * 2**20
"""Timed caches repeat a random slab of this size, which is larger than a last-level cache."""
SPARE_TOKENS = 9
LIST_BLOCK = 4
"""Timed lists name blocks of so many tokens, as an indexer does."""


def max_parts(capacity: int) -> int:
    """Partial results of one head that the buffer has room for."""
    return max(LEAST_MAX_PARTS, -(-capacity // TOKENS_OF_A_PART))


MAX_PARTS = f"max({LEAST_MAX_PARTS}, ceil_div(max_tokens, {TOKENS_OF_A_PART}))"
"""`max_parts` of a cache of `max_tokens` tokens, for dispatch rules."""


def base2_scale(head_size: int) -> float:
    """head_size ** -0.5 * log2(e) rounded to float32, as the device gets it."""
    return float(np.float32(head_size**-0.5 * np.log2(np.e)))


def layout_of(problem: Q8DecodeProblem, *, spare: int = 0) -> PlanarLayout:
    """The cache of a problem, with room for some more tokens than it has."""
    return PlanarLayout(problem.tokens + spare, problem.cache_row)


def scalars_of(problem: Q8DecodeProblem, *, spare: int = 0) -> dict[str, int | float]:
    """The host's scalars for a cache with that much spare room."""
    layout = layout_of(problem, spare=spare)
    return {
        "num_heads": problem.query_heads,
        "num_kv_heads": problem.kv_heads,
        "capacity": layout.capacity,
        "scale_word": layout.scale_offset // 4,
        "visible_stride": problem.seen,
        "max_parts": max_parts(layout.capacity),
        "base2_scale": base2_scale(problem.head_size),
    }


def timing_bytes(problem: Q8DecodeProblem) -> int:
    """Bytes of `make_operands(problem, "timing", …)`, without the arrays."""
    vectors = 2 * problem.head_size + max_parts(problem.tokens) * (problem.head_size + 2)
    lists = problem.seen if isinstance(problem, Q8SelectedProblem) else 0
    words = problem.rows * (problem.query_heads * vectors + lists + 1)
    return 2 * layout_of(problem).nbytes + 4 * words


def make_operands(problem: Q8DecodeProblem, inputs: str, seed: int) -> Operands:
    """Operands of one launch; the same arguments give the same arrays.

    `inputs` is "timing" (uniform codes, a cache as large as needed) or one of `SHAPERS`; with these
    all that must not be read is poison: tokens that no row sees hold codes of -128 and NaN scales,
    gates are NaN, lists end in `NO_TOKEN`.

    Raises:
        UnknownNameError: `inputs` is no such kind.
    """
    if inputs == "timing":
        return _timing_operands(problem, np.random.default_rng([seed, 0]))
    if inputs not in SHAPERS:
        raise UnknownNameError("kind of inputs", inputs, ("timing", *SHAPERS))
    rng = np.random.default_rng([seed, 1 + list(SHAPERS).index(inputs)])
    drawn = _drawn(problem, rng)
    SHAPERS[inputs](problem, drawn, rng)
    layout = layout_of(problem, spare=SPARE_TOKENS)
    seen = np.unique(np.concatenate(drawn.lists))
    sides = []
    for vectors in (drawn.keys, drawn.values):
        words = layout.empty()
        rows = np.zeros((problem.tokens, problem.cache_row), np.float32)
        rows[seen] = vectors.reshape(problem.tokens, -1)[seen]
        write_rows(words, layout, 0, rows)
        codes, scales = layout.planes(words)
        dead = np.setdiff1d(np.arange(layout.capacity), seen)
        codes[dead], scales[dead] = -128, np.nan
        sides.append(words)
    gates = np.full_like(drawn.query, np.nan)
    query_gate = np.concatenate([drawn.query, gates], axis=-1)
    return _operands(problem, query_gate, sides, drawn.lists, SPARE_TOKENS)


def validation_cases(problem: Q8DecodeProblem) -> tuple[ValidationCase, ...]:
    """Small problems of the given heads for every code path.

    Rows see 1 token, whole chunks of 32, one token more or less, and hundreds, on which every loop
    goes round.
    """
    wide = problem.cache_row > 256 or problem.group > 8
    long = 331 if wide else 1003
    sizes = {
        "ragged": ("random", 4, long, long // 3),
        "chunks": ("random", 3, 65, 16),
        "one token": ("random", 1, 1, 1),
        "large_logits": ("large_logits", 2, 97, 32),
        "equal_logits": ("equal_logits", 2, long // 2, 3),
        "dominating": ("dominating", 3, 301, 140),
        "zeros": ("zeros", 3, 70, 30),
        "magnitudes": ("magnitudes", 2, 130, 40),
    }
    return tuple(
        ValidationCase(
            name=name, problem=_resized(problem, rows, seen, step), inputs=inputs, seed=n
        )
        for n, (name, (inputs, rows, seen, step)) in enumerate(sizes.items())
    )


def make_combine_operands(problem: GatedCombineProblem, inputs: str, seed: int) -> Operands:
    """Operands of the combine pass: buffers as above, `partials` being read, and the output.

    Kinds: "timing", "random", "vanishing" (maxima far apart), "gates" (gates far out). Row r has
    `parts` - r parts, at least one; what lies behind them is poison, as are the queries.

    Raises:
        UnknownNameError: `inputs` is no such kind.
    """
    kinds = ("timing", "random", "vanishing", "gates")
    if inputs not in kinds:
        raise UnknownNameError("kind of inputs", inputs, kinds)
    rng = np.random.default_rng([seed, kinds.index(inputs)])
    spare = 0 if inputs == "timing" else 3
    shape = (problem.rows, problem.query_heads, problem.parts + spare, problem.head_size + 2)
    partials = rng.standard_normal(shape, np.float32)
    partials[..., 0] *= {"vanishing": 120.0}.get(inputs, 4.0)
    partials[..., 1] = rng.uniform(1, 40, shape[:-1])
    counts = np.maximum(1, problem.parts - np.arange(problem.rows))
    for row, count in enumerate(counts):
        partials[row, :, count:].view(np.uint32)[...] = NO_TOKEN
    gates = rng.standard_normal((*shape[:2], problem.head_size), np.float32)
    gates *= {"gates": 60.0}.get(inputs, 2.0)
    query_gate = np.concatenate([np.full_like(gates, np.nan), gates], axis=-1)
    out = (problem.rows, problem.query_heads, problem.head_size)
    tokens = (counts * 32 - rng.integers(0, 32, problem.rows)).astype(np.uint32)
    return Operands(
        inputs={"partials": partials, "query_gate": query_gate, "row_tokens": tokens},
        outputs={"out": (out, np.dtype(np.float32))},
        scalars={
            "num_heads": problem.query_heads,
            "max_parts": shape[2],
            "num_parts": problem.parts,
        },
    )


def combine_bytes(problem: GatedCombineProblem) -> int:
    """Bytes of `make_combine_operands(problem, "timing", …)`, without the arrays."""
    vectors = problem.parts * (problem.head_size + 2) + 3 * problem.head_size
    return 4 * problem.rows * (problem.query_heads * vectors + 1)


def combine_cases(problem: GatedCombineProblem) -> tuple[ValidationCase, ...]:
    """Small problems of the given heads: from one part to more than any workgroup joins at once."""
    sizes = {
        "one part": ("random", 1, 1),
        "ragged": ("random", 3, 141),
        "vanishing": ("vanishing", 2, 13),
        "gates": ("gates", 2, 5),
    }
    return tuple(
        ValidationCase(
            name=name,
            problem=msgspec.structs.replace(problem, rows=rows, parts=parts),
            inputs=inputs,
            seed=seed,
        )
        for seed, (name, (inputs, rows, parts)) in enumerate(sizes.items())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Values before quantisation: query [R, H, D]; keys, values [T, Hkv, D]; the tokens that each
    row sees, ascending."""

    query: Floats
    keys: Floats
    values: Floats
    lists: list[npt.NDArray[np.int64]]


def _drawn(problem: Q8DecodeProblem, rng: np.random.Generator) -> Drawn:
    shape = (problem.tokens, problem.kv_heads, problem.head_size)
    query = (problem.rows, problem.query_heads, problem.head_size)
    counts = problem.row_tokens().astype(np.int64)
    if isinstance(problem, Q8SelectedProblem):
        lists = [np.sort(rng.permutation(problem.tokens)[:count]) for count in counts]
    else:
        lists = [np.arange(count) for count in counts]
    return Drawn(
        query=rng.standard_normal(query, np.float32),
        keys=rng.standard_normal(shape, np.float32),
        values=rng.standard_normal(shape, np.float32),
        lists=lists,
    )


def _operands(
    problem: Q8DecodeProblem,
    query_gate: Floats,
    sides: list[Words],
    lists: list[npt.NDArray[np.int64]],
    spare: int,
) -> Operands:
    scalars = scalars_of(problem, spare=spare)
    inputs = {
        "query_gate": query_gate,
        "key_cache": sides[0],
        "value_cache": sides[1],
        "row_tokens": problem.row_tokens(),
    }
    if isinstance(problem, Q8SelectedProblem):
        visible = np.full((problem.rows, problem.seen), NO_TOKEN, np.uint32)
        for row, tokens in zip(visible, lists, strict=True):
            row[: len(tokens)] = tokens
        inputs["visible"] = visible
    shape = (problem.rows, problem.query_heads, int(scalars["max_parts"]), problem.head_size + 2)
    return Operands(
        inputs=inputs, outputs={"partials": (shape, np.dtype(np.float32))}, scalars=scalars
    )


def _timing_operands(problem: Q8DecodeProblem, rng: np.random.Generator) -> Operands:
    layout = layout_of(problem)
    shape = (problem.rows, problem.query_heads, 2 * problem.head_size)
    lists = [_block_list(problem, int(count), rng) for count in problem.row_tokens()]
    return _operands(
        problem,
        rng.standard_normal(shape, np.float32),
        [random_side(layout, rng), random_side(layout, rng)],
        lists,
        0,
    )


def random_side(layout: PlanarLayout, rng: np.random.Generator) -> Words:
    """One side of a cache with uniform codes, at the speed of memory."""
    words = layout.empty(code=0, scale=0.0)
    codes, scales = layout.planes(words)
    slab = rng.integers(-127, 128, min(SLAB_BYTES, codes.size), np.int8)
    flat = codes.reshape(-1)
    for first in range(0, len(flat), len(slab)):
        part = flat[first : first + len(slab)]
        part[...] = slab[: len(part)]
    scales[...] = rng.uniform(0.015, 0.025, scales.shape[1])
    return words


def _block_list(
    problem: Q8DecodeProblem, count: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Ascending tokens in whole blocks as far as they go, the newest ones last."""
    blocks, tail = count // LIST_BLOCK, count % LIST_BLOCK
    room = (problem.tokens - tail) // LIST_BLOCK
    chosen = np.sort(rng.permutation(room)[:blocks])
    tokens = (chosen[:, None] * LIST_BLOCK + np.arange(LIST_BLOCK)).ravel()
    return np.concatenate([tokens, np.arange(problem.tokens - tail, problem.tokens)])


def _resized(problem: Q8DecodeProblem, rows: int, seen: int, step: int) -> Q8DecodeProblem:
    if isinstance(problem, Q8SelectedProblem):
        return msgspec.structs.replace(
            problem, rows=rows, tokens=seen + seen // 2 + 1, visible=seen, step=step
        )
    return msgspec.structs.replace(problem, rows=rows, tokens=seen, step=step)


def _random(_problem: Q8DecodeProblem, _drawn: Drawn, _rng: np.random.Generator) -> None:
    """Normal values, as drawn."""


def _large_logits(problem: Q8DecodeProblem, drawn: Drawn, _rng: np.random.Generator) -> None:
    """Queries scaled so that the largest |logit| is `LARGEST_LOGIT` nats."""
    grouped = drawn.query.reshape(problem.rows, problem.kv_heads, problem.group, problem.head_size)
    logits = np.einsum("rghd,tgd->rght", grouped, drawn.keys, optimize=True)
    largest = np.abs(logits).max() * problem.head_size**-0.5
    drawn.query[...] *= np.float32(LARGEST_LOGIT / largest)


def _equal_logits(_problem: Q8DecodeProblem, drawn: Drawn, _rng: np.random.Generator) -> None:
    """One key for all tokens of a KV head: every token weighs the same."""
    drawn.keys[...] = drawn.keys[:1]


def _dominating(problem: Q8DecodeProblem, drawn: Drawn, rng: np.random.Generator) -> None:
    """The newest token of each row outweighs all others that it sees."""
    directions = rng.standard_normal((problem.kv_heads, problem.head_size)).astype(np.float32)
    directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
    length = np.float32(np.sqrt(DOMINATING_LOGIT * problem.head_size**0.5))
    drawn.query[...] *= np.float32(0.1)
    drawn.query[...] += length * np.repeat(directions, problem.group, axis=0)
    for tokens in drawn.lists:
        drawn.keys[tokens[-1]] = length * directions


def _zeros(problem: Q8DecodeProblem, drawn: Drawn, rng: np.random.Generator) -> None:
    """Zero vectors: the first row's query, and a third of the keys' and values' groups of 32."""
    drawn.query[0] = 0
    for vectors in (drawn.keys, drawn.values):
        rows = vectors.reshape(problem.tokens, -1, 32)
        rows *= rng.random((*rows.shape[:2], 1)) > 1 / 3


def _magnitudes(_problem: Q8DecodeProblem, drawn: Drawn, rng: np.random.Generator) -> None:
    """Tokens of very different sizes: some have scales too small for a normal float16."""
    for vectors in (drawn.keys, drawn.values):
        vectors[...] *= np.exp2(rng.integers(*OCTAVES, (len(vectors), 1, 1))).astype(np.float32)


SHAPERS: dict[str, Callable[[Q8DecodeProblem, Drawn, np.random.Generator], None]] = {
    "random": _random,
    "large_logits": _large_logits,
    "equal_logits": _equal_logits,
    "dominating": _dominating,
    "zeros": _zeros,
    "magnitudes": _magnitudes,
}
"""The kinds of validation inputs, each with the function that shapes normal values in place."""
