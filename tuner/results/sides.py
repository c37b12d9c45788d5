"""Two sets of results side by side: which records belong together, and what their samples show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.errors import UnknownNameError, UsageError
from tuner.problems import Problem
from tuner.records import Record
from tuner.results.outcomes import BaselineOf, Outcome, of_last_device, outcomes
from tuner.results.repeats import between_measurements, series
from tuner.timing import Comparison, compare

BEST, BASELINE = "best", "baseline"
MIN_IDENTITY = 6
"""So many characters of a record's identity name a variant."""

Key = tuple[str, Problem]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: `name` for people, records, and which variant is meant.

    Of records of several devices or drivers, those count that were measured last. `variant` is
    ``best``, ``baseline``, the start of a record's identity, or ``name=value,…``: then the fastest
    with these values is meant.

    Raises:
        UsageError: `variant` is none of these, or has a name or value that no record has.
    """

    name: str
    records: tuple[Record, ...]
    variant: str = BEST

    def __post_init__(self) -> None:
        pattern = rf"{BEST}|{BASELINE}|[0-9a-f]{{{MIN_IDENTITY},}}|[^=,]+=[^=,]+(,[^=,]+=[^=,]+)*"
        if not re.fullmatch(pattern, self.variant):
            raise UsageError(
                f"variant {self.variant!r} of {self.name}: use {BEST}, {BASELINE}, name=value,… or "
                f"{MIN_IDENTITY} or more characters of a record's identity"
            )
        for name, value in self.wanted.items():
            known = {name for record in self.records for name in record.values}
            if name not in known:
                raise UnknownNameError("parameter", name, sorted(known))
            values = {str(r.values[name]) for r in self.records if name in r.values}
            if value not in values:
                raise UnknownNameError(f"value of {name} in {self.name}", value, sorted(values))

    @property
    def names_identity(self) -> bool:
        """Whether a record is meant by the start of its identity."""
        return self.variant not in (BEST, BASELINE) and not self.wanted

    @property
    def wanted(self) -> dict[str, str]:
        """The values that the variant must have."""
        if "=" not in self.variant:
            return {}
        pairs = (part.partition("=") for part in self.variant.split(","))
        return {name: value for name, _, value in pairs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The records of one problem on both sides, and B beside A."""

    family: str
    problem: Problem
    a: Record
    b: Record
    comparison: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpaired:
    """A problem that could not be compared. `failed`: B tried it, and nothing was correct."""

    family: str
    problem: Problem
    reason: str
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """All problems of two sides. `between` is what single measurements of each side do not tell.

    See `between_measurements`; None where a side has too few repeats.
    """

    pairs: tuple[Pair, ...]
    unpaired: tuple[Unpaired, ...]
    between: tuple[float | None, float | None]


def side_by_side(
    a: Side, b: Side, *, baseline_of: BaselineOf | None = None, seed: int = 0
) -> SideBySide:
    """Compare the variants that two sides mean, problem by problem.

    Raises:
        UsageError: no problem has a time on both sides; says what each has.
    """
    found = [_choose(side, baseline_of) for side in (a, b)]
    between = [between_measurements(of_last_device(side.records)) for side in (a, b)]
    pairs: list[Pair] = []
    unpaired: list[Unpaired] = []
    for key in dict.fromkeys([*found[0], *found[1]]):
        chosen = [_record(side, choices, key) for side, choices in zip((a, b), found, strict=True)]
        family, problem = key
        first, second = chosen
        if isinstance(first, str) or isinstance(second, str):
            reason = "; ".join(each for each in chosen if isinstance(each, str))
            failed = isinstance(first, Record) and key in found[1]
            unpaired.append(Unpaired(family=family, problem=problem, reason=reason, failed=failed))
        elif first.measure != second.measure:
            reason = f"{a.name} has {first.measure} samples, {b.name} {second.measure} ones"
            unpaired.append(Unpaired(family=family, problem=problem, reason=reason))
        else:
            both = [series(r, each) for r, each in zip((first, second), between, strict=True)]
            comparison = compare(both[0], both[1], seed=seed)
            pairs.append(
                Pair(family=family, problem=problem, a=first, b=second, comparison=comparison)
            )
    if not pairs:
        raise UsageError(_nothing_in_common(unpaired))
    return SideBySide(
        pairs=tuple(pairs), unpaired=tuple(unpaired), between=(between[0], between[1])
    )


def _nothing_in_common(unpaired: Sequence[Unpaired]) -> str:
    if not unpaired:
        return "nothing to compare: neither side has records"
    listed = "\n".join(f"  {u.family} {u.problem.label}: {u.reason}" for u in unpaired[:12])
    more = f"\n  … and {len(unpaired) - 12} more" if len(unpaired) > 12 else ""
    return f"nothing to compare: no problem has a time on both sides:\n{listed}{more}"


def _choose(side: Side, baseline_of: BaselineOf | None) -> dict[Key, Record | str]:
    """By problem the record that the side means, or why there is none."""
    found = outcomes(of_last_device(side.records), baseline_of=baseline_of)
    return {(each.family, each.problem): _of_outcome(side, each) for each in found}


def _of_outcome(side: Side, outcome: Outcome) -> Record | str:
    if side.variant == BEST:
        return outcome.best or f"{side.name} has no correct variant"
    if side.variant == BASELINE:
        return outcome.baseline or f"{side.name} has no time of the baseline"
    fitting = [record for record in outcome.records if _is_meant(side, record)]
    if not fitting:
        return f"{side.name} has not tried {side.variant}"
    timed = [record for record in outcome.ranked if record in fitting]
    if not timed:
        states = ", ".join(sorted({record.state for record in fitting}))
        return f"{side.name} has no time of {side.variant} ({states})"
    return timed[0]


def _is_meant(side: Side, record: Record) -> bool:
    if not side.wanted:
        return record.variant.startswith(side.variant)
    return all(str(record.values.get(name)) == value for name, value in side.wanted.items())


def _record(side: Side, choices: dict[Key, Record | str], key: Key) -> Record | str:
    return choices.get(key, f"{side.name} has no such problem")
