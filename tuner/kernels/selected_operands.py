"""Operands of block-sparse decode over the paged int8 cache.

Those of `tuner.kernels.decode_operands`, with `context_lens` under the name of `sequence_lens`, and

* `selection` uint32 [S, selected]: complete index blocks in ascending order; `NO_BLOCK` behind
  them;
* `visible_lens` uint32 [S]: tokens that the sequence sees, those of its list and those behind the
  last complete block.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from tuner.kernels.base import Operands, ValidationCase
from tuner.kernels.decode_operands import (
    POISON_CODES,
    POISON_SCALE,
    make_operands,
    timing_bytes,
    timing_scalars,
)
from tuner.kernels.decode_values import NO_BLOCK, Words
from tuner.oracle.selected_decode import visible_tokens
from tuner.problems import PagedSelectedProblem

ROUNDS = 2048
"""Tokens times query heads of a KV head in the longest lists of validation cases: lavapipe before
Mesa 23 ends a kernel's loops, all together, at 65,535 rounds."""
FEWEST_SEEN, MOST_SEEN = 128, 768


def make_selected_operands(problem: PagedSelectedProblem, inputs: str, seed: int) -> Operands:
    """Operands of one launch; the same arguments give the same arrays.

    `inputs` is as in `make_operands`. In all but "timing" tokens that no sequence sees are poison.

    Raises:
        UnknownNameError: `inputs` is no such kind.
        UsageError: the head size is not a multiple of 4.
    """
    dense = make_operands(problem.dense, inputs, seed)
    arrays = dict(dense.inputs)
    arrays["sequence_lens"] = arrays.pop("context_lens")
    arrays["selection"] = _selection(problem, np.random.default_rng([seed, 77]))
    arrays["visible_lens"] = problem.visible_lens().astype(np.uint32)
    operands = Operands(
        inputs=arrays, outputs=dense.outputs, scalars={**dense.scalars, **_own_scalars(problem)}
    )
    if inputs != "timing":
        _poison_unseen(operands)
    return operands


def selected_scalars(problem: PagedSelectedProblem) -> dict[str, int | float]:
    """The scalars of `make_selected_operands(problem, "timing", …)`, without the arrays."""
    return {**timing_scalars(problem.dense), **_own_scalars(problem)}


def selected_bytes(problem: PagedSelectedProblem) -> int:
    """Bytes of `make_selected_operands(problem, "timing", …)`, without the arrays."""
    return timing_bytes(problem.dense) + 4 * problem.sequences * (problem.selected + 1)


def _own_scalars(problem: PagedSelectedProblem) -> dict[str, int | float]:
    return {
        "max_context_len": problem.seen,
        "max_selected": problem.selected,
        "ratio": problem.ratio,
    }


def selected_cases(problem: PagedSelectedProblem) -> tuple[ValidationCase, ...]:
    """Small problems of the given geometry: sequences with no token, no complete block, as many
    blocks as are kept and one more, with a tail and without; long lists."""
    ratio, part = problem.ratio, problem.ratio // 2
    kept = -(-max(FEWEST_SEEN, min(MOST_SEEN, ROUNDS // problem.group)) // ratio)
    few = max(2, 40 // ratio)
    budget = few * ratio
    sizes: dict[str, tuple[str, int, tuple[int, ...]]] = {
        "ragged": (
            "random",
            few,
            (0, 1, ratio - 1, ratio, budget, budget + ratio - 1, budget + ratio, 3 * budget + part),
        ),
        "single": ("random", kept, (kept * ratio * 3 // 2 + part,)),
        "large_logits": ("large_logits", few, (2 * budget + part, budget + ratio, 96)),
        "equal_logits": ("equal_logits", kept, (kept * ratio + ratio + part, budget, 1)),
        "dominating": ("dominating", few, (3 * budget + 1, budget + part, 5)),
        "zeros": ("zeros", few, (2 * budget, ratio + part, 0)),
    }
    return tuple(
        ValidationCase(
            name=name,
            problem=msgspec.structs.replace(
                problem,
                sequences=len(tokens),
                context=max(tokens),
                selected=selected,
                lengths="list:" + ",".join(map(str, tokens)),
            ),
            inputs=inputs,
            seed=seed,
        )
        for seed, (name, (inputs, selected, tokens)) in enumerate(sizes.items())
    )


def _selection(problem: PagedSelectedProblem, rng: np.random.Generator) -> Words:
    """Lists [S, selected]: random blocks where there are more than fit, else all of them."""
    selection = np.full((problem.sequences, problem.selected), NO_BLOCK, np.uint32)
    complete = problem.dense.context_lens().astype(np.int64) // problem.ratio
    for row, blocks, listed in zip(selection, complete, problem.listed(), strict=True):
        row[:listed] = np.sort(rng.permutation(blocks)[:listed])
    return selection


def _poison_unseen(operands: Operands) -> None:
    """Overwrite, in both caches, every token that no sequence sees."""
    caches = [operands.inputs["key_cache"], operands.inputs["value_cache"]]
    seen: npt.NDArray[np.bool_] = np.zeros((caches[0].shape[0], caches[0].shape[2]), np.bool_)
    for sequence in range(len(operands.inputs["visible_lens"])):
        pages, places = visible_tokens(operands, sequence)
        seen[pages, places] = True
    poison = np.full(caches[0].shape[-1], POISON_CODES, np.uint32)
    poison[-1] = POISON_SCALE
    for cache in caches:
        cache[np.broadcast_to(~seen[:, None, :], cache.shape[:-1])] = poison
