"""Teams of lanes: each takes a vector at a time, several make a workgroup, many workgroups a grid.

Parameters and constraints of kernels whose template includes `_team.glsl.jinja`. They mean nothing
to the strategy "baseline", which is written with shared memory alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.device_info import DeviceInfo
from tuner.kernels import limits
from tuner.kernels.base import Candidate, Constraint, DispatchRule, Parameter, Values

BASELINE_THREADS = 128


def by_teams(values: Values) -> bool:
    """Whether the strategy is another than the baseline."""
    return values["strategy"] != "baseline"


PARAMETERS = (
    Parameter(
        name="subgroup_size",
        values=(8, 16, 32, 64),
        help="lanes of a subgroup that the kernel is built for",
        used=by_teams,
    ),
    Parameter(
        name="subgroups", values=(1, 2, 4, 8, 16), help="subgroups per workgroup", used=by_teams
    ),
    Parameter(
        name="lanes",
        values=(1, 2, 4, 8, 16, 32, 64),
        help="lanes of a team, which share one vector",
        used=by_teams,
    ),
)


def teams(c: Candidate) -> int:
    """Teams of a workgroup."""
    return int(c["subgroups"] * c["subgroup_size"] // c["lanes"])


def constants(c: Candidate) -> Mapping[str, object]:
    """What `_team.glsl.jinja` needs beside the parameters."""
    return {"teams": teams(c)}


def required_size(c: Candidate) -> int | None:
    """The subgroup size that a pipeline must ask for."""
    asks = by_teams(c.values) and c.device.subgroup_size_control
    return int(c["subgroup_size"]) if asks else None


def linear_grid(workgroups: int, device: DeviceInfo) -> tuple[int, int, int]:
    """Workgroup counts in x and y that hold at least so many, numbered x first.

    Most devices allow no more than 65,535 in each direction. Kernels must leave alone the few
    workgroups beyond.
    """
    rows = -(-workgroups // device.max_workgroup_count[0])
    return (-(-workgroups // rows), rows, 1) if rows else (1, 1, 1)


def most_workgroups(device: DeviceInfo) -> int:
    """Workgroups of the largest grid that `linear_grid` can make."""
    return device.max_workgroup_count[0] * device.max_workgroup_count[1]


def dispatch(per_workgroup: int, count: str) -> DispatchRule:
    """How to launch on other sizes: `count` is the number of vectors, in words."""
    return DispatchRule(
        policy="none",
        facts={"per_workgroup": per_workgroup},
        groups={},
        text=f"workgroups = ceil({count} / per_workgroup), in x alone, or numbered x first in x "
        "and y where the device allows fewer in x; more do no harm",
    )


def _check_operations(c: Candidate) -> str | None:
    if not by_teams(c.values):
        return None
    return limits.operations_reason(c.device, ("basic", "shuffle"))


def _check_size(c: Candidate) -> str | None:
    if not by_teams(c.values):
        return None
    return limits.subgroup_size_reason(c.device, c["subgroup_size"])


def _check_workgroup(c: Candidate) -> str | None:
    threads = c["subgroups"] * c["subgroup_size"] if by_teams(c.values) else BASELINE_THREADS
    return limits.threads_reason(c.device, threads)


def _check_lanes(c: Candidate) -> str | None:
    if by_teams(c.values) and c["lanes"] > c["subgroup_size"]:
        return f"a team of {c['lanes']} lanes is more than the subgroup's {c['subgroup_size']}"
    return None


SUBGROUP_CONSTRAINTS = (
    Constraint(needs=("strategy",), check=_check_operations),
    Constraint(needs=("strategy", "subgroup_size"), check=_check_size),
    Constraint(needs=("strategy", "subgroup_size", "subgroups"), check=_check_workgroup),
)
"""For kernels that have subgroups, but no teams in this sense."""
CONSTRAINTS = (
    *SUBGROUP_CONSTRAINTS,
    Constraint(needs=("strategy", "subgroup_size", "lanes"), check=_check_lanes),
)
