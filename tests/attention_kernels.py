"""The kernels of paged attention, forward and backward, on a device under test."""

from __future__ import annotations

import numpy as np

from tests.golden_vectors import Golden
from tuner import templates
from tuner.compile import Compiler
from tuner.device_info import DeviceInfo
from tuner.elements import STORED
from tuner.evaluate import Evaluator, Findings, Render, ResidentCases, build_job
from tuner.kernels.base import Candidate, Family, Operands, Values
from tuner.kernels.gradient_operands import with_gradients
from tuner.kernels.space import parse_values, require_legal
from tuner.problems import PagedAttentionProblem
from tuner.runner.protocol import Execution, OutputSpec, Runner

COMPILER = Compiler()


def variant(family: Family, text: str, device: DeviceInfo) -> Values:
    """A variant from its meaningful parameters, "lanes tile_rows=4 …"; the first word is the
    strategy, the subgroup size the device's own, and what is not said is neutral."""
    strategy, *assignments = text.split()
    sized = strategy != "baseline" and "subgroup_size" in family.baseline
    size = [f"subgroup_size={device.subgroup_size}"] if sized else []
    return parse_values(family, [f"strategy={strategy}", *size, *assignments], family.baseline)


def judged(
    runner: Runner,
    family: Family,
    problem: PagedAttentionProblem,
    text: str,
    *,
    cases: ResidentCases | None = None,
    render: Render = templates.render,
) -> Findings:
    """What validation finds in a variant chosen for a problem.

    Raises:
        IllegalVariantError: it is not legal there.
    """
    values = variant(family, text, runner.info)
    evaluator = Evaluator(runner, COMPILER, family, problem, cases=cases, render=render)
    trial = evaluator.prepare(evaluator.draft(values))
    try:
        return evaluator.validate(trial)
    finally:
        evaluator.release(trial)
        evaluator.close()


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


def launched(
    runner: Runner, family: Family, problem: PagedAttentionProblem, operands: Operands, text: str
) -> Execution:
    """One launch of a variant on the given operands."""
    values = variant(family, text, runner.info)
    require_legal(family, values, problem, runner.info)
    candidate = Candidate(values, problem, runner.info)
    job = build_job(family, candidate, operands.scalars, COMPILER).job
    outputs = {
        name: OutputSpec(shape=shape, dtype=dtype.name)
        for name, (shape, dtype) in operands.outputs.items()
    }
    runner.load("launched", operands.inputs, outputs)
    runner.prepare(job)
    try:
        return runner.execute(job, "launched")
    finally:
        runner.release(job)
        runner.unload("launched")


def golden_gradient_operands(golden: Golden) -> Operands:
    """The operands of a golden backward launch."""
    inputs = golden.inputs
    return with_gradients(golden_operands(golden), inputs["d_out"], inputs["out"], inputs["lse"])
