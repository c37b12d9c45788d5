"""Teams of lanes: each takes a vector at a time, several make a workgroup, many workgroups a grid.

Parameters and constraints of kernels whose template includes `_team.glsl.jinja`. They mean nothing
to the strategy "baseline", which is written with shared memory alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.device_info import DeviceInfo
from tuner.kernels import limits, subgroups
from tuner.kernels.base import Candidate, Constraint, Parameter, Terms
from tuner.kernels.subgroups import tuned

BASELINE_THREADS = 128


PARAMETERS = (
    subgroups.SIZE,
    subgroups.per_workgroup(1, 2, 4, 8, 16),
    Parameter(
        name="lanes",
        values=(1, 2, 4, 8, 16, 32, 64),
        help="lanes of a team, which share one vector",
        used=tuned,
    ),
)


def teams(c: Candidate) -> int:
    """Teams of a workgroup."""
    return int(c["subgroups"] * c["subgroup_size"] // c["lanes"])


def constants(c: Candidate) -> Mapping[str, object]:
    """What `_team.glsl.jinja` needs beside the parameters."""
    return {"teams": teams(c)}


def linear_grid(workgroups: int, device: DeviceInfo) -> tuple[int, int, int]:
    """Workgroup counts in x and y that hold at least so many, numbered x first.

    Most devices allow no more than 65,535 in each direction. Kernels must leave alone the few
    workgroups beyond.
    """
    rows = -(-workgroups // device.max_workgroup_count[0])
    return (-(-workgroups // rows), rows, 1) if rows else (1, 1, 1)


def grid_reason(device: DeviceInfo, count: int, things: str) -> str | None:
    """Why no grid of `linear_grid` can have a workgroup for each of so many `things`."""
    limit = device.max_workgroup_count[0] * device.max_workgroup_count[1]
    return f"{count} {things}, the device allows {limit} workgroups" if count > limit else None


def linear_terms(name: str, workgroups: str, device: DeviceInfo) -> Terms:
    """What `linear_counts` needs for a pass of so many workgroups."""
    most = device.max_workgroup_count[0]
    return (
        (f"{name}_workgroups", workgroups),
        (f"{name}_grid_rows", f"max(1, ceil_div({name}_workgroups, {most}))"),
    )


def linear_counts(name: str) -> tuple[str, str, str]:
    """`linear_grid` in expressions."""
    rows = f"{name}_grid_rows"
    return (f"max(1, ceil_div({name}_workgroups, {rows}))", rows, "1")


LINEAR = (
    "workgroups in x alone, or numbered x first in x and y where the device allows fewer in x; "
    "more do no harm"
)
"""What `linear_counts` means, in words."""


def _check_workgroup(c: Candidate) -> str | None:
    threads = c["subgroups"] * c["subgroup_size"] if tuned(c.values) else BASELINE_THREADS
    return limits.threads_reason(c.device, threads)


def _check_lanes(c: Candidate) -> str | None:
    if tuned(c.values) and c["lanes"] > c["subgroup_size"]:
        return f"a team of {c['lanes']} lanes is more than the subgroup's {c['subgroup_size']}"
    return None


CONSTRAINTS = (
    subgroups.operations("basic", "shuffle"),
    subgroups.SIZE_RULE,
    Constraint(needs=("strategy", "subgroup_size", "subgroups"), check=_check_workgroup),
    Constraint(needs=("strategy", "subgroup_size", "lanes"), check=_check_lanes),
)
