"""One decode step of paged attention: heads, blocks and the context lengths of a batch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from tuner.errors import UsageError
from tuner.problems.base import Problem

MAX_TOKENS = 2**31 - 1
MAX_SEQUENCES = 2**16
SOFTCAP_RANGE = (1e-3, 1e6)


class PagedDecodeProblem(Problem, frozen=True, kw_only=True, tag="paged_decode"):
    """One decode step of paged attention: one new query token for each sequence.

    `context` is the longest context of the batch in tokens; `lengths` says how the sequences' own
    lengths spread below it:

    * ``equal``: all have `context` tokens;
    * ``uniform:LO``: uniform from LO to `context`;
    * ``lognormal:LO``: log-normal, LO and `context` being its 2.3 % and 97.7 % points, clipped;
    * ``straggler:SHORT``: one has `context` tokens, all others SHORT;
    * ``list:A,B,C``: exactly these, one a sequence.

    With z the softmax scale times the dot product of query and key t of a sequence of L tokens, the
    switches that some models need are, each off at its default:

    * `window`: only the newest `window` tokens are seen (0: all);
    * `softcap` c: the logit is c tanh(z / c) (0: z itself);
    * `alibi` 1: slope (t - L + 1) is added to the logit then, the slope being one of each head;
    * `sinks` 1: each query head has a logit more, without a value, in the maximum and the sum;
    * `value_head_size`: elements of a value and of an output, if not `head_size` (0).
    """

    SWITCHES: ClassVar[tuple[str, ...]] = (
        "window",
        "softcap",
        "alibi",
        "sinks",
        "value_head_size",
    )

    sequences: int
    context: int
    query_heads: int
    kv_heads: int
    head_size: int
    block_size: int = 16
    lengths: str = "equal"
    window: int = 0
    softcap: float = 0.0
    alibi: int = 0
    sinks: int = 0
    value_head_size: int = 0

    def __post_init__(self) -> None:
        for name in ("sequences", "query_heads", "kv_heads", "head_size", "block_size"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"{name} is {value}, must be at least 1")
        if self.sequences > MAX_SEQUENCES:
            raise UsageError(f"sequences is {self.sequences}, must be at most {MAX_SEQUENCES}")
        if not 0 <= self.context <= MAX_TOKENS:
            raise UsageError(f"context is {self.context}, must be from 0 to {MAX_TOKENS}")
        if self.query_heads % self.kv_heads:
            raise UsageError(
                f"query_heads ({self.query_heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        self._check_switches()
        self.context_lens()

    def _check_switches(self) -> None:
        for name, limit in (("window", MAX_TOKENS), ("value_head_size", MAX_TOKENS)):
            if not 0 <= getattr(self, name) <= limit:
                raise UsageError(f"{name} is {getattr(self, name)}, must be from 0 to {limit}")
        for name in ("alibi", "sinks"):
            if getattr(self, name) not in (0, 1):
                raise UsageError(f"{name} is {getattr(self, name)}, must be 0 (off) or 1 (on)")
        least, most = SOFTCAP_RANGE
        if self.softcap and not least <= self.softcap <= most:
            raise UsageError(
                f"softcap is {self.softcap}, must be 0 (off) or from {least:g} to {most:g}"
            )
        if self.value_head_size == self.head_size:
            # One problem has one name, and so one key.
            msgspec.structs.force_setattr(self, "value_head_size", 0)

    @property
    def value_size(self) -> int:
        """Elements of a cached value, and of an output."""
        return self.value_head_size or self.head_size

    @property
    def effective(self) -> PagedDecodeProblem:
        """The same work without its window, where no context reaches beyond that."""
        idle = self.window >= self.context
        return msgspec.structs.replace(self, window=0) if idle else self

    def visible_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of each sequence [sequences] that its query sees: the newest ones."""
        tokens = self.context_lens().astype(np.int64)
        return np.minimum(tokens, self.window) if self.window else tokens

    @property
    def group(self) -> int:
        """Query heads that share one KV head (the GQA ratio)."""
        return self.query_heads // self.kv_heads

    @property
    def blocks_per_sequence(self) -> int:
        """Columns of the block table (at least 1)."""
        return max(1, -(-self.context // self.block_size))

    @property
    def counts(self) -> Mapping[str, int]:
        """The tokens that the queries of all sequences see together."""
        return {"visible_sum": int(self.visible_tokens().sum())}

    @property
    def label(self) -> str:
        """Sequences x context, heads, head size; lengths, block size, switches where unusual."""
        lengths = "" if self.lengths == "equal" else f" {self.lengths[:24]}"
        block = "" if self.block_size == 16 else f" b{self.block_size}"
        return (
            f"{self.sequences}x{self.context}{lengths} "
            f"h{self.query_heads}/{self.kv_heads} d{self.head_size}{block}{self._switch_text(' ')}"
        )

    @property
    def series(self) -> str:
        """Heads, head size, sequences; lengths, block size and switches where unusual."""
        lengths = "" if self.lengths == "equal" else f", {self.lengths.split(':')[0]} lengths"
        block = "" if self.block_size == 16 else f", blocks of {self.block_size}"
        plural = "s" if self.sequences > 1 else ""
        return (
            f"h{self.query_heads}/{self.kv_heads} d{self.head_size}, "
            f"{self.sequences} sequence{plural}{lengths}{block}{self._switch_text(', ')}"
        )

    def _switch_text(self, separator: str) -> str:
        """The switches that are on, each behind the separator."""
        words = (
            name if name in ("alibi", "sinks") else f"{name} {value:g}"
            for name, value in self.switched.items()
        )
        return "".join(separator + word for word in words)

    def context_lens(self) -> npt.NDArray[np.uint32]:
        """Tokens of each sequence, shape [sequences]; the same for equal problems.

        Raises:
            UsageError: `lengths` is none of the forms above, or its numbers do not fit.
        """
        kind, _, argument = self.lengths.partition(":")
        top, count = self.context, self.sequences
        if self.lengths == "equal":
            return np.full(count, top, np.uint32)
        if kind == "list" and re.fullmatch(r"\d+(,\d+)*", argument):
            values = np.array([int(part) for part in argument.split(",")], np.int64)
            if len(values) != count or values.max() != top:
                raise UsageError(
                    f"lengths {self.lengths!r}: needs {count} numbers with maximum {top}"
                )
            return values.astype(np.uint32)
        if kind in ("uniform", "lognormal", "straggler") and argument.isdecimal():
            low, least = int(argument), 1 if kind == "lognormal" else 0
            if not least <= low <= top:
                raise UsageError(
                    f"lengths {self.lengths!r}: must be from {least} to context ({top})"
                )
            return self._drawn(kind, low)
        raise UsageError(
            f"lengths {self.lengths!r}: use equal, uniform:LO, lognormal:LO, straggler:SHORT "
            "or list:A,B,…"
        )

    def _drawn(self, kind: str, low: int) -> npt.NDArray[np.uint32]:
        top, count = self.context, self.sequences
        rng = np.random.default_rng(20_260_101)
        if kind == "straggler":
            values = np.full(count, low, np.int64)
            values[count // 2] = top
        elif kind == "uniform":
            values = rng.integers(low, top, count, endpoint=True)
        else:
            centre, spread = (np.log(low) + np.log(top)) / 2, (np.log(top) - np.log(low)) / 4
            values = np.clip(np.exp(rng.normal(centre, spread, count)), low, top).astype(np.int64)
        values[values.argmax()] = top
        return values.astype(np.uint32)
