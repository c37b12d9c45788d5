"""Pack and unpack the token-major int8 KV cache in NumPy, exactly and reversibly.

A cached vector of D numbers (one token of one KV head, key or value) is D int8 codes and a float32
scale, stored as D/4 words of four codes (byte 0 lowest) and a word with the scale's bits. Each
vector is quantised by itself, symmetrically: value = code * scale, code from -127 to 127.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.errors import UsageError
from tuner.problems import GROUP_CODES

Array = npt.NDArray[Any]

CODE_MAX = 127
CODES_PER_WORD = 4
PADDING_SLOT = 0xFFFFFFFF
"""Slot of a token that is not to be written."""
SMALLEST_PEAK = float(np.nextafter(np.float32(127) / np.finfo(np.float32).max, np.float32(1)))
"""Peaks below this (about 3.7e-37) have no finite float32 reciprocal 127/peak."""


def words_per_token(head_size: int) -> int:
    """32-bit words of one token of one KV head: codes and scale.

    Raises:
        UsageError: `head_size` is not a positive multiple of 4.
    """
    if head_size < 1 or head_size % CODES_PER_WORD:
        raise UsageError(
            f"head size {head_size} does not fill whole words of {CODES_PER_WORD} codes: "
            f"use a multiple of {CODES_PER_WORD}"
        )
    return head_size // CODES_PER_WORD + 1


def round_half_away(values: Array) -> npt.NDArray[np.float32]:
    """Nearest integers as float32, halves away from zero: 62.5 -> 63, -2.5 -> -3.

    Exact for every float32; floor(|x| + 0.5) is not, since 0.49999997 + 0.5 rounds to 1.
    """
    values = np.asarray(values, np.float32)
    whole = np.trunc(values)
    return np.where(np.abs(values - whole) >= 0.5, whole + np.sign(values), whole)


def quantise_token_vectors(x: Array) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Quantise vectors along the last axis: x [..., D] to codes int8 [..., D], scales f32 [...].

    float32 throughout, as a device does it: with a = max|x|, the codes are x * (127/a), rounded
    half away from zero, and the scale is a/127. A zero vector has codes 0 and scale 1. No element
    is off by more than a * (1/254 + 1e-6).

    Raises:
        UsageError: a number that is not finite, or a vector too small for its reciprocal (all its
            magnitudes below about 3.7e-37, but not all zero).
    """
    x = np.asarray(x, np.float32)
    peak = np.abs(x).max(axis=-1, initial=0.0)
    _refuse_unquantisable(peak)
    nonzero = peak > 0
    divisor = np.where(nonzero, peak, np.float32(1))
    inverse = np.where(nonzero, np.float32(CODE_MAX) / divisor, np.float32(0))
    scales = np.where(nonzero, divisor / np.float32(CODE_MAX), np.float32(1))
    rounded = round_half_away(x * inverse[..., None])
    codes = np.clip(rounded, -CODE_MAX, CODE_MAX).astype(np.int8)
    return codes, scales.astype(np.float32)


def dequantise(codes: Array, scales: Array) -> npt.NDArray[np.float64]:
    """The numbers that codes [..., D] with scales [...] stand for, exact in float64 [..., D]."""
    return codes.astype(np.float64) * scales.astype(np.float64)[..., None]


def pack_codes(codes: npt.NDArray[np.int8]) -> npt.NDArray[np.uint32]:
    """Codes int8 [..., D] as words uint32 [..., D/4], the first code in the lowest byte."""
    words_per_token(codes.shape[-1])
    words = np.ascontiguousarray(codes, np.int8).view(np.dtype("<u4"))
    return words.astype(np.uint32, copy=False)


def unpack_codes(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.int8]:
    """Words uint32 [..., D/4] as codes int8 [..., D]; undoes `pack_codes`."""
    return np.ascontiguousarray(words).astype(np.dtype("<u4"), copy=False).view(np.int8)


def pack_cache(
    codes: npt.NDArray[np.int8], scales: npt.NDArray[np.float32]
) -> npt.NDArray[np.uint32]:
    """Codes [NB, Hkv, BS, D] and scales [NB, Hkv, BS] as cache words [NB, Hkv, BS, D/4+1].

    Leading axes may be any. Keeps the scale's bits, NaN payloads included.
    """
    words = np.empty((*codes.shape[:-1], words_per_token(codes.shape[-1])), np.uint32)
    words[..., :-1] = pack_codes(codes)
    words[..., -1] = np.ascontiguousarray(scales, np.float32).view(np.uint32)
    return words


def unpack_cache(
    words: npt.NDArray[np.uint32],
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Words [..., D/4+1] as codes int8 [..., D] and scales float32 [...]; undoes `pack_cache`."""
    return unpack_codes(words[..., :-1]), np.ascontiguousarray(words[..., -1]).view(np.float32)


def planar(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Cache words [NB, Hkv, BS, D/4+1] with the scales apart: [NB, Hkv, BS * (D/4+1)].

    Of each block and KV head first the codes of all tokens, then their scales, so that rows of
    codes are aligned as their size is.
    """
    *pool, block_size, row_words = words.shape
    codes = words[..., :-1].reshape(*pool, block_size * (row_words - 1))
    return np.concatenate([codes, words[..., -1]], axis=-1)


def token_major(words: npt.NDArray[np.uint32], block_size: int) -> npt.NDArray[np.uint32]:
    """Undoes `planar`: words [..., BS * (D/4+1)] as [..., BS, D/4+1]."""
    codes, scales = words[..., :-block_size], words[..., -block_size:]
    rows = codes.reshape(*codes.shape[:-1], block_size, codes.shape[-1] // block_size)
    return np.concatenate([rows, scales[..., None]], axis=-1)


def write_tokens(cache: npt.NDArray[np.uint32], vectors: Array, slots: Array) -> None:
    """Quantise vectors [T, Hkv, D] into the cache [NB, Hkv, BS, D/4+1], in place.

    Token t goes to slot `slots[t]` = block * BS + offset; slot 0xFFFFFFFF is padding and skipped.
    Words of other slots keep their bits. Of tokens with one slot, which is left is undefined.

    Raises:
        UsageError: a slot past the pool's end, or vectors that cannot be quantised.
    """
    blocks, _, block_size, _ = cache.shape
    slots = np.asarray(slots, np.int64)
    written = slots != PADDING_SLOT
    if (slots[written] >= blocks * block_size).any():
        raise UsageError(
            f"slot {slots[written].max()} is past the pool of {blocks} blocks of {block_size} "
            f"tokens: use slots below {blocks * block_size}, or {PADDING_SLOT:#x} for padding"
        )
    block, offset = np.divmod(slots[written], block_size)
    cache[block, :, offset] = pack_cache(*quantise_token_vectors(vectors[written]))


def _refuse_unquantisable(peak: Array) -> None:
    if not np.isfinite(peak).all():
        raise UsageError(
            "cannot quantise vectors with infinite or NaN elements: int8 codes have no value "
            "for them; replace them first"
        )
    tiny = peak[(peak > 0) & (peak < SMALLEST_PEAK)]
    if tiny.size:
        raise UsageError(
            f"cannot quantise a vector with largest magnitude {tiny.min():.3g}: 127 divided by it "
            f"overflows float32 below {SMALLEST_PEAK:.3g}; scale it up or flush it to zero"
        )


# ------------------------------------------------------------------ groups of 32, planar

PLANE_BYTES = 16384
"""Both planes of a planar cache end at multiples of this."""


def planar_layout(tokens: int, row: int) -> tuple[int, int]:
    """Where the scale plane begins and how large the buffer is, in bytes, for one side.

    Codes int8 [tokens, row] from byte 0; scales float16 [tokens, row/32] after them. What is
    between the planes and after the second belongs to nothing.
    """
    scale_offset = -(-tokens * row // PLANE_BYTES) * PLANE_BYTES
    scale_bytes = tokens * (row // GROUP_CODES) * 2
    return scale_offset, scale_offset + -(-scale_bytes // PLANE_BYTES) * PLANE_BYTES


def quantise_groups(x: Array) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """Quantise groups of 32 along the last axis: x [..., row] to codes int8 [..., row] and scales
    float16 [..., row/32].

    float32 throughout, as a device does it: with a = max|x| of a group and d = a/127, the codes are
    x/d rounded half to even, from the d that is not yet rounded to float16. A zero group has codes
    0 and scale 0; scales from 65,520 on become infinite, and those up to 2^-25 zero.

    Raises:
        UsageError: a number that is not finite.
    """
    grouped = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, GROUP_CODES)
    peak = np.abs(grouped).max(axis=-1)
    if not np.isfinite(peak).all():
        raise UsageError(
            "cannot quantise groups with infinite or NaN elements: int8 codes have no value for "
            "them; replace them first"
        )
    scales = peak / np.float32(CODE_MAX)
    divisor = np.where(scales > 0, scales, np.float32(1))[..., None]
    quotients = np.where(scales[..., None] > 0, grouped / divisor, np.float32(0))
    codes = np.clip(np.rint(quotients), -CODE_MAX, CODE_MAX).astype(np.int8)
    with np.errstate(over="ignore"):
        return codes.reshape(x.shape), scales.astype(np.float16)


def append_rows(
    buffer: npt.NDArray[np.uint32], rows: Array, *, first: int, scale_offset: int
) -> None:
    """Quantise rows [n, row] into one side of a planar cache, at tokens `first` on, in place.

    Everything else in the buffer keeps its bits.
    """
    count, row = rows.shape
    codes, scales = quantise_groups(rows)
    code_bytes, scale_halves = buffer.view(np.int8), buffer.view(np.float16)
    code_bytes[first * row : (first + count) * row] = codes.ravel()
    groups = row // GROUP_CODES
    start = scale_offset // 2 + first * groups
    scale_halves[start : start + count * groups] = scales.ravel()
