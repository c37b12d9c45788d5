from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tuner.errors import UsageError
from tuner.quant import (
    PADDING_SLOT,
    SMALLEST_PEAK,
    dequantise,
    pack_cache,
    pack_codes,
    planar,
    quantise_token_vectors,
    round_half_away,
    token_major,
    unpack_cache,
    unpack_codes,
    words_per_token,
    write_tokens,
)

GATE = 1 / 254 + 1e-6

float32s = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
vectors = st.integers(1, 64).flatmap(
    lambda words: hnp.arrays(np.float32, (3, 4 * words), elements=float32s)
)
word_arrays = st.integers(2, 65).flatmap(
    lambda words: hnp.arrays(np.uint32, (2, 2, 3, words), elements=st.integers(0, 2**32 - 1))
)


def scaled_error(x: np.ndarray) -> np.ndarray:
    """Largest error of each vector over its largest magnitude (over 1 if it is zero)."""
    peak = np.abs(x.astype(np.float64)).max(axis=-1)
    error = np.abs(x - dequantise(*quantise_token_vectors(x))).max(axis=-1)
    return np.asarray(error / np.where(peak > 0, peak, 1))


@given(vectors)
def test_no_element_is_off_by_more_than_half_a_step(x: np.ndarray) -> None:
    tiny = (np.abs(x) < SMALLEST_PEAK).all(axis=-1)
    x[tiny] = 0
    assert (scaled_error(x) <= GATE).all()


@pytest.mark.parametrize("head_size", [64, 80, 96, 112, 128, 192, 256, 512])
def test_error_at_all_magnitudes(head_size: int) -> None:
    rng = np.random.default_rng(head_size)
    magnitudes = 10.0 ** rng.uniform(-6, 6, (256, 1))
    x = (rng.uniform(-1, 1, (256, head_size)) * magnitudes).astype(np.float32)
    error = scaled_error(x)
    assert (error <= GATE).all()
    assert error.max() > 0.9 / 254, "the bound would be too loose to say anything"


def test_outliers_and_tiny_values_keep_the_gate() -> None:
    x = np.random.default_rng(1).uniform(-0.03, 0.03, (2, 128)).astype(np.float32)
    x[0, 17], x[0, 90] = 250, -180
    x[1] = np.where(np.arange(128) % 2, 1e-7, -1e-7)
    assert (scaled_error(x) <= GATE).all()


def test_largest_magnitude_comes_back() -> None:
    x = np.array([[-4.0, 1.0, 0.5, 3.9]], np.float32)
    codes, scales = quantise_token_vectors(x)
    assert codes[0, 0] == -127
    assert scales[0] == pytest.approx(4 / 127, abs=1e-9)
    assert dequantise(codes, scales)[0, 0] == pytest.approx(-4.0, abs=1e-5)


def test_zero_vector_is_exact_with_scale_one() -> None:
    codes, scales = quantise_token_vectors(np.array([[0.0, -0.0, 0.0, 0.0]], np.float32))
    words = pack_cache(codes, scales)
    assert words.tolist() == [[0, 0x3F800000]]
    assert not dequantise(codes, scales).any()


@pytest.mark.parametrize(
    ("x", "codes", "word"),
    [
        ([127, 62.5, -2.5, 0.5], [127, 63, -3, 1], 0x01FD3F7F),
        ([127, -62.5, 1.5, -0.5], [127, -63, 2, -1], 0xFF02C17F),
        ([-127, 63.5, 0.49999997, -0.49999997], [-127, 64, 0, 0], 0x00004081),
    ],
)
def test_halves_round_away_and_pack_lowest_byte_first(
    x: list[float], codes: list[int], word: int
) -> None:
    got, scales = quantise_token_vectors(np.array([x], np.float32))
    assert got.tolist() == [codes]
    assert scales.tolist() == [1.0]
    assert pack_codes(got).tolist() == [[word]]


@given(st.floats(-(2.0**30), 2.0**30, width=32))
def test_rounding_is_exact(value: float) -> None:
    exact = Fraction(value)
    wanted = math.floor(abs(exact) + Fraction(1, 2)) * (1 if exact > 0 else -1)
    assert float(round_half_away(np.float32([value]))[0]) == wanted


def test_multiplies_by_the_reciprocal() -> None:
    x = np.random.default_rng(3).uniform(-1, 1, (50_000, 16)).astype(np.float32)
    peak = np.abs(x).max(axis=-1, keepdims=True)
    multiplied = round_half_away(x * (np.float32(127) / peak))
    divided = round_half_away(x / (peak / np.float32(127)))
    assert (multiplied != divided).any(), "these vectors tell the two apart"
    np.testing.assert_array_equal(quantise_token_vectors(x)[0], multiplied)


@given(word_arrays)
def test_unpacking_is_undone_by_packing(words: np.ndarray) -> None:
    """Any bits at all come back: codes of -128, NaN scales with their payloads."""
    np.testing.assert_array_equal(pack_cache(*unpack_cache(words)), words)


@given(hnp.arrays(np.int8, (2, 3, 8)), hnp.arrays(np.float32, (2, 3)))
def test_packing_is_undone_by_unpacking(codes: np.ndarray, scales: np.ndarray) -> None:
    got_codes, got_scales = unpack_cache(pack_cache(codes, scales))
    np.testing.assert_array_equal(got_codes, codes)
    np.testing.assert_array_equal(got_scales.view(np.uint32), scales.view(np.uint32))


def test_codes_lie_in_the_specified_bytes() -> None:
    codes = np.arange(-4, 4, dtype=np.int8)
    words = pack_codes(codes)
    for d, code in enumerate(codes.tolist()):
        byte = int(words[d // 4]) >> 8 * (d % 4) & 0xFF
        assert byte == code % 256
    np.testing.assert_array_equal(unpack_codes(words), codes)


def test_cache_has_the_specified_layout() -> None:
    blocks, heads, block_size, head_size = 3, 2, 5, 12
    words = words_per_token(head_size)
    x = np.random.default_rng(4).standard_normal((blocks, heads, block_size, head_size))
    codes, scales = quantise_token_vectors(x)
    flat = pack_cache(codes, scales).ravel()
    block, head, offset = 2, 1, 3
    base = ((block * heads + head) * block_size + offset) * words
    assert flat[base + words - 1] == scales[block, head, offset].view(np.uint32)
    assert np.int8(flat[base + 7 // 4] >> 24 & 0xFF) == codes[block, head, offset, 7]


def test_writing_leaves_other_slots_alone() -> None:
    cache = np.full((3, 2, 4, 3), 0xABCD, np.uint32)
    x = np.random.default_rng(5).standard_normal((3, 2, 8)).astype(np.float32)
    write_tokens(cache, x, np.array([9, PADDING_SLOT, 3], np.uint32))
    words = pack_cache(*quantise_token_vectors(x))
    np.testing.assert_array_equal(cache[2, :, 1], words[0])
    np.testing.assert_array_equal(cache[0, :, 3], words[2])
    assert (cache == 0xABCD).sum() == cache.size - words[[0, 2]].size


def test_writing_past_the_pool_is_refused() -> None:
    cache = np.zeros((3, 2, 4, 3), np.uint32)
    with pytest.raises(UsageError, match=r"slot 12 is past the pool of 3 blocks of 4 tokens"):
        write_tokens(cache, np.ones((1, 2, 8), np.float32), np.array([12], np.uint32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_has_no_code_is_refused(value: float) -> None:
    with pytest.raises(UsageError, match="infinite or NaN"):
        quantise_token_vectors(np.array([[1, value, 0, 0]], np.float32))


def test_the_smallest_peak_is_the_smallest() -> None:
    smallest = np.float32(SMALLEST_PEAK)
    x = np.array([smallest, 0, -smallest, smallest / 2], np.float32)
    codes, scales = quantise_token_vectors(x)
    assert codes.tolist() == [127, 0, -127, 64]
    assert np.isfinite(scales)
    with pytest.raises(UsageError, match=r"overflows float32 below 3\.73e-37"):
        quantise_token_vectors(np.nextafter(x, np.float32(0)))


@pytest.mark.parametrize("head_size", [0, -4, 2, 63])
def test_head_sizes_that_do_not_fill_words_are_refused(head_size: int) -> None:
    with pytest.raises(UsageError, match=f"head size {head_size}"):
        words_per_token(head_size)


@given(
    blocks=st.integers(0, 3),
    heads=st.integers(1, 3),
    block_size=st.integers(1, 5),
    head_size=st.sampled_from([4, 8, 20]),
    seed=st.integers(0, 2**32 - 1),
)
def test_planes_hold_the_same_words(
    blocks: int, heads: int, block_size: int, head_size: int, seed: int
) -> None:
    shape = (blocks, heads, block_size, head_size // 4 + 1)
    words = np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32)
    planes = planar(words)
    assert planes.shape == (blocks, heads, block_size * (head_size // 4 + 1))
    np.testing.assert_array_equal(token_major(planes, block_size), words)
    if blocks:
        codes = block_size * head_size // 4
        np.testing.assert_array_equal(planes[0, 0, :codes], words[0, 0, :, :-1].ravel())
        np.testing.assert_array_equal(planes[0, 0, codes:], words[0, 0, :, -1])
