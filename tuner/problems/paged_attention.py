"""Paged attention with log-sum-exp: several query tokens a sequence, one key length for a batch."""

from __future__ import annotations

import re
from typing import ClassVar

from tuner.errors import UsageError
from tuner.problems.base import Problem

MAX_TOKENS = 2**30
MAX_BATCH = 2**16
ELEMENTS = {"f32": 4, "f16": 2, "bf16": 2}
"""Element types of queries, pools and outputs, and their bytes."""


class AttentionProblem(Problem, frozen=True, kw_only=True):
    """What attention of `query_tokens` rows a sequence over `context` cached keys and its gradients
    have in common.

    `causal` says which keys row i sees, out of 0 to context - 1:

    * ``off``: all;
    * ``top_left``: keys 0 to i, an offset of 0;
    * ``bottom_right``: keys 0 to i + context - query_tokens, so that the last row sees all;
    * a signed number N (``5``, ``-8``): keys 0 to i + N. Rows may see nothing.

    `element` is the type of queries, pools and outputs (``f32``, ``f16``, ``bf16``).
    """

    SIZES: ClassVar[tuple[str, ...]] = ("batch", "query_tokens", "context")

    batch: int
    query_tokens: int
    context: int
    query_heads: int
    kv_heads: int
    head_size: int
    block_size: int = 16
    causal: str = "off"
    element: str = "f32"

    def __post_init__(self) -> None:
        for name in ("batch", "query_heads", "kv_heads", "head_size", "block_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.batch > MAX_BATCH:
            raise UsageError(f"batch is {self.batch}, must be at most {MAX_BATCH}")
        for name, least in (("query_tokens", 1), ("context", 0)):
            tokens = getattr(self, name)
            if not least <= tokens <= MAX_TOKENS:
                raise UsageError(f"{name} is {tokens}, must be from {least} to {MAX_TOKENS}")
        if self.query_heads % self.kv_heads:
            raise UsageError(
                f"query_heads ({self.query_heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        if self.element not in ELEMENTS:
            raise UsageError(f"element is {self.element!r}, must be one of {', '.join(ELEMENTS)}")
        if abs(self.q_offset) > MAX_TOKENS:
            raise UsageError(f"causal is {self.causal!r}, must be within {MAX_TOKENS} of 0")

    @property
    def group(self) -> int:
        """Query heads that share one KV head (the GQA ratio)."""
        return self.query_heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Query rows that share the keys of one KV head: query tokens times group."""
        return self.query_tokens * self.group

    @property
    def blocks_per_sequence(self) -> int:
        """Columns of the block table (at least 1)."""
        return max(1, -(-self.context // self.block_size))

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of queries, pools and outputs."""
        return ELEMENTS[self.element]

    @property
    def q_offset(self) -> int:
        """Row i sees keys 0 to i + q_offset, as far as there are any.

        Raises:
            UsageError: `causal` is none of the forms above.
        """
        if self.causal in ("off", "top_left", "bottom_right"):
            shift = {"off": self.context, "top_left": 0}
            return shift.get(self.causal, self.context - self.query_tokens)
        if not re.fullmatch(r"[+-]?\d{1,10}", self.causal):
            raise UsageError(
                f"causal is {self.causal!r}, must be off, top_left, bottom_right or a signed "
                "number such as 5 or -8"
            )
        return int(self.causal)

    def keys_seen(self, query_token: int) -> int:
        """How many keys, from the first on, a query token sees."""
        return min(max(query_token + 1 + self.q_offset, 0), self.context)

    @property
    def label(self) -> str:
        """Batch x query tokens x context, heads, head size; what is unusual where it is."""
        block = "" if self.block_size == 16 else f" b{self.block_size}"
        causal = "" if self.causal == "off" else f" {self.causal}"
        return (
            f"{self.batch}x{self.query_tokens}x{self.context}{causal} "
            f"h{self.query_heads}/{self.kv_heads} d{self.head_size}{block} {self.element}"
        )

    @property
    def series(self) -> str:
        """GQA ratio, head size, element type, mask, batch and query tokens."""
        block = "" if self.block_size == 16 else f", blocks of {self.block_size}"
        causal = "" if self.causal == "off" else f", {self.causal}"
        return (
            f"GQA {self.group} d{self.head_size} {self.element}, {self.batch} x "
            f"{self.query_tokens} query tokens{causal}{block}"
        )


class PagedAttentionProblem(AttentionProblem, frozen=True, kw_only=True, tag="paged_attention"):
    """Outputs and log-sum-exp of such attention."""


class AttentionGradientProblem(
    AttentionProblem, frozen=True, kw_only=True, tag="paged_attention_backward"
):
    """Its gradients, given its outputs, their gradient and the log-sum-exp.

    `element` is the type of all that goes in; gradients are float32.
    """
