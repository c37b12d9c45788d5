"""When enough is measured: pure logic over the samples so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tuner.errors import UsageError
from tuner.timing.summary import CONFIDENCE, median_interval

EndedBy = Literal["precise", "budget", "max_samples", "gave_up"]

FIRST_LOOK_SAMPLES = 3
"""Samples after which a variant that is far too slow may be given up."""
_MARGIN = 1.1
"""How many more samples are asked for than the interval's shrinking would need."""
_BATCH = 0.25
"""Part of the budget that a batch may always cost: asking costs a submission and its warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingRule:
    """Sample until the median is known well enough, or it has cost enough.

    Asked between batches, in this order:

    - ``precise``: `min_samples` are taken, and the interval of the median is no wider than
      `precision` of the median (Le Boudec 2010, Hoefler & Belli 2015);
    - ``max_samples``: so many are taken;
    - ``budget``: `min_samples` are taken and `budget_ns` of device time is spent, or
      `patience_ns` is and there are `FIRST_LOOK_SAMPLES`;
    - ``gave_up``: of at least `FIRST_LOOK_SAMPLES` even the fastest took longer than `give_up_ns`.

    An interval that is looked at again and again until it pleases covers less than it says. What
    keeps that small is that the interval must be looked at seldom: `wanted` asks for about twice
    the samples each time. Tests measure the coverage that remains.

    Raises:
        UsageError: a limit is not a number that can be kept.
    """

    precision: float = 0.005
    min_samples: int = 10
    max_samples: int = 200
    budget_ns: float = 60e6
    patience_ns: float = 400e6
    give_up_ns: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.precision < 1:
            raise UsageError(
                f"precision is {self.precision}, must be a fraction from 0 (never precise) to "
                "below 1: 0.005 is half a per cent"
            )
        for name in ("min_samples", "max_samples"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, must be at least 1")

    def ended(self, samples_ns: Sequence[float]) -> EndedBy | None:
        """The rule that ends sampling now, None if it goes on."""
        count, spent = len(samples_ns), math.fsum(samples_ns)
        if count >= self.min_samples and self._is_precise(samples_ns):
            return "precise"
        if count >= self.max_samples:
            return "max_samples"
        if count >= self.min_samples and spent >= self.budget_ns:
            return "budget"
        if count >= self.fewest and spent >= self.patience_ns:
            return "budget"
        limit = self.give_up_ns
        if limit is not None and count >= self.fewest and min(samples_ns) > limit:
            return "gave_up"
        return None

    def wanted(self, samples_ns: Sequence[float], each_ns: float) -> int:
        """How many more samples to take before asking again, if one takes about `each_ns`.

        At least 1. The first time the minimum, then as many as would make the interval narrow
        enough if it shrinks with the square root of their number, but at most as many as there are;
        of cheap samples more, and of dear ones not many more than the budget pays for.
        """
        count, each = len(samples_ns), max(each_ns, 1.0)
        if count == 0 and self.give_up_ns is not None and each > self.give_up_ns:
            return self.fewest
        target = self.min_samples
        if count >= self.min_samples:
            target = min(2 * count, self._enough(samples_ns))
        target = max(target, count + int(_BATCH * self.budget_ns / each))
        left = max(0.0, self.budget_ns - math.fsum(samples_ns))
        paid = max(self.min_samples, count + math.ceil(_MARGIN * left / each))
        affordable = max(self.fewest, math.ceil(self.patience_ns / each))
        return max(1, min(target, paid, affordable, self.max_samples) - count)

    @property
    def fewest(self) -> int:
        """Samples without which nothing is decided."""
        return min(FIRST_LOOK_SAMPLES, self.min_samples, self.max_samples)

    def _is_precise(self, samples_ns: Sequence[float]) -> bool:
        if self.precision == 0:
            return False
        interval = median_interval(samples_ns)
        return interval.coverage >= CONFIDENCE and interval.width <= self.precision

    def _enough(self, samples_ns: Sequence[float]) -> int:
        """The number of samples that would be precise, going by these."""
        if self.precision == 0:
            return self.max_samples
        factor = (median_interval(samples_ns).width / self.precision) ** 2
        return math.ceil(min(_MARGIN * len(samples_ns) * factor, self.max_samples))
