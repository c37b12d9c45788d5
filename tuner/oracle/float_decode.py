"""The oracle of paged decode over caches of floats: x-packed keys, values by dimension.

Operands are those of `tuner.kernels.float_operands`. Only tokens that a sequence sees are read, and
of the table only their blocks: those before a window may name anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tuner.oracle.attention import HeadGroups
from tuner.oracle.paged_decode import (
    sampled_reference,
    seen_tokens,
    switched,
    whole_reference,
)

if TYPE_CHECKING:
    from tuner.kernels.base import Operands, Reference

Array = npt.NDArray[Any]


def float_decode_reference(operands: Operands) -> Reference:
    """Output `out` [S, H, Dv] of a whole launch, and its error bounds [S, H]."""
    return whole_reference(operands, float_head_groups)


def sampled_float_decode_reference(operands: Operands, count: int) -> Reference:
    """The oracle on some pairs of a sequence and a KV head: see `sampled_reference`."""
    return sampled_reference(operands, count, float_head_groups)


def float_head_groups(operands: Operands, sequence: int, kv_heads: Array) -> HeadGroups:
    """Gather what the given KV heads [N] of a sequence see, and their query heads."""
    inputs, scalars = operands.inputs, operands.scalars
    first, length = seen_tokens(operands, sequence)
    token = np.arange(first, length)
    block_size = inputs["key_cache"].shape[3]
    block = inputs["block_table"][sequence, token // block_size].astype(np.int64)
    offset, head = token % block_size, kv_heads[:, None]
    # Keys are [block, head, packet, token, element of a packet], values [block, head, dim, token].
    keys = inputs["key_cache"][block, head, :, offset].astype(np.float64)
    head_size = keys.shape[2] * keys.shape[3]
    keys = keys.reshape(*keys.shape[:2], head_size)
    values = inputs["value_cache"][block, head, :, offset].astype(np.float64)
    heads = operands.outputs["out"][0][1]
    row = inputs["query"][sequence, : heads * head_size].astype(np.float64)

    return HeadGroups(
        query=row.reshape(int(scalars["num_kv_heads"]), -1, head_size)[kv_heads],
        key_codes=keys,
        key_scales=np.ones(keys.shape[:2]),
        value_codes=values,
        value_scales=np.ones(values.shape[:2]),
        softmax_scale=float(scalars["softmax_scale"]),
        **switched(operands, kv_heads, token, length),
    )
