"""The end of a problem's search: the best few measured again, in turns."""

from __future__ import annotations

import msgspec

from tuner.evaluate import Evaluator, TrialLostDeviceError, measure_again
from tuner.kernels.space import canonical
from tuner.records import FINAL, Record
from tuner.results import Outcome, outcomes
from tuner.results.validation import with_whole_check
from tuner.runner.protocol import BREAKDOWN_SAMPLES, MeasurePlan
from tuner.search.crew import Crew
from tuner.search.desk import RecordStore
from tuner.search.settings import Progress, Settings
from tuner.search.tally import Tally
from tuner.timing import MIN_ROUNDS

CLOSE = 1.05
"""How much slower than the best a finalist may be, where the intervals do not overlap."""
MAX_FINALS = 3
"""How often finals are held, should an earlier time then look better than the winner's."""


def hold_finals(
    evaluator: Evaluator,
    store: RecordStore,
    *,
    crew: Crew,
    settings: Settings,
    tally: Tally,
    progress: Progress,
) -> None:
    """Measure the best variants again, in turns, unless that was done; keep the new records.

    The winner is who is fastest then, with the time of these last measurements, even if that is
    worse than what the search saw. Records hold the check of the whole validation, which was the
    trial's, beside that of the timed operands now.

    Raises:
        TrialLostDeviceError: the device is gone; its record is kept.
        ResultsError: records cannot be kept any more.
    """
    outcome = outcome_of(evaluator, store)
    for turn in range(MAX_FINALS):
        close = finalists(outcome, settings.finalists) if outcome else ()
        chosen = [record for record in close if evaluator.is_current(record)]
        fresh = [record for record in chosen[: 1 if turn else None] if record.note != FINAL]
        if not fresh:
            break
        progress.finals_started(len(chosen), tally.status())
        trials = []
        for record in chosen:
            crew.keep_warm()
            trials.append(evaluator.prepare(evaluator.draft(record.values)))
        plan = _final_plan(evaluator.session.plan)
        rounds, most = settings.final_rounds, settings.most_final_rounds
        try:
            records = measure_again(
                evaluator,
                trials,
                plan=plan,
                rounds=rounds,
                # More rounds decide nothing where times drift with whatever else a CPU does.
                most_rounds=rounds if evaluator.runner.info.is_cpu else most,
                seconds=tally.finals_seconds,
            )
        except TrialLostDeviceError as lost:
            store.append(lost.record)
            raise
        measured = tuple(store.records())
        for record in records:
            store.append(with_whole_check(record, measured))
        crew.keep_warm()
        outcome = outcome_of(evaluator, store)


def outcome_of(evaluator: Evaluator, store: RecordStore) -> Outcome | None:
    """What all records of the evaluator's problem on its device come to; None without any.

    Its leaders and baseline are kernels of today: what sources, compiler or space have changed
    since cannot be exported, and may not be compared with.
    """
    info, family = evaluator.runner.info, evaluator.family
    mine = [
        record
        for record in store.records()
        if record.family == family.name
        and record.problem == evaluator.problem
        and record.device_uuid == info.uuid
        and record.driver == info.driver
    ]
    while mine:
        (found,) = outcomes(mine, baseline_of=lambda _name: canonical(family, family.baseline))
        shown = (*found.leaders, *([found.baseline] if found.baseline else []))
        stale = {record.variant for record in shown if not evaluator.is_current(record)}
        if not stale:
            return found
        mine = [record for record in mine if record.variant not in stale]
    return None


def finalists(outcome: Outcome, limit: int) -> tuple[Record, ...]:
    """The best, and those that its samples do not prove slower by 5 %, fastest first."""
    best = outcome.best
    if best is None or best.median_ns is None:
        return ()
    bound = CLOSE * best.median_ns
    tied = {record.variant for record in outcome.tied}
    timed = sorted(
        (record for record in outcome.records if record.is_timed),
        key=lambda record: (record.median_ns or 0.0, record.variant),
    )
    close = [r for r in timed if (r.median_ns or 0.0) <= bound or r.variant in tied]
    return tuple(close[:limit])


def _final_plan(plan: MeasurePlan) -> MeasurePlan:
    """A round takes a part of a search's measurement, and no look at its precision: rounds count
    alike, and it is their number that makes the result precise."""
    return msgspec.structs.replace(
        plan,
        precision=0.0,
        min_samples=max(3, plan.min_samples // 2),
        max_samples=max(3, plan.max_samples // 4),
        budget_ms=plan.budget_ms / 4,
        give_up_ns=None,
        energy_ms=plan.energy_ms / MIN_ROUNDS,
        breakdown_samples=BREAKDOWN_SAMPLES // MIN_ROUNDS,
    )
