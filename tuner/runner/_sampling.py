"""How launches are spread over submissions, when sampling ends: pure logic over a `Clock`.

A device that has idled for even some milliseconds runs slow, so every submission carries its own
load in front of its samples, sized in time and not in launches.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tuner.errors import VulkanError
from tuner.runner.protocol import MeasurePlan
from tuner.timing import EndedBy

SHORT_NS = 20_000.0
"""A dispatch that takes less may be over before the host has recorded the next: under a load of
nothing else the device would idle most of the time."""
MAX_SHORT_DISPATCHES = 256
"""Of short dispatches no more are load; the rest of the time is filled by the reference kernel."""
REFERENCE_NS = 70_000.0
"""What a launch of the reference kernel takes at 2 GHz; on a slower clock it fills more time."""
REFERENCES = 3
"""Launches of the reference kernel behind the samples of a submission."""
MS = 1e6

_REWARM = 0.5
"""Later submissions of a measurement are preceded by this part of the first warm-up."""
_PROBE = 0.25
"""Load for the estimate, as a part of the warm-up."""
_WARM_ENOUGH = 0.7
_RETRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What one submission holds, in this order: `fill` launches of the reference kernel and `load`
    launches, which are not timed one by one, `samples` samples of `launches` launches each,
    `references` launches of the reference kernel."""

    fill: int = 0
    load: int = 0
    samples: int = 0
    launches: int = 1
    references: int = 0


@dataclass(frozen=True, slots=True)
class Timed:
    """Nanoseconds: of all the load; of a launch, by sample; of each launch of the reference behind
    the samples; of all the filling in front of the load."""

    load_ns: float
    samples_ns: tuple[float, ...] = ()
    references_ns: tuple[float, ...] = ()
    fill_ns: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """All samples of a measurement; `references_ns` has the reference's median by submission."""

    samples_ns: tuple[float, ...]
    launches: int
    warmup_launches: int
    references_ns: tuple[float, ...]
    ended_by: EndedBy


class Clock(Protocol):
    """Launches and times: rotates over the copies of the operands and never starts over."""

    @property
    def capacity(self) -> int:
        """Most samples in one submission."""
        ...

    @property
    def dispatches(self) -> int:
        """Dispatches of a launch."""
        ...

    def run(self, submission: Submission) -> Timed:
        """Launch and time as the submission says."""
        ...


def take_samples(clock: Clock, plan: MeasurePlan) -> Taken:
    """Time launches as `plan` says; the clock is taken to have settled."""
    estimate_ns = _estimate(clock, plan)
    launches = plan.launches_of_a_sample(estimate_ns)
    taken: list[float] = []
    references: list[float] = []
    warmup_launches, retries = 0, _RETRIES
    while True:
        rule = plan.rule_of_samples(launches)
        ended_by = rule.ended(taken)
        if ended_by is not None:
            return Taken(
                samples_ns=tuple(taken),
                launches=launches,
                warmup_launches=warmup_launches,
                references_ns=tuple(references),
                ended_by=ended_by,
            )
        wanted = min(rule.wanted(taken, estimate_ns), clock.capacity)
        made = next_submission(
            plan,
            estimate_ns,
            wanted,
            launches=launches,
            dispatches=clock.dispatches,
            first=not taken,
        )
        timed = clock.run(made)
        if not taken and retries and _too_cold(plan, made, timed, estimate_ns):
            retries -= 1
            estimate_ns = min(estimate_ns, *timed.samples_ns)
            launches = plan.launches_of_a_sample(estimate_ns)
            continue
        taken += timed.samples_ns
        references.append(statistics.median(timed.references_ns))
        warmup_launches += made.load
        estimate_ns = statistics.median_low(taken)


def next_submission(
    plan: MeasurePlan,
    estimate_ns: float,
    wanted: int,
    *,
    launches: int = 1,
    dispatches: int = 1,
    first: bool = False,
) -> Submission:
    """A submission of as many of the `wanted` samples as its limit leaves room for behind the load.

    `estimate_ns` is what a launch takes by the best estimate.
    """
    each = max(estimate_ns, 1.0)
    most_ns = plan.max_submission_ms * MS
    load_ns = plan.warmup_ms * MS * (1.0 if first else _REWARM)
    fill, load = load_of(min(load_ns, max(0.0, most_ns - launches * each)), each, dispatches)
    load = min(load, max(0, int(most_ns / each) - launches))
    room_ns = most_ns - fill * REFERENCE_NS - load * each
    room = max(1, int(room_ns / (launches * each)))
    return Submission(
        fill=fill, load=load, samples=min(wanted, room), launches=launches, references=REFERENCES
    )


def load_of(load_ns: float, each_ns: float, dispatches: int) -> tuple[int, int]:
    """Launches of the reference kernel, then of the job, that load the device for so long.

    The job itself, `each_ns` a launch, is the load that its samples shall find the device under. Of
    a job whose dispatches end before the host has recorded the next, a few launches stand behind
    others of the reference kernel.
    """
    each, most = max(each_ns, 1.0), -(-MAX_SHORT_DISPATCHES // dispatches)
    load = math.ceil(load_ns / each)
    if each >= dispatches * SHORT_NS or load <= most:
        return 0, load
    return math.ceil((load_ns - most * each) / REFERENCE_NS), most


def _estimate(clock: Clock, plan: MeasurePlan) -> float:
    """Time of a launch, nanoseconds: one alone, then some behind a short load."""
    estimate_ns = clock.run(Submission(samples=1)).samples_ns[0]
    load_ns = min(plan.warmup_ms * _PROBE, plan.max_submission_ms) * MS
    if load_ns < estimate_ns:
        return estimate_ns
    fill, load = load_of(load_ns, estimate_ns, clock.dispatches)
    return min(clock.run(Submission(fill=fill, load=load, samples=2)).samples_ns)


def _too_cold(plan: MeasurePlan, made: Submission, timed: Timed, estimate_ns: float) -> bool:
    """The estimate was taken on a slow clock, so the load came out too short."""
    planned = min(plan.warmup_ms * MS, made.load * estimate_ns)
    return made.load > 0 and timed.load_ns < _WARM_ENOUGH * planned


def elapsed(stamps: Sequence[int], valid_bits: int) -> list[int]:
    """Ticks from each stamp to the next, on a counter of `valid_bits` bits that wraps around.

    Raises:
        VulkanError: the stamps stand still or run backwards.
    """
    if trouble := stamp_trouble(stamps, valid_bits):
        hint = "the device's clock failed while it was read"
        raise VulkanError("vkGetQueryPoolResults", trouble, 0, hint)
    return _ticks(stamps, valid_bits)


def stamp_trouble(stamps: Sequence[int], valid_bits: int) -> str | None:
    """What is wrong with stamps between which launches took place; None if they tell time."""
    ticks = _ticks(stamps, valid_bits)
    if any(each >= 1 << (valid_bits - 1) for each in ticks):
        return "timestamps run backwards"
    if not any(ticks):
        return "timestamps all read the same"
    return None


def _ticks(stamps: Sequence[int], valid_bits: int) -> list[int]:
    mask = (1 << valid_bits) - 1
    return [(after - before) & mask for before, after in itertools.pairwise(stamps)]
