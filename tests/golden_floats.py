"""Golden vectors of paged decode over caches of floats as problems and operands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.golden_vectors import Golden
from tuner import kernels
from tuner.kernels.base import Operands

F32, F16 = kernels.family("paged_decode_f32"), kernels.family("paged_decode_f16")


def golden_operands(golden: Golden) -> Operands:
    """The operands of a golden decode over the float32 cache, in packets of its own `x`."""
    inputs, attributes = golden.inputs, golden.attributes
    heads = int(attributes["num_heads"])
    shape = (len(inputs["context_lens"]), heads, int(attributes["head_size"]))
    nothing = np.full(heads, np.nan, np.float32)
    return Operands(
        inputs={
            "query": inputs["q"],
            "key_cache": inputs["key_cache"],
            "value_cache": inputs["value_cache"],
            "block_table": inputs["block_tables"],
            "context_lens": inputs["context_lens"],
            "sinks": nothing,
            "slopes": nothing,
        },
        outputs={"out": (shape, np.dtype(np.float32))},
        scalars={
            "q_stride": attributes["q_stride"],
            "max_blocks": attributes["max_num_blocks_per_seq"],
            "max_context_len": attributes["max_context_len"],
            "softmax_scale": attributes["scale"],
            "num_kv_heads": attributes["num_kv_heads"],
            "num_heads": heads,
            "packet": attributes["x"],
            "window": 0,
            "softcap": 0.0,
            "alibi": 0,
            "sinks": 0,
        },
    )


def with_inputs(operands: Operands, **inputs: np.ndarray[Any, Any]) -> Operands:
    """The same operands with other arrays."""
    return replace(operands, inputs=operands.inputs | inputs)
