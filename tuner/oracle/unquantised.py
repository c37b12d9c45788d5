"""The second, looser oracle: attention over the values as they were before quantisation.

It shares neither packing nor scales with the first one, so that an error in the cache format itself
cannot hide in both; what quantisation may do to the output is a bound of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tuner.oracle.attention import HeadGroups, attend
from tuner.oracle.paged_decode import head_groups, reference_of
from tuner.oracle.tolerance import error_bounds, quantisation_bounds

if TYPE_CHECKING:
    from tuner.kernels.base import ArithmeticClass, Operands, Reference
    from tuner.kernels.decode_values import FloatPool

Array = npt.NDArray[Any]


def unquantised_decode_reference(operands: Operands, pool: FloatPool) -> Reference:
    """Output `out` [S, H, D] from the floats that the operands were quantised from.

    Its bounds are those of the quantisation and of the arithmetic class together.
    """
    sequences, heads, head_size = operands.outputs["out"][0]
    every_head = np.arange(int(operands.scalars["num_kv_heads"]))
    quantised = [head_groups(operands, s, every_head) for s in range(sequences)]
    plain = [_plain_groups(groups, pool, s) for s, groups in enumerate(quantised)]
    out = np.stack([attend(groups).out for groups in plain])

    def bounds(arithmetic: ArithmeticClass) -> Array:
        rows = [
            error_bounds(arithmetic, groups)
            + quantisation_bounds(groups, _peaks(floats.key_codes), _peaks(floats.value_codes))
            for groups, floats in zip(quantised, plain, strict=True)
        ]
        return np.stack(rows).reshape(sequences, heads)

    return reference_of(out.reshape(sequences, heads, head_size), bounds)


def _plain_groups(groups: HeadGroups, pool: FloatPool, sequence: int) -> HeadGroups:
    """The same heads with floats for codes, all scales being 1."""
    kv_heads, tokens, head_size = groups.key_codes.shape
    block_size = pool.keys.shape[2]
    blocks = pool.block_table[sequence, : -(-tokens // block_size)].astype(np.int64)

    def gathered(values: Array) -> Array:
        rows = values[blocks].swapaxes(0, 1).reshape(kv_heads, -1, head_size)
        return np.asarray(rows[:, :tokens], np.float64)

    return HeadGroups(
        query=pool.query[sequence].reshape(groups.query.shape).astype(np.float64),
        key_codes=gathered(pool.keys),
        key_scales=np.ones((kv_heads, tokens)),
        value_codes=gathered(pool.values),
        value_scales=np.ones((kv_heads, tokens)),
        softmax_scale=groups.softmax_scale,
    )


def _peaks(vectors: Array) -> Array:
    return np.asarray(np.abs(vectors).max(axis=-1, initial=0))
