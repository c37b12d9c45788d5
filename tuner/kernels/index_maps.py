"""Tables as arithmetic: a table in GLSL is read from memory, a few shifts and masks are not.

The mappings of lanes to matrix elements are mostly sums of bits of the lane's number, each times a
constant; those become such a sum, any other stays a table.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence


def index_map(values: Sequence[int]) -> str:
    """A GLSL expression of type uint for `values[i]`, given the uint `i` below `len(values)`."""
    return _index_map(tuple(values))


@functools.lru_cache(4096)
def _index_map(values: tuple[int, ...]) -> str:
    """The same, kept: a device has few mappings, and each variant is rendered for several cases."""
    weights = _bit_weights(values)
    if weights is None:
        listed = "u, ".join(map(str, values))
        return f"uint[]({listed}u)[i]"
    terms = [_term(run, len(weights)) for run in _runs(weights)]
    if values[0] or not terms:
        terms.append(f"{values[0]}u")
    return " + ".join(terms)


def _bit_weights(values: Sequence[int]) -> list[int] | None:
    """What each bit of the index adds to `values[0]`; None if that is not all there is to it."""
    bits = max(0, (len(values) - 1).bit_length())
    if len(values) != 1 << bits:
        return None
    weights = [values[1 << bit] - values[0] for bit in range(bits)]
    for i, value in enumerate(values):
        if value != values[0] + sum(w for bit, w in enumerate(weights) if i >> bit & 1):
            return None
    return weights if all(weight >= 0 for weight in weights) else None


def _runs(weights: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first bit, bits, weight of the first) of neighbouring bits that count as one number."""
    runs: list[tuple[int, int, int]] = []
    for bit, weight in enumerate(weights):
        if not weight:
            continue
        if runs:
            first, count, unit = runs[-1]
            if first + count == bit and weight == unit << count:
                runs[-1] = (first, count + 1, unit)
                continue
        runs.append((bit, 1, weight))
    return runs


def _term(run: tuple[int, int, int], bits: int) -> str:
    first, count, weight = run
    number = f"i >> {first}" if first else "i"
    if first + count < bits:
        number = f"{number} & {(1 << count) - 1}u"
    if weight == 1:
        return f"({number})"
    return f"({number}) * {weight}u"
