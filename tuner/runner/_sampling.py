"""How launches are spread over submissions, when sampling ends: pure logic over a `Clock`.

A device that has idled for even some milliseconds runs slow, so every submission carries its own
load in front of its samples, sized in time and not in launches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tuner.errors import VulkanError
from tuner.runner.protocol import MeasurePlan

EndedBy = Literal["max_samples", "budget", "gave_up"]

FIRST_LOOK_SAMPLES = 3
_MAX_WARMUP_LAUNCHES = 20_000
_SLOW_BUDGETS = 4
"""A job so slow that it exhausts its budget this many times over, and a whole submission, gets by
with fewer samples."""
_REWARM = 0.5
"""Later submissions of a measurement are preceded by this part of the first warm-up."""
_PROBE = 0.25
"""Load for the estimate, as a part of the warm-up."""
_WARM_ENOUGH = 0.7
_RETRIES = 2
_MS = 1e6


@dataclass(frozen=True, slots=True)
class Timed:
    """One submission: how long its warm-up took, and its samples, in nanoseconds."""

    warmup_ns: float
    samples_ns: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Launches of one submission."""

    warmup: int
    samples: int


@dataclass(frozen=True, slots=True)
class Taken:
    """All samples of a measurement."""

    samples_ns: tuple[float, ...]
    warmup_launches: int
    ended_by: EndedBy


class Clock(Protocol):
    """Launches and times: rotates over the copies of the operands and never starts over."""

    @property
    def capacity(self) -> int:
        """Most samples in one submission."""
        ...

    def run(self, warmup: int, samples: int) -> Timed:
        """Launch `warmup` times and then `samples` times, timing each of the latter."""
        ...


def take_samples(clock: Clock, plan: MeasurePlan, *, settle: bool = False) -> Taken:
    """Time launches as `plan` says, after `plan.settle_ms` of load if asked to `settle`."""
    warmup_launches = _settle(clock, plan) if settle else 0
    estimate_ns = _estimate(clock, plan)
    taken: list[float] = []
    retries = _RETRIES
    while True:
        batch = next_batch(plan, estimate_ns, taken, clock.capacity)
        timed = clock.run(batch.warmup, batch.samples)
        if not taken and retries and _too_cold(plan, batch, timed, estimate_ns):
            retries -= 1
            estimate_ns = min(estimate_ns, *timed.samples_ns)
            continue
        taken += timed.samples_ns
        warmup_launches += batch.warmup
        estimate_ns = sorted(taken)[len(taken) // 2]
        ended_by = ended(plan, taken)
        if ended_by is not None:
            return Taken(tuple(taken), warmup_launches, ended_by)


def _settle(clock: Clock, plan: MeasurePlan) -> int:
    """Keep the device under load for `plan.settle_ms`; how many launches that took.

    By time and not until launches take equally long: on the way up a clock rests on steps of a
    hundred milliseconds and more.
    """
    spent_ns, launches = 0.0, 0
    each_ns = clock.run(0, 1).samples_ns[0]
    while spent_ns < plan.settle_ms * _MS:
        load_ns = min(plan.settle_ms * _MS - spent_ns, plan.max_submission_ms * _MS)
        count = min(math.ceil(load_ns / max(each_ns, 1.0)), _MAX_WARMUP_LAUNCHES)
        timed = clock.run(count, 1)
        spent_ns += timed.warmup_ns + timed.samples_ns[0]
        each_ns = timed.samples_ns[0]
        launches += count + 1
    return launches


def next_batch(plan: MeasurePlan, estimate_ns: float, taken: list[float], capacity: int) -> Batch:
    """The next submission, given what a launch takes by the best estimate."""
    each = max(estimate_ns, 1.0)
    limit = plan.max_submission_ms * _MS
    load = plan.warmup_ms * _MS * (_REWARM if taken else 1.0)
    warmup = min(math.ceil(load / each), _MAX_WARMUP_LAUNCHES, max(0, int(limit / each) - 1))
    room = max(1, int(limit / each) - warmup)
    return Batch(warmup, max(1, min(_wanted(plan, each, taken), room, capacity)))


def ended(plan: MeasurePlan, taken: list[float]) -> EndedBy | None:
    """The rule that ends sampling now, None if it goes on."""
    count, spent, budget = len(taken), sum(taken), plan.budget_ms * _MS
    if count >= plan.max_samples:
        return "max_samples"
    if count >= plan.min_samples and spent >= budget:
        return "budget"
    if count >= _fewest(plan) and spent >= _patience_ns(plan):
        return "budget"
    if plan.give_up_ns is not None and count >= _fewest(plan) and min(taken) > plan.give_up_ns:
        return "gave_up"
    return None


def _wanted(plan: MeasurePlan, each: float, taken: list[float]) -> int:
    """Samples still wanted, a few more than the budget pays for so that it is spent in one go."""
    if not taken and plan.give_up_ns is not None and each > plan.give_up_ns:
        return min(FIRST_LOOK_SAMPLES, plan.max_samples)
    total = max(plan.min_samples, math.ceil(1.1 * plan.budget_ms * _MS / each))
    affordable = max(_fewest(plan), math.ceil(_patience_ns(plan) / each))
    return min(total, affordable, plan.max_samples) - len(taken)


def _fewest(plan: MeasurePlan) -> int:
    """Samples without which nothing is decided."""
    return min(FIRST_LOOK_SAMPLES, plan.min_samples, plan.max_samples)


def _patience_ns(plan: MeasurePlan) -> float:
    """Time that samples may take in all before a slow job gets by with fewer than the minimum."""
    return max(_SLOW_BUDGETS * plan.budget_ms, plan.max_submission_ms) * _MS


def _estimate(clock: Clock, plan: MeasurePlan) -> float:
    """Time of a launch, nanoseconds: one alone, then some behind a short load."""
    estimate_ns = clock.run(0, 1).samples_ns[0]
    load = min(plan.warmup_ms * _PROBE, plan.max_submission_ms) * _MS
    launches = min(int(load / max(estimate_ns, 1.0)), _MAX_WARMUP_LAUNCHES)
    if launches < 1:
        return estimate_ns
    return min(clock.run(launches, 2).samples_ns)


def _too_cold(plan: MeasurePlan, batch: Batch, timed: Timed, estimate_ns: float) -> bool:
    """The estimate was taken on a slow clock, so the load came out too short."""
    planned = min(plan.warmup_ms * _MS, batch.warmup * estimate_ns)
    return 0 < batch.warmup < _MAX_WARMUP_LAUNCHES and timed.warmup_ns < _WARM_ENOUGH * planned


def elapsed(stamps: Sequence[int], valid_bits: int) -> list[int]:
    """Ticks from each stamp to the next, on a counter of `valid_bits` bits that wraps around.

    Raises:
        VulkanError: the stamps stand still or run backwards.
    """
    mask = (1 << valid_bits) - 1
    ticks = [(after - before) & mask for before, after in itertools.pairwise(stamps)]
    if any(each > mask >> 1 for each in ticks):
        raise _broken("run backwards")
    if not any(ticks):
        raise _broken("all read the same")
    return ticks


def _broken(how: str) -> VulkanError:
    return VulkanError(
        "vkGetQueryPoolResults", f"timestamps {how}", 0, "this driver cannot time kernels"
    )
