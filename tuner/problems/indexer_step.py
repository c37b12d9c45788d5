"""One step of a block-sparse indexer: new rows at the end of a cache of index keys."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from tuner.errors import UsageError
from tuner.problems.base import Problem

MAX_POSITIONS = 2**24
"""Positions up to here, and their float64 angles, are exact with plenty to spare."""


class IndexerStepProblem(Problem, frozen=True, kw_only=True, tag="indexer_step"):
    """The indexer's part of one decode step: `rows` new tokens, after which there are `context`.

    Row b stands at position `base_pos` + b. Blocks of `ratio` tokens have one key each; a row with
    more complete blocks than fit in `budget` tokens attends only to the best of them. Queries have
    `index_heads` heads of `index_dim` dimensions, of which the first `rotary` are turned by the
    position (base `theta`). `capacity` is how many tokens the caches have room for, 0: just
    `context`. `one_plus` is 1 where norm weights are stored as w of 1 + w, else 0.
    """

    SIZES: ClassVar[tuple[str, ...]] = ("rows", "capacity", "context")

    rows: int
    context: int
    capacity: int = 0
    index_heads: int = 4
    index_dim: int = 128
    ratio: int = 4
    budget: int = 2048
    rotary: int = 64
    theta: float = 1e7
    eps: float = 1e-6
    one_plus: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "index_heads", "index_dim", "ratio", "budget"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, must be at least 1")
        if not self.rows <= self.context <= MAX_POSITIONS:
            raise UsageError(
                f"context is {self.context}, must be from rows ({self.rows}) to {MAX_POSITIONS}"
            )
        if self.capacity and not self.context <= self.capacity <= MAX_POSITIONS:
            raise UsageError(
                f"capacity is {self.capacity}, must be 0 or from context ({self.context}) to "
                f"{MAX_POSITIONS}"
            )
        if self.budget % self.ratio:
            raise UsageError(
                f"budget ({self.budget}) must be a multiple of ratio ({self.ratio}), whole blocks"
            )
        if self.index_dim % 4:
            raise UsageError(f"index_dim is {self.index_dim}, must be a multiple of 4")
        if self.rotary % 2 or not 0 <= self.rotary <= self.index_dim:
            raise UsageError(
                f"rotary is {self.rotary}, must be even and from 0 to index_dim ({self.index_dim})"
            )
        if not (self.theta > 0 and math.isfinite(self.theta)):
            raise UsageError(f"theta is {self.theta}, must be a positive number")
        if not (self.eps >= 0 and math.isfinite(self.eps)):
            raise UsageError(f"eps is {self.eps}, must be a number from 0")
        if self.one_plus not in (0, 1):
            raise UsageError(f"one_plus is {self.one_plus}, must be 0 (w) or 1 (1 + w)")

    @property
    def base_pos(self) -> int:
        """Position of the first new row: tokens that were there before."""
        return self.context - self.rows

    @property
    def max_tokens(self) -> int:
        """Tokens the caches have room for."""
        return self.capacity or self.context

    @property
    def max_blocks(self) -> int:
        """Blocks the caches have room for, and elements of a row of scores."""
        return self.max_tokens // self.ratio + 1

    @property
    def kept_blocks(self) -> int:
        """Blocks that a selective row attends to."""
        return self.budget // self.ratio

    @property
    def first_block(self) -> int:
        """The first block that this step may complete; it may have been started earlier."""
        return self.base_pos // self.ratio

    @property
    def end_block(self) -> int:
        """One past the last block that this step completes."""
        return self.context // self.ratio

    @property
    def visible_stride(self) -> int:
        """Elements of a row of visible tokens."""
        return self.budget + self.ratio

    @property
    def mask_words(self) -> int:
        """32-bit words of a row of the block mask."""
        return -(-self.max_blocks // 32)

    def positions(self) -> npt.NDArray[np.int64]:
        """Position of each row, shape [rows]."""
        return np.arange(self.base_pos, self.context)

    def complete_blocks(self) -> npt.NDArray[np.int64]:
        """Blocks complete at each row, shape [rows]."""
        return (self.positions() + 1) // self.ratio

    @property
    def label(self) -> str:
        """Rows x context, then the geometry; what is usual is left out."""
        return f"{self.rows}x{self.context} {self._geometry}"

    @property
    def series(self) -> str:
        """Rows and geometry."""
        plural = "s" if self.rows > 1 else ""
        return f"{self.rows} row{plural}, {self._geometry}"

    @property
    def _geometry(self) -> str:
        usual = {
            "capacity": (0, "of "),
            "ratio": (4, "r"),
            "budget": (2048, "budget "),
            "rotary": (64, "rotary "),
            "theta": (1e7, "theta "),
            "eps": (1e-6, "eps "),
        }
        unusual = [
            f"{mark}{getattr(self, name):g}" if name in ("theta", "eps") else f"{mark}{value}"
            for name, (common, mark) in usual.items()
            if (value := getattr(self, name)) != common
        ]
        convention = ["1+w"] if self.one_plus else []
        return " ".join((f"i{self.index_heads} e{self.index_dim}", *unusual, *convention))
