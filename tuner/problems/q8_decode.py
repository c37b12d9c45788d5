"""Decode over the planar q8 cache: some rows of one sequence attend to its tokens, or to lists."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from tuner.errors import UsageError
from tuner.problems.base import GROUP_CODES, Problem
from tuner.problems.paged_decode import MAX_TOKENS

MAX_ROWS = 65_535


class Q8DecodeProblem(Problem, frozen=True, kw_only=True, tag="q8_decode"):
    """Query rows of one sequence over its planar q8 cache, which all of them share.

    The last row sees `tokens` tokens, each row before it `step` fewer, but at least one: drafts of
    one decode step see one token more each.
    """

    SIZES: ClassVar[tuple[str, ...]] = ("rows", "tokens")

    rows: int = 1
    tokens: int
    query_heads: int
    kv_heads: int
    head_size: int
    step: int = 1

    def __post_init__(self) -> None:
        for name in ("rows", "tokens", "query_heads", "kv_heads", "head_size", "step"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"{name} is {value}, must be at least 1")
        if self.rows > MAX_ROWS:
            raise UsageError(f"rows is {self.rows}, must be at most {MAX_ROWS}")
        if self.tokens > MAX_TOKENS:
            raise UsageError(f"tokens is {self.tokens}, must be at most {MAX_TOKENS}")
        if self.query_heads % self.kv_heads:
            raise UsageError(
                f"query_heads ({self.query_heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        if self.cache_row % GROUP_CODES:
            raise UsageError(
                f"kv_heads times head_size is {self.cache_row}, must be a multiple of "
                f"{GROUP_CODES}, the codes of one scale"
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads

    @property
    def cache_row(self) -> int:
        """Numbers that one token has in each side of the cache."""
        return self.kv_heads * self.head_size

    @property
    def seen(self) -> int:
        """Tokens that the last row attends to."""
        return self.tokens

    @property
    def heads_label(self) -> str:
        """Heads, head size and rows, as tables name them."""
        rows = "" if self.rows == 1 else f" {self.rows} rows"
        apart = "" if self.step == 1 else f" {self.step} apart"
        return f"h{self.query_heads}/{self.kv_heads} d{self.head_size}{rows}{apart}"

    @property
    def label(self) -> str:
        """Tokens, heads, rows."""
        return f"{self.tokens} {self.heads_label}"

    @property
    def series(self) -> str:
        """All but the tokens."""
        return self.heads_label

    def row_tokens(self) -> npt.NDArray[np.uint32]:
        """Tokens that each row [rows] attends to."""
        before = np.arange(self.rows, dtype=np.int64)[::-1] * self.step
        return np.maximum(1, self.seen - before).astype(np.uint32)


class Q8SelectedProblem(Q8DecodeProblem, frozen=True, kw_only=True, tag="q8_selected"):
    """The same over lists: of the cache's `tokens` tokens the last row sees the `visible` ones that
    its list names."""

    SIZES: ClassVar[tuple[str, ...]] = ("rows", "visible", "tokens")

    visible: int

    def __post_init__(self) -> None:
        Q8DecodeProblem.__post_init__(self)
        if not 1 <= self.visible <= self.tokens:
            raise UsageError(f"visible is {self.visible}, must be from 1 to tokens ({self.tokens})")

    @property
    def seen(self) -> int:
        """Tokens that the last row attends to."""
        return self.visible

    @property
    def label(self) -> str:
        """Tokens seen of those cached, heads, rows."""
        return f"{self.visible} of {self.tokens} {self.heads_label}"

    @property
    def series(self) -> str:
        """All but the cached tokens."""
        return f"{self.visible} seen, {self.heads_label}"


class GatedCombineProblem(Problem, frozen=True, kw_only=True, tag="gated_combine"):
    """Joining `parts` partial results of each query head of each row, and the sigmoid gate."""

    SIZES: ClassVar[tuple[str, ...]] = ("rows", "parts")

    rows: int = 1
    parts: int
    query_heads: int
    head_size: int

    def __post_init__(self) -> None:
        for name in ("rows", "parts", "query_heads", "head_size"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"{name} is {value}, must be at least 1")
        if self.rows > MAX_ROWS:
            raise UsageError(f"rows is {self.rows}, must be at most {MAX_ROWS}")

    @property
    def label(self) -> str:
        """Parts, heads, head size, rows."""
        return f"{self.parts} parts {self.series}"

    @property
    def series(self) -> str:
        """All but the parts."""
        rows = "" if self.rows == 1 else f" {self.rows} rows"
        return f"h{self.query_heads} d{self.head_size}{rows}"
