"""From raw samples to what may be said of them: pure functions, no clock and no device.

`summarise` says what one measurement found, `StoppingRule` when enough is measured, `compare` which
of two is faster. Each choice and where it comes from: docs/measuring.md.
"""

from tuner.timing.comparison import Comparison, Series, Verdict, compare, differ
from tuner.timing.stopping import FIRST_LOOK_SAMPLES, EndedBy, StoppingRule
from tuner.timing.summary import (
    CONFIDENCE,
    MIN_ROUNDS,
    Interval,
    Summary,
    median_interval,
    overlap,
    require_samples,
    summarise,
)

__all__ = [
    "CONFIDENCE",
    "FIRST_LOOK_SAMPLES",
    "MIN_ROUNDS",
    "Comparison",
    "EndedBy",
    "Interval",
    "Series",
    "StoppingRule",
    "Summary",
    "Verdict",
    "compare",
    "differ",
    "median_interval",
    "overlap",
    "require_samples",
    "summarise",
]
