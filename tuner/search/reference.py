"""A reference variant timed every so often in a search, so that drift shows and is mended."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from tuner.evaluate import DRIFT_LIMIT, Evaluator, PreparedTrial, time_again, time_prepared
from tuner.kernels.space import canonical
from tuner.records import REFERENCE, Record
from tuner.results.validation import with_whole_check
from tuner.search.desk import RecordStore
from tuner.timing import differ

CONFIRMATIONS = 3
"""How often a change of the reference must show again: the times of some variants fall into two
modes, so that one is as likely as the other (4 % apart for one of 13 us on the H200)."""


@dataclass(slots=True, kw_only=True)
class Reference:
    """Watches the trials of one problem's search; for the device thread alone.

    The first correct variant besides the baseline is the reference (the baseline may take a hundred
    times as long). After `every` more timed trials it is timed again; its record gets the note
    `REFERENCE`. If it is shown to have changed by more than `DRIFT_LIMIT`, and again so each time
    that it is asked, so may have whatever ran in between: that is timed once more, and its newer
    records count.
    """

    evaluator: Evaluator
    store: RecordStore
    every: int
    last: Record | None = None
    trial: PreparedTrial | None = None
    since: list[Record] = field(default_factory=list)

    def follow(self, record: Record) -> Iterator[Record]:
        """Take note of a trial; yields the records of those that were timed again, kept already.

        Whoever iterates may stop between two of them.

        Raises:
            TrialLostDeviceError: the device is gone; carries the record.
            ResultsError: records cannot be kept.
        """
        if not self.every or not record.is_timed:
            return
        self.since.append(record)
        if self.last is None:
            family = self.evaluator.family
            if record.values != dict(canonical(family, family.baseline)):
                self.last, self.since = record, []
            return
        if len(self.since) >= self.every:
            yield from self._close(self.last)

    def put_away(self) -> None:
        """Release what is prepared; there is no more to follow."""
        if self.trial is not None:
            self.evaluator.release(self.trial)
            self.trial = None

    def _prepared(self, before: Record) -> PreparedTrial:
        """The reference, prepared once for all the times that it is asked."""
        if self.trial is None or self.trial.draft.key != before.variant:
            self.put_away()
            self.trial = self.evaluator.prepare(self.evaluator.draft(before.values))
        return self.trial

    def _close(self, before: Record) -> Iterator[Record]:
        suspects, self.since = self.since, []
        self.last = self._confirmed(before)
        if self.last is None or not _differ(before, self.last):
            return
        why = f"timed again: the reference changed by {100 * _change(before, self.last):+.1f} %"
        for suspect in sorted(suspects, key=lambda each: each.median_ns or math.inf):
            again = time_again(self.evaluator, suspect.values, note=why)
            again = with_whole_check(again, [suspect])
            self.store.append(again)
            yield again

    def _confirmed(self, before: Record) -> Record | None:
        """The reference's newest record: the first that shows no change, or one of several that all
        do; None if it fails, though it ran before: another one shall be the reference."""
        plan = msgspec.structs.replace(self.evaluator.session.plan, energy_ms=0.0)
        after = before
        for _ in range(1 + CONFIRMATIONS):
            after = time_prepared(self.evaluator, self._prepared(before), note=REFERENCE, plan=plan)
            self.store.append(after)
            if not after.is_timed:
                return None
            if not _differ(before, after):
                break
        return after


def _differ(before: Record, after: Record) -> bool:
    return differ(before.samples_ns, after.samples_ns, limit=DRIFT_LIMIT)


def _change(before: Record, after: Record) -> float:
    return after.timed_ns / before.timed_ns - 1
