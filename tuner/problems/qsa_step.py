"""One decode step of block-sparse-indexed attention: all that lies between its projections."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from tuner.errors import UsageError
from tuner.problems.base import Problem
from tuner.problems.indexer_step import IndexerStepProblem
from tuner.problems.kv_append import KvAppendProblem
from tuner.problems.norm_rope import NormRopeProblem
from tuner.problems.q8_decode import GatedCombineProblem, Q8DecodeProblem

MAX_ROWS = 64
"""Rows of a step: a token and the drafts behind it."""


class QsaStepProblem(Problem, frozen=True, kw_only=True, tag="qsa_step"):
    """From the projections of `rows` new tokens to their gated attention output.

    After the step there are `context` tokens; row b stands at position context - rows + b. A row
    with more complete blocks of `ratio` tokens than fit in `budget` attends to the best of them
    only; a budget of 0 is plain dense decode, without an indexer. `capacity` is how many tokens the
    caches have room for, 0: just `context`. `one_plus` is 1 where norm weights are stored as w of
    1 + w.
    """

    SIZES: ClassVar[tuple[str, ...]] = ("rows", "capacity", "context")

    rows: int = 1
    context: int
    capacity: int = 0
    query_heads: int = 24
    kv_heads: int = 2
    head_size: int = 256
    index_heads: int = 4
    index_dim: int = 128
    ratio: int = 4
    budget: int = 2048
    rotary: int = 64
    theta: float = 1e7
    eps: float = 1e-6
    one_plus: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MAX_ROWS:
            raise UsageError(f"rows is {self.rows}, must be from 1 to {MAX_ROWS}")
        if self.budget < 0:
            raise UsageError(f"budget is {self.budget}, must be 0 (dense) or more")
        # Each step's own problem says what is wrong with its share of the fields.
        _ = self.indexer, self.norm_rope, self.append, self.attention

    @property
    def base_pos(self) -> int:
        """Position of the first new row."""
        return self.context - self.rows

    @property
    def max_tokens(self) -> int:
        """Tokens the caches have room for."""
        return self.capacity or self.context

    @property
    def selects(self) -> bool:
        """Whether the last row, at least, attends to selected blocks only."""
        return self.budget > 0 and self.context // self.ratio > self.indexer.kept_blocks

    @property
    def completes(self) -> bool:
        """Whether the step completes an index block."""
        return self.budget > 0 and self.indexer.end_block > self.indexer.first_block

    @property
    def indexer(self) -> IndexerStepProblem:
        """The indexer's share; of a dense step only for its geometry."""
        return IndexerStepProblem(
            rows=self.rows,
            context=self.context,
            capacity=self.capacity,
            index_heads=self.index_heads,
            index_dim=self.index_dim,
            ratio=self.ratio,
            budget=self.budget or self.ratio,
            rotary=self.rotary,
            theta=self.theta,
            eps=self.eps,
            one_plus=self.one_plus,
        )

    @property
    def norm_rope(self) -> NormRopeProblem:
        """Norm and rope of queries and keys."""
        return NormRopeProblem(
            rows=self.rows,
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            rotary=self.rotary,
            one_plus=self.one_plus,
        )

    @property
    def append(self) -> KvAppendProblem:
        """The new rows of the cache."""
        return KvAppendProblem(
            rows=self.rows,
            context=self.base_pos,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
        )

    @property
    def attention(self) -> Q8DecodeProblem:
        """Attention, as far as its geometry goes: over as many tokens as any row sees."""
        return Q8DecodeProblem(
            rows=self.rows,
            tokens=int(self.row_tokens().max()),
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
        )

    def combine(self, parts: int) -> GatedCombineProblem:
        """The join of so many parts."""
        return GatedCombineProblem(
            rows=self.rows, parts=parts, query_heads=self.query_heads, head_size=self.head_size
        )

    def selective(self) -> npt.NDArray[np.bool_]:
        """Which rows [rows] attend to selected blocks only."""
        if self.budget == 0:
            return np.zeros(self.rows, np.bool_)
        return np.asarray(self.indexer.complete_blocks() > self.budget // self.ratio)

    def row_tokens(self) -> npt.NDArray[np.uint32]:
        """Tokens that each row [rows] sees, as the host counts them."""
        dense = np.arange(self.base_pos, self.context) + 1
        return np.where(self.selective(), self.budget + dense % self.ratio, dense).astype(np.uint32)

    @property
    def label(self) -> str:
        """Tokens, budget, heads, rows."""
        return f"{self.context} {self.series}"

    @property
    def series(self) -> str:
        """All but the tokens, as far as it is unusual."""
        rows = "" if self.rows == 1 else f" {self.rows} rows"
        seen = f"budget {self.budget}" if self.budget else "dense"
        index = f" i{self.index_heads} e{self.index_dim} r{self.ratio}" if self.budget else ""
        room = f" of {self.capacity}" if self.capacity else ""
        weights = " 1+w" if self.one_plus else ""
        heads = f"h{self.query_heads}/{self.kv_heads} d{self.head_size} rot{self.rotary}"
        return f"{heads}{rows} {seen}{index}{room}{weights}"
