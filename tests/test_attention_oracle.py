"""The oracle of paged attention: golden vectors, plain definitions, bounds that hold and bite."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from tests.golden_attention import golden_operands
from tests.golden_vectors import load, names
from tuner.elements import STORED, stored, widened
from tuner.kernels.attention_operands import make_operands, validation_cases
from tuner.kernels.base import Operands, Reference
from tuner.oracle import judge
from tuner.oracle.paged_attention import (
    forward,
    forward_reference,
    geometry,
    row_groups,
    sampled_forward_reference,
)
from tuner.problems import PagedAttentionProblem

ORACLE = 1e-9
"""What the vectors' README asks of a float64 oracle, relative 2-norm."""


def small(**changes: Any) -> PagedAttentionProblem:
    fields: dict[str, Any] = {
        "batch": 2,
        "query_tokens": 5,
        "context": 11,
        "query_heads": 6,
        "kv_heads": 2,
        "head_size": 8,
        "block_size": 4,
        "causal": "bottom_right",
    }
    return PagedAttentionProblem(**(fields | changes))


@lru_cache(maxsize=8)
def prepared(element: str) -> tuple[tuple[str, Operands, Reference], ...]:
    made = []
    for case in validation_cases(small(head_size=64, block_size=16, element=element)):
        operands = make_operands(case.problem, case.inputs, case.seed)
        made.append((case.name, operands, forward_reference(operands)))
    return tuple(made)


@pytest.mark.parametrize("name", names("s2_forward_*"))
def test_golden_vectors(name: str) -> None:
    golden = load(name)
    out, lse = forward(golden_operands(golden))
    assert not golden.differences({"out": out, "lse": lse}, bound=ORACLE)


@pytest.mark.parametrize("causal", ["off", "top_left", "bottom_right", "2", "-3"])
def test_reference_is_the_definition_row_by_row(causal: str) -> None:
    operands = make_operands(small(causal=causal), "random", 1)
    out, lse = forward(operands)
    inputs, offset = operands.inputs, int(operands.scalars["q_offset"])
    for b, h, i in np.ndindex(2, 6, 5):
        places = [(int(inputs["block_table"][b, t // 4]), t % 4, h // 3) for t in range(11)]
        seen = places[: min(max(i + 1 + offset, 0), 11)]
        query = inputs["query"][b, h, i].astype(float)
        scale = float(operands.scalars["softmax_scale"])
        z = np.array([scale * (query @ inputs["keys"][at].astype(float)) for at in seen])
        weights = np.exp(z)
        total = max(float(weights.sum()), 1e-10)
        wanted = sum(
            (w * inputs["values"][at] for w, at in zip(weights, seen, strict=True)), np.zeros(8)
        )
        np.testing.assert_allclose(out[b, h, i], wanted / total, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(lse[b, h, i], np.log(total), rtol=1e-10)


def test_rows_that_see_nothing_have_the_specified_values() -> None:
    out, lse = forward(make_operands(small(causal="-3"), "random", 1))
    assert not out[:, :, :3].any()
    assert out[:, :, 3:].all()
    np.testing.assert_allclose(lse[:, :, :3], np.log(1e-10))


@pytest.mark.parametrize("element", STORED)
def test_poison_has_no_way_into_reference_or_bounds(element: str) -> None:
    for _, operands, reference in prepared(element):
        assert np.isnan(widened(operands.inputs["keys"])).any()
        for arrays in (reference.outputs, reference.bounds("f32"), reference.bounds("f16_matrix")):
            assert all(np.isfinite(array).all() for array in arrays.values())


@pytest.mark.parametrize("count", [1, 3, 40])
def test_sample_is_part_of_the_whole(count: int) -> None:
    operands = make_operands(small(), "random", 1)
    whole, sample = forward_reference(operands), sampled_forward_reference(operands, count)
    rows = sample.names["out"]
    assert len(set(rows.tolist())) == len(rows) >= min(3 * count, 15)
    assert 59 in rows, "the last row of the last head"
    for name, width in (("out", 8), ("lse", 1)):
        np.testing.assert_allclose(
            sample.outputs[name], whole.outputs[name].reshape(-1, width)[rows], rtol=1e-12
        )
        np.testing.assert_allclose(
            sample.bounds("f32")[name], whole.bounds("f32")[name].ravel()[rows], rtol=1e-5
        )


def emulated(operands: Operands, *, weights: str = "f32", short: int = 0) -> dict[str, np.ndarray]:
    """A kernel in float32 that rounds weights to `weights` and leaves out the last `short` keys."""
    of = geometry(operands)
    shape, stored_as = operands.outputs["out"]
    out = np.zeros(shape)
    lse = np.full(shape[:-1], np.log(1e-10))
    for b, i in np.ndindex(of.batch, of.rows):
        groups = row_groups(operands, b, [i], np.arange(of.kv_heads))
        groups = groups.tokens(0, max(0, groups.key_codes.shape[1] - short))
        if not groups.key_codes.shape[1]:
            continue
        keys = groups.key_codes.astype(np.float32)
        z = groups.query.astype(np.float32) @ keys.swapaxes(-1, -2)
        z *= np.float32(groups.softmax_scale)
        peak = z.max(axis=-1, keepdims=True)
        p = np.exp(z - peak)
        total = p.sum(axis=-1, dtype=np.float32)
        p = widened(stored(p, weights)).astype(np.float32)
        values = groups.value_codes.astype(np.float32)
        out[b, :, i] = (p @ values / total[..., None]).reshape(of.heads, -1)
        lse[b, :, i] = (np.log(total) + peak[..., 0]).ravel()
    element = next(name for name, dtype in STORED.items() if dtype == stored_as)
    return {"out": stored(out, element), "lse": lse.astype(np.float32)}


@pytest.mark.parametrize("element", STORED)
def test_correct_kernels_stay_well_below_their_bound(element: str) -> None:
    for name, operands, reference in prepared(element):
        verdict = judge(emulated(operands), reference, "f32", name)
        assert verdict.ok, verdict.message
        assert verdict.check.error <= 0.8 * verdict.check.bound


def test_weights_of_16_bits_stay_within_their_class_and_exceed_f32() -> None:
    exceeding = 0
    for name, operands, reference in prepared("f16"):
        got = emulated(operands, weights="f16")
        verdict = judge(got, reference, "f16_matrix", name)
        assert verdict.ok, verdict.message
        wide = replace(
            operands,
            outputs=operands.outputs | {"out": (operands.outputs["out"][0], STORED["f32"])},
        )
        strict = judge(emulated(wide, weights="f16"), forward_reference(wide), "f32", name)
        exceeding += not strict.ok
    assert exceeding >= 4


@pytest.mark.parametrize("element", STORED)
def test_a_kernel_one_key_short_is_caught(element: str) -> None:
    wrong = [
        not judge(emulated(operands, short=1), reference, "f16_matrix", name).ok
        for name, operands, reference in prepared(element)
    ]
    assert sum(wrong) >= 8
