"""Kernels of any family on a device under test: judged by the oracle, or launched on operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tuner import templates
from tuner.compile import Compiler
from tuner.device_info import DeviceInfo
from tuner.evaluate import Evaluator, Findings, Render, ResidentCases, build_job
from tuner.evaluate.residents import output_specs
from tuner.kernels.base import Candidate, Family, Operands, Values
from tuner.kernels.space import parse_values, require_legal
from tuner.problems import Problem
from tuner.runner.protocol import Execution, Job, Runner
from tuner.templates import Rendered

COMPILER = Compiler()


def variant(family: Family, text: str, device: DeviceInfo) -> Values:
    """A variant from its meaningful parameters, "teams lanes=8 …"; the first word is the strategy,
    what is not said is neutral, and the subgroup size, if it means anything, is the device's."""
    strategy, *assignments = text.split()
    values = parse_values(family, [f"strategy={strategy}", *assignments], family.baseline)
    if "subgroup_size" not in family.meaningful(values):
        return values
    size = f"subgroup_size={device.subgroup_size}"
    return parse_values(family, [f"strategy={strategy}", size, *assignments], family.baseline)


def judged(
    runner: Runner,
    family: Family,
    problem: Problem,
    chosen: Values | str,
    *,
    cases: ResidentCases | None = None,
    render: Render = templates.render,
) -> Findings:
    """What validation finds in a variant, its values or the text of `variant`, for a problem.

    Raises:
        IllegalVariantError: it is not legal there.
    """
    evaluator = Evaluator(runner, COMPILER, family, problem, cases=cases, render=render)
    values = variant(family, chosen, runner.info) if isinstance(chosen, str) else chosen
    trial = evaluator.prepare(evaluator.draft(values))
    try:
        return evaluator.validate(trial)
    finally:
        evaluator.release(trial)
        evaluator.close()


def launched(
    runner: Runner, family: Family, problem: Problem, operands: Operands, chosen: Values | str
) -> Execution:
    """One launch of a legal variant on the given operands; nothing past their ends is written."""
    values = variant(family, chosen, runner.info) if isinstance(chosen, str) else chosen
    require_legal(family, values, problem, runner.info)
    candidate = Candidate(values, problem, runner.info)
    return launch(runner, build_job(family, candidate, operands.scalars, COMPILER).job, operands)


def launch(runner: Runner, job: Job, operands: Operands) -> Execution:
    """One launch of a job on the given operands; nothing past their ends is written."""
    runner.load("launched", operands.inputs, output_specs(operands))
    runner.prepare([job])
    try:
        (execution,) = runner.execute([(job, "launched")])
    finally:
        runner.release([job])
        runner.unload("launched")
    assert execution.broken_guards == ()
    return execution


def assert_right(
    runner: Runner, family: Family, problem: Problem, chosen: Values | str, cases: ResidentCases
) -> None:
    """The variant passes all validation cases of the problem."""
    found = judged(runner, family, problem, chosen, cases=cases)
    assert found.failure is None
    assert found.check is not None
    assert found.check.cases == len(family.validation_cases(problem))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """In a variant's GLSL, or only in the named passes, `wrong` stands for each `right`; `says` is
    in the verdict."""

    variant: str
    right: str
    wrong: str
    says: str = "is off by"
    passes: tuple[str, ...] = ()

    def render(self, template: str, context: Mapping[str, Any]) -> Rendered:
        """As `tuner.templates.render`, with the mistake."""
        rendered = templates.render(template, context)
        if self.passes and context["pass_name"] not in self.passes:
            return rendered
        assert self.right in rendered.text, f"no longer in the template: {self.right}"
        return replace(rendered, text=rendered.text.replace(self.right, self.wrong))


def assert_caught(
    runner: Runner, family: Family, problem: Problem, mistake: Mistake, cases: ResidentCases
) -> None:
    """The variant fails with the mistake in it."""
    found = judged(runner, family, problem, mistake.variant, cases=cases, render=mistake.render)
    assert found.failure is not None
    assert found.failure.state == "correctness"
    assert mistake.says in found.failure.error
