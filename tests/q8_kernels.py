"""The kernels of decode over the planar q8 cache: golden vectors as operands, variants by text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.golden_vectors import Array, Golden
from tuner.compile import Compiler
from tuner.evaluate import build_job
from tuner.kernels import family
from tuner.kernels.base import Candidate, Family, Operands, Values
from tuner.kernels.space import parse_values, require_legal
from tuner.problems import GatedCombineProblem, Problem, Q8DecodeProblem, Q8SelectedProblem
from tuner.runner.protocol import Execution, OutputSpec

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

COMPILER = Compiler()
DENSE = family("attn_partials_q8")
SELECTED = family("attn_partials_selected_q8")
COMBINE = family("gated_combine")


def variant(of: Family, text: str, subgroup_size: int) -> Values:
    """A variant from its meaningful parameters, "scalar_f32 lanes_per_token=8 …"."""
    strategy, *assignments = text.split()
    has_size = strategy != "baseline" and of is not COMBINE
    size = [f"subgroup_size={subgroup_size}"] if has_size else []
    return parse_values(of, [f"strategy={strategy}", *size, *assignments], of.baseline)


def launched(
    runner: VulkanRunner, of: Family, problem: Problem, values: Values, operands: Operands
) -> Execution:
    """One checked launch of a legal variant."""
    require_legal(of, values, problem, runner.info)
    candidate = Candidate(values, problem, runner.info)
    job = build_job(of, candidate, operands.scalars, COMPILER).job
    outputs = {
        name: OutputSpec(shape=shape, dtype=np.dtype(dtype).name)
        for name, (shape, dtype) in operands.outputs.items()
    }
    runner.load("q8", operands.inputs, outputs)
    runner.prepare(job)
    try:
        execution = runner.execute(job, "q8")
    finally:
        runner.release(job)
        runner.unload("q8")
    assert execution.broken_guards == ()
    return execution


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
