"""Time against energy: the variants that none beats in both."""

from __future__ import annotations

from collections.abc import Iterable

from tuner.records import Record


def front(records: Iterable[Record]) -> tuple[Record, ...]:
    """The variants than which none is better in both time and energy, fastest first.

    So the last takes the least energy. Of records with a time and an energy; the last record of a
    variant counts.
    """
    latest = {record.variant: record for record in records}
    priced = sorted(
        (record.timed_ns, record.energy_j_per_token, record.variant)
        for record in latest.values()
        if record.is_timed and record.energy_j_per_token
    )
    found: list[Record] = []
    least_j = float("inf")
    for _, joules, variant in priced:
        if joules < least_j:
            found.append(latest[variant])
            least_j = joules
    return tuple(found)
