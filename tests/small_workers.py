"""Workers over the small kernels, and a job that does no harm."""

from __future__ import annotations

from collections.abc import Callable

from tests.small_kernels import job, operands, run, step
from tuner.runner._deadlines import Deadlines
from tuner.runner.protocol import Job, Measurement, MeasurePlan
from tuner.runner.worker import WorkerRunner

SHORT = Deadlines(start_s=60.0, launch_s=1.0, prepare_s=2.0, close_s=20.0, spare_s=0.5)
"""Short for what hangs on purpose, and a thousand times what anything else takes."""
PLAN = MeasurePlan(
    warmup_ms=1.0, min_samples=3, max_samples=5, budget_ms=1.0, max_submission_ms=1.0
)
GOOD = job(step("scale", factor=3.0))
Start = Callable[..., WorkerRunner]


def is_right(runner: WorkerRunner) -> bool:
    """Whether a job that does no harm still gets its answer."""
    answer = run(runner, GOOD).outputs["o"]
    return bool((answer == 3.0 * operands()["a"]).all())


def measured(runner: WorkerRunner, made: Job, workload: str) -> Measurement:
    return runner.measure(made, workload, PLAN)
