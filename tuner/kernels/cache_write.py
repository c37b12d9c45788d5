"""What the writers into the paged caches (the first system's) share: floats as they are, or int8.

Each token goes to its slot, block * block size + place; a slot of 0xFFFFFFFF is padding. The float
cache packs neighbouring dimensions of keys and keeps values by dimension; an int8 vector is codes
x * (127/a), halves away from zero, and the scale a/127 (1 for zeros), with a = max|x|.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.kernels import teams
from tuner.kernels.base import (
    Candidate,
    DispatchRule,
    Parameter,
    Pass,
    PushField,
)
from tuner.kernels.subgroups import tuned
from tuner.problems import CacheWriteProblem

SIDES = Parameter(
    name="sides",
    values=("together", "apart"),
    help="whether the same threads write a token's key and value, or different ones",
    used=lambda values: values["strategy"] in ("direct", "teams"),
)
WIDTH = Parameter(name="width", values=(1, 4), help="numbers of one load", used=tuned)
PUSH_FIELDS = tuple(
    PushField(name=name, type="uint") for name in ("tokens", "key_stride", "value_stride")
)


def check_width(c: Candidate) -> str | None:
    """Why rows are no whole loads of 4."""
    size, strides = c.problem.head_size, c.problem.strides
    if c["width"] == 4 and (size % 4 or any(stride % 4 for stride in strides)):
        return (
            f"loads of 4 need a head size and strides that are multiples of 4, not {size} and "
            f"{strides[0]}/{strides[1]}"
        )
    return None


def check_grid(c: Candidate) -> str | None:
    """Why there are too many vectors, of each of which a workgroup may be made."""
    return teams.grid_reason(c.device, 2 * c.problem.tokens * c.problem.kv_heads, "vectors")


def write_pass(
    c: Candidate,
    scalars: Mapping[str, int | float],
    workgroups: int,
    more: Mapping[str, object],
    subgroup_size: int | None = None,
) -> tuple[Pass, ...]:
    """The one pass of a writer with so many workgroups; `more` are the family's own constants."""
    problem: CacheWriteProblem = c.problem
    shape = {
        "head_size": problem.head_size,
        "block_size": problem.block_size,
        "kv_heads": problem.kv_heads,
        "pack": problem.pack,
    }
    return (
        Pass(
            name="write",
            constants={**shape, **more},
            push={f.name: scalars[f.name] for f in PUSH_FIELDS if f.name in scalars},
            groups=teams.linear_grid(workgroups, c.device),
            subgroup_size=subgroup_size,
        ),
    )


def write_rule(c: Candidate, workgroups: str, text: str) -> DispatchRule:
    """The dispatch rule of a writer with so many workgroups."""
    row = "kv_heads * head_size"
    return DispatchRule(
        policy="none",
        terms=teams.linear_terms("write", workgroups, c.device),
        groups={"write": teams.linear_counts("write")},
        push={
            "tokens": "tokens",
            "key_stride": f"max(key_stride, {row})",
            "value_stride": f"max(value_stride, {row})",
        },
        text=f"{text}; {teams.LINEAR}",
    )
