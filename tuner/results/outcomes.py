"""What the trials of a problem come to: the best variant, its ties, the baseline, the failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tuner.errors import UnknownNameError
from tuner.problems import Problem
from tuner.records import FINAL, REFERENCE, Record, State
from tuner.results.repeats import series
from tuner.results.simplicity import simplest
from tuner.timing import compare, overlap

if TYPE_CHECKING:
    from tuner.kernels.base import Values

NEAR = 0.01
"""How much slower than the fastest a variant may be to be preferred as the simpler one."""

BaselineOf: TypeAlias = "Callable[[str], Values | None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All trials of one family on one problem with one device and driver.

    `records` holds the newest record of each variant, in the order of appending. `ranked` are the
    correct ones, fastest first: those of a final measurement, where there was one, before all
    others, as only these were timed side by side; then by median, upper bound and variant, so that
    the same records always have the same best. `leaders` are the fastest and those of the same
    standing that the samples do not show to be slower, the preferred one first: the fastest or, of
    those timed in turns with it, the simplest within `NEAR` of it.
    """

    device: str
    driver: str
    family: str
    problem: Problem
    records: tuple[Record, ...]
    ranked: tuple[Record, ...]
    leaders: tuple[Record, ...]
    baseline: Record | None
    failures: Mapping[State, int]

    @property
    def best(self) -> Record | None:
        """The variant to use, if any is correct: the simplest of the fastest."""
        return self.leaders[0] if self.leaders else None

    @property
    def tied(self) -> tuple[Record, ...]:
        """The other variants that the samples do not show to be slower than the fastest."""
        return self.leaders[1:]

    @property
    def speedup(self) -> float | None:
        """Time of the baseline over that of the best, None unless both were measured."""
        if self.best is None or self.baseline is None:
            return None
        return self.baseline.timed_ns / self.best.timed_ns


def outcomes(
    records: Iterable[Record], *, baseline_of: BaselineOf | None = None
) -> tuple[Outcome, ...]:
    """One outcome per device, driver, family and problem, in the order of first appearance.

    `baseline_of` gives the values of a family's baseline; by default the family's declaration does.
    """
    baseline_of = baseline_of or declared_baseline
    records = tuple(records)
    baselines = _baselines(records, baseline_of)
    groups: dict[tuple[str, str, str, Problem], list[Record]] = {}
    for record in latest(records):
        key = (record.device, record.driver, record.family, record.problem)
        groups.setdefault(key, []).append(record)
    return tuple(_outcome(tuple(group), baselines) for group in groups.values())


def _baselines(records: Iterable[Record], baseline_of: BaselineOf) -> frozenset[str]:
    """The variants that are their family's baseline, whatever values they were also reached by:
    values that come to the same launches are one variant."""
    known: dict[str, Values | None] = {}
    found = set()
    for record in records:
        if record.family not in known:
            known[record.family] = baseline_of(record.family)
        baseline = known[record.family]
        if baseline and _agrees(record.values, baseline):
            found.add(record.variant)
    return frozenset(found)


def latest(records: Iterable[Record]) -> tuple[Record, ...]:
    """The newest record of each variant, in the order in which variants first appear.

    What was measured as a reference does not count: it stands beside a record of its own.
    """
    newest: dict[str, Record] = {}
    for record in records:
        if record.note == REFERENCE:
            continue
        known = newest.get(record.variant)
        if known is None or known.time <= record.time:
            newest[record.variant] = record
    return tuple(newest.values())


def of_last_device(records: Iterable[Record]) -> tuple[Record, ...]:
    """The records of the device and driver that were measured last."""
    listed = tuple(records)
    newest = max(listed, key=lambda record: record.time, default=None)
    if newest is None:
        return ()
    key = (newest.device, newest.driver)
    return tuple(record for record in listed if (record.device, record.driver) == key)


def declared_baseline(family: str) -> Values | None:
    """The values that matter in the baseline that this version declares for the family.

    None if it knows no such family.
    """
    from tuner import kernels
    from tuner.kernels.space import canonical

    try:
        found = kernels.family(family)
    except UnknownNameError:
        return None
    return found.meaningful(canonical(found, found.baseline))


def interval(record: Record) -> tuple[float, float]:
    """(low, high) of the median of a correct record, nanoseconds."""
    median = record.timed_ns
    low = record.low_ns if record.low_ns is not None else median
    high = record.high_ns if record.high_ns is not None else median
    return low, high


def leading(ranked: Sequence[Record]) -> tuple[Record, ...]:
    """See `Outcome.leaders`; `ranked` has the fastest first."""
    if not ranked:
        return ()
    fastest, *others = ranked
    tied = [fastest, *(other for other in others if _is_tied(fastest, other))]
    limit = (1 + NEAR) * fastest.timed_ns
    race = fastest.interleaved
    near = [r for r in tied if race and r.interleaved == race and r.timed_ns <= limit]
    preferred = simplest(near) if near else fastest
    return preferred, *(record for record in tied if record is not preferred)


def _is_tied(fastest: Record, other: Record) -> bool:
    """Whether the two are of the same standing, and `other` is not shown to be slower.

    What was timed in turns is compared round by round; for the rest intervals must overlap.
    """
    if (fastest.note == FINAL) != (other.note == FINAL):
        return False
    if fastest.interleaved and fastest.interleaved == other.interleaved:
        found = compare(series(fastest), series(other), resamples=1000)
        return found.verdict != "slower"
    return overlap(interval(fastest), interval(other))


def _outcome(records: tuple[Record, ...], baselines: Set[str]) -> Outcome:
    ranked = _ranked([r for r in records if r.is_timed])
    first = records[0]
    return Outcome(
        device=first.device,
        driver=first.driver,
        family=first.family,
        problem=first.problem,
        records=records,
        ranked=ranked,
        leaders=leading(ranked),
        baseline=next((r for r in ranked if r.variant in baselines), None),
        failures=Counter(r.state for r in records if r.state != "correct"),
    )


def _agrees(values: Values, baseline: Values) -> bool:
    """Whether these are the baseline's values, as far as the record knows its parameters.

    A parameter that the family has got since is missing in records of before.
    """
    shared = [name for name in baseline if name in values]
    return bool(shared) and all(values[name] == baseline[name] for name in shared)


def _ranked(timed: list[Record]) -> tuple[Record, ...]:
    """Finalists first, by the times they were measured side by side; before them only variants that
    were no finalists and are proven faster than all of these, as after a run that was stopped."""
    ranked = sorted(timed, key=_rank)
    finals = [record for record in ranked if record.note == FINAL]
    if finals:
        held, fastest = {record.variant for record in finals}, interval(finals[0])[0]
        ahead = [r for r in ranked if r.variant not in held and interval(r)[1] < fastest]
        ranked = ahead + [record for record in ranked if record not in ahead]
    return tuple(ranked)


def _rank(record: Record) -> tuple[bool, float, float, str]:
    return record.note != FINAL, record.timed_ns, interval(record)[1], record.variant
