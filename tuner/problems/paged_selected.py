"""One decode step of block-sparse attention over a paged cache: lists of selected blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from tuner.errors import UsageError
from tuner.problems.base import Problem
from tuner.problems.paged_decode import PagedDecodeProblem


class PagedSelectedProblem(Problem, frozen=True, kw_only=True, tag="paged_selected"):
    """One new query token for each sequence, which sees some of its sequence's tokens.

    A sequence of L tokens has L // ratio complete index blocks of `ratio` tokens. Of these it sees
    the `selected` ones that its list names, all if there are no more, and always the tokens behind
    the last complete one. Pages of the cache have `block_size` tokens. `lengths` is as in
    `PagedDecodeProblem`.
    """

    SIZES: ClassVar[tuple[str, ...]] = ("sequences", "selected", "context")

    sequences: int
    context: int
    selected: int
    query_heads: int
    kv_heads: int
    head_size: int
    ratio: int = 4
    block_size: int = 16
    lengths: str = "equal"

    def __post_init__(self) -> None:
        for name in ("selected", "ratio"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"{name} is {value}, must be at least 1")
        self.dense  # noqa: B018 - it checks the other fields

    @property
    def dense(self) -> PagedDecodeProblem:
        """The same step over all tokens."""
        return PagedDecodeProblem(
            sequences=self.sequences,
            context=self.context,
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            block_size=self.block_size,
            lengths=self.lengths,
        )

    @property
    def group(self) -> int:
        """Query heads that share one KV head (the GQA ratio)."""
        return self.query_heads // self.kv_heads

    @property
    def run(self) -> int:
        """Tokens, seen one after the other from a multiple of it on, that follow each other in the
        cache."""
        if self.block_size % self.ratio == 0:
            return self.ratio
        return self.block_size if self.ratio % self.block_size == 0 else 1

    @property
    def seen(self) -> int:
        """The most tokens that a sequence sees."""
        return int(self.visible_lens().max())

    @property
    def counts(self) -> Mapping[str, int]:
        """The most tokens that a sequence sees, and those that all see together."""
        seen = self.visible_lens()
        return {"visible": int(seen.max()), "visible_sum": int(seen.sum())}

    @property
    def label(self) -> str:
        """Sequences, tokens seen of the context, then the heads."""
        sparse = f"{self.selected * self.ratio} of {self.context}"
        return f"{self.sequences}x{sparse} {self._geometry}"

    @property
    def series(self) -> str:
        """All but the context."""
        plural = "s" if self.sequences > 1 else ""
        sparse = f"{self.selected} blocks of {self.ratio}"
        return f"{self._geometry}, {self.sequences} sequence{plural}, {sparse}"

    @property
    def _geometry(self) -> str:
        page = "" if self.block_size == 16 else f" b{self.block_size}"
        lengths = "" if self.lengths == "equal" else f" {self.lengths[:24]}"
        return f"h{self.query_heads}/{self.kv_heads} d{self.head_size}{page}{lengths}"

    def listed(self) -> npt.NDArray[np.int64]:
        """Blocks that each sequence's list [sequences] names."""
        complete = self.dense.context_lens().astype(np.int64) // self.ratio
        return np.minimum(complete, self.selected)

    def visible_lens(self) -> npt.NDArray[np.int64]:
        """Tokens that each sequence [sequences] sees."""
        return self.listed() * self.ratio + self.dense.context_lens().astype(np.int64) % self.ratio
