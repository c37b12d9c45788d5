"""Kinds of inputs by name, each with random numbers of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tuner.errors import UnknownNameError


def generator_of(inputs: str, kinds: Sequence[str], seed: int) -> np.random.Generator:
    """What draws the operands of a kind of inputs; the same arguments give the same numbers.

    Raises:
        UnknownNameError: `inputs` is none of the kinds; names the nearest.
    """
    if inputs not in kinds:
        raise UnknownNameError("kind of inputs", inputs, kinds)
    return np.random.default_rng([seed, kinds.index(inputs)])
