"""The kernels of paged decode on a device under test, judged by the oracle."""

from __future__ import annotations

from tuner import templates
from tuner.compile import Compiler
from tuner.evaluate import Evaluator, Findings, Render, ResidentCases
from tuner.kernels.base import Family, Values
from tuner.kernels.paged_decode_q8 import PAGED_DECODE_Q8
from tuner.kernels.space import parse_values
from tuner.problems import PagedDecodeProblem
from tuner.runner.protocol import Runner

FAMILY = PAGED_DECODE_Q8
COMPILER = Compiler()


def variant(text: str, subgroup_size: int, family: Family = FAMILY) -> Values:
    """A variant from its meaningful parameters, "scalar_f32 lanes_per_token=8 …"; the first word
    is the strategy, and what is not said is neutral."""
    strategy, *assignments = text.split()
    size = [] if strategy == "baseline" else [f"subgroup_size={subgroup_size}"]
    return parse_values(family, [f"strategy={strategy}", *size, *assignments], family.baseline)


def judged(
    runner: Runner,
    problem: PagedDecodeProblem,
    values: Values,
    *,
    cases: ResidentCases | None = None,
    render: Render = templates.render,
    family: Family = FAMILY,
) -> Findings:
    """What validation finds in a variant chosen for a problem.

    Raises:
        IllegalVariantError: it is not legal there.
    """
    evaluator = Evaluator(runner, COMPILER, family, problem, cases=cases, render=render)
    trial = evaluator.prepare(evaluator.draft(values))
    try:
        return evaluator.validate(trial)
    finally:
        evaluator.release(trial)
        evaluator.close()
