"""What every problem is: a frozen shape with a stable identity.

A problem is plain data. Operands are made from it by its family, with a seed.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

GROUP_CODES = 32
"""Codes of a planar cache that lie under one scale."""


class Problem(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all problems. Subclasses are tagged, so that records can carry any of them.

    Fields are whole numbers, numbers or text, so that a shape text or a workload file can name
    every problem (see `tuner.workloads`).
    """

    SIZES: ClassVar[tuple[str, ...]] = ("sequences", "context")
    """Fields that a launch may differ in from the problem that its kernels were built for; all
    others, but for `lengths`, are compiled into the kernels."""

    STEP_TOKENS: ClassVar[tuple[str, ...]] = ("sequences", "rows", "batch", "query_tokens")
    """Fields that count the tokens of a step."""

    SWITCHES: ClassVar[tuple[str, ...]] = ()
    """Fields that a problem only has where they differ from their defaults: its key, its texts and
    its place among others are the same as before the kind had them."""

    @property
    def key(self) -> str:
        """A short stable identity: equal problems have equal keys, on every machine."""
        raw = msgspec.json.encode(self.stated, order="sorted")
        return hashlib.sha256(raw).hexdigest()[:12]

    @property
    def switched(self) -> dict[str, Any]:
        """The switches that are on, by name."""
        if not self.SWITCHES:
            return {}
        defaults = _defaults(type(self))
        return {
            name: getattr(self, name)
            for name in self.SWITCHES
            if getattr(self, name) != defaults[name]
        }

    @property
    def stated(self) -> dict[str, Any]:
        """`kind` and all fields by name, without the switches that are off."""
        off = set(self.SWITCHES) - self.switched.keys()
        return {name: v for name, v in msgspec.to_builtins(self).items() if name not in off}

    @property
    def counts(self) -> Mapping[str, int]:
        """What a launch may hang on beside the fields, by name: sums and maxima over a batch."""
        return {}

    @property
    def label(self) -> str:
        """How tables and plots name the problem."""
        return f"{self.series} {self.SIZES[-1]} {self.extent}"

    @property
    def series(self) -> str:
        """The name of the problems that differ in their last size only: one line of a plot."""
        fields = self.stated
        del fields["kind"], fields[self.SIZES[-1]]
        return " ".join(f"{name} {value}" for name, value in fields.items())

    @property
    def effective(self) -> Problem:
        """The problem that is the same work with the fewest switches."""
        return self

    @property
    def way_smaller(self) -> str:
        """What to do where the problem is too large."""
        *others, last = self.SIZES
        return f"lower its {', '.join(others)}{' or ' if others else ''}{last}"

    @property
    def step_tokens(self) -> int:
        """Tokens that a launch works for: the product of the `STEP_TOKENS` that the problem has."""
        counted = set(self.STEP_TOKENS) & set(self.__struct_fields__)
        return math.prod(getattr(self, name) for name in counted)

    @property
    def extent(self) -> int:
        """The last of `SIZES`: what a plot has on its axis."""
        return int(getattr(self, self.SIZES[-1]))

    @property
    def order(self) -> tuple[object, ...]:
        """Where the problem stands among others of its kind in tables and plots."""
        fields = msgspec.to_builtins(self)
        geometry = [value for name, value in fields.items() if name not in self.SIZES]
        return (*geometry, *(fields[name] for name in self.SIZES))


@functools.cache
def _defaults(kind: type[Problem]) -> dict[str, Any]:
    """The defaults of a kind's fields by name: msgspec reads annotations anew at each question."""
    return {field.name: field.default for field in msgspec.structs.fields(kind)}
