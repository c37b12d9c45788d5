"""The last measurement of the best variants of a problem: a race in turns, in one warm stretch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tuner.errors import MeasurementError
from tuner.evaluate.evaluator import Evaluator
from tuner.evaluate.trials import RAN_BADLY, Findings, PreparedTrial, failure_of, utc_now
from tuner.kernels.base import Values
from tuner.records import FINAL, Record
from tuner.runner.protocol import Measurement, MeasurePlan
from tuner.timing import MIN_ROUNDS, Series, compare, differ, require_samples

DRIFT_LIMIT = 0.03
"""What was measured between two times of the reference that differ by more is measured again."""

_SEEN_ENOUGH = 3
"""From so many rounds on a finalist may fall out of the race, and lack of time may end it."""
_GRACE_S = 2.0
"""What the first `rounds` may take beyond their time: six of six quick variants take half."""
_SURE = 0.99
"""Confidence of a judgement in the race: one is made after each round."""
_ALIKE = 0.01
"""Finalists nearer to the leader than this fraction do not fall out: they may be simpler."""


def measure_again(
    evaluator: Evaluator,
    trials: Sequence[PreparedTrial],
    *,
    plan: MeasurePlan,
    rounds: int = MIN_ROUNDS,
    most_rounds: int | None = None,
    seconds: float = math.inf,
) -> tuple[Record, ...]:
    """Time several prepared variants in turns, so that a drifting clock treats all alike.

    Each is first checked on the timed operands once more. The first variant is the reference: it is
    timed before each round and after the last. A round between two times of it that differ by more
    than `DRIFT_LIMIT` is thrown away and taken again, as long as rounds thrown away are no more
    than rounds wanted. The order of the others rotates from round to round.

    It is a race (Maron & Moore 1994; Birattari et al. 2002): who is shown to be slower than the
    leader falls out, all others go on, for at least `rounds` and up to `most_rounds`, until each is
    shown to be slower than the leader or equal to it within 1 %. Once `seconds` are over no round
    beyond `rounds` begins, and two seconds later none beyond three: what is left then is for
    `tuner.timing.compare` to judge by its samples. The records, one a trial, hold the samples of
    all its rounds and the note `FINAL`. The trials are released.

    Raises:
        TrialLostDeviceError: the device is gone; carries the record of the trial at work.
    """
    race = _Race(evaluator, plan, [_Finalist(trial) for trial in trials], utc_now())
    try:
        for finalist in race.finalists:
            finalist.findings = evaluator.check_sampled(finalist.trial)
        race.run(rounds, most_rounds or rounds, time.monotonic() + seconds)
        return tuple(race.record(finalist) for finalist in race.finalists)
    finally:
        for trial in trials:
            evaluator.release(trial)


def time_again(
    evaluator: Evaluator, values: Values, *, note: str, plan: MeasurePlan | None = None
) -> Record:
    """One more measurement of a variant that was validated before; its record.

    `plan` says how, by default the session's. It is checked on the timed operands once more.

    Raises:
        TrialLostDeviceError: the device is gone; carries the record.
    """
    trial = evaluator.prepare(evaluator.draft(values))
    try:
        return time_prepared(evaluator, trial, note=note, plan=plan)
    finally:
        evaluator.release(trial)


def time_prepared(
    evaluator: Evaluator, trial: PreparedTrial, *, note: str, plan: MeasurePlan | None = None
) -> Record:
    """`time_again` for a variant that is prepared, and stays so."""
    once = _Finalist(trial)
    once.findings = evaluator.check_sampled(trial)
    taken = once.measure(evaluator, plan or evaluator.session.plan)
    return once.record(evaluator, [] if taken is None else [taken], note=note)


@dataclass(slots=True, eq=False)
class _Finalist:
    trial: PreparedTrial
    findings: Findings = field(default_factory=Findings)
    rounds: list[Measurement] = field(default_factory=list)
    racing: bool = True
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.findings.failure is not None

    @property
    def samples_ns(self) -> list[float]:
        return [sample for measured in self.rounds for sample in measured.samples_ns]

    def measure(self, evaluator: Evaluator, plan: MeasurePlan) -> Measurement | None:
        """Samples as the plan wants; None if it has failed, now or before."""
        if self.failed:
            return None
        started = time.perf_counter()
        try:
            measured = evaluator.measure(self.trial, plan)
            require_samples(measured.samples_ns)
            return measured
        except (*RAN_BADLY, MeasurementError) as error:
            self.findings = self.findings.followed_by(Findings(failure=failure_of(error)))
            return None
        finally:
            self.seconds += time.perf_counter() - started

    def series(self, run: str) -> Series:
        counts = [len(measured.samples_ns) for measured in self.rounds]
        return Series(samples_ns=self.samples_ns, rounds=counts, run=run)

    def record(
        self, evaluator: Evaluator, taken: Sequence[Measurement], *, note: str, rounds: bool = False
    ) -> Record:
        record = evaluator.record(self.trial, self.findings, taken, note=note, in_rounds=rounds)
        return msgspec.structs.replace(record, measure_seconds=self.seconds)


@dataclass(slots=True)
class _Race:
    evaluator: Evaluator
    plan: MeasurePlan
    finalists: list[_Finalist]
    name: str
    undecided: bool = True
    repeated: int = 0
    reference_ns: list[float] = field(default_factory=list)

    def run(self, least: int, most: int, until: float) -> None:
        """Rounds from `least` to `most`, as far as there is time for them.

        `until` is a time of the monotonic clock: then none beyond `least` begins, and `_GRACE_S`
        later none beyond three.
        """
        done = 0
        opening: tuple[_Finalist, Measurement] | None = None
        while True:
            over_s = time.monotonic() - until
            wanted = least if over_s < _GRACE_S else min(least, _SEEN_ENOUGH)
            if done >= wanted and not (over_s < 0 and done < most and self.undecided):
                return
            reference = next((each for each in self.finalists if not each.failed), None)
            if reference is None:
                return
            if opening is None or opening[0] is not reference:
                opening = self._time_reference(reference)
                continue
            others = [each for each in self._racing() if each is not reference]
            start = done % max(1, len(others))
            taken = [
                (e, e.measure(self.evaluator, self.plan)) for e in others[start:] + others[:start]
            ]
            closing = self._time_reference(reference)
            if closing is None:
                continue
            if self._steady(opening[1], closing[1], wanted):
                for finalist, measured in (opening, *taken):
                    if measured is not None:
                        finalist.rounds.append(measured)
                done += 1
                self._judge()
            opening = closing

    def record(self, finalist: _Finalist) -> Record:
        record = finalist.record(self.evaluator, finalist.rounds, note=FINAL, rounds=True)
        if finalist.failed:
            return record
        return msgspec.structs.replace(
            record,
            interleaved=self.name,
            rounds_repeated=self.repeated,
            reference_ns=tuple(self.reference_ns),
        )

    def _racing(self) -> list[_Finalist]:
        return [each for each in self.finalists if each.racing and not each.failed]

    def _time_reference(self, reference: _Finalist) -> tuple[_Finalist, Measurement] | None:
        measured = reference.measure(self.evaluator, self.plan)
        if measured is None:
            return None
        self.reference_ns.append(statistics.median(measured.samples_ns))
        return reference, measured

    def _steady(self, before: Measurement, after: Measurement, patience: int) -> bool:
        """Whether a round counts that was taken between two times of the reference."""
        if not differ(before.samples_ns, after.samples_ns, limit=DRIFT_LIMIT):
            return True
        if self.repeated >= patience:
            return True
        self.repeated += 1
        return False

    def _judge(self) -> None:
        """Who falls out, and whether anything is still open."""
        racing = [each for each in self._racing() if len(each.rounds) >= _SEEN_ENOUGH]
        leader = min(racing, key=lambda each: statistics.median(each.samples_ns), default=None)
        self.undecided = leader is None
        for each in racing:
            if leader is None or each is leader:
                continue
            first, second = leader.series(self.name), each.series(self.name)
            found = compare(first, second, confidence=_SURE)
            slower = found.verdict == "slower"
            each.racing = not (slower and found.ratio > 1 + _ALIKE)
            alike = found.low > 1 - _ALIKE and found.high < 1 + _ALIKE
            self.undecided |= not (slower or alike)
