"""The mathematics of a block-sparse indexer, float64, one function for each step of the chain.

Names follow the chain: nb rows, I index heads of E dimensions, R tokens a block. Only what a step
may read is read, so poison elsewhere has no way in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


def norm(x: Array, weight: Array, *, eps: float, one_plus: int) -> Floats:
    """RMS norm along the last axis: x / sqrt(mean(x^2) + eps) * w, or times 1 + w."""
    wide = x.astype(np.float64)
    scale = weight.astype(np.float64) + one_plus
    mean = (wide**2).mean(axis=-1, keepdims=True)
    return np.asarray(wide / np.sqrt(mean + np.float64(np.float32(eps))) * scale)


def angles(positions: Array, rotary: int, theta: float) -> Floats:
    """Angles [len(positions), rotary/2]: position * theta^(-2j/rotary)."""
    frequencies = np.float64(np.float32(theta)) ** (-2 * np.arange(rotary // 2) / max(1, rotary))
    return np.asarray(positions.astype(np.float64)[:, None] * frequencies)


def rope(y: Array, positions: Array, rotary: int, theta: float) -> Floats:
    """Turn the first `rotary` dimensions of y [N, ..., E] by the positions [N], halves as pairs."""
    half = rotary // 2
    angle = angles(positions, rotary, theta).reshape(len(y), *[1] * (y.ndim - 2), half)
    cos, sin = np.cos(angle), np.sin(angle)
    low, high = y[..., :half], y[..., half:rotary]
    return np.concatenate(
        [low * cos - high * sin, high * cos + low * sin, y[..., rotary:]], axis=-1
    )


def pooled(keys: Array, ratio: int) -> Floats:
    """Means [N, E] of groups of `ratio` float16 keys [N * ratio, E]."""
    return np.asarray(keys.astype(np.float64).reshape(-1, ratio, keys.shape[-1]).mean(axis=1))


def block_scores(query: Array, keys: Array) -> Floats:
    """Scores [N] of block keys [N, E] for one row's queries [I, E]: the sum over heads of the dot
    products above 0, over sqrt(E)."""
    dots = query.astype(np.float64) @ keys.astype(np.float64).T
    return np.asarray(np.maximum(dots, 0).sum(axis=0) / np.sqrt(query.shape[-1]))


def selected_blocks(scores: Array, kept: int) -> npt.NDArray[np.int64]:
    """The `kept` blocks with the largest scores, ascending; of equal scores the lower blocks."""
    order = np.lexsort((np.arange(len(scores)), -scores.astype(np.float64)))
    return np.sort(order[:kept])


def visible_tokens(blocks: Array, *, ratio: int, position: int) -> npt.NDArray[np.int64]:
    """Tokens of the selected blocks, then those at `position` or before it that are in no complete
    block; ascending."""
    tail = np.arange((position + 1) // ratio * ratio, position + 1)
    return np.concatenate([(blocks[:, None] * ratio + np.arange(ratio)).ravel(), tail])


def block_mask(blocks: Array, words: int) -> npt.NDArray[np.uint32]:
    """Bit j % 32 of word j // 32 is set for every selected block j."""
    bits = np.zeros(32 * words, np.uint8)
    bits[blocks] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
