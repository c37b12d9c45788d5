"""The oracle of decoding against plain definitions, samples and merged parts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode_cases import CLASSES, GEOMETRIES, prepared, small_problem
from tuner.kernels.decode_operands import make_operands
from tuner.oracle import decode_reference, sampled_decode_reference
from tuner.oracle.attention import LOWEST, Partial, merge
from tuner.oracle.paged_decode import decode_partial
from tuner.quant import unpack_cache


def test_reference_is_the_definition_element_by_element() -> None:
    """Section by section as specified, in loops that share nothing with the oracle."""
    operands = make_operands(small_problem(), "random", 1)
    out = decode_reference(operands).outputs["out"]
    keys, values = (unpack_cache(operands.inputs[c]) for c in ("key_cache", "value_cache"))
    for s, h in np.ndindex(4, 6):
        head, z, rows = h // 3, [], []
        query = operands.inputs["query"][s, 8 * h : 8 * h + 8].astype(float)
        for t in range(int(operands.inputs["context_lens"][s])):
            place = (operands.inputs["block_table"][s, t // 4], head, t % 4)
            dot = sum(query[d] * int(keys[0][place][d]) for d in range(8))
            z.append(operands.scalars["softmax_scale"] * float(keys[1][place]) * dot)
            rows.append(values[0][place].astype(float) * float(values[1][place]))
        weights = np.exp(np.array(z) - max(z, default=0))
        wanted = sum((w * row for w, row in zip(weights, rows, strict=True)), np.zeros(8))
        np.testing.assert_allclose(out[s, h], wanted / (weights.sum() + 1e-6), rtol=1e-12)


def test_an_empty_context_gives_zeros() -> None:
    reference = decode_reference(make_operands(small_problem(), "random", 1))
    assert not reference.outputs["out"][1].any()
    assert not reference.bounds("f16")["out"][1].any()


def test_contexts_are_cut_at_the_largest_length_the_host_allows() -> None:
    operands = make_operands(small_problem(), "random", 1)
    cut = replace(operands, scalars=operands.scalars | {"max_context_len": 5})
    short = np.minimum(operands.inputs["context_lens"], 5)
    wanted = replace(operands, inputs=operands.inputs | {"context_lens": short})
    np.testing.assert_array_equal(
        decode_reference(cut).outputs["out"], decode_reference(wanted).outputs["out"]
    )


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_poison_has_no_way_into_the_reference(geometry: str) -> None:
    for _, _, reference in prepared(geometry):
        assert np.isfinite(reference.outputs["out"]).all()
        for arithmetic in CLASSES:
            assert np.isfinite(reference.bounds(arithmetic)["out"]).all()


@pytest.mark.parametrize("count", [1, 3, 5, 100])
def test_sample_is_part_of_the_whole(count: int) -> None:
    operands = make_operands(small_problem(), "random", 1)
    whole = decode_reference(operands)
    sample = sampled_decode_reference(operands, count)
    indices = sample.names["out"]
    assert len(indices) == 3 * min(count, 8)
    assert len(set(indices.tolist())) == len(indices)
    np.testing.assert_allclose(
        sample.outputs["out"], whole.outputs["out"].reshape(24, 8)[indices], rtol=1e-12
    )
    np.testing.assert_allclose(
        sample.bounds("f16")["out"], whole.bounds("f16")["out"].ravel()[indices], rtol=1e-5
    )


def test_sample_holds_the_first_last_and_longest_pairs() -> None:
    problem = small_problem(sequences=9, lengths="list:3,3,3,3,37,3,3,3,4")
    operands = make_operands(problem, "timing", 1)
    indices = sampled_decode_reference(operands, 3).names["out"]
    assert set(indices.tolist()) == {0, 1, 2, 24, 25, 26, 51, 52, 53}
    again = sampled_decode_reference(operands, 3).names["out"]
    np.testing.assert_array_equal(indices, again)


@pytest.mark.parametrize(
    ("window", "sampled"),
    [(0, [6, 7, 8]), (2, [*range(9), 15, 16, 17])],
    ids=["whole contexts", "a window"],
)
def test_sample_cut_short_keeps_the_longest_sequence(
    window: int, sampled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.oracle.paged_decode.SAMPLED_TOKENS", 8)
    problem = small_problem(sequences=3, lengths="list:8,37,20", window=window)
    operands = make_operands(problem, "timing", 1)
    np.testing.assert_array_equal(sampled_decode_reference(operands, 8).names["out"], sampled)


@given(
    cuts=st.lists(st.integers(0, 37), max_size=6),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None)
def test_any_cut_in_any_order_merges_to_the_whole(cuts: list[int], order: object) -> None:
    operands = make_operands(small_problem(), "large_logits", 2)
    edges = sorted([0, *cuts, 37])
    splits = list(itertools.pairwise(edges))
    order.shuffle(splits)  # type: ignore[attr-defined]
    parts = [decode_partial(operands, 0, start, stop) for start, stop in splits]
    whole = decode_partial(operands, 0, 0, 37)
    joined = merge(
        Partial(
            peak=np.stack([part.peak for part in parts], axis=-1),
            weight=np.stack([part.weight for part in parts], axis=-1),
            mixture=np.stack([part.mixture for part in parts], axis=-2),
        )
    )
    np.testing.assert_array_equal(joined.peak, whole.peak)
    np.testing.assert_allclose(joined.weight, whole.weight, rtol=1e-12)
    np.testing.assert_allclose(joined.out, whole.out, rtol=1e-9, atol=1e-12)


def test_splits_without_tokens_bring_no_infinity() -> None:
    empty = Partial(
        peak=np.full((2, 3), LOWEST), weight=np.zeros((2, 3)), mixture=np.zeros((2, 3, 4))
    )
    joined = merge(empty)
    assert not joined.out.any()
    assert (joined.peak == LOWEST).all()
