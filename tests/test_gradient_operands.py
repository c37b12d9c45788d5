"""Operands of the backward pass: who uses each block, and what the validation cases exercise."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.test_attention_oracle import small
from tests.test_gradient_oracle import prepared
from tuner.kernels.gradient_operands import block_users, validation_cases


def test_users_of_each_block_come_in_order() -> None:
    table = np.array([[4, 2, 9], [2, 4, 9], [0, 4, 9]], np.uint32)
    starts, users = block_users(table, 6, 2)
    of = [users[starts[i] : starts[i + 1]].tolist() for i in range(6)]
    assert of == [[[2, 0]], [], [[0, 1], [1, 0]], [], [[0, 0], [1, 1], [2, 1]], []]


def test_a_pool_that_nobody_uses_has_no_users() -> None:
    starts, users = block_users(np.full((2, 1), 0xFFFFFFFF, np.uint32), 3, 0)
    assert not starts.any()
    assert users.shape == (1, 2)


def test_every_validation_case_keeps_its_masks_and_shares_blocks() -> None:
    cases: dict[str, Any] = {
        case.name: case.problem for case in validation_cases(small(block_size=16))
    }
    assert cases["decode"].context == 56
    assert cases["rows see nothing"].keys_seen(0) == 0
    shares = [
        np.diff(operands.inputs["user_starts"].astype(int)).max()
        for _, operands, _ in prepared("f32")
    ]
    assert max(shares) == 3
    assert sum(share > 1 for share in shares) >= 4
