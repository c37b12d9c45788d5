"""The oracle of the backward pass: golden vectors, finite differences, bounds that bite."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from tests.golden_attention import golden_gradient_operands
from tests.golden_vectors import load, names
from tests.test_attention_oracle import ORACLE, small
from tuner.elements import STORED, widened
from tuner.kernels.base import Operands, Reference
from tuner.kernels.gradient_operands import make_operands, validation_cases
from tuner.oracle import judge
from tuner.oracle.paged_attention import forward, geometry, pool_rows
from tuner.oracle.paged_attention_backward import (
    backward,
    backward_reference,
    sampled_backward_reference,
)

NAMES = ("query_gradient", "key_gradient", "value_gradient")


@lru_cache(maxsize=8)
def prepared(element: str) -> tuple[tuple[str, Operands, Reference], ...]:
    made = []
    for case in validation_cases(small(head_size=32, block_size=8, element=element)):
        operands = make_operands(case.problem, case.inputs, case.seed)
        made.append((case.name, operands, backward_reference(operands)))
    return tuple(made)


@pytest.mark.parametrize("name", names("s2_backward_*"))
def test_golden_vectors(name: str) -> None:
    golden = load(name)
    operands = golden_gradient_operands(golden)
    found, pool = backward(operands, exact=True), operands.inputs["keys"].shape
    got = {
        "dq": found.query,
        "dk_blocks": found.key.reshape(pool),
        "dv_blocks": found.value.reshape(pool),
    }
    assert not golden.differences(got, bound=ORACLE)


def test_no_vector_is_missing() -> None:
    assert len(names("s2_backward_*")) == 7


@pytest.mark.parametrize("inputs", ["random", "shared"])
@pytest.mark.parametrize("causal", ["off", "bottom_right", "2", "-3"])
def test_gradients_are_finite_differences_of_the_forward_pass(causal: str, inputs: str) -> None:
    """Of the loss sum(dO * O), along the axes of a few elements; shared blocks add up by nature."""
    operands = make_operands(small(batch=3, causal=causal), inputs, 3)
    double = {name: widened(operands.inputs[name]) for name in ("query", "keys", "values")}
    incoming, step = widened(operands.inputs["out_gradient"]), 1e-5
    found = backward(operands, exact=True)
    gradients = {"query": found.query, "keys": found.key, "values": found.value}

    def loss(name: str, place: tuple[int, ...], by: float) -> float:
        moved = double[name].copy()
        moved.reshape(gradients[name].shape)[place] += by
        changed = replace(operands, inputs=operands.inputs | double | {name: moved})
        return float((incoming * forward(changed)[0]).sum())

    rng = np.random.default_rng(5)
    live = np.unique(np.concatenate([pool_rows(operands, b, 11) for b in range(3)]))
    for name, gradient in gradients.items():
        for _ in range(12):
            place = tuple(int(rng.integers(0, extent)) for extent in gradient.shape)
            if name != "query":
                place = (int(rng.choice(live)), *place[1:])
            slope = (loss(name, place, step) - loss(name, place, -step)) / (2 * step)
            np.testing.assert_allclose(gradient[place], slope, rtol=1e-5, atol=1e-7)


def test_what_no_row_sees_has_a_gradient_of_zero() -> None:
    operands = make_operands(small(causal="-3"), "random", 1)
    reference = backward_reference(operands)
    bounds = reference.bounds("f32")
    assert not reference.outputs["query_gradient"][:, :, :3].any()
    assert not bounds["query_gradient"][:, :, :3].any()
    unused = np.setdiff1d(
        np.arange(operands.inputs["keys"].shape[0]), operands.inputs["block_table"][:, :3]
    )
    assert len(unused)
    for name in ("key_gradient", "value_gradient"):
        assert not reference.outputs[name][unused].any()
        assert not bounds[name][unused].any()
        assert reference.outputs[name].any()


@pytest.mark.parametrize("count", [1, 4, 30])
def test_sample_is_part_of_the_whole(count: int) -> None:
    operands = make_operands(small(batch=3, query_tokens=6), "shared", 1)
    whole, sample = backward_reference(operands), sampled_backward_reference(operands, count)
    for name in NAMES:
        rows = sample.names[name]
        assert len(rows) >= min(count, 12)
        wanted = whole.outputs[name].reshape(-1, 8)[rows]
        np.testing.assert_allclose(sample.outputs[name], wanted, rtol=1e-9, atol=1e-12)
        bounds = whole.bounds("f32")[name].ravel()[rows]
        # A row alone, or a token alone, has the same terms.
        np.testing.assert_allclose(sample.bounds("f32")[name], bounds, rtol=1e-6)
        np.testing.assert_array_equal(sample.seen(whole.outputs)[name], wanted)


def test_timing_operands_have_plausible_weights() -> None:
    operands = make_operands(small(query_tokens=20, context=40), "timing", 0)
    sample = sampled_backward_reference(operands, 4)
    for name in NAMES:
        assert np.isfinite(sample.outputs[name]).all()
        assert 1e-4 < np.abs(sample.outputs[name]).max() < 1e3


def emulated(operands: Operands, *, mistake: str = "") -> dict[str, np.ndarray]:
    """A kernel in float32, or one that makes a mistake."""
    of, inputs = geometry(operands), operands.inputs
    found = {name: np.zeros(shape, np.float32) for name, (shape, _) in operands.outputs.items()}
    pool = (-1, of.kv_heads, of.head_size)
    flat = {name: found[name].reshape(pool) for name in ("key_gradient", "value_gradient")}
    single = {
        name: widened(inputs[name]).astype(np.float32)
        for name in ("query", "keys", "values", "out", "out_gradient")
    }
    delta = (single["out"] * single["out_gradient"]).sum(axis=-1)
    for b, h, i in np.ndindex(of.batch, of.heads, of.rows):
        g = h // of.group
        places = pool_rows(operands, b, of.keys_seen(i) - (mistake == "one key short"))
        if not len(places):
            continue
        keys, values = (single[n].reshape(pool)[places, g] for n in ("keys", "values"))
        p = np.exp(
            keys @ single["query"][b, h, i] * np.float32(of.softmax_scale) - inputs["lse"][b, h, i]
        )
        incoming = single["out_gradient"][b, h, i]
        t = values @ incoming - (0 if mistake == "no delta" else delta[b, h, i])
        ds = p * t * np.float32(1 if mistake == "no scale" else of.softmax_scale)
        found["query_gradient"][b, h, i] = ds @ keys
        if mistake == "shared blocks overwritten" and h % of.group == 0 and i == 0:
            flat["key_gradient"][places, g] = 0
        np.add.at(flat["key_gradient"], (places, g), ds[:, None] * single["query"][b, h, i])
        np.add.at(flat["value_gradient"], (places, g), p[:, None] * incoming)
    return found


@pytest.mark.parametrize("element", STORED)
def test_correct_kernels_stay_well_below_their_bound(element: str) -> None:
    for name, operands, reference in prepared(element):
        verdict = judge(emulated(operands), reference, "f32", name)
        assert verdict.ok, verdict.message
        assert verdict.check.error <= 0.8 * verdict.check.bound


@pytest.mark.parametrize(
    ("mistake", "cases"),
    [("one key short", 8), ("no delta", 6), ("no scale", 6), ("shared blocks overwritten", 3)],
)
def test_a_wrong_kernel_exceeds_its_bound(mistake: str, cases: int) -> None:
    wrong = [
        not judge(emulated(operands, mistake=mistake), reference, "f32", name).ok
        for name, operands, reference in prepared("f32")
    ]
    assert sum(wrong) >= cases
