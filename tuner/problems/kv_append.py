"""Appending a step's keys and values to the planar int8 cache."""

from __future__ import annotations

from typing import ClassVar

from tuner.errors import UsageError
from tuner.problems.base import GROUP_CODES, Problem

MAX_ROWS = 2**20
MAX_POSITION = 2**24


class KvAppendProblem(Problem, frozen=True, kw_only=True, tag="kv_append"):
    """`rows` tokens, from position `context` on, of `kv_heads` keys and values each."""

    SIZES: ClassVar[tuple[str, ...]] = ("context", "rows")

    rows: int
    context: int
    kv_heads: int
    head_size: int

    def __post_init__(self) -> None:
        for name in ("rows", "kv_heads", "head_size"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"{name} is {value}, must be at least 1")
        if self.rows > MAX_ROWS:
            raise UsageError(f"rows is {self.rows}, must be at most {MAX_ROWS}")
        if not 0 <= self.context <= MAX_POSITION:
            raise UsageError(f"context is {self.context}, must be from 0 to {MAX_POSITION}")
        if self.row % GROUP_CODES:
            raise UsageError(
                f"kv_heads * head_size is {self.row}, must be a multiple of the {GROUP_CODES} "
                "codes that share a scale"
            )

    @property
    def row(self) -> int:
        """Codes of one token: all KV heads."""
        return self.kv_heads * self.head_size

    @property
    def groups(self) -> int:
        """Scales of one token."""
        return self.row // GROUP_CODES

    @property
    def capacity(self) -> int:
        """Tokens that the cache has room for: those before, those appended, one more."""
        return self.context + self.rows + 1

    @property
    def label(self) -> str:
        """Rows, the position of the first, and the heads."""
        rows = f"{self.rows} row{'s' if self.rows > 1 else ''}"
        return f"{rows} at {self.context} kv{self.kv_heads} d{self.head_size}"

    @property
    def series(self) -> str:
        """The heads, and the position of the first row."""
        return f"kv{self.kv_heads} d{self.head_size} at {self.context}"
