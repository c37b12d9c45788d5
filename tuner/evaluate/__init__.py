"""The one place that strings render, compile, run, check and time, and names what goes wrong."""

from tuner.evaluate.building import (
    Built,
    Render,
    RenderedPass,
    SpirvCompiler,
    build_job,
    pack_push,
    render_context,
    render_passes,
    unpack_push,
    variant_key,
)
from tuner.evaluate.currency import Currency, Sifted
from tuner.evaluate.evaluator import Evaluator
from tuner.evaluate.finals import DRIFT_LIMIT, measure_again, time_again, time_prepared
from tuner.evaluate.residents import ResidentCases, copies_for
from tuner.evaluate.trials import (
    Draft,
    Failure,
    Findings,
    PreparedTrial,
    Session,
    TrialLostDeviceError,
    utc_now,
)

__all__ = [
    "DRIFT_LIMIT",
    "Built",
    "Currency",
    "Draft",
    "Evaluator",
    "Failure",
    "Findings",
    "PreparedTrial",
    "Render",
    "RenderedPass",
    "ResidentCases",
    "Session",
    "Sifted",
    "SpirvCompiler",
    "TrialLostDeviceError",
    "build_job",
    "copies_for",
    "measure_again",
    "pack_push",
    "render_context",
    "render_passes",
    "time_again",
    "time_prepared",
    "unpack_push",
    "utc_now",
    "variant_key",
]
