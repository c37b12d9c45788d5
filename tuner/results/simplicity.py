"""Which of several variants is the simplest, by what the driver says of its pipelines."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.records import Record

REGISTERS = ("Register Count", "VGPRs", "Max live registers")
"""What drivers call the registers of a thread: NVIDIA, RADV, ANV."""
CODE = ("Binary Size", "Code size", "Instruction Count")
"""What they call the size of the code."""


def simplest(records: Sequence[Record]) -> Record:
    """The record with the fewest registers in its hungriest pass, then the least code in all.

    The first of those that are alike; the first of all if the driver does not tell it of each.
    """
    known = [_complexity(record) for record in records]
    if any(each is None for each in known):
        return records[0]
    return min(zip(known, records, strict=True), key=lambda pair: pair[0] or (0.0, 0.0))[1]


def _complexity(record: Record) -> tuple[float, float] | None:
    registers = [_first(each.statistics, REGISTERS) for each in record.statistics]
    code = [_first(each.statistics, CODE) for each in record.statistics]
    if not registers or None in registers or None in code:
        return None
    return max(r for r in registers if r is not None), sum(c for c in code if c is not None)


def _first(statistics: dict[str, int | float | str | bool], names: Sequence[str]) -> float | None:
    values = (statistics[name] for name in names if name in statistics)
    return next((float(value) for value in values if isinstance(value, int | float)), None)
