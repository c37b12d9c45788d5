"""Picking from a space: which variant is nearest, which few cover all pairs of values.

A legal space may hold a million variants, so `Variants` keeps them as one byte per parameter and
makes the mappings when they are asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import overload

import numpy as np
import numpy.typing as npt

from tuner.errors import UsageError
from tuner.kernels.base import Value, Values

Codes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]

MAX_VALUES = 255
_UNKNOWN = 255


class Variants(Sequence[Values]):
    """An immutable sequence of distinct variants of one family, stored as value numbers.

    `codes` has the shape [variants, parameters]; a code is the place of the value in
    `domains[name]`.
    """

    def __init__(self, domains: Mapping[str, Sequence[Value]], codes: Codes) -> None:
        """`domains` gives the values of each parameter in order, at most `MAX_VALUES` of them."""
        self.domains = {name: tuple(values) for name, values in domains.items()}
        for name, values in self.domains.items():
            if len(values) > MAX_VALUES:
                raise UsageError(f"{name} has {len(values)} values, the limit is {MAX_VALUES}")
        width = max(1, len(self.domains))
        # A parameter at a time: that is how a million variants are compared in a millisecond or so.
        self.codes = np.asfortranarray(codes.reshape(-1, width))
        self._code_of = {
            name: {value: code for code, value in enumerate(values)}
            for name, values in self.domains.items()
        }
        keys = _keys(self.codes)
        self._order = np.argsort(keys, kind="stable")
        self._sorted_keys = keys[self._order]

    @classmethod
    def of(cls, variants: Iterable[Values]) -> Variants:
        """From mappings, the values of each parameter being numbered as they first occur."""
        listed = list(variants)
        domains: dict[str, dict[Value, None]] = {name: {} for name in (listed or [{}])[0]}
        for variant in listed:
            for name, values in domains.items():
                values.setdefault(variant[name])
        made = cls({n: tuple(v) for n, v in domains.items()}, np.empty((0, 1), np.uint8))
        return cls(made.domains, np.array([made.encode(v) for v in listed], np.uint8))

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> Values: ...
    @overload
    def __getitem__(self, index: slice) -> Variants: ...
    def __getitem__(self, index: int | slice) -> Values | Variants:
        if isinstance(index, slice):
            return Variants(self.domains, self.codes[index])
        row = self.codes[index].tolist()
        return {n: v[c] for (n, v), c in zip(self.domains.items(), row, strict=True)}

    def __iter__(self) -> Iterator[Values]:
        return (self[index] for index in range(len(self)))

    def __contains__(self, values: object) -> bool:
        return isinstance(values, Mapping) and self.find(values) is not None

    def encode(self, values: Values) -> Codes:
        """The codes of any variant, shape [parameters]; a value outside its domain gets 255."""
        codes = [self._code_of[name].get(values[name], _UNKNOWN) for name in self.domains]
        return np.array(codes, np.uint8)

    def find(self, values: Values) -> int | None:
        """The place of a variant in the sequence, None if it is not there."""
        if set(values) != set(self.domains) or not len(self):
            return None
        key = _keys(self.encode(values)[np.newaxis])
        place = int(np.searchsorted(self._sorted_keys, key)[0])
        found = place < len(self) and self._sorted_keys[place] == key[0]
        return int(self._order[place]) if found else None

    def having(
        self, wanted: Mapping[str, Collection[Value]], *, beside: Values | None = None
    ) -> Variants:
        """The variants in which each of the named parameters has one of the values given for it.

        If there are any, `beside` is one more that is kept whatever it has.
        """
        kept = np.ones(len(self), np.bool_)
        for column, (name, domain) in zip(self.codes.T, self.domains.items(), strict=True):
            if name in wanted:
                kept &= np.array([value in wanted[name] for value in domain], np.bool_)[column]
        if beside is not None and kept.any() and (index := self.find(beside)) is not None:
            kept[index] = True
        return Variants(self.domains, self.codes[kept])

    def nearest(self, values: Values, among: Mask | None = None) -> int:
        """The place of the variant that differs from `values` in the fewest parameters.

        Ties go to the smaller sum of steps along the parameters' values, then to the earlier
        variant. `among` (shape [variants]) limits the choice.

        Raises:
            UsageError: there is none to choose from.
        """
        if not len(self) or (among is not None and not among.any()):
            raise UsageError("no legal variant of the family is left to choose from")
        wanted = self.encode(values)
        differing = np.zeros(len(self), np.uint8)
        for column, code in zip(self.codes.T, wanted, strict=True):
            differing += column != code
        if among is not None:
            differing[~among] = _UNKNOWN
        closest = np.flatnonzero(differing == differing.min())
        known = wanted != _UNKNOWN
        steps = np.abs(self.codes[closest][:, known].astype(np.int16) - wanted[known]).sum(axis=1)
        return int(closest[steps.argmin()])


def nearest_legal(values: Values, variants: Sequence[Values]) -> Values:
    """The variant of `variants` nearest to `values`, as `Variants.nearest` tells.

    Raises:
        UsageError: there are no variants.
    """
    space = variants if isinstance(variants, Variants) else Variants.of(variants)
    return space[space.nearest(values)]


def pairwise(variants: Sequence[Values], names: Sequence[str] | None = None) -> tuple[Values, ...]:
    """A few variants that hold every pair of parameter values that any variant holds.

    Greedy: the rarest pair not yet covered is covered by the variant that brings most new pairs.
    `names` are the parameters to pair (default all). The result is in the order chosen and the same
    for the same variants.
    """
    space = variants if isinstance(variants, Variants) else Variants.of(variants)
    if not len(space):
        return ()
    kept = [name in (names or space.domains) for name in space.domains]
    codes = space.codes[:, kept]
    columns = [np.ascontiguousarray(column) for column in codes.T]
    pairs = list(combinations(range(len(columns)), 2)) or [(0, 0)]
    open_counts = [_pair_counts(columns[a], columns[b]) for a, b in pairs]
    chosen: list[Values] = []
    while (rarest := _rarest(open_counts)) is not None:
        index, first, second = rarest
        a, b = pairs[index]
        rows = np.flatnonzero((columns[a] == first) & (columns[b] == second))
        gain = np.zeros(len(rows), np.int32)
        for (a, b), counts in zip(pairs, open_counts, strict=True):
            gain += counts[columns[a][rows], columns[b][rows]] > 0
        best = int(rows[gain.argmax()])
        for (a, b), counts in zip(pairs, open_counts, strict=True):
            counts[columns[a][best], columns[b][best]] = 0
        chosen.append(space[best])
    return tuple(chosen)


def every_value(variants: Sequence[Values], *, seed: int = 0) -> tuple[Values, ...]:
    """A few variants that hold every parameter value that any variant holds.

    Greedy: the next is the one that brings most new values; of several the one most like one chosen
    before, since the fewer kernels differ the fewer must be compiled; then chance decides, by
    `seed`. The result is in the order chosen and the same for the same variants.
    """
    space = variants if isinstance(variants, Variants) else Variants.of(variants)
    codes = np.random.default_rng(seed).permutation(space.codes)
    width = len(space.domains)
    is_open = [np.ones(len(values), np.int32) for values in space.domains.values()]
    unlikeness = np.full(len(codes), width)
    chosen: list[int] = []
    while len(codes):
        gain = sum(new[column] for new, column in zip(is_open, codes.T, strict=True))
        best = int(np.argmax(gain * (width + 1) - unlikeness))
        if not any(new[code] for new, code in zip(is_open, codes[best], strict=True)):
            break
        for new, code in zip(is_open, codes[best], strict=True):
            new[code] = 0
        unlikeness = np.minimum(unlikeness, (codes != codes[best]).sum(axis=1))
        chosen.append(best)
    return tuple(Variants(space.domains, codes[chosen]))


def _keys(codes: Codes) -> npt.NDArray[np.bytes_]:
    """One sortable key a row: the row's bytes, ordered as the codes are."""
    return np.ascontiguousarray(codes).view(f"S{codes.shape[1]}").reshape(-1)


def _pair_counts(first: Codes, second: Codes) -> Counts:
    """How many variants hold each pair of values, shape [values of first, values of second]."""
    rows, columns = int(first.max()) + 1, int(second.max()) + 1
    joined = first.astype(np.int64) * columns + second
    return np.bincount(joined, minlength=rows * columns).reshape(rows, columns)


def _rarest(counts: Sequence[Counts]) -> tuple[int, int, int] | None:
    """(table, row, column) of the smallest positive count; None if there is none."""
    best: tuple[int, int, int] | None = None
    lowest = np.iinfo(np.int64).max
    for index, table in enumerate(counts):
        masked = np.where(table > 0, table, np.iinfo(np.int64).max)
        flat = int(masked.argmin())
        if masked.flat[flat] < lowest:
            lowest = int(masked.flat[flat])
            best = (index, flat // table.shape[1], flat % table.shape[1])
    return best
