"""Load until the clock stands still: by a reference kernel's time, and never by a count.

An idle device comes back in steps, and rests on them: the H200 stays near its idle clock for 200
to 280 ms of load, where times agree with one another, and then jumps. So no test of stability alone
will do: the load has a minimum, which is longer than any such rest that was seen, and only then is
the reference kernel asked. It does arithmetic in one workgroup, so its time follows the core clock
and nothing else that the job does to the device.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Literal, Protocol

from tuner.records import ClockState
from tuner.runner._sampling import (
    MS,
    REFERENCES,
    Clock,
    Submission,
    Taken,
    load_of,
    take_samples,
)
from tuner.runner.protocol import MeasurePlan

STEADY_WITHIN = 0.01
"""How far apart the reference's times may be, slowest over fastest less 1."""
STEADY_MS = 100.0
"""For how long they must have kept within that."""
SLICE_MS = 20.0
"""Load between two looks at the reference."""
SLOWED_BY = 0.05
"""How much slower than on the settled clock the reference may be behind samples that are kept: more
than a clock dithers that boosts as far as power and heat allow."""
_FEWEST_LOOKS = 3

Care = Literal["settle", "check", "none"]
"""What is done for the clock: settle it first; see afterwards whether it has slowed, and if so
settle it and measure again; nothing. The first does what the second does, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """How long the load was; whether the clock then stood still; the reference's time then."""

    load_ms: float
    steady: bool
    reference_ns: float


@dataclass(frozen=True, slots=True)
class Look:
    """What the reference took, `at_ns` into the load."""

    at_ns: float
    reference_ns: float


class SettledClock:
    """What the reference took when the clock was last seen settled; later times are held to it."""

    def __init__(self) -> None:
        self._reference_ns = math.inf

    @property
    def reference_ns(self) -> float:
        """What the reference takes on the settled clock; infinite if it never was."""
        return self._reference_ns

    def note(self, settled: Settled) -> None:
        """The clock has settled, whatever it was before: a device may be held down for good."""
        self._reference_ns = settled.reference_ns

    def has_slowed(self, reference_ns: float) -> bool:
        """Whether the clock is slower now; a faster one is what counts from now on."""
        self._reference_ns = min(self._reference_ns, reference_ns)
        return reference_ns > (1 + SLOWED_BY) * self._reference_ns


class Sensors(Protocol):
    """What else tells of the clock while samples are taken."""

    @property
    def held_down(self) -> bool:
        """Whether power or heat is known to have lowered it since the beginning."""
        ...

    def begin(self) -> None:
        """Samples begin now."""
        ...


def take_settled(
    clock: Clock, plan: MeasurePlan, known: SettledClock, care: Care, sensors: Sensors
) -> tuple[Taken, ClockState]:
    """Samples as `plan` says, and how the clock stood.

    Where the clock turns out to have slowed under the samples, they are thrown away, and taken anew
    once it has settled: it had idled too long after all. Unless power or heat has lowered it, as
    that is how the job runs on this device, and it would rise and fall for ever.
    """
    settled = _settle(clock, plan, known) if care == "settle" else None
    sensors.begin()
    taken = take_samples(clock, plan)
    slowed = care != "none" and known.has_slowed(max(taken.references_ns))
    repeated = slowed and not sensors.held_down
    if repeated:
        settled = _settle(clock, plan, known)
        sensors.begin()
        taken = take_samples(clock, plan)
    return taken, ClockState(
        reference_ns=taken.references_ns,
        settled_ms=0.0 if settled is None else settled.load_ms,
        steady=settled is None or settled.steady,
        repeated=repeated,
    )


def _settle(clock: Clock, plan: MeasurePlan, known: SettledClock) -> Settled:
    settled = settle(clock, plan)
    known.note(settled)
    return settled


def settle(clock: Clock, plan: MeasurePlan) -> Settled:
    """Load the device with the job for at least `plan.settle_ms`, and on until the reference has
    been steady for `STEADY_MS`, or for `plan.settle_max_ms`."""
    looks: list[Look] = []
    each_ns = clock.run(Submission(samples=1)).samples_ns[0]
    spent_ns = each_ns
    slice_ns = min(SLICE_MS, plan.max_submission_ms) * MS
    while True:
        fill, load = load_of(slice_ns, each_ns, clock.dispatches)
        timed = clock.run(Submission(fill=fill, load=load, references=REFERENCES))
        spent_ns += timed.fill_ns + timed.load_ns + sum(timed.references_ns)
        each_ns = timed.load_ns / load
        looks.append(Look(spent_ns, statistics.median(timed.references_ns)))
        if spent_ns >= plan.settle_ms * MS and is_steady(looks):
            return _settled(spent_ns, looks, steady=True)
        if spent_ns >= max(plan.settle_ms, plan.settle_max_ms) * MS:
            return _settled(spent_ns, looks, steady=False)


def _settled(spent_ns: float, looks: list[Look], *, steady: bool) -> Settled:
    return Settled(load_ms=spent_ns / MS, steady=steady, reference_ns=looks[-1].reference_ns)


def is_steady(looks: list[Look]) -> bool:
    """Whether the reference's times agree over the last `STEADY_MS`, and at three looks or more."""
    since = looks[-1].at_ns - STEADY_MS * MS if looks else math.inf
    recent = [look.reference_ns for look in looks if look.at_ns >= since]
    if len(recent) < _FEWEST_LOOKS:
        recent = [look.reference_ns for look in looks[-_FEWEST_LOOKS:]]
    return len(recent) >= _FEWEST_LOOKS and max(recent) <= (1 + STEADY_WITHIN) * min(recent)
