"""Parameters and geometry of the indexer's kernels that normalise and turn single vectors."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.kernels import indexer, limits, subgroups
from tuner.kernels.base import Candidate, Constraint, DispatchRule, Parameter, Pass, Values

VECTORS = "each workgroup takes the same number of vectors"
MAX_LANE_QUADS = 16
"""Groups of four values that one lane may hold in registers."""

STRATEGY = Parameter(
    name="strategy",
    values=("baseline", "lanes"),
    help="baseline: a workgroup for each vector, a thread for each dimension, sums through shared "
    "memory; lanes: some lanes of a subgroup for each vector, all in registers",
)
SUBGROUPS = subgroups.per_workgroup(1, 2, 4, 8)
LANES = Parameter(
    name="lanes",
    values=(1, 2, 4, 8, 16, 32, 64),
    help="lanes that share a vector",
    used=subgroups.tuned,
)
PARAMETERS = (STRATEGY, subgroups.SIZE, SUBGROUPS, LANES)
PORTABLE: tuple[Values, ...] = tuple(
    {"strategy": "lanes", "subgroup_size": size, "subgroups": 1, "lanes": lanes}
    for lanes in (32, 16, 8, 4)
    for size in (64, 32, 16, 8)
    if lanes <= size
)
"""Variants for vectors of fewer dimensions than a subgroup has work for."""


def vectors(c: Candidate) -> int:
    """Vectors that one workgroup takes."""
    if c["strategy"] == "baseline":
        return 1
    return int(c["subgroups"] * max(1, c["subgroup_size"] // c["lanes"]))


def _check_threads(c: Candidate) -> str | None:
    baseline = c["strategy"] == "baseline"
    threads = c.problem.index_dim if baseline else c["subgroups"] * c["subgroup_size"]
    return limits.threads_reason(c.device, threads)


def _check_rotary(c: Candidate) -> str | None:
    if c["strategy"] == "lanes" and c.problem.rotary % 4:
        return f"rotary is {c.problem.rotary}, two neighbours and two partners need a multiple of 4"
    return None


def _check_lanes(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        return None
    quads, lanes = c.problem.index_dim // 4, c["lanes"]
    if lanes > c["subgroup_size"]:
        return f"{lanes} lanes of a vector are more than the subgroup's {c['subgroup_size']}"
    if lanes > quads:
        return f"{lanes} lanes for the {quads} groups of four dimensions of a vector"
    if -(-quads // lanes) > MAX_LANE_QUADS:
        return f"a lane would hold {-(-quads // lanes)} groups of four, at most {MAX_LANE_QUADS}"
    return None


CONSTRAINTS = (
    subgroups.operations("basic", "shuffle"),
    subgroups.SIZE_RULE,
    Constraint(needs=("strategy",), check=_check_rotary),
    Constraint(needs=("strategy", "subgroup_size", "subgroups"), check=_check_threads),
    Constraint(needs=("strategy", "subgroup_size", "lanes"), check=_check_lanes),
)


def workgroups(c: Candidate, count: int) -> int:
    """Workgroups for so many vectors."""
    return -(-count // vectors(c))


def vector_pass(c: Candidate, name: str, count: int, scalars: Mapping[str, int | float]) -> Pass:
    """The one launch: each workgroup takes `vectors` of the `count` vectors."""
    return Pass(
        name=name,
        constants=indexer.constants(c.problem),
        push=indexer.push(scalars),
        groups=(workgroups(c, count), 1, 1),
        subgroup_size=subgroups.required_size(c),
    )


def dispatch(c: Candidate, name: str, count: str) -> DispatchRule:
    """How to launch on other sizes, `count` being an expression for the number of vectors."""
    return indexer.rule({name: (f"ceil_div({count}, {vectors(c)})", "1", "1")}, VECTORS)
