"""Problems of the indexer's step: sizes that follow from others, names, what is no problem."""

from __future__ import annotations

import pytest

from tuner.errors import UsageError
from tuner.problems import IndexerStepProblem


def step(**changes: float) -> IndexerStepProblem:
    return IndexerStepProblem(**{"rows": 2, "context": 2056, **changes})  # type: ignore[arg-type]


def test_sizes_follow_from_the_context() -> None:
    of = step(rows=4, context=2053, capacity=2304)
    assert of.positions().tolist() == [2049, 2050, 2051, 2052]
    assert of.complete_blocks().tolist() == [512, 512, 513, 513]
    assert (of.base_pos, of.first_block, of.end_block) == (2049, 512, 513)
    assert (of.max_tokens, of.max_blocks, of.mask_words) == (2304, 577, 19)
    assert (of.kept_blocks, of.visible_stride) == (512, 2052)
    assert step().max_tokens == 2056


def test_labels_say_what_is_unusual() -> None:
    assert step().label == "2x2056 i4 e128"
    unusual = step(capacity=4096, ratio=8, one_plus=1, eps=1e-5)
    assert unusual.label == "2x2056 i4 e128 of 4096 r8 eps 1e-05 1+w"
    assert unusual.series == "2 rows, i4 e128 of 4096 r8 eps 1e-05 1+w"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 0}, "rows is 0, must be at least 1"),
        ({"rows": 3000}, r"context is 2056, must be from rows \(3000\)"),
        ({"capacity": 2000}, r"capacity is 2000, must be 0 or from context \(2056\)"),
        ({"budget": 2050}, r"budget \(2050\) must be a multiple of ratio \(4\)"),
        ({"index_dim": 126}, "index_dim is 126, must be a multiple of 4"),
        ({"rotary": 130}, r"rotary is 130, must be even and from 0 to index_dim \(128\)"),
        ({"rotary": 3}, "rotary is 3, must be even"),
        ({"theta": 0.0}, "theta is 0.0, must be a positive number"),
        ({"eps": float("nan")}, "eps is nan, must be a number from 0"),
        ({"one_plus": 2}, r"one_plus is 2, must be 0 \(w\) or 1 \(1 \+ w\)"),
    ],
)
def test_what_is_no_problem(changes: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        step(**changes)
