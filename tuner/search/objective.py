"""What a search minimises: the time of a launch, the energy of a decoded token, or both."""

from __future__ import annotations

from typing import Literal

from tuner.errors import UsageError
from tuner.records import Record
from tuner.runner.protocol import Runner

Objective = Literal["time", "energy", "both"]
OBJECTIVES: tuple[Objective, ...] = ("time", "energy", "both")

Costs = tuple[float, ...]
"""What one variant costs: microseconds, millijoules a token, or these two, by the objective."""


def costs(record: Record, objective: Objective) -> Costs | None:
    """What the variant of a record costs; None if it failed, or if not all of it was measured."""
    if record.state != "correct" or record.median_ns is None:
        return None
    time_us, joules = record.median_ns / 1e3, record.energy_j_per_token
    if objective == "time":
        return (time_us,)
    if joules is None:
        return None
    return (1e3 * joules,) if objective == "energy" else (time_us, 1e3 * joules)


def require_meter(runner: Runner, objective: Objective) -> None:
    """Refuse an objective that the device cannot tell.

    Raises:
        UsageError: energy is asked for, and no sensor tells power.
    """
    if objective == "time":
        return
    observed = runner.observe()
    if observed is None or observed.power_w is None:
        why = "no sensors were found" if observed is None else f"{observed.source} tells no power"
        raise UsageError(
            f"objective {objective!r} needs the energy of {runner.info.name}: {why}; "
            "use --objective time"
        )
