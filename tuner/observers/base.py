"""What an observer is, and how its readings become the summary in a record.

Observers read sensors that the system has for a device, beside Vulkan. They are optional: whatever
goes wrong with one makes it say nothing, and never spoils what is being measured.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from tuner.records import Energy, Observation

LOOK_S, FIRST_LOOK_S = 0.02, 0.005
"""Between two looks of a watch, and before the first: sensors are renewed some ten times a second.
"""
METER_S = 0.002
"""Between two looks at a meter, so that the moment of its steps is known to that."""
_FEWEST_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at the sensors; None for what they do not tell.

    `energy_j` is a counter's total since some moment in the past; `throttle` names the reasons for
    which the clock is held down at this moment.
    """

    power_w: float | None = None
    core_mhz: float | None = None
    memory_mhz: float | None = None
    temperature_c: float | None = None
    throttle: tuple[str, ...] = ()
    energy_j: float | None = None


class Observer(Protocol):
    """Sensors of one device. Used by one thread at a time."""

    @property
    def name(self) -> str:
        """What is read: "nvml", "amdgpu" …"""
        ...

    def read(self) -> Reading:
        """All sensors now; one that cannot be read is None. Never raises."""
        ...

    def power(self) -> tuple[float | None, float | None]:
        """(counter in joules, power in watts) now, quickly; None as in `Reading`. Never raises."""
        ...

    def close(self) -> None:
        """Let go of what it holds; idempotent."""
        ...


@dataclass(slots=True)
class Watch:
    """Readings taken while something went on."""

    source: str = ""
    readings: list[Reading] = field(default_factory=list)

    def begin(self) -> None:
        """Forget what was read so far."""
        self.readings.clear()

    @property
    def held_down(self) -> bool:
        """See `Observation.held_down`."""
        seen = self.summary()
        return seen is not None and seen.held_down

    def summary(self) -> Observation | None:
        """All readings in one; None without any."""
        return summarised(self.source, self.readings) if self.readings else None


@contextmanager
def watched(observer: Observer | None) -> Iterator[Watch]:
    """Read the sensors again and again beside the block, which need not wait for them; behind it
    only if they were not read since it began."""
    watch = Watch()
    if observer is None:
        yield watch
        return
    watch.source = observer.name

    def look() -> None:
        watch.readings.append(observer.read())

    with _repeating(look, LOOK_S, first_s=FIRST_LOOK_S):
        yield watch
    if not watch.readings:
        look()


@dataclass(slots=True)
class Meter:
    """(time.perf_counter_ns, joules, watts) at each look."""

    looks: list[tuple[int, float | None, float | None]] = field(default_factory=list)

    def energy(self, begun_ns: int, ended_ns: int, launches: int) -> Energy | None:
        """Energy of `launches` that went on, without a pause, from `begun_ns` to `ended_ns`.

        The counter advances in steps some ten times a second, so its power is taken from the first
        step to the last within that time, and holds for all of it. Without a counter it is the mean
        of the power readings. None if there was neither.
        """
        inside = [look for look in self.looks if begun_ns <= look[0] <= ended_ns]
        seconds = (ended_ns - begun_ns) / 1e9
        power_w = _counted_power(inside)
        if power_w is not None:
            return Energy(
                joules_per_launch=power_w * seconds / launches,
                launches=launches,
                seconds=seconds,
                method="counter",
            )
        watts = [look[2] for look in inside if look[2] is not None]
        if not watts:
            return None
        return Energy(
            joules_per_launch=sum(watts) / len(watts) * seconds / launches,
            launches=launches,
            seconds=seconds,
            method="mean power",
        )


@contextmanager
def metered(observer: Observer) -> Iterator[Meter]:
    """Read the meter at both ends of the block and every `METER_S` between them."""
    meter = Meter()

    def look() -> None:
        joules, watts = observer.power()
        meter.looks.append((time.perf_counter_ns(), joules, watts))

    look()
    with _repeating(look, METER_S, first_s=METER_S):
        yield meter
    look()


def summarised(source: str, readings: Sequence[Reading]) -> Observation:
    """Readings as the summary that records carry."""
    watts = [reading.power_w for reading in readings if reading.power_w is not None]
    heat = [reading.temperature_c for reading in readings if reading.temperature_c is not None]
    reasons = dict.fromkeys(name for reading in readings for name in reading.throttle)
    return Observation(
        source=source,
        looks=len(readings),
        power_w=sum(watts) / len(watts) if watts else None,
        core_mhz=_range([reading.core_mhz for reading in readings]),
        memory_mhz=_range([reading.memory_mhz for reading in readings]),
        temperature_c=max(heat, default=None),
        throttled=tuple(reasons),
    )


def _counted_power(looks: Sequence[tuple[int, float | None, float | None]]) -> float | None:
    """Watts between the first and the last step of the counter; None with fewer than two."""
    counted = [(at, joules) for at, joules, _ in looks if joules is not None]
    steps = [
        (at, joules) for (_, before), (at, joules) in itertools.pairwise(counted) if joules > before
    ]
    if len(steps) < _FEWEST_STEPS:
        return None
    (first_ns, first_j), (last_ns, last_j) = steps[0], steps[-1]
    return (last_j - first_j) / ((last_ns - first_ns) / 1e9)


def _range(values: Sequence[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None


@contextmanager
def _repeating(look: Callable[[], None], every_s: float, *, first_s: float) -> Iterator[None]:
    """Call `look` beside the block, after `first_s` and then again and again."""
    done = threading.Event()

    def go_on() -> None:
        wait_s = first_s
        while not done.wait(wait_s):
            look()
            wait_s = every_s

    beside = threading.Thread(target=go_on, name="observer", daemon=True)
    beside.start()
    try:
        yield
    finally:
        done.set()
        beside.join()
