"""Paged attention by lanes: how the lanes of a token sum their parts of its scores."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.kernels.attention_lanes import exchanges


@pytest.mark.parametrize("scores", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("lanes", [1, 2, 8, 32])
def test_each_lane_is_left_with_its_own_scores(scores: int, lanes: int) -> None:
    parts = np.random.default_rng(0).standard_normal((lanes, scores))
    held = parts.copy()
    for mask, kept in exchanges(scores, lanes):
        partner = held[np.arange(lanes) ^ mask]
        if kept:
            upper = (np.arange(lanes) & mask != 0)[:, None]
            mine = np.where(upper, held[:, kept : 2 * kept], held[:, :kept])
            theirs = np.where(upper, partner[:, kept : 2 * kept], partner[:, :kept])
            held = mine + theirs
        else:
            held = held[:, :1] + partner[:, :1]
    own = max(1, scores // lanes)
    first = np.arange(lanes) * scores // lanes
    np.testing.assert_allclose(held, parts.sum(axis=0)[first[:, None] + np.arange(own)])
