"""The oracle and the packers against golden vectors that were computed independently."""

from __future__ import annotations

import numpy as np
import pytest

from tests.golden_decode import decode_operands
from tests.golden_vectors import Golden, load, names
from tuner.oracle.attention import Partial, merge
from tuner.oracle.paged_decode import decode_partial, decode_reference
from tuner.quant import pack_codes, quantise_token_vectors, write_tokens

ORACLE = 1e-9
"""What the vectors' README asks of a float64 oracle, relative 2-norm."""


def written_caches(golden: Golden) -> dict[str, np.ndarray]:
    attributes = golden.attributes
    shape = (-1, int(attributes["num_kv_heads"]), int(attributes["head_size"]))
    row = shape[1] * shape[2]
    caches = {}
    for side in ("key", "value"):
        cache = golden.inputs[f"{side}_cache"].copy()
        write_tokens(cache, golden.inputs[side][:, :row].reshape(shape), golden.inputs["slots"])
        caches[f"{side}_cache"] = cache
    return caches


def test_all_vectors_of_the_family_are_here() -> None:
    assert len(names("s1_*")) == 20


@pytest.mark.parametrize("name", names("s1_quantise_*"))
def test_quantised_vectors_are_equal(name: str) -> None:
    golden = load(name)
    codes, scales = quantise_token_vectors(golden.inputs["x"])
    got = {"codes": codes, "words": pack_codes(codes), "scale_bits": scales.view(np.uint32)}
    assert not golden.differences(got, bound=ORACLE)


@pytest.mark.parametrize("name", names("s1_write_q8_*"))
def test_written_caches_are_equal(name: str) -> None:
    golden = load(name)
    assert not golden.differences(written_caches(golden), bound=ORACLE)


@pytest.mark.parametrize("name", names("s1_decode_q8_*"))
def test_decode_agrees(name: str) -> None:
    golden = load(name)
    out = decode_reference(decode_operands(golden)).outputs["out"]
    assert not golden.differences({"out": out}, bound=ORACLE)


@pytest.mark.parametrize("name", names("s1_decode_q8_*"))
def test_maximum_and_weight_agree(name: str) -> None:
    golden = load(name)
    operands, limit = decode_operands(golden), int(golden.attributes["max_context_len"])
    for sequence in range(len(golden.inputs["context_lens"])):
        part = decode_partial(operands, sequence, 0, limit)
        np.testing.assert_allclose(part.peak, golden.want["m"][sequence], rtol=ORACLE)
        np.testing.assert_allclose(part.weight, golden.want["l"][sequence], rtol=ORACLE)


def test_decode_after_write_agrees() -> None:
    golden = load("s1_write_decode_q8")
    caches = written_caches(golden)
    got = caches | {"out": decode_reference(decode_operands(golden, **caches)).outputs["out"]}
    plain = {key: golden.want[key] for key in ("out_unquantised",)}
    assert not golden.differences(got | plain, bound=ORACLE)
    unquantised = {"out_unquantised": got["out"]}
    assert not [
        text for text in golden.differences(golden.want | unquantised) if "out_unquantised" in text
    ]


def test_splits_and_their_merge_agree() -> None:
    golden = load("s1_split_q8_gqa4")
    operands = decode_operands(golden)
    starts, ends = golden.inputs["split_start"], golden.inputs["split_end"]
    splits = [
        [decode_partial(operands, s, int(a), int(b)) for a, b in zip(*row, strict=True)]
        for s, row in enumerate(zip(starts, ends, strict=True))
    ]
    parts = Partial(
        peak=np.array([np.stack([p.peak for p in row], axis=-1) for row in splits]),
        weight=np.array([np.stack([p.weight for p in row], axis=-1) for row in splits]),
        mixture=np.array([np.stack([p.mixture for p in row], axis=-2) for row in splits]),
    )
    got = {
        "part_m": parts.peak,
        "part_l": parts.weight,
        "part_o": parts.mixture,
        "out": merge(parts).out,
    }
    assert not golden.differences(got, bound=ORACLE)


def test_combine_agrees() -> None:
    golden = load("s1_split_combine")
    given = {key: value.astype(np.float64) for key, value in golden.inputs.items()}
    parts = Partial(peak=given["part_m"], weight=given["part_l"], mixture=given["part_o"])
    assert not golden.differences({"out": merge(parts).out}, bound=ORACLE)
