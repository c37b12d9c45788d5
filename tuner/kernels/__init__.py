"""Kernel families: one module each, found by name through `family` and `families`."""

from __future__ import annotations

from tuner.errors import UnknownNameError
from tuner.kernels.attn_partials_q8 import ATTN_PARTIALS_Q8, ATTN_PARTIALS_SELECTED_Q8
from tuner.kernels.base import Family, Values
from tuner.kernels.cache_write_f32 import CACHE_WRITE_F32
from tuner.kernels.cache_write_q8 import CACHE_WRITE_Q8
from tuner.kernels.gated_combine import GATED_COMBINE
from tuner.kernels.index_append import INDEX_APPEND
from tuner.kernels.index_blocks import INDEX_BLOCKS
from tuner.kernels.index_q import INDEX_Q
from tuner.kernels.index_score import INDEX_SCORE
from tuner.kernels.index_select import INDEX_SELECT
from tuner.kernels.kv_append import KV_APPEND_Q8
from tuner.kernels.norm_rope import QK_NORM_ROPE
from tuner.kernels.paged_attention import PAGED_ATTENTION
from tuner.kernels.paged_attention_backward import PAGED_ATTENTION_BACKWARD
from tuner.kernels.paged_decode_floats import PAGED_DECODE_F16, PAGED_DECODE_F32
from tuner.kernels.paged_decode_q8 import (
    PAGED_DECODE_Q8,
    PAGED_DECODE_Q8_PLANAR,
    PAGED_DECODE_Q8_SWITCHED,
)
from tuner.kernels.qsa_chain import QSA_CHAIN
from tuner.kernels.selected_decode import PAGED_SELECTED_Q8

_FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        PAGED_DECODE_Q8,
        PAGED_DECODE_Q8_PLANAR,
        PAGED_DECODE_Q8_SWITCHED,
        PAGED_DECODE_F32,
        PAGED_DECODE_F16,
        PAGED_SELECTED_Q8,
        PAGED_ATTENTION,
        PAGED_ATTENTION_BACKWARD,
        INDEX_APPEND,
        INDEX_BLOCKS,
        INDEX_Q,
        INDEX_SCORE,
        INDEX_SELECT,
        QK_NORM_ROPE,
        KV_APPEND_Q8,
        ATTN_PARTIALS_Q8,
        ATTN_PARTIALS_SELECTED_Q8,
        GATED_COMBINE,
        QSA_CHAIN,
        CACHE_WRITE_F32,
        CACHE_WRITE_Q8,
    )
}


def families() -> tuple[Family, ...]:
    """All families, in a fixed order."""
    return tuple(_FAMILIES.values())


def family(name: str) -> Family:
    """The family of that name.

    Raises:
        UnknownNameError: there is none; the message names the nearest.
    """
    if name not in _FAMILIES:
        raise UnknownNameError("family", name, _FAMILIES)
    return _FAMILIES[name]


def meaningful(name: str, values: Values) -> Values:
    """The parameters of a recorded variant that tell it from others: `Family.meaningful`.

    All of them where the record is of another version, and its family is gone.
    """
    found = _FAMILIES.get(name)
    return values if found is None else found.meaningful(values)
