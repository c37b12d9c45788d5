"""The order and names of problems in figures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tuner.results import Outcome


def in_order(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """By family, then as the problem's kind orders them."""
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
    return (outcome.family, outcome.problem.order)
