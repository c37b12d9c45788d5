"""The oracle of paged attention with log-sum-exp, in float64 from the stored elements.

Operands are those of `tuner.kernels.attention_operands`. Only keys that a row sees are read, so
poison elsewhere has no way in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tuner.elements import SMALLEST_NORMAL, UNIT_ROUNDOFF, widened
from tuner.oracle.attention import HeadGroups, logits
from tuner.oracle.tolerance import (
    ROUNDINGS,
    SMALLEST_SUM,
    Rounding,
    log_sum_bounds,
    output_bounds,
)

if TYPE_CHECKING:
    from tuner.kernels.base import ArithmeticClass, Operands, Reference

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

SAMPLE_SEED = 20_260_104
SAMPLED_KEYS = 2**18
"""Keys, over all sampled rows, that the oracle goes through for a large launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The sizes of a launch, from its operands; the rows are those of one query head."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    head_size: int
    block_size: int
    context: int
    q_offset: int
    softmax_scale: float

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    def keys_seen(self, row: int) -> int:
        """How many keys, from the first on, row `row` sees."""
        return min(max(row + 1 + self.q_offset, 0), self.context)

    def rows_by_keys(self) -> dict[int, list[int]]:
        """The rows by the number of keys that they see."""
        found: dict[int, list[int]] = {}
        for row in range(self.rows):
            found.setdefault(self.keys_seen(row), []).append(row)
        return found


def geometry(operands: Operands) -> Geometry:
    """The sizes of a launch."""
    inputs, scalars = operands.inputs, operands.scalars
    batch, heads, rows, head_size = inputs["query"].shape
    return Geometry(
        batch=batch,
        heads=heads,
        kv_heads=int(scalars["kv_heads"]),
        rows=rows,
        head_size=head_size,
        block_size=inputs["keys"].shape[1],
        context=int(scalars["context"]),
        q_offset=int(scalars["q_offset"]),
        softmax_scale=float(scalars["softmax_scale"]),
    )


def pool_rows(operands: Operands, sequence: int, keys: int) -> Array:
    """Where the first `keys` tokens of a sequence are, as rows of a pool [NB * BS, Hkv, D]."""
    block_size = operands.inputs["keys"].shape[1]
    token = np.arange(keys)
    blocks = operands.inputs["block_table"][sequence, token // block_size].astype(np.int64)
    return np.asarray(blocks * block_size + token % block_size)


def gathered(operands: Operands, name: str, rows: Array) -> Floats:
    """Rows of the pool `name` as [Hkv, L, D]."""
    pool = operands.inputs[name]
    return widened(pool.reshape(-1, *pool.shape[2:])[rows]).swapaxes(0, 1)


def row_groups(
    operands: Operands, sequence: int, rows: Iterable[int], kv_heads: Array
) -> HeadGroups:
    """Rows that see as many keys, with the keys: N KV heads, G = group * len(rows) queries each."""
    of, chosen = geometry(operands), list(rows)
    keys = of.keys_seen(chosen[0])
    places = pool_rows(operands, sequence, keys)
    query = widened(operands.inputs["query"][sequence][:, chosen])
    query = query.reshape(of.kv_heads, of.group * len(chosen), of.head_size)[kv_heads]
    ones = np.ones((len(kv_heads), keys))
    return HeadGroups(
        query=query,
        key_codes=gathered(operands, "keys", places)[kv_heads],
        key_scales=ones,
        value_codes=gathered(operands, "values", places)[kv_heads],
        value_scales=ones,
        softmax_scale=of.softmax_scale,
    )


def attend_with_log_sum(groups: HeadGroups) -> tuple[Floats, Floats]:
    """Outputs [N, G, D] and natural log-sum-exp [N, G] of rows over all keys given."""
    z = logits(groups)
    peak = z.max(axis=-1, initial=-np.inf)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    weights = np.exp(z - peak[..., None])
    total = np.maximum(weights.sum(axis=-1), SMALLEST_SUM)
    out: Floats = weights @ groups.value_codes / total[..., None]
    return out, np.log(total) + peak


def rounding_of(arithmetic: ArithmeticClass) -> Rounding:
    """Where a class rounds; queries are stored in the type that is multiplied."""
    return replace(ROUNDINGS[arithmetic], query_unit=0.0)


def store_bounds(values: Floats, element: str) -> Floats:
    """Largest 2-norm of the error of storing vectors [..., D]: relative, or all of what is tiny."""
    tiny = np.where(np.abs(values) < SMALLEST_NORMAL[element], values, 0.0)
    unit = UNIT_ROUNDOFF[element] if element != "f32" else 0.0
    return np.asarray(
        2 * unit * np.linalg.norm(values, axis=-1) + np.linalg.norm(tiny, axis=-1), np.float64
    )


def forward(operands: Operands) -> tuple[Floats, Floats]:
    """Outputs [B, H, Sq, D] and natural log-sum-exp [B, H, Sq] of a whole launch."""
    of = geometry(operands)
    out = np.zeros((of.batch, of.heads, of.rows, of.head_size))
    lse = np.zeros(out.shape[:-1])
    every_head = np.arange(of.kv_heads)
    for sequence in range(of.batch):
        for rows in of.rows_by_keys().values():
            some, sums = attend_with_log_sum(row_groups(operands, sequence, rows, every_head))
            out[sequence][:, rows] = some.reshape(of.heads, len(rows), of.head_size)
            lse[sequence][:, rows] = sums.reshape(of.heads, len(rows))
    return out, lse


def forward_reference(operands: Operands) -> Reference:
    """Outputs `out` [B, H, Sq, D] and `lse` [B, H, Sq, 1] of a whole launch, and their bounds."""
    from tuner.kernels.base import Reference

    of = geometry(operands)
    out, lse = forward(operands)
    every_head = np.arange(of.kv_heads)

    def bounds(arithmetic: ArithmeticClass) -> dict[str, Array]:
        rounding = rounding_of(arithmetic)
        output, log_sum = np.zeros(lse.shape), np.zeros(lse.shape)
        for sequence in range(of.batch):
            for rows in of.rows_by_keys().values():
                groups = row_groups(operands, sequence, rows, every_head)
                shape = (of.heads, len(rows))
                output[sequence][:, rows] = output_bounds(rounding, groups).reshape(shape)
                log_sum[sequence][:, rows] = log_sum_bounds(rounding, groups).reshape(shape)
        return {"out": output + store_bounds(out, _element(operands)), "lse": log_sum}

    return Reference(
        outputs={"out": out, "lse": lse[..., None]},
        bounds=bounds,
        seen=lambda outputs: {"out": widened(outputs["out"]), "lse": outputs["lse"][..., None]},
        zero_may_differ=frozenset({"lse"}),
    )


def sampled_forward_reference(operands: Operands, count: int) -> Reference:
    """The oracle on some query rows, for launches too large to redo.

    Takes the last row, which sees most, the first and others at random (always the same), each with
    one KV head's group of query heads; at most `count`, and no more than see `SAMPLED_KEYS` keys.
    """
    from tuner.kernels.base import Reference

    of = geometry(operands)
    places = _sampled_places(of, count)
    groups = [row_groups(operands, b, [row], np.array([g])) for b, g, row in places]
    answers = [attend_with_log_sum(each) for each in groups]
    out = np.concatenate([each.reshape(-1, of.head_size) for each, _ in answers])
    lse = np.concatenate([each.reshape(-1, 1) for _, each in answers])
    heads = [
        (b * of.heads + g * of.group + h, row) for b, g, row in places for h in range(of.group)
    ]
    chosen = np.array([head * of.rows + row for head, row in heads])

    def bounds(arithmetic: ArithmeticClass) -> dict[str, Array]:
        rounding = rounding_of(arithmetic)
        output = np.concatenate([output_bounds(rounding, each).ravel() for each in groups])
        log_sum = np.concatenate([log_sum_bounds(rounding, each).ravel() for each in groups])
        return {"out": output + store_bounds(out, _element(operands)), "lse": log_sum}

    def seen(outputs: Mapping[str, Array]) -> dict[str, Array]:
        return {
            "out": widened(outputs["out"].reshape(-1, of.head_size)[chosen]),
            "lse": outputs["lse"].reshape(-1, 1)[chosen],
        }

    return Reference(
        outputs={"out": out, "lse": lse},
        bounds=bounds,
        seen=seen,
        names={"out": chosen, "lse": chosen},
        zero_may_differ=frozenset({"lse"}),
    )


def _sampled_places(of: Geometry, count: int) -> list[tuple[int, int, int]]:
    """(sequence, KV head, row) of the sampled rows, each once."""
    rng = np.random.default_rng(SAMPLE_SEED)
    drawn = rng.integers(0, (of.batch, of.kv_heads, of.rows), (count, 3)).tolist()
    places = [
        (of.batch - 1, of.kv_heads - 1, of.rows - 1),
        (0, 0, 0),
        *((int(b), int(g), int(row)) for b, g, row in drawn),
    ]
    places = list(dict.fromkeys(places))[: max(1, count)]
    keys = np.cumsum([of.keys_seen(row) for _, _, row in places])
    return places[: max(1, int(np.searchsorted(keys, SAMPLED_KEYS, side="right")))]


def _element(operands: Operands) -> str:
    """The element type of the outputs."""
    return {"float32": "f32", "float16": "f16"}.get(operands.outputs["out"][1].name, "bf16")
