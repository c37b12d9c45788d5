"""How a search times: coarser than a measurement that stands for itself, finer at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.toy_family import TOY, ToyCompiler, toy_problem, toy_render, toy_runner
from tuner.evaluate import Session
from tuner.results import Store
from tuner.runner.protocol import Job, Measurement, MeasurePlan
from tuner.search import Settings, tune


@pytest.mark.parametrize(
    ("asked", "warmup_ms", "precision"),
    [
        (MeasurePlan(), 5.0, 0.01),
        (MeasurePlan(warmup_ms=1.0, precision=0.02), 1.0, 0.02),
    ],
    ids=["defaults", "coarser yet"],
)
def test_trials_are_timed_coarsely_and_the_finals_by_their_rounds(
    asked: MeasurePlan,
    warmup_ms: float,
    precision: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, plans = toy_runner(), []
    measure = runner.measure

    def watched(job: Job, workload: str, plan: MeasurePlan) -> Measurement:
        plans.append(plan)
        return measure(job, workload, plan)

    monkeypatch.setattr(runner, "measure", watched)
    tune(
        runner,
        ToyCompiler(),
        [(TOY, toy_problem(4, 4096))],
        Store(tmp_path),
        storage=tmp_path / "study.journal",
        settings=Settings(trials=6, workers=1, reference_every=0),
        session=Session(plan=asked),
        render=toy_render,
    )
    assert {plan.warmup_ms for plan in plans} == {warmup_ms}
    assert {plan.precision for plan in plans[:6]} == {precision}
    assert {plan.precision for plan in plans[6:]} == {0.0}
