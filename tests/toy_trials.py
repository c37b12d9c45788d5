"""Trials of the toy family on the fake runner."""

from __future__ import annotations

from typing import Any

from tests.toy_family import TOY, ToyCompiler, toy_problem, toy_render, toy_runner
from tuner.evaluate import Evaluator, Session
from tuner.kernels.base import Values
from tuner.problems import Problem
from tuner.runner.fake import FakeRunner
from tuner.runner.protocol import MeasurePlan

TILED: Values = {"mode": "tiled", "width": 64, "unroll": 2, "tile": 8, "split": 1}
SPLIT: Values = {"mode": "half", "width": 32, "unroll": 1, "tile": 1, "split": 2}
PLAN = MeasurePlan(min_samples=5, max_samples=9, budget_ms=0.01)


def evaluator(
    runner: FakeRunner | None = None,
    compiler: ToyCompiler | None = None,
    problem: Problem | None = None,
    **options: Any,
) -> Evaluator:
    return Evaluator(
        runner or toy_runner(),
        compiler or ToyCompiler(),
        TOY,
        problem or toy_problem(4, 4096),
        session=Session(name="s1", plan=PLAN, read_gb_s=1000.0, sampler="tpe"),
        render=toy_render,
        **options,
    )
