"""The last measurement of the best variants of a problem: in turns, in one warm stretch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tuner.evaluate.evaluator import Evaluator
from tuner.evaluate.trials import RAN_BADLY, Findings, PreparedTrial, failure_of
from tuner.records import Record
from tuner.runner.protocol import Measurement, MeasurePlan

FINAL = "final"
"""The note of records that hold a variant's last, interleaved measurement."""


def measure_again(
    evaluator: Evaluator, trials: Sequence[PreparedTrial], *, rounds: int, plan: MeasurePlan
) -> tuple[Record, ...]:
    """Time several prepared variants in turns, so that a drifting clock treats all alike.

    Each is first checked on the timed operands once more. The order rotates from round to round.
    The records, one a trial, hold the samples of all rounds and the note `FINAL`. The trials are
    released.

    Raises:
        TrialLostDeviceError: the device is gone; carries the record of the trial at work.
    """
    finalists = [_Finalist(trial) for trial in trials]
    try:
        for finalist in finalists:
            finalist.findings = evaluator.check_sampled(finalist.trial)
        for turn in range(rounds):
            start = turn % max(1, len(finalists))
            for finalist in (*finalists[start:], *finalists[:start]):
                finalist.measure(evaluator, plan)
        return tuple(finalist.record(evaluator) for finalist in finalists)
    finally:
        for trial in trials:
            evaluator.release(trial)


@dataclass(slots=True)
class _Finalist:
    trial: PreparedTrial
    findings: Findings = field(default_factory=Findings)
    taken: list[Measurement] = field(default_factory=list)
    seconds: float = 0.0

    def measure(self, evaluator: Evaluator, plan: MeasurePlan) -> None:
        """Take another round of samples, unless it has failed."""
        if self.findings.failure is not None:
            return
        started = time.perf_counter()
        try:
            self.taken.append(evaluator.measure(self.trial, plan))
        except RAN_BADLY as error:
            self.findings = self.findings.followed_by(Findings(failure=failure_of(error)))
        self.seconds += time.perf_counter() - started

    def record(self, evaluator: Evaluator) -> Record:
        record = evaluator.record(self.trial, self.findings, self.taken, note=FINAL)
        return msgspec.structs.replace(record, measure_seconds=self.seconds)
