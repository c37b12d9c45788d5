"""Norm and rotary embedding of a step's query and key heads, in place."""

from __future__ import annotations

from typing import ClassVar

from tuner.errors import UsageError
from tuner.problems.base import Problem

MAX_ROWS = 2**20


class NormRopeProblem(Problem, frozen=True, kw_only=True, tag="norm_rope"):
    """RMS norm of every query and key head, then rotation of its first `rotary` dimensions.

    A row is a token. Each query head has a gate of `head_size` numbers behind it, which stays as it
    is. `one_plus` is 1 where weights are stored as w of 1 + w, as checkpoints have them, else 0.
    """

    SIZES: ClassVar[tuple[str, ...]] = ("rows",)

    rows: int
    query_heads: int
    kv_heads: int
    head_size: int
    rotary: int
    one_plus: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "query_heads", "kv_heads", "head_size"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"{name} is {value}, must be at least 1")
        if self.rows > MAX_ROWS:
            raise UsageError(f"rows is {self.rows}, must be at most {MAX_ROWS}")
        if self.rotary % 2 or not 2 <= self.rotary <= self.head_size:
            raise UsageError(
                f"rotary is {self.rotary}, must be even and from 2 to head_size ({self.head_size})"
            )
        if self.one_plus not in (0, 1):
            raise UsageError(f"one_plus is {self.one_plus}, must be 0 or 1")

    @property
    def heads(self) -> int:
        """Query and key heads of a row."""
        return self.query_heads + self.kv_heads

    @property
    def label(self) -> str:
        """Rows, heads, head size and rotary dimensions; the weights where they are 1 + w."""
        return f"{self.rows} row{'s' if self.rows > 1 else ''} {self.series}"

    @property
    def series(self) -> str:
        """Heads, head size and rotary dimensions; the weights where they are 1 + w."""
        weights = " 1+w" if self.one_plus else ""
        return f"h{self.query_heads}/{self.kv_heads} d{self.head_size} rot{self.rotary}{weights}"
