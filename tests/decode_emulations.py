"""Paged decode as a device computes it, rounding for rounding, in NumPy; and kernels gone wrong.

Each emulation takes the heads of `tuner.oracle.attention.HeadGroups` and returns outputs [N, G, D]
as float32. They are slow and sequential on purpose: partial sums round as in a kernel's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.kernels.base import ArithmeticClass, Operands
from tuner.oracle.attention import HeadGroups
from tuner.oracle.paged_decode import head_groups

Array = npt.NDArray[Any]
F16, F32 = np.float16, np.float32


def chained_sum(products: Array, axis: int, dtype: type[np.floating[Any]]) -> Array:
    """Sum along an axis, one term after the other, each partial sum rounded to `dtype`."""
    terms = np.moveaxis(products, axis, 0)
    total = np.zeros(terms.shape[1:], dtype)
    for term in terms:
        total = (total + term.astype(dtype)).astype(dtype)
    return total


def chunks(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `count`."""
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


def _dots_f32(query: Array, codes: Array) -> Array:
    products = query.astype(F32)[..., None, :] * codes.astype(F32)[:, None]
    return chained_sum(products, -1, F32)


def _dots_f16(query: Array, codes: Array) -> Array:
    peak = np.abs(query).max(axis=-1, keepdims=True).astype(F32)
    unit = np.where(peak > 0, peak, F32(1))
    small = (query.astype(F32) / unit).astype(F16)
    total = np.zeros((*query.shape[:2], codes.shape[1]), F32)
    for part in chunks(query.shape[-1], 32):
        products = small[..., None, part] * codes.astype(F16)[:, None, :, part]
        total += chained_sum(products, -1, F16).astype(F32)
    return np.asarray(total * unit)


def _dots_f16_matrix(query: Array, codes: Array) -> Array:
    return _dots_f32(query.astype(F16), codes)


def _dots_int8(query: Array, codes: Array, terms: int) -> Array:
    step = np.abs(query).max(axis=-1, keepdims=True).astype(F32) / F32(127)
    rest, dots = query.astype(F32), np.zeros((*query.shape[:2], codes.shape[1]), F32)
    for _ in range(terms):
        unit = np.where(step > 0, step, F32(1))
        quantised = np.rint(rest / unit).clip(-127, 127).astype(np.int64)
        whole = quantised @ codes.astype(np.int64).swapaxes(-1, -2)
        dots += whole.astype(F32) * step
        rest = rest - quantised.astype(F32) * unit
        step = step / F32(254)
    return dots


def _weights(heads: HeadGroups, dots: Array) -> tuple[Array, Array]:
    z = dots * (F32(heads.softmax_scale) * heads.key_scales.astype(F32))[:, None, :]
    weights = np.exp(z - z.max(axis=-1, keepdims=True))
    return weights, chained_sum(weights, -1, F32)


def _normalised(mixture: Array, total: Array) -> Array:
    return np.asarray(mixture / (total + F32(1e-6))[..., None])


def _mix_f32(heads: HeadGroups, weights: Array, total: Array) -> Array:
    scaled = weights * heads.value_scales.astype(F32)[:, None, :]
    products = scaled[..., None] * heads.value_codes.astype(F32)[:, None]
    return _normalised(chained_sum(products, -2, F32), total)


def _mix_f16(heads: HeadGroups, weights: Array, total: Array) -> Array:
    scaled = weights * heads.value_scales.astype(F32)[:, None, :]
    mixture = np.zeros(heads.query.shape, F32)
    for part in chunks(weights.shape[-1], 32):
        peak = scaled[..., part].max(axis=-1, keepdims=True)
        unit = np.where(peak > 0, peak, F32(1))
        small = (scaled[..., part] / unit).astype(F16)
        products = small[..., None] * heads.value_codes.astype(F16)[:, None, part]
        mixture += chained_sum(products, -2, F16).astype(F32) * peak
    return _normalised(mixture, total)


def _mix_f16_matrix(heads: HeadGroups, weights: Array, total: Array) -> Array:
    scaled = weights * heads.value_scales.astype(F32)[:, None, :]
    return _mixed_by_matrix(heads, scaled, heads.value_codes.astype(F32), total)


def _mix_f16_matrix_scaled(heads: HeadGroups, weights: Array, total: Array) -> Array:
    octaves = np.exp2(np.floor(np.log2(np.maximum(heads.value_scales, 2.0**-24)))).astype(F32)
    ratios = (heads.value_scales / octaves).astype(F16)
    values = (heads.value_codes.astype(F16) * ratios[..., None]).astype(F32)
    return _mixed_by_matrix(heads, weights * octaves[:, None, :], values, total)


def _mixed_by_matrix(heads: HeadGroups, scaled: Array, values: Array, total: Array) -> Array:
    mixture = np.zeros(heads.query.shape, F32)
    for part in chunks(scaled.shape[-1], 16):
        peak = scaled[..., part].max(axis=-1, keepdims=True)
        unit = np.where(peak > 0, peak, F32(1))
        small = (scaled[..., part] / unit).astype(F16).astype(F32)
        products = small[..., None] * values[:, None, part]
        mixture += chained_sum(products, -2, F32) * peak
    return _normalised(mixture, total)


_Dots = Callable[[Array, Array], Array]
_Mix = Callable[[HeadGroups, Array, Array], Array]

CLASSES: dict[ArithmeticClass, tuple[_Dots, _Mix]] = {
    "f32": (_dots_f32, _mix_f32),
    "f16": (_dots_f16, _mix_f16),
    "f16_matrix": (_dots_f16_matrix, _mix_f16_matrix),
    "f16_matrix_scaled": (_dots_f16_matrix, _mix_f16_matrix_scaled),
    "int8_matrix": (lambda q, codes: _dots_int8(q, codes, 2), _mix_f16_matrix),
    "int8_one_term": (lambda q, codes: _dots_int8(q, codes, 1), _mix_f32),
    "int8_two_terms": (lambda q, codes: _dots_int8(q, codes, 2), _mix_f32),
}


def emulate(operands: Operands, arithmetic: ArithmeticClass) -> Array:
    """The output [S, H, D] of a correct kernel of an arithmetic class."""
    dots, mix = CLASSES[arithmetic]
    shape = operands.outputs["out"][0]
    out = np.zeros(shape, F32)
    every_head = np.arange(int(operands.scalars["num_kv_heads"]))
    for sequence in range(shape[0]):
        heads = head_groups(operands, sequence, every_head)
        if heads.key_codes.shape[1]:
            weights, total = _weights(heads, dots(heads.query, heads.key_codes))
            out[sequence] = mix(heads, weights, total).reshape(shape[1:])
    return out


# Kernels gone wrong: what they would have been right about


def _with(operands: Operands, **inputs: Array) -> Operands:
    return replace(operands, inputs=operands.inputs | inputs)


def skipped_partial_block(operands: Operands) -> Operands:
    """The last block of a context is skipped if it is not full."""
    lengths, block = operands.inputs["context_lens"], operands.inputs["key_cache"].shape[2]
    return _with(operands, context_lens=lengths - lengths % block)


def one_token_short(operands: Operands) -> Operands:
    """The newest token is not seen."""
    lengths = operands.inputs["context_lens"]
    return _with(operands, context_lens=lengths - (lengths > 0))


def first_token_missing(operands: Operands) -> Operands:
    """Tokens count from 1: the first is lost, by an infinitely small weight."""
    keys = operands.inputs["key_cache"].copy()
    values = operands.inputs["value_cache"].copy()
    first = operands.inputs["block_table"][operands.inputs["context_lens"] > 0, 0]
    keys[first, :, 0, -1] = values[first, :, 0, -1] = 0
    return _with(operands, key_cache=keys, value_cache=values)


def _neighbours_scale(operands: Operands, cache: str) -> Operands:
    words = operands.inputs[cache].copy()
    words[:, :, 1:, -1] = operands.inputs[cache][:, :, :-1, -1]
    return _with(operands, **{cache: words})


def neighbours_key_scale(operands: Operands) -> Operands:
    """A key is scaled with the scale of the token before it in its block."""
    return _neighbours_scale(operands, "key_cache")


def neighbours_value_scale(operands: Operands) -> Operands:
    """A value is scaled with the scale of the token before it in its block."""
    return _neighbours_scale(operands, "value_cache")


def wrong_kv_head(operands: Operands) -> Operands:
    """Every query head reads the KV head after its own."""
    caches = ("key_cache", "value_cache")
    return _with(operands, **{c: np.roll(operands.inputs[c], -1, axis=1) for c in caches})


def interleaved_kv_heads(operands: Operands) -> Operands:
    """Query head h reads KV head h % Hkv instead of h // (H / Hkv), as if heads alternated."""
    kv_heads = int(operands.scalars["num_kv_heads"])
    _, heads, head_size = operands.outputs["out"][0]
    order = np.arange(heads).reshape(-1, kv_heads).T.ravel()
    query = operands.inputs["query"].copy()
    rows = query[:, : heads * head_size].reshape(-1, heads, head_size)
    query[:, : heads * head_size] = rows[:, order].reshape(len(query), -1)
    return _with(operands, query=query)


def lost_split(operands: Operands) -> Operands:
    """Of every context the second quarter, in whole blocks, is lost in the combine."""
    block = operands.inputs["key_cache"].shape[2]
    lengths = operands.inputs["context_lens"].astype(np.int64)
    table = operands.inputs["block_table"].copy()
    shorter = lengths.copy()
    for sequence, row in enumerate(operands.inputs["block_table"]):
        part = int(lengths[sequence]) // block // 4
        table[sequence, part : len(row) - part] = row[2 * part :]
        shorter[sequence] -= part * block
    return _with(operands, block_table=table, context_lens=shorter.astype(np.uint32))
