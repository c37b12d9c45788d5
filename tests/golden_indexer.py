"""Golden vectors of the indexer as problems, operands and results of its families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.golden_vectors import Golden
from tuner.kernels import indexer
from tuner.kernels.base import Family, Operands
from tuner.kernels.indexer_operands import block_table, row_table
from tuner.problems import IndexerStepProblem

GOLDEN_INPUTS = {
    "iqk": "index_projection",
    "ikc_bits": "index_keys",
    "blk_bits": "block_keys",
    "iq": "index_query",
    "score": "scores",
    "vis": "visible",
    "nvis": "visible_count",
    "vmask": "block_mask",
}
"""Names of golden arrays and of the buffers that they are."""


def golden_problem(golden: Golden) -> IndexerStepProblem:
    """The problem of a golden file."""
    attributes = golden.attributes
    rows = int(attributes["nb"])
    return IndexerStepProblem(
        rows=rows,
        context=int(attributes["base_pos"]) + rows,
        capacity=int(attributes["max_t"]),
        index_heads=int(attributes["index_heads"]),
        index_dim=int(attributes["index_dim"]),
        ratio=int(attributes["ratio"]),
        budget=int(attributes["budget"]),
        rotary=int(attributes["rot"]),
        theta=float(attributes["theta"]),
        eps=float(attributes["eps"]),
        one_plus=int(attributes["one_plus"]),
    )


def golden_operands(golden: Golden, family: Family) -> Operands:
    """A golden file's arrays as the operands of a family.

    Outputs come poisoned where the file has them as inputs, too: the runner's poison is the
    files'.
    """
    problem = golden_problem(golden)
    made = family.operands(problem, "timing", 0)
    arrays: dict[str, Any] = {
        GOLDEN_INPUTS[name]: array for name, array in golden.inputs.items() if name != "w"
    }
    if "w" in golden.inputs:
        arrays |= dict.fromkeys(("index_query_weight", "index_key_weight"), golden.inputs["w"])
    arrays |= {"rope_rows": row_table(problem), "rope_blocks": block_table(problem)}
    return Operands(
        inputs={name: arrays[name] for name in made.inputs},
        outputs=made.outputs,
        scalars=indexer.scalars(problem),
    )


def golden_results(golden: Golden, outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs under the names that a golden file wants them by."""
    buffers = {name: buffer for name, buffer in GOLDEN_INPUTS.items() if buffer in outputs}
    return {name: outputs[buffer] for name, buffer in buffers.items() if name in golden.want}
