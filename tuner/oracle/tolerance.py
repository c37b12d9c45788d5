"""How far a correct kernel may be off: bounds for each arithmetic class, derived and not guessed.

The derivation is in docs/tolerances.md; symbols here are the same. In short, for one query head
with logits z_t, weights p_t, values v_t and output o, an error d_t of the logits moves the output
by sum p_t d_t (v_t - o) to first order. Roundings that are independent of each other add up as
variances and count `DEVIATIONS` standard deviations; what may be systematic (the exponential,
weights that all round alike, weights that vanish) counts in full.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tuner.oracle.attention import EPSILON, LOWEST, HeadGroups

if TYPE_CHECKING:
    from tuner.kernels.base import ArithmeticClass

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

U32 = 2.0**-24
"""Unit roundoff of float32: the largest relative error of one operation."""
U16 = 2.0**-11
"""Unit roundoff of float16."""
SMALLEST_F16 = 2.0**-14
"""Smallest normal float16: below it a device may flush to zero."""
TINY = 2.0**-126
"""Smallest normal float32: likewise."""
ROUNDING_VARIANCE = 1 / 3
"""Mean square of an error that is uniform between -1 and 1 units."""
DEVIATIONS = 6.0
"""Standard deviations a sum of independent errors may reach (two in 10^9 exceed it)."""
SHORT_SUM = 32
"""Terms that the f16 class adds up in float16 before it goes on in float32."""
EXP_ROUNDINGS = 48.0
"""Units of 3 ulp (6 units each) for the exponential of a weight and 7 rescalings of it."""
EXP_SLOPE = 8.0
"""Units per nat below the maximum: 2 ulp in the exponential, 4 units in the scaled logit."""
OUTPUT_ROUNDINGS = 16.0
"""Units for the division (2.5 ulp), the value scale, the merge's factors and the store."""
LOGIT_ROUNDINGS = 4.0
"""Multiplications and subtractions after the dot product, each of one unit of the logit."""
SMALLEST_SUM = 1e-10
"""Where a log-sum-exp is wanted, the sum of weights of an empty context counts as this."""
LOG_ERROR = 2.0**-21
"""What Vulkan allows a logarithm to be off by where its argument is from 0.5 to 2."""
LOG_ROUNDINGS = 8.0
"""Units of maximum, log-sum-exp and 1 for the logarithm (3 ulp), its factor, the sum, the store."""
CAP_ROUNDINGS = 16.0
"""Units of the cap itself that a capped logit may be off by: tanh is 1 - 2 / (exp(2 x) + 1)."""
MOST_NATS = 1e4
"""What is farther below the maximum has no weight in any arithmetic."""
DIRECTIONS = 32
DIRECTION_SEED = 20_260_103
TOKEN_CHUNK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Where an arithmetic class rounds more coarsely than float32 (0: nowhere).

    `query_unit`: relative rounding of a query value; `query_step`: its spacing as a share of the
    head's largest |q|; `logit_unit` and `value_unit`: products and sums of at most `SHORT_SUM`
    terms in QK and in PV; `weight_unit`: softmax weights, relative to a maximum near them;
    `element_unit`: each element of a value; `sum_unit`: the long sums.
    """

    query_unit: float = 0.0
    query_step: float = 0.0
    logit_unit: float = 0.0
    weight_unit: float = 0.0
    element_unit: float = 0.0
    value_unit: float = 0.0
    sum_unit: float = U32


ROUNDINGS: dict[ArithmeticClass, Rounding] = {
    "f32": Rounding(),
    "f16": Rounding(query_unit=U16, logit_unit=U16, weight_unit=U16, value_unit=U16),
    "f16_matrix": Rounding(query_unit=U16, weight_unit=U16, sum_unit=2 * U32),
    "f16_matrix_scaled": Rounding(
        query_unit=U16, weight_unit=U16, element_unit=U16, sum_unit=2 * U32
    ),
    "int8_matrix": Rounding(query_step=1 / (127 * 254), weight_unit=U16, sum_unit=2 * U32),
    "int8_one_term": Rounding(query_step=1 / 127),
    "int8_two_terms": Rounding(query_step=1 / (127 * 254)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    """What the bounds need of N x G heads over L tokens, in float32: a bound need not be exact."""

    query: Array  # [N, G, D]
    keys: Array  # [N, L, D], softmax scale included
    values: Array  # [N, L, D]
    value_scales: Array  # [N, 1, L]
    value_scale_peaks: Array  # [N, 1, L]
    dots: Array  # [N, G, L], logits before cap and bias
    z: Array  # [N, G, L]
    peak: Array  # [N, G], the largest logit, of a sink too
    gain: Array  # [N, G, L], how much of an error the soft cap lets through
    p: Array  # [N, G, L]
    o: Array  # [N, G, D]
    value_norm: Array  # [N, 1, L]
    distance: Array  # [N, G, L], |v_t - o|
    o_norm: Array  # [N, G]
    bias: Array  # [N, G, L], its size
    cap: float
    sink_share: Array  # [N, G], of the sum of weights
    sink: Array  # [N, G], its logit


def error_bounds(arithmetic: ArithmeticClass, groups: HeadGroups) -> Floats:
    """Largest 2-norm [N, G] that the error of each head's output may have in a correct kernel."""
    return output_bounds(ROUNDINGS[arithmetic], groups)


def output_bounds(rounding: Rounding, groups: HeadGroups) -> Floats:
    """`error_bounds` of an arithmetic that is given by its roundings."""
    if not groups.key_codes.shape[1]:
        return np.zeros(groups.query.shape[:2])
    heads = _heads(groups)
    logit_variance, query_variance = _logit_variances(rounding, heads)
    independent = (heads.p**2 * logit_variance * heads.distance**2).sum(axis=-1)
    spread = (heads.p * (logit_variance + query_variance)).sum(axis=-1)
    moved = np.sqrt(independent + _query_response(rounding, heads))
    result: Floats = (
        DEVIATIONS * moved * _growth(DEVIATIONS * np.sqrt(spread))
        + DEVIATIONS * np.sqrt(_value_variance(rounding, heads))
        + _systematic(rounding, heads)
    )
    return result


def log_sum_bounds(rounding: Rounding, groups: HeadGroups) -> Floats:
    """Largest error [N, G] of the natural log-sum-exp of each head in a correct kernel."""
    if not groups.key_codes.shape[1]:
        return np.full(groups.query.shape[:2], LOG_ROUNDINGS * U32 * (1 - np.log(SMALLEST_SUM)))
    heads = _heads(groups)
    peak = heads.z.max(axis=-1)
    own, query = _logit_variances(rounding, heads)
    weights = (heads.p**2).sum(axis=-1)
    variance = (heads.p**2 * own).sum(axis=-1)
    variance += rounding.sum_unit**2 * sum_variance(heads.p.shape[-1], weights, np.ones(()))
    below = peak[..., None] - heads.z
    exponential = (heads.p * U32 * (EXP_ROUNDINGS + EXP_SLOPE * below)).sum(axis=-1)
    # One error of a rounded query moves all tokens: its shares add up linearly.
    shared = DEVIATIONS * (heads.p * np.sqrt(query)).sum(axis=-1)
    total = peak - np.log(heads.p.max(axis=-1))
    last = LOG_ERROR + LOG_ROUNDINGS * U32 * (np.abs(peak) + np.abs(total) + 1)
    return np.asarray(DEVIATIONS * np.sqrt(variance) + exponential + shared + last)


def _heads(groups: HeadGroups) -> _Heads:
    query = groups.query.astype(np.float32)
    keys = groups.key_codes.astype(np.float32)
    keys *= (groups.softmax_scale * groups.key_scales)[..., None].astype(np.float32)
    values = groups.value_codes.astype(np.float32)
    values *= groups.value_scales[..., None].astype(np.float32)
    dots = query @ keys.swapaxes(-1, -2)
    z, gain, bias = _logits(groups, dots)
    sink = np.full(z.shape[:2], LOWEST) if groups.sinks is None else groups.sinks
    sink = sink.astype(np.float32)
    peak = np.maximum(z.max(axis=-1), sink)
    p = np.exp(z - peak[..., None])
    sink_share = np.exp(sink - peak)
    total = p.sum(axis=-1) + sink_share
    p /= total[..., None]
    o = p @ values
    square = np.einsum("nld,nld->nl", values, values)[:, None, :]
    o_square = np.einsum("ngd,ngd->ng", o, o)
    peaks = groups.value_scales if groups.value_scale_peaks is None else groups.value_scale_peaks
    distance = square - 2 * (o @ values.swapaxes(-1, -2)) + o_square[..., None]
    return _Heads(
        query=query,
        keys=keys,
        values=values,
        value_scales=groups.value_scales[:, None, :].astype(np.float32),
        value_scale_peaks=peaks[:, None, :].astype(np.float32),
        dots=dots,
        z=z,
        peak=peak,
        gain=gain,
        p=p,
        o=o,
        value_norm=np.sqrt(square),
        distance=np.sqrt(np.maximum(distance, 0)),
        o_norm=np.sqrt(o_square),
        bias=np.abs(bias),
        cap=groups.softcap,
        sink_share=sink_share / total,
        sink=sink,
    )


def _logits(groups: HeadGroups, dots: Array) -> tuple[Array, Array, Array]:
    """Logits, what the cap lets through of an error (both [N, G, L]), and the bias in them."""
    z, gain, bias = dots, np.ones_like(dots), np.zeros((1, 1, 1), np.float32)
    if groups.softcap:
        share = np.tanh(z / np.float32(groups.softcap))
        z, gain = np.float32(groups.softcap) * share, 1 - share**2
    if groups.biases is not None:
        bias = groups.biases.astype(np.float32)
        z = z + bias
    return z, gain, bias


def sum_variance(terms: float | Array, scatter: Array, total: Array) -> Array:
    """Variance, in square units, of adding `terms` products one after the other.

    `scatter` is the sum of the squared products, `total` their sum: partial sums wander with the
    first and drift with the second, and each rounds by a unit of itself.
    """
    result: Array = ROUNDING_VARIANCE * ((terms / 2 + 1) * scatter + terms / 3 * total**2)
    return result


def _query_sizes(rounding: Rounding, heads: _Heads) -> Array:
    """Standard deviation [N, G, D] of the rounding of each query value."""
    size = np.abs(heads.query)
    largest = size.max(axis=-1, keepdims=True)
    relative = rounding.query_unit * np.sqrt(ROUNDING_VARIANCE) * size
    if rounding.query_unit:
        relative = np.where(size < SMALLEST_F16 * largest, size, relative)
    step: Array = rounding.query_step / 2 * np.sqrt(ROUNDING_VARIANCE) * largest
    return np.asarray(relative + step)


def _logit_variances(rounding: Rounding, heads: _Heads) -> tuple[Array, Array]:
    """Variances [N, G, L] of each logit: its own roundings, and those of the query."""
    squares = (heads.keys**2).swapaxes(-1, -2)
    scatter = heads.query**2 @ squares
    head_size = heads.keys.shape[-1]
    own = rounding.sum_unit**2 * sum_variance(head_size, scatter, heads.dots)
    own += rounding.logit_unit**2 * sum_variance(SHORT_SUM, scatter, heads.dots)
    own *= heads.gain**2
    own += U32**2 * LOGIT_ROUNDINGS * ROUNDING_VARIANCE * (heads.z**2 + heads.bias**2)
    query = (_query_sizes(rounding, heads) ** 2 @ squares) * heads.gain**2
    return own, query


def _query_response(rounding: Rounding, heads: _Heads) -> Array:
    """Mean square [N, G] of the output's answer to a rounded query.

    All tokens see the same rounding e of the query, so their errors are not independent: the output
    moves by C e with C = sum p_t (v_t - o) k_t', and the mean square is that of C's columns. These
    are measured along a few random directions of the output.
    """
    answer = np.zeros(heads.o_norm.shape)
    if not (rounding.query_unit or rounding.query_step):
        return answer
    head_size = heads.o.shape[-1]
    sizes = _query_sizes(rounding, heads)
    directions = _directions(head_size, min(head_size, DIRECTIONS))
    values, o = heads.values @ directions, heads.o @ directions
    for n, (p, keys) in enumerate(zip(heads.p * heads.gain, heads.keys, strict=True)):
        columns = -o[n][..., None] * (p @ keys)[:, None, :]
        for first in range(0, len(keys), TOKEN_CHUNK):
            part = slice(first, first + TOKEN_CHUNK)
            weighted = p[:, None, part] * values[n, part].T
            rows = weighted.reshape(-1, weighted.shape[-1]) @ keys[part]
            columns += rows.reshape(columns.shape)
        answer[n] = ((columns * sizes[n][:, None, :]) ** 2).sum(axis=(-1, -2))
    return answer


@functools.lru_cache(maxsize=16)
def _directions(head_size: int, count: int) -> Array:
    """Orthogonal directions [D, count] whose squared norms are those of the whole on average."""
    normal = np.random.default_rng(DIRECTION_SEED).standard_normal((head_size, count))
    return np.asarray(np.linalg.qr(normal)[0] * np.sqrt(head_size / count), np.float32)


def _value_variance(rounding: Rounding, heads: _Heads) -> Array:
    """Variance [N, G] of the output from rounded weights, products and sums over tokens."""
    tokens = heads.p.shape[-1]
    scatter = (heads.p**2 * heads.value_norm**2).sum(axis=-1)
    # The sum of weights rounds like the output's drift, hence its share twice.
    variance = rounding.sum_unit**2 * sum_variance(tokens, scatter, np.sqrt(2) * heads.o_norm)
    rounded = rounding.weight_unit**2 + rounding.element_unit**2
    variance += rounded * ROUNDING_VARIANCE * scatter
    concentration = np.minimum(1, SHORT_SUM * (heads.p**2).sum(axis=-1))
    drift = heads.o_norm * np.sqrt(concentration)
    variance += rounding.value_unit**2 * sum_variance(SHORT_SUM, scatter, drift)
    return np.asarray(variance)


def _systematic(rounding: Rounding, heads: _Heads) -> Array:
    """The part [N, G] that may have one sign in all tokens, in full.

    `EPSILON` is in it because a kernel may add it beside another maximum than the true one.
    """
    below = heads.peak[..., None] - heads.z
    exponential = U32 * (EXP_ROUNDINGS + EXP_SLOPE * below)
    exponential += U32 * CAP_ROUNDINGS * heads.cap
    error = (heads.p * exponential * heads.distance).sum(axis=-1)
    sink = U32 * (EXP_ROUNDINGS + EXP_SLOPE * np.minimum(heads.peak - heads.sink, MOST_NATS))
    error += heads.sink_share * sink * heads.o_norm
    error += (OUTPUT_ROUNDINGS * U32 + EPSILON + rounding.weight_unit) * heads.o_norm
    if rounding.weight_unit:
        error += _vanished(heads)
    return np.asarray(error)


def _vanished(heads: _Heads) -> Array:
    """What the output [N, G] loses if weights too small for a normal float16 become zero.

    Which of them do depends on the maximum they are taken relative to, in the worst case the
    largest weight of all, with or without the value's scale.
    """
    largest = (heads.p * heads.value_scale_peaks).max(axis=-1, keepdims=True)
    scaled = heads.p * heads.value_scales
    share = np.minimum(
        heads.p / heads.p.max(axis=-1, keepdims=True),
        np.divide(scaled, largest, out=np.zeros_like(scaled), where=largest > 0),
    )
    weights = np.where(share < SMALLEST_F16, heads.p, 0)
    all_of_them = np.linalg.norm(weights @ heads.values, axis=-1)
    some = DEVIATIONS * np.sqrt((weights**2 * heads.value_norm**2).sum(axis=-1))
    return np.asarray(np.minimum(all_of_them + some, (weights * heads.value_norm).sum(axis=-1)))


def quantisation_bounds(groups: HeadGroups, key_peaks: Array, value_peaks: Array) -> Floats:
    """Largest 2-norm [N, G] of what int8 codes do to each head's output.

    `groups` are the quantised heads, the peaks [N, L] the largest magnitude of each vector before
    quantisation. An element is then off by at most peak / 254, evenly spread and independent.
    """
    if not groups.key_codes.shape[1]:
        return np.zeros(groups.query.shape[:2])
    heads, head_size = _heads(groups), groups.query.shape[-1]
    key_variance = ROUNDING_VARIANCE * (groups.softmax_scale * key_peaks / 254) ** 2
    logit_variance = (heads.query**2).sum(axis=-1)[..., None] * key_variance[:, None, :]
    moved = np.sqrt((heads.p**2 * logit_variance * heads.distance**2).sum(axis=-1))
    spread = np.sqrt((heads.p * logit_variance).sum(axis=-1))
    value_variance = ROUNDING_VARIANCE * head_size * (value_peaks[:, None, :] / 254) ** 2
    mixed = np.sqrt((heads.p**2 * value_variance).sum(axis=-1))
    return np.asarray(DEVIATIONS * (moved * _growth(DEVIATIONS * spread) + mixed))


def _growth(deviation: Array) -> Array:
    """What the first order leaves out: (exp(x) - 1) / x for logits that are x off."""
    safe = np.maximum(deviation, 1e-12)
    return np.asarray(np.expm1(np.minimum(safe, 700.0)) / safe)
