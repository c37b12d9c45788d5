"""The indexer's families on a device under test: judged by the oracle, and on golden vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.golden_vectors import Golden
from tuner import templates
from tuner.compile import Compiler
from tuner.evaluate import build_job
from tuner.kernels import indexer
from tuner.kernels.base import Candidate, Family, Operands, Values
from tuner.kernels.indexer_operands import block_table, row_table
from tuner.kernels.space import parse_values, require_legal
from tuner.problems import IndexerStepProblem
from tuner.runner.protocol import Execution, OutputSpec, Runner
from tuner.templates import Rendered

COMPILER = Compiler()

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


def variant(family: Family, text: str, subgroup_size: int) -> Values:
    """A variant from its meaningful parameters, "lanes lanes=8 …"; the first word is the strategy,
    and what is not said is neutral."""
    strategy, *assignments = text.split()
    sized = strategy != "baseline" and any(p.name == "subgroup_size" for p in family.parameters)
    size = [f"subgroup_size={subgroup_size}"] if sized else []
    return parse_values(family, [f"strategy={strategy}", *size, *assignments], family.baseline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """In the kernels of a variant, `wrong` stands for each `right`; `says` is in the verdict."""

    variant: str
    right: str
    wrong: str
    says: str
    pass_name: str | None = None

    def render(self, template: str, context: Mapping[str, Any]) -> Rendered:
        """As `tuner.templates.render`, with the mistake (in one pass, if it is named)."""
        rendered = templates.render(template, context)
        if self.pass_name not in (None, context["pass_name"]):
            return rendered
        assert self.right in rendered.text, f"no longer in the template: {self.right}"
        return replace(rendered, text=rendered.text.replace(self.right, self.wrong))


def launched(
    runner: Runner,
    family: Family,
    problem: IndexerStepProblem,
    operands: Operands,
    values: Values,
) -> Execution:
    """One launch of a legal variant."""
    require_legal(family, values, problem, runner.info)
    candidate = Candidate(values, problem, runner.info)
    job = build_job(family, candidate, operands.scalars, COMPILER).job
    outputs = {
        name: OutputSpec(shape=shape, dtype=np.dtype(dtype).name)
        for name, (shape, dtype) in operands.outputs.items()
    }
    runner.load("indexer", operands.inputs, outputs)
    runner.prepare(job)
    try:
        return runner.execute(job, "indexer")
    finally:
        runner.release(job)
        runner.unload("indexer")


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
