"""The oracle of norm and rotary embedding: float64 from position and theta, not from a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tuner.oracle.indexer import norm, rope
from tuner.oracle.indexer_bounds import norm_rope_bounds

if TYPE_CHECKING:
    from tuner.kernels.base import ArithmeticClass, Operands, Reference

Array = npt.NDArray[Any]

SAMPLE_SEED = 20_260_104
SAMPLED_ROWS = 16


def norm_rope_reference(operands: Operands) -> Reference:
    """Outputs `query` [rows, H, D], `gate_bits` [rows, H, D] and `key` [rows, Hkv, D]."""
    return _reference(operands, np.arange(len(operands.inputs["query_gate"])))


def sampled_norm_rope_reference(operands: Operands, count: int) -> Reference:
    """The same for a few rows of a large launch: the first, the last, others at random."""
    rows = len(operands.inputs["query_gate"])
    rng = np.random.default_rng(SAMPLE_SEED)
    drawn = rng.choice(rows, min(rows, max(count, SAMPLED_ROWS)), replace=False)
    return _reference(operands, np.unique(np.concatenate([[0, rows - 1], drawn])))


def _reference(operands: Operands, rows: Array) -> Reference:
    # tuner.kernels imports this module for its families, so its types are known only later.
    from tuner.kernels.base import Reference

    inputs, scalars = operands.inputs, operands.scalars
    head_size = inputs["key"].shape[-1]
    positions = int(scalars["base_position"]) + rows
    wanted: dict[str, Array] = {"gate_bits": _gate_bits(inputs["query_gate"][rows], head_size)}
    bounds: dict[str, Array] = {"gate_bits": np.zeros(wanted["gate_bits"].shape[:-1])}
    for name, buffer in (("query", "query_gate"), ("key", "key")):
        y = norm(
            inputs[buffer][rows, :, :head_size],
            inputs[f"{name}_weight"],
            eps=float(scalars["epsilon"]),
            one_plus=int(scalars["one_plus"]),
        )
        wanted[name] = rope(y, positions, int(scalars["rotary"]), float(scalars["theta"]))
        bounds[name] = norm_rope_bounds(wanted[name])

    def seen(outputs: Mapping[str, Array]) -> dict[str, Array]:
        query = outputs["query_gate"][rows]
        return {
            "query": query[..., :head_size],
            "gate_bits": _gate_bits(query, head_size),
            "key": outputs["key"][rows],
        }

    def bounds_of(_arithmetic: ArithmeticClass) -> dict[str, Array]:
        return bounds

    names = {
        name: np.array([f"row {row}, head {h}" for row in rows for h in range(array.shape[1])])
        for name, array in wanted.items()
    }
    return Reference(outputs=wanted, bounds=bounds_of, seen=seen, names=names)


def _gate_bits(query_gate: Array, head_size: int) -> Array:
    """The bits of the gates, as numbers: they must be equal, not-a-numbers too."""
    return np.ascontiguousarray(query_gate[..., head_size:]).view(np.uint32)
