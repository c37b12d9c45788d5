"""The search space of decode over caches of floats: parameters, and which choices are legal."""

from __future__ import annotations

from functools import partial

from tuner.kernels import float_lanes as lanes
from tuner.kernels import float_matrix as matrix
from tuner.kernels import limits, subgroups
from tuner.kernels.base import Candidate, Constraint, Parameter, Value
from tuner.kernels.float_launches import plan_of, workgroup_counts
from tuner.kernels.float_operands import CacheFormat
from tuner.kernels.splits import POLICIES, combine_reason, split_reason

MAX_HEAD_SIZE = 512
SPLITS = tuple(policy for policy in POLICIES if not policy.startswith("fit:"))
"""The policies that say into how many parts a context is cut."""


def parameters(strategies: tuple[Value, ...]) -> tuple[Parameter, ...]:
    """The parameters of a family with these strategies."""
    return (
        Parameter(
            name="strategy",
            values=strategies,
            help="baseline: one workgroup per query head, two passes over K. The others split the "
            "context and read KV once per KV head; they compute in f32, in packed f16, or with "
            "cooperative matrices",
        ),
        subgroups.SIZE,
        subgroups.per_workgroup(1, 2, 4, 8, 12, 16),
        *lanes.PARAMETERS,
        *(matrix.PARAMETERS if "matrix" in strategies else ()),
        Parameter(
            name="prefetch",
            values=(0, 1),
            help="0: values are loaded once keys are used; 1: the next tile's keys and values are "
            "loaded as soon as these are used",
            used=lambda values: lanes.by_lanes(values) or matrix.fed_by_lanes(values),
        ),
        Parameter(
            name="split",
            values=SPLITS,
            help="how the context is cut: none, count:N parts, parts of tokens:N, or device:N "
            "workgroups per compute unit",
            used=subgroups.tuned,
        ),
        Parameter(
            name="combine_slices",
            values=(1, 2, 4, 8),
            help="parts into which the combine pass deals out the splits of a query head",
            used=lambda values: subgroups.tuned(values) and values["split"] != "none",
        ),
    )


def _check_split(c: Candidate) -> str | None:
    if subgroups.tuned(c.values):
        reason = split_reason(c["split"], plan_of(c).parts, c.device.compute_units)
        if reason is not None:
            return reason
    return limits.launches_reason(c.device, workgroup_counts(c))


def _check_combine(c: Candidate) -> str | None:
    if c["split"] == "none":
        return None
    size, slices = c.problem.value_size, c["combine_slices"]
    if size % 4:
        return f"values of {size} elements do not combine in vectors of 4"
    return combine_reason(c.device, columns=size // 4, slices=slices, dimensions=size)


def _check_head_size(c: Candidate, cache: CacheFormat) -> str | None:
    if c.problem.head_size % cache.packet:
        return (
            f"head size {c.problem.head_size} is no multiple of {cache.packet}, the elements that "
            "lie side by side in the cache"
        )
    for name, size in (("head", c.problem.head_size), ("value", c.problem.value_size)):
        if size > MAX_HEAD_SIZE:
            return f"{name} size {size} is more than the {MAX_HEAD_SIZE} that are supported"
    return None


def _check_whole_words(c: Candidate, cache: CacheFormat) -> str | None:
    if c.problem.value_size * c.problem.block_size * cache.dtype.itemsize % 4:
        return (
            f"{c.problem.value_size} x {c.problem.block_size} values of a block do not fill whole "
            "32-bit words"
        )
    return None


def constraints(cache: CacheFormat, *, matrices: bool) -> tuple[Constraint, ...]:
    """The rules of a family over caches of a format, with matrix units or without."""
    granule = (
        *("strategy", "subgroups", "head_slices", "token_lanes", "tokens_unrolled"),
        *(("matrix_shape", "value_width") if matrices else ()),
    )
    return (
        Constraint(needs=(), check=partial(_check_head_size, cache=cache)),
        Constraint(needs=(), check=partial(_check_whole_words, cache=cache)),
        subgroups.SIZE_RULE,
        subgroups.WORKGROUP_RULE,
        *lanes.constraints(cache),
        *(matrix.CONSTRAINTS if matrices else ()),
        Constraint(needs=(*granule, "split"), check=_check_split),
        Constraint(needs=("split", "combine_slices"), check=_check_combine),
    )
