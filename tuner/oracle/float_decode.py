"""The oracle of paged decode over caches of floats: x-packed keys, values by dimension.

Operands are those of `tuner.kernels.float_operands`. Only tokens that a sequence sees are read, and
of the table only their blocks: those before a window may name anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tuner.oracle.attention import HeadGroups
from tuner.oracle.paged_decode import sampled_reference, whole_reference

if TYPE_CHECKING:
    from tuner.kernels.base import Operands, Reference

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


def float_decode_reference(operands: Operands) -> Reference:
    """Output `out` [S, H, Dv] of a whole launch, and its error bounds [S, H]."""
    return whole_reference(operands, float_head_groups)


def sampled_float_decode_reference(operands: Operands, count: int) -> Reference:
    """The oracle on some pairs of a sequence and a KV head: see `sampled_reference`."""
    return sampled_reference(operands, count, float_head_groups)


def float_head_groups(operands: Operands, sequence: int, kv_heads: Array) -> HeadGroups:
    """Gather what the given KV heads [N] of a sequence see, and their query heads.

    Token t of the L that a sequence has is seen if t >= L - window (all are without a window); its
    bias is slope * (t - L + 1).
    """
    inputs, scalars = operands.inputs, operands.scalars
    length = min(int(inputs["context_lens"][sequence]), int(scalars["max_context_len"]))
    window = int(scalars["window"])
    token = np.arange(max(0, length - window) if window else 0, length)
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

    def per_head(numbers: Array) -> Floats:
        """Numbers [H] of the query heads as [N, G]."""
        return numbers.astype(np.float64).reshape(int(scalars["num_kv_heads"]), -1)[kv_heads]

    distance = token - length + 1.0
    return HeadGroups(
        query=row.reshape(int(scalars["num_kv_heads"]), -1, head_size)[kv_heads],
        key_codes=keys,
        key_scales=np.ones(keys.shape[:2]),
        value_codes=values,
        value_scales=np.ones(values.shape[:2]),
        softmax_scale=float(scalars["softmax_scale"]),
        softcap=float(scalars["softcap"]),
        biases=per_head(inputs["slopes"])[..., None] * distance if scalars["alibi"] else None,
        sinks=per_head(inputs["sinks"]) if scalars["sinks"] else None,
    )
