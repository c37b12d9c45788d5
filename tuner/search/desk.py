"""The desk of a search: what is under way, the books, and what to prepare next."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from tuner.errors import TunerError
from tuner.evaluate import Evaluator, PreparedTrial
from tuner.kernels.base import Values
from tuner.records import Record
from tuner.search.objective import Objective, costs
from tuner.search.proposer import Proposal, Proposer
from tuner.search.settings import RETRIED
from tuner.search.studylog import StudyLog


class RecordStore(Protocol):
    """What the search needs of `tuner.results.Store`."""

    def find(self, variant: str) -> Record | None:
        """The newest record of a variant; any thread may ask."""
        ...

    def append(self, record: Record) -> None:
        """Keep a record; on return it is safe. Raises ResultsError."""
        ...

    def records(self) -> tuple[Record, ...]:
        """All records so far."""
        ...


@dataclass(frozen=True, slots=True)
class Item:
    """A variant under way. `future` brings it prepared, or a record that is known already."""

    proposal: Proposal
    trial_id: int
    future: Future[PreparedTrial | Record]


class Desk:
    """Proposes, has prepared, books results in study and model. For one thread but for `items`.

    Args:
        evaluator: drafts and prepares variants, on the threads of `pool`.
        store: where records may be that make a trial needless.
        pool: where variants are prepared.
        look_ahead: how many variants to have under way at most.
        limit: how many more variants to begin at most; None for no limit.
        retry_failed: pass over records in the states `RETRIED`.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        proposer: Proposer,
        log: StudyLog,
        store: RecordStore,
        *,
        pool: Executor,
        look_ahead: int,
        limit: int | None,
        retry_failed: bool,
    ) -> None:
        self._evaluator, self._proposer, self._log, self._store = evaluator, proposer, log, store
        self._pool, self._look_ahead, self._limit = pool, look_ahead, limit
        self._retry_failed = retry_failed
        self._items: list[Item] = []
        self._lock = Lock()
        self._booked: float | None = None
        self._over = False
        self.exhausted = False
        """Whether every legal variant has been proposed."""

    @property
    def objective(self) -> Objective:
        """What the search minimises."""
        return self._log.objective

    @property
    def items(self) -> tuple[Item, ...]:
        """What is under way and not yet taken, oldest first; any thread may ask."""
        with self._lock:
            return tuple(self._items)

    def take(self, item: Item) -> None:
        """Remove an item that is to be tried; any thread may do so."""
        with self._lock:
            self._items.remove(item)

    def refill(self, time_for: Callable[[int], bool]) -> None:
        """Propose variants and have them prepared, up to the look-ahead.

        `time_for` tells whether there is time for a variant behind so many others.
        """
        while len(self.items) < self._look_ahead and self._limit != 0:
            if not time_for(len(self.items)):
                return
            proposal = self._proposer.next()
            if proposal is None:
                self.exhausted = True
                return
            trial_id = self._log.start(proposal.values)
            item = Item(proposal, trial_id, self._pool.submit(self._ready, proposal.values))
            with self._lock:
                self._items.append(item)
            if self._limit is not None:
                self._limit -= 1

    def book(self, item: Item, record: Record, *, known: bool) -> None:
        """Tell a result to the study and the model; `known` if nothing was run for it.

        Raises:
            ResultsError: the study cannot be kept.
        """
        self._log.finish(item.trial_id, record, known=known)
        self._proposer.tell(item.proposal, costs(record, self.objective))
        self.spend()

    def spend(self) -> None:
        """Charge the study with the time since the last result; what went before the first is not
        charged to it (see `tuner.search.shares`)."""
        now = time.monotonic()
        if self._booked is not None:
            self._log.spend(now - self._booked)
        self._booked = now

    def put_away(self, *taken: Item) -> None:
        """Give up what is under way, and what was `taken` but not booked.

        What cannot be noted in the study any more is left; the next run takes it over.
        """
        self._over = True
        with self._lock:
            items, self._items = tuple(self._items), []
        for item in items:
            if not item.future.cancel():
                with contextlib.suppress(TunerError):
                    result = item.future.result()
                    if isinstance(result, PreparedTrial):
                        self._evaluator.release(result)
        for item in (*taken, *items):
            with contextlib.suppress(TunerError):
                self._log.drop(item.trial_id, "stopped")

    def _ready(self, values: Values) -> PreparedTrial | Record:
        draft = self._evaluator.draft(values)
        known = self._store.find(draft.key)
        if known is not None and not self._is_wanted_again(known):
            return known
        trial = self._evaluator.prepare(draft)
        if trial.failure is None and not self._over:
            self._evaluator.foresee([draft.values])
        return trial

    def _is_wanted_again(self, known: Record) -> bool:
        if self._retry_failed and known.state in RETRIED:
            return True
        # It was measured when energy did not matter.
        return known.is_timed and costs(known, self.objective) is None
