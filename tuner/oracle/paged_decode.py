"""The oracle of paged decode over the int8 cache: float64 from the quantised cache.

Operands are those of `tuner.kernels.decode_operands`. Only tokens that a sequence sees are read, so
poison elsewhere has no way in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt

from tuner.oracle.attention import HeadGroups, Partial, attend
from tuner.oracle.tolerance import error_bounds
from tuner.quant import token_major, unpack_cache, words_per_token

if TYPE_CHECKING:
    from tuner.kernels.base import ArithmeticClass, Operands, Reference

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

SAMPLE_SEED = 20_260_102

SAMPLED_TOKENS = 2**17
"""Tokens that the oracle goes through for a large launch, unless one pair alone sees more."""


class Switched(TypedDict):
    """The fields of `HeadGroups` that switches fill."""

    softcap: float
    biases: Floats | None
    sinks: Floats | None


Gather = Callable[["Operands", int, Array], HeadGroups]
"""Gathers what the given KV heads [N] of a sequence see: `head_groups` of some cache format."""


def decode_reference(operands: Operands) -> Reference:
    """Output `out` [S, H, D] of a whole launch, and its error bounds [S, H]."""
    return whole_reference(operands, head_groups)


def sampled_decode_reference(operands: Operands, count: int) -> Reference:
    """The oracle on some pairs of a sequence and a KV head: see `sampled_reference`."""
    return sampled_reference(operands, count, head_groups)


def whole_reference(operands: Operands, gather: Gather) -> Reference:
    """Output `out` [S, H, Dv] of a launch over any cache format, and its bounds [S, H]."""
    sequences, heads, head_size = operands.outputs["out"][0]
    every_head = np.arange(int(operands.scalars["num_kv_heads"]))

    def groups(sequence: int) -> HeadGroups:
        return gather(operands, sequence, every_head)

    out = np.stack([attend(groups(s)).out for s in range(sequences)])

    def bounds(arithmetic: ArithmeticClass) -> Floats:
        rows = [error_bounds(arithmetic, groups(s)) for s in range(sequences)]
        return np.stack(rows).reshape(sequences, heads)

    return reference_of(out.reshape(sequences, heads, head_size), bounds)


def sampled_reference(operands: Operands, count: int, gather: Gather) -> Reference:
    """The oracle on some pairs of a sequence and a KV head, for launches too large to redo.

    Takes `count` pairs, or fewer where these see more than `SAMPLED_TOKENS` tokens in all: at
    131,072 tokens one pair costs seconds. In order of worth: a pair of the longest sequence, the
    last pair, the first, one of the shortest sequence, and others at random (but always the same).

    The reference's output is [rows, D]: rows of the output flattened to [S * H, D], which messages
    call by their indices there.
    """
    heads, head_size = operands.outputs["out"][0][1:]
    kv_heads = int(operands.scalars["num_kv_heads"])
    group = heads // kv_heads
    pairs = _sampled_pairs(operands, kv_heads, count)

    def groups(pair: int) -> HeadGroups:
        return gather(operands, pair // kv_heads, np.array([pair % kv_heads]))

    out = np.concatenate([attend(groups(pair)).out for pair in pairs])

    def bounds(arithmetic: ArithmeticClass) -> Floats:
        return np.concatenate([error_bounds(arithmetic, groups(p)) for p in pairs]).ravel()

    rows = (np.array(pairs)[:, None] * group + np.arange(group)).ravel()

    def seen(outputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"out": outputs["out"].reshape(-1, head_size)[rows]}

    reference = reference_of(out.reshape(-1, head_size), bounds)
    return replace(reference, seen=seen, names={"out": rows})


def decode_partial(operands: Operands, sequence: int, start: int, stop: int) -> Partial:
    """One split of a sequence, tokens `start` to `stop` - 1, for its H query heads."""
    heads, head_size = operands.outputs["out"][0][1:]
    every_head = np.arange(int(operands.scalars["num_kv_heads"]))
    part = attend(head_groups(operands, sequence, every_head).tokens(start, stop))
    return Partial(
        peak=part.peak.reshape(heads),
        weight=part.weight.reshape(heads),
        mixture=part.mixture.reshape(heads, head_size),
    )


def seen_tokens(operands: Operands, sequence: int) -> tuple[int, int]:
    """(first, end) of the tokens that a sequence sees; the last is the query's own."""
    scalars = operands.scalars
    length = min(int(operands.inputs["context_lens"][sequence]), int(scalars["max_context_len"]))
    window = int(scalars.get("window", 0))
    return max(0, length - window) if window else 0, length


def switched(operands: Operands, kv_heads: Array, token: Array, length: int) -> Switched:
    """What the switches do to the given KV heads [N] of a sequence of so many tokens, of which it
    sees `token` [L]: the bias of token t is slope * (t - length + 1)."""
    inputs, scalars = operands.inputs, operands.scalars

    def per_head(name: str) -> Floats:
        """Numbers [H] of the query heads as [N, G]."""
        numbers = inputs[name].astype(np.float64)
        return numbers.reshape(int(scalars["num_kv_heads"]), -1)[kv_heads]

    distance = token - length + 1.0
    return Switched(
        softcap=float(scalars.get("softcap", 0.0)),
        biases=per_head("slopes")[..., None] * distance if scalars.get("alibi") else None,
        sinks=per_head("sinks") if scalars.get("sinks") else None,
    )


def head_groups(operands: Operands, sequence: int, kv_heads: Array) -> HeadGroups:
    """Gather what the given KV heads [N] of a sequence see, and their query heads."""
    inputs, scalars = operands.inputs, operands.scalars
    heads, head_size = operands.outputs["out"][0][1:]
    first, length = seen_tokens(operands, sequence)
    block_size = _block_size(inputs["key_cache"], head_size)
    start = first // block_size
    blocks = inputs["block_table"][sequence, start : -(-length // block_size)].astype(np.int64)
    seen = slice(first - start * block_size, length - start * block_size)
    row = inputs["query"][sequence, : heads * head_size].astype(np.float64)
    query = row.reshape(int(scalars["num_kv_heads"]), -1, head_size)[kv_heads]

    def tokens(name: str) -> tuple[Array, Floats]:
        words = inputs[name][blocks, kv_heads[:, None]]
        if inputs[name].ndim == 3:
            words = token_major(words, block_size)
        words = words.reshape(len(kv_heads), -1, words.shape[-1])[:, seen]
        codes, scales = unpack_cache(words)
        return codes, scales.astype(np.float64)

    key_codes, key_scales = tokens("key_cache")
    value_codes, value_scales = tokens("value_cache")
    return HeadGroups(
        query=query,
        key_codes=key_codes,
        key_scales=key_scales,
        value_codes=value_codes,
        value_scales=value_scales,
        softmax_scale=float(scalars["softmax_scale"]),
        **switched(operands, kv_heads, np.arange(first, length), length),
    )


def _block_size(cache: Array, head_size: int) -> int:
    """Tokens of a block of a token-major cache [NB, Hkv, BS, W] or a planar one [NB, Hkv, BS*W]."""
    return int(cache.shape[2] if cache.ndim == 4 else cache.shape[2] // words_per_token(head_size))


def _sampled_pairs(operands: Operands, kv_heads: int, count: int) -> list[int]:
    """Flat indices sequence * kv_heads + head, ascending, at most `count`."""
    lengths = operands.inputs["context_lens"]
    total = len(lengths) * kv_heads
    chosen = [
        int(lengths.argmax()) * kv_heads,
        total - 1,
        0,
        int(lengths.argmin()) * kv_heads + kv_heads - 1,
    ]
    rng = np.random.default_rng(SAMPLE_SEED)
    chosen += rng.choice(total, min(total, count), replace=False).tolist()
    chosen = list(dict.fromkeys(chosen))[:count]
    spans = [seen_tokens(operands, pair // kv_heads) for pair in chosen]
    tokens = np.cumsum([end - first for first, end in spans])
    fitting = int(np.searchsorted(tokens, SAMPLED_TOKENS, side="right"))
    return sorted(chosen[: max(1, fitting)])


def reference_of(out: Floats, bounds: Callable[[ArithmeticClass], Floats]) -> Reference:
    """A reference with the one output `out`."""
    # tuner.kernels imports this module for its families, so its types are known only later.
    from tuner.kernels.base import Reference

    return Reference(outputs={"out": out}, bounds=lambda of: {"out": bounds(of)})
