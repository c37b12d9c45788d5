"""The search for the best variant: Optuna's samplers over legal spaces, budgets, resumption."""

from tuner.search.interrupts import Interrupts
from tuner.search.objective import OBJECTIVES, Objective, require_meter
from tuner.search.run import Task, tune
from tuner.search.settings import (
    LEAST_TRIALS,
    SAMPLERS,
    Ending,
    ProblemResult,
    Progress,
    RunResult,
    SamplerName,
    Settings,
    Silent,
    Status,
)

__all__ = [
    "LEAST_TRIALS",
    "OBJECTIVES",
    "SAMPLERS",
    "Ending",
    "Interrupts",
    "Objective",
    "ProblemResult",
    "Progress",
    "RunResult",
    "SamplerName",
    "Settings",
    "Silent",
    "Status",
    "Task",
    "require_meter",
    "tune",
]
