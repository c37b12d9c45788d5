"""The oracle of block-sparse decode: dense attention over a cache that holds what is seen, alone.

Operands are those of `tuner.kernels.selected_operands`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tuner.oracle.paged_decode import decode_reference, sampled_decode_reference

if TYPE_CHECKING:
    from tuner.kernels.base import Operands, Reference

Array = npt.NDArray[Any]
Places = npt.NDArray[np.int64]


def selected_reference(operands: Operands) -> Reference:
    """Output `out` [S, H, D] of a whole launch, and its error bounds [S, H]."""
    return decode_reference(gathered(operands))


def sampled_selected_reference(operands: Operands, count: int) -> Reference:
    """The oracle on some pairs of a sequence and a KV head, as `sampled_decode_reference`."""
    return sampled_decode_reference(gathered(operands), count)


def visible_tokens(operands: Operands, sequence: int) -> tuple[Places, Places]:
    """Pages of the cache, and places in them, of the tokens that a sequence sees, in order."""
    inputs, ratio = operands.inputs, int(operands.scalars["ratio"])
    length, visible = int(inputs["sequence_lens"][sequence]), int(inputs["visible_lens"][sequence])
    tail = np.arange(length - length % ratio, length)
    blocks = inputs["selection"][sequence, : (visible - len(tail)) // ratio].astype(np.int64)
    listed = (blocks[:, None] * ratio + np.arange(ratio)).ravel()
    tokens = np.concatenate([listed, tail])
    block_size = inputs["key_cache"].shape[2]
    pages = inputs["block_table"][sequence, tokens // block_size].astype(np.int64)
    return pages, tokens % block_size


def gathered(operands: Operands) -> Operands:
    """Operands of dense decode over pages of one token: the tokens that each sequence sees."""
    # tuner.kernels imports this module for its families, so its types are known only later.
    from tuner.kernels.base import Operands

    inputs = operands.inputs
    each = [visible_tokens(operands, s) for s in range(len(inputs["visible_lens"]))]
    lengths = np.array([len(pages) for pages, _ in each], np.uint32)
    table = np.zeros((len(each), max(1, int(lengths.max(initial=0)))), np.uint32)
    first = 0
    for row, length in zip(table, lengths.astype(int), strict=True):
        row[:length] = first + np.arange(length)
        first += length
    pages, places = (np.concatenate(part) for part in zip(*each, strict=True))
    caches = {
        name: inputs[name][pages, :, places][:, :, None] for name in ("key_cache", "value_cache")
    }
    return Operands(
        inputs={
            "query": inputs["query"],
            **caches,
            "block_table": table,
            "context_lens": lengths,
        },
        outputs=operands.outputs,
        scalars=operands.scalars,
    )
