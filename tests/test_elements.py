"""Elements as a device stores them: rounding to bfloat16, and names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.elements import stored, widened
from tuner.errors import UnknownNameError


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
def test_bfloat16_rounds_to_the_nearest_and_ties_to_even(values: list[float]) -> None:
    single = np.array(values, np.float32)
    bits = stored(single, "bf16")
    for value, got in zip(single, bits, strict=True):
        around = np.array([int(got) - 1, int(got), int(got) + 1], np.int64) & 0xFFFF
        near = widened(around.astype(np.uint16))
        if not np.isfinite(near).all() or not np.isfinite(value):
            continue
        distance = np.abs(near - float(value))
        assert distance[1] == distance.min()
        assert (distance == distance.min()).sum() == 1 or got % 2 == 0


def test_elements_that_do_not_exist_are_named() -> None:
    assert np.isnan(widened(stored(np.array([np.nan]), "bf16")))
    with pytest.raises(UnknownNameError, match="f32"):
        stored(np.zeros(1), "f33")
