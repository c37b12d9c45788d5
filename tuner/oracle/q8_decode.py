"""The oracle of decode over the planar q8 cache: partial results in base 2, their join, the gate.

Operands are those of `tuner.kernels.q8_operands`. Only tokens that a row sees are read, so poison
elsewhere has no way in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tuner.oracle.attention import HeadGroups, attend
from tuner.oracle.tolerance import ROUNDINGS, U32, error_bounds, log_sum_bounds
from tuner.planar import PlanarLayout, dequantise_groups
from tuner.problems import GROUP_CODES
from tuner.records import POISON_WORD

if TYPE_CHECKING:
    from tuner.kernels.base import ArithmeticClass, Operands, Reference

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

PART_TOKENS = 32
"""Tokens of a chunk; chunks are dealt out to the parts in turn."""
LN2 = float(np.log(2))
SAMPLE_SEED = 20_260_104
SAMPLED_TOKENS = 2**17
"""Tokens, over all sampled pairs of row and KV head, that the oracle goes through."""
EXP_UNITS = 10.0
"""Units of U32 in the exponential of a part's maximum: 3 ulp, a multiplication, two roundings."""
EXP_SLOPE_UNITS = 4.0
"""Units for each octave that the part's maximum lies below the common one."""
PART_UNITS = 3.0
"""Units for each part: an addition, and a quarter of a rescaling (an exponential, a product)."""
GATE_UNITS = 16.0
"""Units for exponential, addition, two divisions, the product and the store."""


def partials_reference(operands: Operands) -> Reference:
    """What all parts of each row and head join to: `attention` [N, D] and `log_sum` [N, 1].

    N counts rows times query heads; `log_sum` is m + log2(s). Parts that a kernel did not write are
    those that still hold poison.
    """
    rows, heads = operands.outputs["partials"][0][:2]
    kv_heads = int(operands.scalars["num_kv_heads"])
    pairs = [(row, head) for row in range(rows) for head in range(kv_heads)]
    assert heads % kv_heads == 0
    return _partials_reference(operands, pairs)


def sampled_partials_reference(operands: Operands, count: int) -> Reference:
    """The same for some pairs of a row and a KV head, for launches too large to redo."""
    rows = operands.outputs["partials"][0][0]
    kv_heads = int(operands.scalars["num_kv_heads"])
    rng = np.random.default_rng(SAMPLE_SEED)
    flat = [rows * kv_heads - 1, 0, *rng.permutation(rows * kv_heads).tolist()]
    pairs = [divmod(each, kv_heads) for each in dict.fromkeys(flat)][: max(1, count)]
    tokens = np.cumsum([int(operands.inputs["row_tokens"][row]) for row, _ in pairs])
    fitting = int(np.searchsorted(tokens, SAMPLED_TOKENS, side="right"))
    return _partials_reference(operands, pairs[: max(1, fitting)])


def partial_results(operands: Operands, row: int, parts: int) -> Floats:
    """The parts [H, parts, D+2] of one row: m (base 2), s, o; all of them must have tokens."""
    kv_heads = int(operands.scalars["num_kv_heads"])
    found = []
    for kv_head in range(kv_heads):
        groups = head_groups(operands, row, kv_head)
        chunk = np.arange(groups.key_codes.shape[1]) // PART_TOKENS
        each = [attend(_only(groups, chunk % parts == part)) for part in range(parts)]
        rows = [
            np.concatenate([p.peak[..., None] / LN2, p.weight[..., None], p.mixture], axis=-1)
            for p in each
        ]
        found.append(np.stack(rows, axis=-2)[0])
    return np.concatenate(found)


def head_groups(operands: Operands, row: int, kv_head: int) -> HeadGroups:
    """One KV head, the tokens that a row sees of it, and the query heads that share it."""
    inputs, scalars = operands.inputs, operands.scalars
    count = int(inputs["row_tokens"][row])
    tokens = np.arange(count)
    if "visible" in inputs:
        tokens = inputs["visible"][row, :count].astype(np.int64)
    heads, twice = inputs["query_gate"].shape[1:]
    group, head_size = heads // int(scalars["num_kv_heads"]), twice // 2
    first = kv_head * group
    query = inputs["query_gate"][row, first : first + group, :head_size].astype(np.float64)
    return planar_groups(
        query,
        (inputs["key_cache"], inputs["value_cache"]),
        PlanarLayout(int(scalars["capacity"]), int(scalars["num_kv_heads"]) * head_size),
        tokens,
        kv_head=kv_head,
        base2_scale=float(scalars["base2_scale"]),
    )


def planar_groups(
    query: Floats,
    caches: tuple[Array, Array],
    layout: PlanarLayout,
    tokens: Array,
    *,
    kv_head: int,
    base2_scale: float,
) -> HeadGroups:
    """Query heads [G, D] of a KV head over `tokens` of both sides of a planar cache."""
    head_size = query.shape[-1]
    dims = slice(kv_head * head_size, (kv_head + 1) * head_size)
    numbers, scales = [], []
    for words in caches:
        codes, all_scales = layout.planes(words)
        groups = slice(dims.start // GROUP_CODES, -(-dims.stop // GROUP_CODES))
        chosen = all_scales[tokens, groups]
        padded = np.zeros((len(tokens), GROUP_CODES * chosen.shape[1]), np.int8)
        first = GROUP_CODES * groups.start
        inside = slice(dims.start - first, dims.stop - first)
        padded[:, inside] = codes[tokens, dims]
        numbers.append(dequantise_groups(padded, chosen)[:, inside])
        scales.append(chosen.astype(np.float64))
    smallest = np.where(scales[1] > 0, scales[1], np.inf).min(axis=-1)
    smallest[np.isinf(smallest)] = 1.0
    return HeadGroups(
        query=query[None],
        key_codes=numbers[0][None],
        key_scales=np.ones((1, len(tokens))),
        value_codes=(numbers[1] / smallest[:, None])[None],
        value_scales=smallest[None],
        value_scale_peaks=np.maximum(scales[1].max(axis=-1), smallest)[None],
        softmax_scale=base2_scale * LN2,
    )


def attended(groups: HeadGroups) -> tuple[Floats, Floats]:
    """Output [G, D] and m + log2(s) [G] of one KV head's query heads; no epsilon enters."""
    whole = attend(groups)
    return (
        (whole.mixture / whole.weight[..., None])[0],
        (whole.peak / LN2 + np.log2(whole.weight))[0],
    )


def joined(partials: Array) -> tuple[Floats, Floats]:
    """Output [..., D] and m + log2(s) [...] of partial results [..., P, D+2].

    Parts that nobody wrote, whose m is still poison, count as nothing.
    """
    written = _written(partials)
    used = 1 + int(np.flatnonzero(written.any(axis=tuple(range(written.ndim - 1)))).max(initial=0))
    written, values = written[..., :used], partials[..., :used, :].astype(np.float64)
    peaks = np.where(written, values[..., 0], -np.inf)
    with np.errstate(all="ignore"):
        top = peaks.max(axis=-1, keepdims=True)
        factors = np.where(written, np.exp2(peaks - top), 0)
        weight = (factors * np.where(written, values[..., 1], 0)).sum(axis=-1)
        mixture = np.where(written[..., None], values[..., 2:], 0) * factors[..., None]
        return mixture.sum(axis=-2) / weight[..., None], top[..., 0] + np.log2(weight)


def _written(partials: Array) -> Array:
    """Which parts [..., P] somebody wrote."""
    peaks = np.ascontiguousarray(partials[..., 0], np.float32)
    return np.asarray(peaks.view(np.uint32) != POISON_WORD)


def combine_reference(operands: Operands, rows: Array | None = None) -> Reference:
    """Gated output `out` [N, D] of the given rows of the output flattened to [rows * H, D]."""
    from tuner.kernels.base import Reference

    shape, head_size = operands.outputs["out"][0], operands.outputs["out"][0][-1]
    rows = np.arange(shape[0] * shape[1]) if rows is None else rows
    partials = operands.inputs["partials"].reshape(-1, *operands.inputs["partials"].shape[2:])[rows]
    gates = (
        operands.inputs["query_gate"]
        .reshape(-1, 2 * head_size)[rows, head_size:]
        .astype(np.float64)
    )
    sigmoid = _sigmoid(gates)
    out = joined(partials)[0] * sigmoid
    bound = _combine_bounds(partials, gates, sigmoid)
    return Reference(
        outputs={"out": out},
        bounds=lambda _arithmetic: {"out": bound},
        seen=lambda outputs: {"out": outputs["out"].reshape(-1, head_size)[rows]},
        names={"out": rows},
    )


def sampled_combine_reference(operands: Operands, count: int) -> Reference:
    """The same for some query heads of some rows."""
    total = int(np.prod(operands.outputs["out"][0][:2]))
    rng = np.random.default_rng(SAMPLE_SEED)
    chosen = dict.fromkeys([total - 1, 0, *rng.permutation(total).tolist()])
    return combine_reference(operands, np.array(list(chosen)[: max(1, count)]))


def gated(attention: Floats, gates: Array) -> Floats:
    """Attention output [..., D] times the sigmoid of its gates [..., D]."""
    result: Floats = attention * _sigmoid(gates.astype(np.float64))
    return result


def _partials_reference(operands: Operands, pairs: Sequence[tuple[int, int]]) -> Reference:
    from tuner.kernels.base import Reference

    heads = operands.outputs["partials"][0][1]
    group = heads // int(operands.scalars["num_kv_heads"])
    names = np.concatenate(
        [row * heads + kv_head * group + np.arange(group) for row, kv_head in pairs]
    )
    answers = [attended(head_groups(operands, row, kv_head)) for row, kv_head in pairs]

    def bounds(arithmetic: ArithmeticClass) -> dict[str, Array]:
        groups = [head_groups(operands, row, kv_head) for row, kv_head in pairs]
        logs = np.concatenate([log_sum_bounds(ROUNDINGS[arithmetic], each)[0] for each in groups])
        return {
            "attention": np.concatenate([error_bounds(arithmetic, each)[0] for each in groups]),
            "log_sum": logs / LN2,
        }

    def seen(outputs: Mapping[str, Array]) -> dict[str, Array]:
        partials = outputs["partials"]
        attention, log_sum = joined(partials.reshape(-1, *partials.shape[2:])[names])
        return {"attention": attention, "log_sum": log_sum[:, None]}

    return Reference(
        outputs={
            "attention": np.concatenate([attention for attention, _ in answers]),
            "log_sum": np.concatenate([log_sum for _, log_sum in answers])[:, None],
        },
        bounds=bounds,
        seen=seen,
        names={"attention": names, "log_sum": names},
        zero_may_differ=frozenset({"log_sum"}),
    )


def _only(groups: HeadGroups, chosen: Array) -> HeadGroups:
    return HeadGroups(
        query=groups.query,
        key_codes=groups.key_codes[:, chosen],
        key_scales=groups.key_scales[:, chosen],
        value_codes=groups.value_codes[:, chosen],
        value_scales=groups.value_scales[:, chosen],
        softmax_scale=groups.softmax_scale,
    )


def _sigmoid(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))


def _combine_bounds(partials: Array, gates: Floats, sigmoid: Floats) -> Floats:
    """Largest 2-norm [N] of the error of each gated output: a sum of at most P terms above and
    below, each with its exponentials, and the gate's; see docs/tolerances.md."""
    written = _written(partials)
    values = np.where(written[..., None], partials.astype(np.float64), 0)
    below = np.where(written, values[..., 0], -np.inf)
    below = below.max(axis=-1, keepdims=True) - below
    factors = np.where(written, np.exp2(-below), 0)
    units = 2 * EXP_UNITS + EXP_SLOPE_UNITS * np.where(written, below, 0)
    units += PART_UNITS * written.sum(-1)[:, None]
    weight = (factors * values[..., 1]).sum(axis=-1)
    above = (units * factors)[..., None] * np.abs(values[..., 2:])
    under = (units * factors * values[..., 1]).sum(axis=-1) / weight
    whole = (factors[..., None] * values[..., 2:]).sum(axis=-2) / weight[:, None]
    gate = GATE_UNITS + EXP_SLOPE_UNITS * np.abs(gates) * (1 - sigmoid)
    error = above.sum(axis=-2) / weight[:, None] + (under[:, None] + gate) * np.abs(whole)
    return np.asarray(np.linalg.norm(U32 * error * sigmoid, axis=-1) + U32**5)
