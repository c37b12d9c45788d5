"""Frozen descriptions of what is to be computed: one module for each kind of problem."""

from __future__ import annotations

from typing import get_args

from tuner.problems.base import GROUP_CODES, Problem
from tuner.problems.cache_write import CacheWriteProblem
from tuner.problems.indexer_step import IndexerStepProblem
from tuner.problems.kv_append import KvAppendProblem
from tuner.problems.norm_rope import NormRopeProblem
from tuner.problems.paged_attention import (
    AttentionGradientProblem,
    AttentionProblem,
    PagedAttentionProblem,
)
from tuner.problems.paged_decode import MAX_SEQUENCES, MAX_TOKENS, PagedDecodeProblem
from tuner.problems.paged_selected import PagedSelectedProblem
from tuner.problems.q8_decode import GatedCombineProblem, Q8DecodeProblem, Q8SelectedProblem
from tuner.problems.qsa_step import QsaStepProblem

AnyProblem = (
    PagedDecodeProblem
    | PagedSelectedProblem
    | PagedAttentionProblem
    | AttentionGradientProblem
    | IndexerStepProblem
    | NormRopeProblem
    | KvAppendProblem
    | Q8DecodeProblem
    | Q8SelectedProblem
    | GatedCombineProblem
    | QsaStepProblem
    | CacheWriteProblem
)
"""The union of all problem types, for decoding records."""

KINDS: dict[str, type[Problem]] = {
    str(kind.__struct_config__.tag): kind for kind in (get_args(AnyProblem) or (AnyProblem,))
}
"""Every type of problem by its name in records, shape texts and workload files."""

__all__ = [
    "GROUP_CODES",
    "KINDS",
    "MAX_SEQUENCES",
    "MAX_TOKENS",
    "AnyProblem",
    "AttentionGradientProblem",
    "AttentionProblem",
    "CacheWriteProblem",
    "GatedCombineProblem",
    "IndexerStepProblem",
    "KvAppendProblem",
    "NormRopeProblem",
    "PagedAttentionProblem",
    "PagedDecodeProblem",
    "PagedSelectedProblem",
    "Problem",
    "Q8DecodeProblem",
    "Q8SelectedProblem",
    "QsaStepProblem",
]
