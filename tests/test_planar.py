"""A whole planar q8 cache: its layout, and that writing rows touches nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from tests.golden_vectors import load, names
from tuner.errors import UsageError
from tuner.planar import PlanarLayout, dequantise_groups, write_rows
from tuner.quant import quantise_groups


def test_planes_begin_where_the_specification_says() -> None:
    layout = PlanarLayout(8192, 512)
    assert (layout.groups, layout.scale_offset, layout.nbytes) == (16, 4194304, 4456448)
    words = layout.empty()
    codes, scales = layout.planes(words)
    assert (codes == -128).all()
    assert np.isnan(scales).all()
    assert codes.shape == (8192, 512)
    assert scales.shape == (8192, 16)
    codes[1, 2], scales[-1, -1] = 5, 1.0
    assert words.view(np.int8)[514] == 5
    assert words.view(np.float16)[(4194304 + 8192 * 32) // 2 - 1] == 1.0


@pytest.mark.parametrize("name", names("s3_kv_append_*"))
def test_written_rows_are_as_golden_and_all_else_keeps_its_bits(name: str) -> None:
    golden = load(name)
    attributes = {key: int(value) for key, value in golden.attributes.items()}
    layout = PlanarLayout(attributes["max_t"], attributes["row"])
    assert layout.scale_offset == attributes["scale_off"]
    assert layout.nbytes == attributes["buffer_bytes"]
    got = {}
    rows = slice(attributes["base_pos"], attributes["base_pos"] + attributes["nb"])
    for side in "kv":
        words = golden.inputs[f"{side}c"].copy()
        vectors = golden.inputs[side].reshape(attributes["nb"], -1)
        write_rows(words, layout, attributes["base_pos"], vectors)
        codes, scales = layout.planes(words)
        got[f"{side}c"] = words
        got[f"{side}_codes"] = codes[rows]
        got[f"{side}_scale_bits"] = scales[rows].view(np.uint16)
    assert golden.differences(got, bound=1e-9) == []


def test_values_come_back_within_half_a_step_of_their_group() -> None:
    x = np.random.default_rng(1).standard_normal((5, 96), np.float32)
    x[2, 32:64] = 0
    codes, scales = quantise_groups(x)
    back = dequantise_groups(codes, scales)
    peaks = np.abs(x.reshape(5, 3, 32)).max(axis=-1)
    assert (np.abs(back - x).reshape(5, 3, 32).max(axis=-1) <= 0.00443 * peaks).all()
    assert scales[2, 1] == 0
    assert (codes[2, 32:64] == 0).all()


def test_what_cannot_be_stored_is_refused() -> None:
    with pytest.raises(UsageError, match="row of 40 numbers"):
        PlanarLayout(4, 40)
    with pytest.raises(UsageError, match="cache of 0 tokens"):
        PlanarLayout(0, 32)
    layout = PlanarLayout(4, 32)
    with pytest.raises(UsageError, match="2 rows at token 3 do not fit"):
        write_rows(layout.empty(), layout, 3, np.zeros((2, 32)))
