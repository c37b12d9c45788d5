"""What is right: float64 references in NumPy, the error each may have, and verdicts.

One module for each system (`paged_decode`); `attention` is the mathematics they share, `tolerance`
the error bounds of each arithmetic class (derived in docs/tolerances.md), `verdict` the judge.
"""

from tuner.oracle.paged_decode import decode_reference, sampled_decode_reference
from tuner.oracle.unquantised import unquantised_decode_reference
from tuner.oracle.verdict import Verdict, judge, worst_of

__all__ = [
    "Verdict",
    "decode_reference",
    "judge",
    "sampled_decode_reference",
    "unquantised_decode_reference",
    "worst_of",
]
