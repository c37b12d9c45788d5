"""Writing new keys and values into a paged cache."""

from __future__ import annotations

from typing import ClassVar

from tuner.errors import UsageError
from tuner.problems.base import Problem

MAX_ELEMENTS = 2**30
"""Numbers of one side: kernels count both sides' in 32 bits."""


class CacheWriteProblem(Problem, frozen=True, kw_only=True, tag="cache_write"):
    """`tokens` new tokens, equally many of each of `sequences`, go to the slots of their blocks.

    `pack` is how many neighbouring dimensions of a key stay together in the float cache (16 bytes
    over the size of the engine's own type; the int8 cache has none). Strides count numbers from
    token to token; 0 means that tokens follow each other closely.
    """

    SIZES: ClassVar[tuple[str, ...]] = ("sequences", "tokens")
    STEP_TOKENS: ClassVar[tuple[str, ...]] = ("tokens",)

    tokens: int
    kv_heads: int
    head_size: int
    sequences: int = 1
    block_size: int = 16
    pack: int = 4
    key_stride: int = 0
    value_stride: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "kv_heads", "head_size", "sequences", "block_size", "pack"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"{name} is {value}, must be at least 1")
        if self.tokens % self.sequences:
            raise UsageError(
                f"tokens ({self.tokens}) must be a multiple of sequences ({self.sequences})"
            )
        for name in ("key_stride", "value_stride"):
            stride = getattr(self, name)
            if stride and stride < self.row:
                raise UsageError(
                    f"{name} is {stride}, must be 0 or at least kv_heads * head_size ({self.row})"
                )
        if self.tokens * self.widest > MAX_ELEMENTS:
            raise UsageError(
                f"{self.tokens} tokens of {self.widest} numbers are more than the {MAX_ELEMENTS} "
                "that one launch takes: write them in several"
            )

    @property
    def row(self) -> int:
        """Numbers of a token: all KV heads."""
        return self.kv_heads * self.head_size

    @property
    def strides(self) -> tuple[int, int]:
        """From token to token of the keys, and of the values."""
        return (self.key_stride or self.row, self.value_stride or self.row)

    @property
    def widest(self) -> int:
        """The larger stride."""
        return max(self.strides)

    @property
    def label(self) -> str:
        """Sequences and their tokens, then what `series` says."""
        return f"{self.sequences}x{self.tokens // self.sequences} {self._geometry}"

    @property
    def series(self) -> str:
        """Heads and head size, sequences; block size, pack and strides where unusual."""
        return f"{self._geometry}, {self.sequences} sequence{'s' if self.sequences > 1 else ''}"

    @property
    def _geometry(self) -> str:
        block = "" if self.block_size == 16 else f" b{self.block_size}"
        pack = "" if self.pack == 4 else f" x{self.pack}"
        apart = self.strides != (self.row, self.row)
        strides = f" strides {self.strides[0]}/{self.strides[1]}" if apart else ""
        return f"kv{self.kv_heads} d{self.head_size}{block}{pack}{strides}"
