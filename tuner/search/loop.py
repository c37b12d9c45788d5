"""The search on one problem: prepare ahead, try on the device, keep the books.

Three kinds of threads share the work. The calling thread is the device thread: it validates and
times, keeps the record, and tells progress. A pool prepares variants (render, compile, make
pipelines). The clerk's thread keeps study and model and proposes what to prepare next, so that the
device does not wait for samplers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from tuner.errors import NoWorkerError
from tuner.evaluate import Evaluator, TrialLostDeviceError
from tuner.kernels.space import canonical
from tuner.records import Record
from tuner.search.crew import WARM_PAUSE_SECONDS, Crew
from tuner.search.desk import Desk, Item, RecordStore
from tuner.search.interrupts import Interrupts
from tuner.search.proposer import Proposer
from tuner.search.reference import Reference
from tuner.search.settings import LEAST_TRIALS, Ending, Progress, Settings
from tuner.search.studylog import StudyLog
from tuner.search.tally import Tally

GIVE_UP_FACTOR = 1.5
"""A variant this much slower than the best so far is not measured to the end."""
MAX_LOSSES_IN_A_ROW = 5
"""So many trials without a correct one between them may lose the runner's worker, before it is seen
whether the device still works at all."""
POLL_SECONDS = 0.2


def search_problem(
    evaluator: Evaluator,
    proposer: Proposer,
    log: StudyLog,
    store: RecordStore,
    *,
    crew: Crew,
    settings: Settings,
    tally: Tally,
    progress: Progress,
    interrupts: Interrupts,
    at_first: Callable[[], None],
    at_half: Callable[[], None],
) -> tuple[Ending, Future[None]]:
    """Try variants until the tally's limits, the end of the space or an interrupt; says which.

    The future is done when what was left over is put away: variants still being prepared, which
    nobody need wait for. `at_first` is called when the first result is there. `at_half` is called
    once half of a limit is spent, or at the end, and after each trial from then on.

    Raises:
        TrialLostDeviceError: the device is gone; all records so far are kept.
        NoWorkerError: the runner's worker is gone for good, or was lost too often; as above.
        OutOfMemoryError: the problem does not fit on the device.
        ResultsError: records cannot be kept any more.
    """
    desk = Desk(
        evaluator,
        proposer,
        log,
        store,
        pool=crew.pool,
        look_ahead=crew.workers + 1 if crew.overlap else crew.workers,
        limit=None if tally.trial_limit is None else tally.trial_limit - tally.trials,
        retry_failed=settings.retry_failed,
    )
    reference = Reference(
        evaluator=evaluator,
        store=store,
        every=settings.reference_after(evaluator.runner.info),
    )
    loop = _Loop(
        evaluator=evaluator,
        store=store,
        desk=desk,
        crew=crew,
        tally=tally,
        progress=progress,
        interrupts=interrupts,
        reference=reference,
        at_first=at_first,
        at_half=at_half,
    )
    try:
        ending = loop.run()
    except BaseException:
        loop.put_away().result()
        raise
    return ending, loop.put_away()


@dataclass(slots=True, kw_only=True)
class _Loop:
    """The device thread's part."""

    evaluator: Evaluator
    store: RecordStore
    desk: Desk
    crew: Crew
    tally: Tally
    progress: Progress
    interrupts: Interrupts
    reference: Reference
    at_first: Callable[[], None]
    at_half: Callable[[], None]
    taken: tuple[Item, ...] = ()
    losses: int = 0
    losses_in_a_row: int = 0

    def run(self) -> Ending:
        clerk = self.crew.clerk
        self.losses = self.evaluator.runner.losses or 0
        booking: Future[None] = clerk.submit(self.desk.refill, self._time_for)
        while (ending := self._ending()) is None:
            item = self._next_item(booking)
            if item is None:
                ending = self._ending() or ("exhausted" if self.desk.exhausted else "seconds")
                break
            record, known = self._try(item, booking)
            if self.tally.first_result is None:
                self.at_first()
            # At most one booking is open, so that an error in keeping the study stops the run.
            booking.result()
            booking = clerk.submit(self._book, item, record, known)
            self.taken = ()
            self.progress.trial_finished(record, self.tally.status())
            self._count_losses(record)
            if not known:
                self._watch_drift(record)
            if self.tally.half_spent:
                self.at_half()
            if self.tally.first_trial is not None:
                self.tally.search_seconds = time.monotonic() - self.tally.first_trial
        if ending != "interrupted":
            self.at_half()
        self.crew.result_of(booking)
        return ending

    def put_away(self) -> Future[None]:
        """Give up what is under way; done when nothing of it is prepared any more."""
        self.reference.put_away()
        leaving = self.crew.clerk.submit(self.desk.put_away, *self.taken)
        if not self.crew.overlap:
            wait([leaving])
        return leaving

    def _ending(self) -> Ending | None:
        tally = self.tally
        if self.interrupts.asked:
            return "interrupted"
        if tally.trial_limit is not None and tally.trials >= tally.trial_limit:
            return "trials"
        return "seconds" if tally.time_is_over else None

    def _next_item(self, booking: Future[None]) -> Item | None:
        """The oldest variant that is prepared; None at an ending or when none is left."""
        while self._ending() is None:
            settled = booking.done()
            items = self.desk.items
            if settled and not items:
                booking.result()
                return None
            pending: list[Future[Any]] = [item.future for item in items if not item.future.done()]
            if not self.crew.overlap and (pending or not settled):
                # Nothing else may run while the CPU is the device.
                wait([*pending, booking], timeout=POLL_SECONDS)
                continue
            ready = [item for item in items if item.future.done()]
            if ready:
                return ready[0]
            self.crew.keep_warm()
            waited = pending if settled else [*pending, booking]
            wait(waited, timeout=WARM_PAUSE_SECONDS, return_when=FIRST_COMPLETED)
        return None

    def _try(self, item: Item, booking: Future[None]) -> tuple[Record, bool]:
        """The record of a prepared variant, and whether it was known before."""
        self.desk.take(item)
        self.taken = (item,)
        result = item.future.result()
        if isinstance(result, Record):
            self.tally.add(result, known=True)
            return result, True
        self.progress.trial_started(item.proposal.values, self.tally.status())
        started = time.monotonic()
        self.tally.first_trial = self.tally.first_trial or started
        try:
            record = self.evaluator.finish(result, give_up_ns=self._give_up_ns(item))
        except TrialLostDeviceError as lost:
            self.store.append(lost.record)
            booking.result()
            self.crew.clerk.submit(self.desk.book, item, lost.record, known=False).result()
            self.taken = ()
            raise
        finally:
            self.tally.busy_seconds += time.monotonic() - started
        # Before the next trial begins: what was measured must survive whatever that one does.
        self.store.append(record)
        self.tally.add(record, known=False)
        return record, False

    def _watch_drift(self, record: Record) -> None:
        """Time the reference if it is due, and again what ran while it drifted."""
        started = time.monotonic()
        try:
            for again in self.reference.follow(record):
                self.tally.correct(again)
                if self._ending() is not None:
                    break
        except TrialLostDeviceError as lost:
            self.store.append(lost.record)
            raise
        finally:
            self.tally.busy_seconds += time.monotonic() - started

    def _count_losses(self, record: Record) -> None:
        """Go on after a lost worker, unless trial after trial loses it and the best fails, too.

        Raises:
            NoWorkerError: nothing works any more.
        """
        before, self.losses = self.losses, self.evaluator.runner.losses or 0
        if record.state == "correct":
            self.losses_in_a_row = 0
        elif self.losses > before:
            self.losses_in_a_row += 1
        if self.losses_in_a_row < MAX_LOSSES_IN_A_ROW:
            return
        if not self._best_still_works():
            raise NoWorkerError(
                f"{self.losses_in_a_row} trials in a row lost the worker process, the last so: "
                f"{record.error}; see that the device is well, then run the same command again"
            )
        self.losses_in_a_row, self.losses = 0, self.evaluator.runner.losses or 0

    def _best_still_works(self) -> bool:
        """Whether the best variant so far still answers rightly: then the others are to blame."""
        if self.tally.best is None:
            return False
        trial = self.evaluator.prepare(self.evaluator.draft(self.tally.best.values))
        try:
            return self.evaluator.validate(trial).failure is None
        finally:
            self.evaluator.release(trial)

    def _give_up_ns(self, item: Item) -> float | None:
        """The baseline is what the others are compared with, so it is always measured in full; and
        a slow variant may yet take the least energy."""
        best = self.tally.best
        if best is None or best.median_ns is None or self.desk.objective != "time":
            return None
        family = self.evaluator.family
        if item.proposal.values == canonical(family, family.baseline):
            return None
        return GIVE_UP_FACTOR * best.median_ns

    def _book(self, item: Item, record: Record, known: bool) -> None:
        self.desk.book(item, record, known=known)
        # With the CPU as device, a batch is prepared, then tried, in turns.
        if self.crew.overlap or not self.desk.items:
            self.desk.refill(self._time_for)

    def _time_for(self, waiting: int) -> bool:
        """Whether a variant behind `waiting` others would still get the device."""
        tally = self.tally
        if self.interrupts.asked:
            return False
        if tally.deadline is None or tally.trials + waiting < LEAST_TRIALS:
            return True
        each = tally.busy_seconds / max(1, tally.measured)
        return time.monotonic() + waiting * each < tally.deadline
