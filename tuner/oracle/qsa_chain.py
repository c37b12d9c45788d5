"""The oracle of a whole decode step: float64, and float32 where a buffer lies between two steps.

A kernel is judged step by step, each step by what the steps before it left in the buffers: so a
score that rounds another way at the edge of the budget changes the list, as it may, and the
attention is then that over the kernel's own list.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tuner.oracle import indexer
from tuner.oracle.attention import HeadGroups
from tuner.oracle.indexer_references import (
    append_reference,
    blocks_reference,
    new_block_keys,
    queries,
    query_reference,
    sampled_append_reference,
    sampled_blocks_reference,
    sampled_query_reference,
    sampled_score_reference,
    score_reference,
)
from tuner.oracle.kv_append import kv_append_reference, sampled_kv_append_reference
from tuner.oracle.norm_rope import norm_rope_reference, sampled_norm_rope_reference
from tuner.oracle.q8_decode import attended, gated, planar_groups
from tuner.oracle.tolerance import U32, error_bounds
from tuner.oracle.verdict import judge
from tuner.planar import PlanarLayout, write_rows

if TYPE_CHECKING:
    from tuner.kernels.base import ArithmeticClass, Operands, Reference

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Buffers = Mapping[str, Array]

NOT_RIGHT = sys.float_info.max
"""The share of its bound that a step has reached which must be exact, and is not."""
GATE_UNITS = 32.0
"""Units of U32 for the gate, its product, and the join of the parts."""
SAMPLED_TOKENS = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """How one step is judged: its reference, given the step's own operands, whole or sampled."""

    whole: Callable[[Operands], Reference]
    sampled: Callable[[Operands, int], Reference]
    buffers: tuple[str, ...]
    """Inputs that the steps before it have written."""


_STEPS: Mapping[str, _Judged] = {
    "index_append": _Judged(whole=append_reference, sampled=sampled_append_reference, buffers=()),
    "index_blocks": _Judged(
        whole=blocks_reference, sampled=sampled_blocks_reference, buffers=("index_keys",)
    ),
    "index_q": _Judged(whole=query_reference, sampled=sampled_query_reference, buffers=()),
    "index_score": _Judged(
        whole=score_reference,
        sampled=sampled_score_reference,
        buffers=("block_keys", "index_query"),
    ),
    "qk_norm_rope": _Judged(
        whole=norm_rope_reference, sampled=sampled_norm_rope_reference, buffers=()
    ),
    "kv_append_q8": _Judged(
        whole=kv_append_reference, sampled=sampled_kv_append_reference, buffers=("key",)
    ),
}


def chain_step(operands: Operands) -> dict[str, Array]:
    """All that one step computes from these operands, by the names of its buffers.

    Beside the buffers `block_keys_exact` [b1 - b0, E], `index_query` and `scores` (NaN where there
    is none) before rounding, `key` after norm and rope. float64, but what a buffer rounds is
    rounded on its way to the next step.
    """
    found = {name: array.copy() for name, array in operands.inputs.items()}
    scalars = operands.scalars
    rows, base = int(scalars["rows"]), int(scalars["base_pos"])
    if scalars["budget"]:
        _index(operands, found)
    size = found["key"].shape[-1]
    rotated = _normed(operands, found["query_gate"][..., :size], "query_weight")
    found["query_gate"][..., :size] = rotated
    found["key_exact"] = _normed(operands, found["key"], "key_weight")
    found["key"] = found["key_exact"].astype(np.float32)
    layout = _layout(operands)
    for side in ("key", "value"):
        write_rows(found[f"{side}_cache"], layout, base, found[side].reshape(rows, -1))
    found["out"] = _attention(operands, found, range(rows), range(int(scalars["num_kv_heads"])))
    return found


def chain_reference(operands: Operands) -> Reference:
    """`steps` [n, 1]: the largest share of its bound that an error of each step takes, all its
    inputs being what the steps before it left; `attention` [rows * H, D]: the difference to what
    the kernel's own caches, queries and lists come to."""
    rows, heads = operands.outputs["out"][0][:2]
    every = [(row, head) for row in range(rows) for head in range(_kv_heads(operands))]
    assert heads % _kv_heads(operands) == 0
    return _reference(operands, every, sampled=False, count=0)


def sampled_chain_reference(operands: Operands, count: int) -> Reference:
    """The same over parts of what each step writes, for caches too large to go through."""
    last = operands.outputs["out"][0][0] - 1
    tokens = int(operands.inputs["row_tokens"][last])
    pairs = [(last, head) for head in range(_kv_heads(operands))]
    most = max(1, min(count, SAMPLED_TOKENS // max(1, tokens)))
    return _reference(operands, pairs[:most], sampled=True, count=count)


def _reference(
    operands: Operands, pairs: list[tuple[int, int]], *, sampled: bool, count: int
) -> Reference:
    # tuner.kernels imports this module for its families, so its types are known only later.
    from tuner.kernels.base import Reference

    names = _steps_of(operands)
    heads, size = operands.outputs["out"][0][1:]
    group = heads // _kv_heads(operands)
    flat = np.concatenate([row * heads + head * group + np.arange(group) for row, head in pairs])
    long = _LongRows(operands) if sampled else None

    def seen(outputs: Buffers) -> dict[str, Array]:
        left = _left(operands, outputs)
        shares = [_share(name, operands, left, sampled, count) for name in names]
        if selective_rows(operands).any():
            shares.append(_list_share(operands, left))
        with np.errstate(all="ignore"):
            wanted = np.concatenate([_one_head(operands, left, *pair, long) for pair in pairs])
        got = outputs["out"].reshape(-1, size)[flat].astype(np.float64)
        return {"steps": np.array(shares)[:, None], "attention": got - wanted}

    every = [*names, *(["index_select"] if selective_rows(operands).any() else [])]

    def bounds(arithmetic: ArithmeticClass) -> dict[str, Array]:
        known = chain_step(operands) if not sampled else _stepped(operands)
        each = [_attention_bounds(operands, known, pair, arithmetic) for pair in pairs]
        return {"steps": np.ones(len(every)), "attention": np.concatenate(each)}

    return Reference(
        outputs={
            "steps": np.zeros((len(every), 1)),
            "attention": np.zeros((len(flat), size)),
        },
        bounds=bounds,
        seen=seen,
        names={"steps": np.array(every), "attention": flat},
        zero_may_differ=frozenset({"steps", "attention"}),
    )


def _stepped(operands: Operands) -> dict[str, Array]:
    """What attention reads, without going through every score: the lists do not change its bounds
    by much, so that any list of the right length will do."""
    light = replace(operands, scalars={**operands.scalars, "budget": 0})
    found = dict(operands.inputs)
    size = found["key"].shape[-1]
    gates = found["query_gate"][..., size:]
    rotated = _normed(light, found["query_gate"][..., :size], "query_weight")
    found["query_gate"] = np.concatenate([rotated.astype(np.float32), gates], axis=-1)
    lengths = operands.inputs["row_tokens"].astype(np.int64)
    context = int(operands.scalars["base_pos"]) + int(operands.scalars["rows"])
    found["visible"] = np.stack(
        [np.linspace(0, context - 2, int(lengths.max())).astype(np.int64) for _ in lengths]
    )
    return found


def selective_rows(operands: Operands) -> npt.NDArray[np.bool_]:
    """Which rows attend to selected blocks only."""
    scalars = operands.scalars
    rows = np.arange(int(scalars["rows"]))
    if not scalars["budget"]:
        return np.zeros(len(rows), np.bool_)
    blocks = (int(scalars["base_pos"]) + rows + 1) // int(scalars["ratio"])
    return np.asarray(blocks > int(scalars["kept_blocks"]))


def _steps_of(operands: Operands) -> list[str]:
    """Steps that have something to do, but for the selection."""
    scalars = operands.scalars
    found = ["qk_norm_rope", "kv_append_q8"]
    if scalars["budget"]:
        found += ["index_append", "index_blocks"]
    if selective_rows(operands).any():
        found += ["index_q", "index_score"]
    return found


def _left(operands: Operands, outputs: Buffers) -> dict[str, Array]:
    """Every buffer as the kernel left it."""
    return {**operands.inputs, **outputs}


def _share(name: str, operands: Operands, left: Buffers, sampled: bool, count: int) -> float:
    """The largest share of its bound that an error of the step takes."""
    judged = _STEPS[name]
    inputs = {**operands.inputs, **{each: left[each] for each in judged.buffers}}
    own = replace(operands, inputs=inputs)
    if name == "kv_append_q8":
        flat = {side: inputs[side].reshape(len(inputs[side]), -1) for side in ("key", "value")}
        caches = {f"{side}_cache": operands.outputs[f"{side}_cache"] for side in flat}
        own = replace(own, inputs={**inputs, **flat}, outputs=caches)
    if name == "index_score":
        own = replace(own, outputs={"scores": operands.outputs["scores"]})
    # What a step before left may be anything at all.
    with np.errstate(all="ignore"):
        reference = judged.sampled(own, count) if sampled else judged.whole(own)
        verdict = judge(left, reference, "f32", name)
    if verdict.check.bound > 0:
        return float(verdict.check.error / verdict.check.bound)
    return 0.0 if verdict.ok else NOT_RIGHT


def _list_share(operands: Operands, left: Buffers) -> float:
    """0 if every selective row's list and count are exactly what the kernel's own scores say."""
    scalars = operands.scalars
    ratio, kept = int(scalars["ratio"]), int(scalars["kept_blocks"])
    for row in np.flatnonzero(selective_rows(operands)):
        position = int(scalars["base_pos"]) + int(row)
        scores = left["scores"][row, : (position + 1) // ratio]
        blocks = indexer.selected_blocks(scores, kept)
        tokens = indexer.visible_tokens(blocks, ratio=ratio, position=position)
        if int(left["visible_count"][row]) != len(tokens):
            return NOT_RIGHT
        if not np.array_equal(left["visible"][row, : len(tokens)], tokens):
            return NOT_RIGHT
    return 0.0


def _kv_heads(operands: Operands) -> int:
    return int(operands.scalars["num_kv_heads"])


def _layout(operands: Operands) -> PlanarLayout:
    size = operands.inputs["key"].shape[-1]
    return PlanarLayout(int(operands.scalars["capacity"]), _kv_heads(operands) * size)


def _index(operands: Operands, found: dict[str, Array]) -> None:
    """Steps of the indexer, into `found`."""
    scalars = operands.scalars
    rows, base = int(scalars["rows"]), int(scalars["base_pos"])
    ratio, kept = int(scalars["ratio"]), int(scalars["kept_blocks"])
    dims = int(scalars["index_dim"])
    raw = found["index_projection"][:, -dims:].astype(np.float16)
    found["index_keys"][base : base + rows] = raw.view(np.uint16)
    blocks, exact, _ = new_block_keys(replace(operands, inputs=found))
    found["block_keys_exact"] = exact
    found["block_keys"][blocks] = exact.astype(np.float16).view(np.uint16)
    exact_query = queries(operands)
    found["index_query"] = exact_query
    query = exact_query.astype(np.float32)
    blocks_seen = (base + np.arange(rows) + 1) // ratio
    keys = found["block_keys"].view(np.float16)
    found["scores"] = np.full((rows, len(keys)), np.nan)
    found["visible"] = np.full(operands.outputs["visible"][0], 0xFFFFFFFF, np.uint32)
    found["visible_count"] = operands.inputs["row_tokens"].copy()
    for row, count in enumerate(blocks_seen):
        if count <= kept:
            continue
        found["scores"][row, :count] = indexer.block_scores(query[row], keys[:count])
        chosen = indexer.selected_blocks(found["scores"][row, :count].astype(np.float32), kept)
        tokens = indexer.visible_tokens(chosen, ratio=ratio, position=base + row)
        found["visible"][row, : len(tokens)] = tokens
        found["visible_count"][row] = len(tokens)


def _normed(operands: Operands, x: Array, weight: str) -> Floats:
    scalars = operands.scalars
    y = indexer.norm(
        x,
        operands.inputs[weight],
        eps=float(scalars["eps"]),
        one_plus=int(scalars["one_plus"]),
    )
    positions = int(scalars["base_pos"]) + np.arange(len(x))
    return indexer.rope(y, positions, int(scalars["rotary"]), float(scalars["theta"]))


def _attention(operands: Operands, left: Buffers, rows: range, heads: range) -> Floats:
    shape = operands.outputs["out"][0]
    parts = [_one_head(operands, left, row, head, None) for row in rows for head in heads]
    return np.concatenate(parts).reshape(shape)


def _one_head(
    operands: Operands, left: Buffers, row: int, kv_head: int, long: _LongRows | None
) -> Floats:
    """Gated attention [G, D] of a row's query heads of one KV head."""
    groups = (
        _groups(operands, left, row, kv_head) if long is None else long.groups(left, row, kv_head)
    )
    return gated(attended(groups)[0], _gates(operands, row, kv_head))


def _gates(operands: Operands, row: int, kv_head: int) -> Array:
    """Gates [G, D] of the query heads of one KV head."""
    heads, twice = operands.inputs["query_gate"].shape[1:]
    group = heads // _kv_heads(operands)
    own = slice(kv_head * group, (kv_head + 1) * group)
    return operands.inputs["query_gate"][row, own, twice // 2 :]


def _groups(operands: Operands, left: Buffers, row: int, kv_head: int) -> HeadGroups:
    """What one KV head's query heads attend to, as the buffers have it."""
    count = int(operands.inputs["row_tokens"][row])
    tokens = np.arange(count)
    if selective_rows(operands)[row]:
        tokens = left["visible"][row, :count].astype(np.int64)
        tokens = np.where(tokens < int(operands.scalars["capacity"]), tokens, 0)
    return _over(operands, left, row, kv_head, tokens)


def _over(operands: Operands, left: Buffers, row: int, kv_head: int, tokens: Array) -> HeadGroups:
    heads, twice = left["query_gate"].shape[1:]
    group = heads // _kv_heads(operands)
    own = left["query_gate"][row, kv_head * group : (kv_head + 1) * group, : twice // 2]
    return planar_groups(
        own.astype(np.float64),
        (left["key_cache"].reshape(-1), left["value_cache"].reshape(-1)),
        _layout(operands),
        tokens,
        kv_head=kv_head,
        base2_scale=float(operands.scalars["base2_scale"]),
    )


class _LongRows:
    """What rows attend to, remembering the tokens of dense ones: a step changes only the last, and
    to widen a quarter of a million anew for each launch takes many seconds."""

    def __init__(self, operands: Operands) -> None:
        self._operands = operands
        self._known: dict[tuple[int, int], HeadGroups] = {}

    def groups(self, left: Buffers, row: int, kv_head: int) -> HeadGroups:
        """As `_groups`."""
        operands, pair = self._operands, (row, kv_head)
        if selective_rows(operands)[row]:
            return _groups(operands, left, row, kv_head)
        if pair not in self._known:
            self._known[pair] = _groups(operands, left, row, kv_head)
        known, first = self._known[pair], int(operands.scalars["base_pos"])
        new = np.arange(first, int(operands.inputs["row_tokens"][row]))
        fresh = _over(operands, left, row, kv_head, new)
        assert known.value_scale_peaks is not None
        assert fresh.value_scale_peaks is not None
        known.key_codes[:, first:] = fresh.key_codes
        known.value_codes[:, first:] = fresh.value_codes
        known.value_scales[:, first:] = fresh.value_scales
        known.value_scale_peaks[:, first:] = fresh.value_scale_peaks
        return replace(known, query=fresh.query)


def _attention_bounds(
    operands: Operands, known: Buffers, pair: tuple[int, int], arithmetic: ArithmeticClass
) -> Floats:
    """Largest 2-norm [G] of the error of each gated output.

    A gate is below 1, so that it makes no error larger, and adds a few units of its own.
    """
    groups = _groups(operands, known, *pair)
    slope = np.abs(_gates(operands, *pair)).max(axis=-1, initial=0)
    norm = np.linalg.norm(attended(groups)[0], axis=-1)
    return np.asarray(error_bounds(arithmetic, groups)[0] + U32 * (GATE_UNITS + 4 * slope) * norm)
