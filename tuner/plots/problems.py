"""The order and names of problems in figures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tuner.results import Outcome


def in_order(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """By family, head geometry, sequences, then context."""
    return sorted(outcomes, key=_order)


def names(outcomes: Iterable[Outcome]) -> list[str]:
    """Labels for an axis, with the family where there are several."""
    listed = list(outcomes)
    several = len({outcome.family for outcome in listed}) > 1
    return [
        f"{outcome.problem.label}\n{outcome.family}" if several else outcome.problem.label
        for outcome in listed
    ]


def _order(outcome: Outcome) -> tuple[Any, ...]:
    problem: Any = outcome.problem
    return (
        outcome.family,
        problem.head_size,
        problem.query_heads // problem.kv_heads,
        problem.kv_heads,
        problem.sequences,
        problem.context,
        problem.lengths,
        problem.block_size,
    )
