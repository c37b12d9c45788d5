"""A reference variant timed every so often in a search, so that drift shows and is mended."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from tuner.evaluate import DRIFT_LIMIT, REFERENCE, Evaluator, time_again
from tuner.kernels.space import canonical
from tuner.records import Record
from tuner.search.desk import RecordStore, is_timed
from tuner.timing import differ


@dataclass(slots=True, kw_only=True)
class Reference:
    """Watches the trials of one problem's search; for the device thread alone.

    The first correct variant besides the baseline is the reference (the baseline may take a hundred
    times as long). After `every` more timed trials it is timed again; its record gets the note
    `REFERENCE`. If it is shown to have changed by more than `DRIFT_LIMIT`, so may have whatever ran
    in between: that is timed once more, and its newer records count.
    """

    evaluator: Evaluator
    store: RecordStore
    every: int
    last: Record | None = None
    since: list[Record] = field(default_factory=list)

    def follow(self, record: Record) -> Iterator[Record]:
        """Take note of a trial; yields the records of those that were timed again, kept already.

        Whoever iterates may stop between two of them.

        Raises:
            TrialLostDeviceError: the device is gone; carries the record.
            ResultsError: records cannot be kept.
        """
        if not self.every or not is_timed(record):
            return
        self.since.append(record)
        if self.last is None:
            family = self.evaluator.family
            if record.values != dict(canonical(family, family.baseline)):
                self.last, self.since = record, []
            return
        if len(self.since) >= self.every:
            yield from self._close(self.last)

    def _close(self, before: Record) -> Iterator[Record]:
        suspects, self.since = self.since, []
        plan = msgspec.structs.replace(self.evaluator.session.plan, energy_ms=0.0)
        after = time_again(self.evaluator, before.values, note=REFERENCE, plan=plan)
        self.store.append(after)
        if not is_timed(after):
            # It ran before and does not now: another one shall be the reference.
            self.last = None
            return
        self.last = after
        if not differ(before.samples_ns, after.samples_ns, limit=DRIFT_LIMIT):
            return
        why = f"timed again: the reference changed by {100 * _change(before, after):+.1f} %"
        for suspect in sorted(suspects, key=lambda each: each.median_ns or math.inf):
            again = time_again(self.evaluator, suspect.values, note=why)
            if again.check is not None and suspect.check is not None:
                again = msgspec.structs.replace(again, check=suspect.check)
            self.store.append(again)
            yield again


def _change(before: Record, after: Record) -> float:
    assert before.median_ns is not None
    assert after.median_ns is not None
    return after.median_ns / before.median_ns - 1
