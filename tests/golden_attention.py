"""Golden vectors of paged attention, forward and backward, as problems and operands."""

from __future__ import annotations

import numpy as np

from tests.golden_vectors import Golden
from tuner.elements import STORED
from tuner.kernels.base import Operands
from tuner.kernels.gradient_operands import with_gradients
from tuner.problems import PagedAttentionProblem


def golden_problem(golden: Golden) -> PagedAttentionProblem:
    """The problem of a golden launch."""
    of = golden.attributes
    return PagedAttentionProblem(
        batch=int(of["batch"]),
        query_tokens=int(of["seq_len_q"]),
        context=int(of["seq_len_k"]),
        query_heads=int(of["num_heads"]),
        kv_heads=int(of["num_kv_heads"]),
        head_size=int(of["head_dim"]),
        block_size=int(of["block_size"]),
        causal=str(of["q_offset"]) if of["causal"] else "off",
    )


def golden_operands(golden: Golden) -> Operands:
    """The operands of a golden forward launch."""
    problem, inputs = golden_problem(golden), golden.inputs
    rows = (problem.batch, problem.query_heads, problem.query_tokens)
    return Operands(
        inputs={
            "query": inputs["q"],
            "keys": inputs["k_blocks"],
            "values": inputs["v_blocks"],
            "block_table": inputs["block_table"].view(np.uint32),
        },
        outputs={
            "out": ((*rows, problem.head_size), STORED["f32"]),
            "lse": (rows, STORED["f32"]),
        },
        scalars={
            "batch": problem.batch,
            "query_heads": problem.query_heads,
            "kv_heads": problem.kv_heads,
            "query_tokens": problem.query_tokens,
            "context": problem.context,
            "max_blocks": golden.attributes["max_num_blocks"],
            "q_offset": problem.q_offset,
            "softmax_scale": golden.attributes["scale"],
        },
    )


def golden_gradient_operands(golden: Golden) -> Operands:
    """The operands of a golden backward launch."""
    inputs = golden.inputs
    return with_gradients(golden_operands(golden), inputs["d_out"], inputs["out"], inputs["lse"])
