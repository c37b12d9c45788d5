"""The oracles of the cache writers: copies bit for bit, codes as IEEE float32 has them.

Codes and scale words are compared as the integers that they are. Where the exact quotient lies so
near to a half that a division within 2.5 ulp may cross it, a device's code may be off by one, and
its scale by 3 ulp; what is not written must keep its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tuner.oracle.rounding import codes_near_boundaries
from tuner.quant import PADDING_SLOT, quantise_token_vectors, unpack_codes

if TYPE_CHECKING:
    from tuner.kernels.base import ArithmeticClass, Operands, Reference

Array = npt.NDArray[Any]

SIDES = ("key", "value")
SCALE_ULP = 3.0
SAMPLED_TOKENS = 64
SAMPLE_SEED = 20_260_105


def q8_write_reference(operands: Operands) -> Reference:
    """Per side: `…_codes` [n * Hkv * D, 1] and `…_scales` [n * Hkv, 1] of the n tokens that are
    written, `…_rest` [NB * Hkv * BS, D/4+1]."""
    return _q8_reference(operands, _written(operands), rest=True)


def sampled_q8_write_reference(operands: Operands, count: int) -> Reference:
    """Codes and scales of a few tokens of a large launch."""
    return _q8_reference(operands, _sampled(operands, count), rest=False)


def f32_write_reference(operands: Operands) -> Reference:
    """Per side `…_bits`: the whole cache, in rows of its last axis."""
    tokens = _written(operands)
    block, offset = _places(operands, tokens)
    wanted = {}
    for side in SIDES:
        cache = _bits(operands.inputs[f"{side}_cache"]).copy()
        # Of [n, Hkv, D/x, x] and [n, Hkv, D]: the block and the token of it come first.
        cells = cache[block, :, :, offset]
        cache[block, :, :, offset] = _bits(_vectors(operands, side, tokens)).reshape(cells.shape)
        wanted[f"{side}_bits"] = _rows(cache)

    def seen(outputs: Mapping[str, Array]) -> dict[str, Array]:
        return {f"{side}_bits": _rows(_bits(outputs[f"{side}_cache"])) for side in SIDES}

    return _exact(wanted, seen)


def sampled_f32_write_reference(operands: Operands, count: int) -> Reference:
    """Per side `…_bits` [n * Hkv, D] of a few tokens of a large launch."""
    tokens = _sampled(operands, count)
    block, offset = _places(operands, tokens)
    wanted = {f"{side}_bits": _rows(_bits(_vectors(operands, side, tokens))) for side in SIDES}

    def seen(outputs: Mapping[str, Array]) -> dict[str, Array]:
        return {
            name: _bits(outputs[f"{side}_cache"])[block, :, :, offset].reshape(wanted[name].shape)
            for side, name in zip(SIDES, wanted, strict=True)
        }

    return _exact(wanted, seen)


def _exact(
    wanted: Mapping[str, Array], seen: Callable[[Mapping[str, Array]], Mapping[str, Array]]
) -> Reference:
    # tuner.kernels imports this module for its families, so its types are known only later.
    from tuner.kernels.base import Reference

    bounds: dict[str, Array] = {n: np.zeros(array.shape[:-1]) for n, array in wanted.items()}
    return Reference(
        outputs={name: array.astype(np.float64) for name, array in wanted.items()},
        bounds=lambda _arithmetic: bounds,
        seen=seen,
    )


def _q8_reference(operands: Operands, tokens: Array, *, rest: bool) -> Reference:
    # As in `_exact`.
    from tuner.kernels.base import Reference

    block, offset = _places(operands, tokens)

    def seen(outputs: Mapping[str, Array]) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for side in SIDES:
            cache = outputs[f"{side}_cache"]
            words = cache[block, :, offset]
            found[f"{side}_codes"] = unpack_codes(words[..., :-1]).reshape(-1, 1)
            found[f"{side}_scales"] = words[..., -1].reshape(-1, 1)
            if rest:
                others = cache.copy()
                others[block, :, offset] = 0
                found[f"{side}_rest"] = _rows(others)
        return found

    wanted = seen({name: operands.inputs[name] for name in operands.outputs})
    bounds: dict[str, Array] = {}
    for side in SIDES:
        vectors = _vectors(operands, side, tokens)
        codes, scales = quantise_token_vectors(vectors)
        wanted[f"{side}_codes"] = codes.reshape(-1, 1)
        wanted[f"{side}_scales"] = scales.view(np.uint32).reshape(-1, 1)
        near = codes_near_boundaries(vectors)
        bounds[f"{side}_codes"] = near.reshape(-1, 1).astype(np.float64)
        bounds[f"{side}_scales"] = np.full((scales.size, 1), SCALE_ULP)
        if rest:
            bounds[f"{side}_rest"] = np.zeros((len(wanted[f"{side}_rest"]), 1))

    def bounds_of(_arithmetic: ArithmeticClass) -> dict[str, Array]:
        return bounds

    return Reference(
        outputs={name: array.astype(np.float64) for name, array in wanted.items()},
        bounds=bounds_of,
        seen=seen,
        zero_may_differ=frozenset(f"{side}_codes" for side in SIDES),
    )


def _written(operands: Operands) -> Array:
    """The tokens that are not padding."""
    return np.flatnonzero(operands.inputs["slots"] != PADDING_SLOT)


def _sampled(operands: Operands, count: int) -> Array:
    """The first token and the last that are written, and others at random (always the same)."""
    tokens = _written(operands)
    rng = np.random.default_rng(SAMPLE_SEED)
    drawn = rng.choice(tokens, min(len(tokens), max(count, SAMPLED_TOKENS)), replace=False)
    return np.unique(np.concatenate([tokens[:1], tokens[-1:], drawn]))


def _places(operands: Operands, tokens: Array) -> tuple[Array, Array]:
    """Block and place in the block of each token [n]."""
    block_size = _block_size(operands)
    slots = operands.inputs["slots"][tokens].astype(np.int64)
    return slots // block_size, slots % block_size


def _block_size(operands: Operands) -> int:
    cache = operands.inputs["value_cache"]
    return int(cache.shape[2] if cache.dtype == np.uint32 else cache.shape[3])


def _vectors(operands: Operands, side: str, tokens: Array) -> Array:
    """What the tokens [n] bring, [n, Hkv, D] of one side."""
    cache = operands.inputs["value_cache"]
    heads = cache.shape[1]
    dims = 4 * (cache.shape[3] - 1) if cache.dtype == np.uint32 else cache.shape[2]
    rows = operands.inputs[side][tokens, : heads * dims]
    return rows.reshape(len(tokens), heads, dims)


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.uint32)


def _rows(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1])
