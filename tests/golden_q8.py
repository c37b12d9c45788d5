"""Golden vectors of decode over the planar q8 cache as problems and operands of its families."""

from __future__ import annotations

import numpy as np

from tests.golden_vectors import Array, Golden
from tuner.kernels import family
from tuner.kernels.base import Operands
from tuner.problems import GatedCombineProblem, Q8DecodeProblem, Q8SelectedProblem
from tuner.runner.protocol import Execution

DENSE = family("attn_partials_q8")
SELECTED = family("attn_partials_selected_q8")
COMBINE = family("gated_combine")


def partials_operands(golden: Golden) -> tuple[Q8DecodeProblem, Operands]:
    """A golden attention pass with its row alone, and the problem it belongs to."""
    inputs, attributes = golden.inputs, {k: int(v) for k, v in golden.attributes.items()}
    row, tokens, heads = attributes["row_b"], attributes["t_len"], attributes["num_heads"]
    fields = {
        "tokens": attributes["max_t"] if "vis" in inputs else tokens,
        "query_heads": heads,
        "kv_heads": attributes["num_kv_heads"],
        "head_size": attributes["head_dim"],
    }
    buffers = {
        "query_gate": inputs["qg"][row : row + 1],
        "key_cache": inputs["kc"],
        "value_cache": inputs["vc"],
        "row_tokens": np.array([tokens], np.uint32),
    }
    problem = Q8DecodeProblem(**fields)
    if "vis" in inputs:
        buffers["visible"] = inputs["vis"][None]
        problem = Q8SelectedProblem(**fields, visible=tokens)
    shape = (1, heads, attributes["max_blk"], fields["head_size"] + 2)
    return problem, Operands(
        inputs=buffers,
        outputs={"partials": (shape, np.dtype(np.float32))},
        scalars={
            "num_heads": heads,
            "num_kv_heads": fields["kv_heads"],
            "capacity": attributes["max_t"],
            "scale_word": attributes["scale_off"] // 4,
            "visible_stride": tokens,
            "max_parts": attributes["max_blk"],
            "base2_scale": golden.attributes["scale"],
        },
    )


def combine_operands(golden: Golden) -> tuple[GatedCombineProblem, Operands]:
    """A golden combine with its row alone, and the problem it belongs to."""
    attributes = {k: int(v) for k, v in golden.attributes.items()}
    row, parts, heads = attributes["row_b"], attributes["n_wg"], attributes["num_heads"]
    size = attributes["head_dim"]
    problem = GatedCombineProblem(parts=parts, query_heads=heads, head_size=size)
    return problem, Operands(
        inputs={
            "partials": golden.inputs["part"][None],
            "query_gate": golden.inputs["qg"][row : row + 1],
            "row_tokens": np.array([32 * parts], np.uint32),
        },
        outputs={"out": ((1, heads, size), np.dtype(np.float32))},
        scalars={"num_heads": heads, "max_parts": parts, "num_parts": parts},
    )


def written_parts(execution: Execution, parts: int) -> Array:
    """The partial results [H, parts, D+2] of the only row; all others must be untouched."""
    (partials,) = execution.outputs["partials"]
    assert (np.ascontiguousarray(partials[:, parts:]).view(np.uint32) == 0xFFFFFFFF).all()
    return np.asarray(partials[:, :parts])
