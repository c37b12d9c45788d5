"""Kernels made for subgroups of a chosen size: all strategies of a family but its "baseline".

Parameters, rules and launch details that families with such strategies share.
"""

from __future__ import annotations

from tuner.kernels import limits
from tuner.kernels.base import Candidate, Constraint, Parameter, Values


def tuned(values: Values) -> bool:
    """Whether the strategy is another than the baseline."""
    return values["strategy"] != "baseline"


SIZE = Parameter(
    name="subgroup_size",
    values=(8, 16, 32, 64),
    help="lanes of a subgroup that the kernel is built for",
    used=tuned,
)


def per_workgroup(*counts: int) -> Parameter:
    """The parameter that says how many subgroups a workgroup has."""
    return Parameter(name="subgroups", values=counts, help="subgroups per workgroup", used=tuned)


def required_size(c: Candidate) -> int | None:
    """The size that a pass must ask the device for; None for baselines, or where none can be."""
    asks = tuned(c.values) and c.device.subgroup_size_control
    return int(c["subgroup_size"]) if asks else None


def operations(*kinds: str) -> Constraint:
    """A rule: tuned strategies need these kinds of subgroup operations."""

    def check(c: Candidate) -> str | None:
        return limits.operations_reason(c.device, kinds) if tuned(c.values) else None

    return Constraint(needs=("strategy",), check=check)


def _check_size(c: Candidate) -> str | None:
    if not tuned(c.values):
        return None
    return limits.subgroup_size_reason(c.device, c["subgroup_size"])


def _check_workgroup(c: Candidate) -> str | None:
    if not tuned(c.values):
        return None
    return limits.threads_reason(c.device, c["subgroups"] * c["subgroup_size"])


SIZE_RULE = Constraint(needs=("strategy", "subgroup_size"), check=_check_size)
WORKGROUP_RULE = Constraint(
    needs=("strategy", "subgroup_size", "subgroups"), check=_check_workgroup
)


def head_slices_reason(slices: int, subgroups: int, group: int) -> str | None:
    """Why the `group` query heads of a KV head cannot be dealt out in so many slices, each to as
    many of the subgroups."""
    if slices > min(subgroups, group):
        return (
            f"{slices} head slices need as many subgroups (here {subgroups}) and query heads per "
            f"KV head (here {group})"
        )
    if subgroups % slices:
        return f"{subgroups} subgroups are not dealt out evenly to {slices} slices"
    heads = -(-group // slices)
    if (slices - 1) * heads >= group:
        return (
            f"{slices} head slices of {heads} query heads leave one without any of the group's "
            f"{group}"
        )
    return None
