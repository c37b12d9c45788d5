"""Operands and scalars of the switches of paged decode: window, soft cap, ALiBi, sinks.

Buffers `sinks` and `slopes` are float32 [H]: natural logits, and what a token's distance is
multiplied by; NaN where the switch is off.
"""

from __future__ import annotations

import msgspec
import numpy as np

from tuner.kernels.base import PushField
from tuner.kernels.decode_values import Floats
from tuner.problems import PagedDecodeProblem

VALIDATION_WINDOW = 151
"""Windows are cut to this for validation, so that contexts of a thousand tokens reach beyond."""
PUSH_FIELDS = (PushField(name="window", type="uint"), PushField(name="softcap", type="float"))
"""Push constants of kernels that have switches."""
LARGE_SINK, NO_SINK = 40.0, -np.inf


def switch_inputs(problem: PagedDecodeProblem, rng: np.random.Generator) -> dict[str, Floats]:
    """The buffers, whether they are used or not."""
    return {"sinks": _sinks(problem, rng), "slopes": _slopes(problem)}


def switch_scalars(problem: PagedDecodeProblem) -> dict[str, int | float]:
    """What the oracle has to know of the switches."""
    return {
        "window": problem.window,
        "softcap": problem.softcap,
        "alibi": problem.alibi,
        "sinks": problem.sinks,
    }


def with_validation_window(problem: PagedDecodeProblem) -> PagedDecodeProblem:
    """The same with a window that contexts for validation reach beyond, and an odd one: lengths are
    even, so that walks begin in the middle of tokens that are loaded together."""
    window = min(problem.window, VALIDATION_WINDOW)
    return msgspec.structs.replace(problem, window=window - (window > 0 and window % 2 == 0))


def _sinks(problem: PagedDecodeProblem, rng: np.random.Generator) -> Floats:
    """Sink logits [H] about as large as others, the first far above all, the last none."""
    if not problem.sinks:
        return np.full(problem.query_heads, np.nan, np.float32)
    sinks = 3 * rng.standard_normal(problem.query_heads, np.float32)
    sinks[0], sinks[-1] = LARGE_SINK, NO_SINK
    return sinks


def _slopes(problem: PagedDecodeProblem) -> Floats:
    """The published slopes of ALiBi [H]: powers of two from 2^(-8/H) down to 2^-8."""
    if not problem.alibi:
        return np.full(problem.query_heads, np.nan, np.float32)
    head = np.arange(1, problem.query_heads + 1)
    return np.asarray(2.0 ** (-8 * head / problem.query_heads), np.float32)
