"""Load until the clock stands still: by a reference kernel's time, and never by a count.

An idle device comes back in steps, and rests on them: the H200 stays near its idle clock for some
200 ms of load, where times agree with one another, and then jumps. So no test of stability alone
will do: the load has a minimum, which is longer than any such rest that was seen, and only then is
the reference kernel asked. It does arithmetic in one workgroup, so its time follows the core clock
and nothing else that the job does to the device.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from tuner.runner._sampling import MAX_LOAD_LAUNCHES, MS, REFERENCES, Clock, Submission
from tuner.runner.protocol import MeasurePlan

STEADY_WITHIN = 0.01
"""How far apart the reference's times may be, slowest over fastest less 1."""
STEADY_MS = 100.0
"""For how long they must have kept within that."""
SLICE_MS = 20.0
"""Load between two looks at the reference."""
_FEWEST_LOOKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """How long the load was; whether the clock then stood still."""

    load_ms: float
    steady: bool


@dataclass(frozen=True, slots=True)
class Look:
    """What the reference took, `at_ns` into the load."""

    at_ns: float
    reference_ns: float


def settle(clock: Clock, plan: MeasurePlan) -> Settled:
    """Load the device with the job for at least `plan.settle_ms`, and on until the reference has
    been steady for `STEADY_MS`, or for `plan.settle_max_ms`."""
    looks: list[Look] = []
    each_ns = clock.run(Submission(samples=1)).samples_ns[0]
    spent_ns = each_ns
    slice_ns = min(SLICE_MS, plan.max_submission_ms) * MS
    while True:
        count = min(max(1, round(slice_ns / max(each_ns, 1.0))), MAX_LOAD_LAUNCHES)
        timed = clock.run(Submission(load=count, references=REFERENCES))
        spent_ns += timed.load_ns + sum(timed.references_ns)
        each_ns = timed.load_ns / count
        looks.append(Look(spent_ns, statistics.median(timed.references_ns)))
        if spent_ns >= plan.settle_ms * MS and is_steady(looks):
            return Settled(load_ms=spent_ns / MS, steady=True)
        if spent_ns >= max(plan.settle_ms, plan.settle_max_ms) * MS:
            return Settled(load_ms=spent_ns / MS, steady=False)


def is_steady(looks: list[Look]) -> bool:
    """Whether the reference's times agree over the last `STEADY_MS`, and at three looks or more."""
    since = looks[-1].at_ns - STEADY_MS * MS if looks else math.inf
    recent = [look.reference_ns for look in looks if look.at_ns >= since]
    if len(recent) < _FEWEST_LOOKS:
        recent = [look.reference_ns for look in looks[-_FEWEST_LOOKS:]]
    return len(recent) >= _FEWEST_LOOKS and max(recent) <= (1 + STEADY_WITHIN) * min(recent)
