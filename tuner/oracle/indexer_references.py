"""References for the indexer's kernels: what each step must write, and that it writes no more.

Operands are those of the families in `tuner.kernels` (`index_append`, `index_blocks` …).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tuner.oracle import indexer
from tuner.oracle.indexer_bounds import block_key_bounds, norm_rope_bounds, score_bounds
from tuner.records import POISON_WORD

if TYPE_CHECKING:
    from tuner.kernels.base import ArithmeticClass, Operands, Reference

Array = npt.NDArray[Any]
Outputs = Mapping[str, Array]

SAMPLE_SEED = 20_260_104
SAMPLED_BLOCKS = 256


def _reference(outputs: dict[str, Array], bounds: dict[str, Array], **more: Any) -> Reference:
    """A reference whose bounds are the same in every arithmetic class."""
    # tuner.kernels imports this module for its families, so its types are known only later.
    from tuner.kernels.base import Reference

    def known(_arithmetic: ArithmeticClass) -> dict[str, Array]:
        return bounds

    return Reference(outputs=outputs, bounds=known, **more)


def _exact(rows: Array) -> Array:
    """Bounds for rows that must be equal."""
    return np.zeros(rows.shape[:-1])


# ------------------------------------------------------------------ append


def appended_keys(operands: Operands) -> Array:
    """The new raw keys [nb, E] as float16 bits, rounded to nearest even."""
    dims = int(operands.scalars["index_dim"])
    with np.errstate(over="ignore"):
        keys = operands.inputs["index_projection"][:, -dims:].astype(np.float16)
    return np.asarray(keys.view(np.uint16))


def append_reference(operands: Operands) -> Reference:
    """`index_keys` [max_t, E]: the new rows, and all else as it was, bit for bit."""
    wanted = operands.inputs["index_keys"].astype(np.float64)
    first = int(operands.scalars["base_pos"])
    wanted[first : first + int(operands.scalars["rows"])] = appended_keys(operands)
    return _reference({"index_keys": wanted}, {"index_keys": _exact(wanted)})


def sampled_append_reference(operands: Operands, _count: int) -> Reference:
    """The new rows of `index_keys` alone."""
    wanted = appended_keys(operands).astype(np.float64)
    rows = int(operands.scalars["base_pos"]) + np.arange(len(wanted))
    return _reference(
        {"index_keys": wanted},
        {"index_keys": _exact(wanted)},
        seen=lambda outputs: {"index_keys": outputs["index_keys"][rows]},
        names={"index_keys": rows},
    )


# ------------------------------------------------------------------ blocks


def new_block_keys(operands: Operands) -> tuple[Array, Array, Array]:
    """What the step completes: blocks [n], keys [n, E] before rounding, their bounds [n, E]."""
    scalars, keys = operands.scalars, operands.inputs["index_keys"].view(np.float16)
    ratio, base = int(scalars["ratio"]), int(scalars["base_pos"])
    blocks = np.arange(base // ratio, (base + int(scalars["rows"])) // ratio)
    first = base // ratio * ratio
    raw = keys[first : first + len(blocks) * ratio]
    mean = indexer.pooled(raw, ratio)
    weight = operands.inputs["index_key_weight"]
    eps, one_plus = float(scalars["eps"]), int(scalars["one_plus"])
    exact = indexer.norm(mean, weight, eps=eps, one_plus=one_plus)
    rotary, theta = int(scalars["rotary"]), float(scalars["theta"])
    exact = indexer.rope(exact, blocks * ratio, rotary, theta)
    return blocks, exact, block_key_bounds(exact, raw, mean, weight, eps=eps, one_plus=one_plus)


def blocks_reference(operands: Operands) -> Reference:
    """`block_keys`: each element of the new keys within its bound, all other rows bit for bit."""
    new = sampled_blocks_reference(operands, 0)
    blocks = new_block_keys(operands)[0]
    before = operands.inputs["block_keys"]
    others = np.setdiff1d(np.arange(len(before)), blocks)
    untouched = before[others].astype(np.float64)

    def seen(outputs: Outputs) -> dict[str, Array]:
        return {**new.seen(outputs), "untouched": outputs["block_keys"][others]}

    return _reference(
        {**new.outputs, "untouched": untouched},
        {**new.bounds("f32"), "untouched": _exact(untouched)},
        seen=seen,
        names={**new.names, "untouched": others},
        zero_may_differ=new.zero_may_differ,
    )


def sampled_blocks_reference(operands: Operands, _count: int) -> Reference:
    """The new keys of `block_keys` alone, an element a group."""
    blocks, exact, bounds = new_block_keys(operands)

    def seen(outputs: Outputs) -> dict[str, Array]:
        written = outputs["block_keys"][blocks].view(np.float16)
        return {"block_keys": written.reshape(-1, 1)}

    places = [f"{block}, {dim}" for block in blocks for dim in range(exact.shape[-1])]
    return _reference(
        {"block_keys": exact.reshape(-1, 1)},
        {"block_keys": bounds.ravel()},
        seen=seen,
        names={"block_keys": np.array(places)},
        zero_may_differ=frozenset({"block_keys"}),
    )


# ------------------------------------------------------------------ queries


def queries(operands: Operands) -> Array:
    """Normalised and turned queries [nb, I, E]."""
    scalars = operands.scalars
    rows, heads = int(scalars["rows"]), int(scalars["index_heads"])
    raw = operands.inputs["index_projection"].reshape(rows, heads + 1, -1)[:, :heads]
    y = indexer.norm(
        raw,
        operands.inputs["index_query_weight"],
        eps=float(scalars["eps"]),
        one_plus=int(scalars["one_plus"]),
    )
    positions = int(scalars["base_pos"]) + np.arange(rows)
    return indexer.rope(y, positions, int(scalars["rotary"]), float(scalars["theta"]))


def query_reference(operands: Operands) -> Reference:
    """`index_query` [nb, I, E]."""
    wanted = queries(operands)
    return _reference({"index_query": wanted}, {"index_query": norm_rope_bounds(wanted)})


def sampled_query_reference(operands: Operands, _count: int) -> Reference:
    """All of them: a step has few rows."""
    return query_reference(operands)


# ------------------------------------------------------------------ scores


def row_scores(operands: Operands, row: int, blocks: Array) -> Array:
    """Scores of the given blocks in one row."""
    keys = operands.inputs["block_keys"].view(np.float16)[blocks]
    return indexer.block_scores(operands.inputs["index_query"][row], keys)


def score_reference(operands: Operands) -> Reference:
    """`scores`: each complete block's of every row, and nothing written behind these.

    Blocks with equal keys must score equally, bit for bit, or ties would not go to the lowest:
    `apart` is how far the scores of each group of such blocks lie from one another in each row.
    """
    counts = complete_blocks(operands)
    twins = _equal_keys(operands, int(counts.min()))
    apart = np.zeros((len(counts) * len(twins), 1))
    live = _scores_of(operands, [np.arange(count) for count in counts])
    width = operands.outputs["scores"][0][1]
    behind = np.arange(width) >= counts[:, None]
    poison = np.full((int(behind.sum()), 1), POISON_WORD, np.float64)

    def seen(outputs: Outputs) -> dict[str, Array]:
        unwritten = outputs["scores"].view(np.uint32)[behind]
        spread = [np.ptp(row[twin]) for row in outputs["scores"] for twin in twins]
        return {
            **live.seen(outputs),
            "unwritten": unwritten[:, None],
            "apart": np.array(spread, np.float64)[:, None],
        }

    def bounds(arithmetic: ArithmeticClass) -> dict[str, Array]:
        exact = {"unwritten": _exact(poison), "apart": _exact(apart)}
        return {**live.bounds(arithmetic), **exact}

    places = [f"{row}, {block}" for row, block in np.argwhere(behind)]
    return replace(
        live,
        outputs={**live.outputs, "unwritten": poison, "apart": apart},
        bounds=bounds,
        seen=seen,
        names={**live.names, "unwritten": np.array(places)},
    )


def sampled_score_reference(operands: Operands, count: int) -> Reference:
    """The first and last blocks of each row, and `count` times `SAMPLED_BLOCKS` others."""
    rng = np.random.default_rng(SAMPLE_SEED)

    def sample(complete: int) -> Array:
        ends = np.r_[:SAMPLED_BLOCKS, complete - SAMPLED_BLOCKS : complete]
        others = rng.integers(0, max(1, complete), count * SAMPLED_BLOCKS)
        chosen = np.unique(np.concatenate([ends, others]))
        return chosen[(chosen >= 0) & (chosen < complete)]

    return _scores_of(operands, [sample(int(each)) for each in complete_blocks(operands)])


def _equal_keys(operands: Operands, blocks: int) -> list[Array]:
    """Groups of those of the first blocks that have equal keys."""
    keys = np.ascontiguousarray(operands.inputs["block_keys"][:blocks])
    whole = keys.view(np.dtype((np.void, keys.shape[1] * keys.itemsize))).ravel()
    _, kind, many = np.unique(whole, return_inverse=True, return_counts=True)
    return [np.flatnonzero(kind == each) for each in np.flatnonzero(many > 1)]


def complete_blocks(operands: Operands) -> Array:
    """Blocks that are complete at each row [nb]."""
    scalars = operands.scalars
    positions = int(scalars["base_pos"]) + np.arange(int(scalars["rows"]))
    return (positions + 1) // int(scalars["ratio"])


def _scores_of(operands: Operands, blocks: list[Array]) -> Reference:
    """A reference for some blocks of each row, a score a group."""
    from tuner.kernels.base import Reference

    rows = np.repeat(np.arange(len(blocks)), [len(each) for each in blocks])
    chosen = np.concatenate(blocks)
    wanted = [row_scores(operands, row, each) for row, each in enumerate(blocks)]

    def seen(outputs: Outputs) -> dict[str, Array]:
        return {"scores": outputs["scores"][rows, chosen][:, None]}

    def bounds(arithmetic: ArithmeticClass) -> dict[str, Array]:
        keys, query = operands.inputs["block_keys"].view(np.float16), operands.inputs["index_query"]
        parts = [
            score_bounds(arithmetic, query[row], keys[each]) for row, each in enumerate(blocks)
        ]
        return {"scores": np.concatenate(parts)}

    places = [f"{row}, {block}" for row, block in zip(rows, chosen, strict=True)]
    return Reference(
        outputs={"scores": np.concatenate(wanted)[:, None]},
        bounds=bounds,
        seen=seen,
        names={"scores": np.array(places)},
        zero_may_differ=frozenset({"scores"}),
    )


# ------------------------------------------------------------------ selection


def selection(operands: Operands) -> dict[str, Array]:
    """`visible`, `visible_count` and `block_mask` as a launch leaves them, uint32: what no row
    writes is poison."""
    scalars = operands.scalars
    ratio, kept = int(scalars["ratio"]), int(scalars["kept_blocks"])
    wanted = {
        name: np.full(shape, POISON_WORD, np.uint32)
        for name, (shape, _) in operands.outputs.items()
    }
    for row, blocks in enumerate(complete_blocks(operands)):
        if blocks <= kept:
            continue
        position = int(scalars["base_pos"]) + row
        chosen = indexer.selected_blocks(operands.inputs["scores"][row, :blocks], kept)
        tokens = indexer.visible_tokens(chosen, ratio=ratio, position=position)
        wanted["visible"][row, : len(tokens)] = tokens
        wanted["visible_count"][row] = len(tokens)
        wanted["block_mask"][row] = indexer.block_mask(chosen, wanted["block_mask"].shape[1])
    return wanted


def select_reference(operands: Operands) -> Reference:
    """All three outputs, word for word, rows that select nothing and ends of lists included."""
    wanted = {name: words.astype(np.float64) for name, words in selection(operands).items()}
    wanted["visible_count"] = wanted["visible_count"][:, None]

    def seen(outputs: Outputs) -> dict[str, Array]:
        return {**outputs, "visible_count": outputs["visible_count"][:, None]}

    return _reference(wanted, {name: _exact(rows) for name, rows in wanted.items()}, seen=seen)


def sampled_select_reference(operands: Operands, _count: int) -> Reference:
    """All of it: a step has few rows."""
    return select_reference(operands)
