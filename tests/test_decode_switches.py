"""Window, soft cap, ALiBi, sinks, values of another size: problems, texts and the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode_emulations import chained_sum
from tests.golden_floats import golden_operands
from tests.golden_vectors import load, names
from tuner import kernels, shapes, workloads
from tuner.errors import UsageError
from tuner.kernels.base import Operands
from tuner.kernels.decode_operands import validation_cases
from tuner.kernels.decode_values import NO_BLOCK, VALIDATION_INPUTS
from tuner.kernels.float_operands import F16, F32, make_operands, pack_keys
from tuner.oracle import judge
from tuner.oracle.attention import HeadGroups, attend
from tuner.oracle.float_decode import (
    float_decode_reference,
    float_head_groups,
    sampled_float_decode_reference,
)
from tuner.problems import PagedDecodeProblem

ORACLE = 1e-9
SWITCHES: dict[str, Any] = {
    "window": 11,
    "softcap": 3.5,
    "alibi": 1,
    "sinks": 1,
    "value_head_size": 24,
}


def problem(**changes: Any) -> PagedDecodeProblem:
    fields = {
        "sequences": 5,
        "context": 37,
        "query_heads": 6,
        "kv_heads": 2,
        "head_size": 16,
        "block_size": 8,
        "lengths": "list:37,0,1,9,16",
    }
    return PagedDecodeProblem(**(fields | changes))


switches = st.fixed_dictionaries(
    {},
    optional={
        "window": st.integers(0, 45),
        "softcap": st.sampled_from((0.0, 0.5, 3.5, 50.0)),
        "alibi": st.integers(0, 1),
        "sinks": st.integers(0, 1),
        "value_head_size": st.sampled_from((0, 8, 24)),
    },
)


# The problem


def test_problems_without_switches_keep_the_keys_and_texts_they_had() -> None:
    plain = PagedDecodeProblem(
        sequences=8, context=16384, query_heads=32, kv_heads=8, head_size=128
    )
    assert plain.key == "dc9bbb264930"
    assert plain.label == "8x16384 h32/8 d128"
    assert plain.series == "h32/8 d128, 8 sequences"
    assert shapes.format_shape(plain) == "8x16384:h32/8:d128:b16"
    assert plain.switched == {}


@given(switches)
def test_a_switch_is_in_key_label_and_text_just_if_it_is_on(chosen: dict[str, Any]) -> None:
    switched = problem(**chosen)
    on = {name: value for name, value in chosen.items() if value}
    assert switched.switched == on
    assert (switched.key == problem().key) == (not on)
    for name in on:
        assert name in switched.label
        assert name in switched.series
    assert shapes.parse_shape(shapes.format_shape(switched)) == switched


def test_values_as_large_as_keys_are_no_switch() -> None:
    assert problem(value_head_size=16) == problem()
    assert problem(value_head_size=16).key == problem().key
    assert (problem().value_size, problem(value_head_size=24).value_size) == (16, 24)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"window": -1}, "window is -1"),
        ({"alibi": 2}, "alibi is 2, must be 0 (off) or 1 (on)"),
        ({"sinks": -1}, "sinks is -1"),
        ({"softcap": float("nan")}, "softcap is nan"),
        ({"softcap": float("inf")}, "softcap is inf"),
        ({"softcap": 1e-9}, "must be 0 (off) or from 0.001 to 1e+06"),
        ({"value_head_size": -4}, "value_head_size is -4"),
    ],
)
def test_a_switch_out_of_range_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        problem(**changes)
    assert told in str(caught.value)


def test_workload_files_and_shapes_name_switches() -> None:
    heads = "query_heads = 8\nkv_heads = 2\nhead_size = 64\n"
    text = f"[[problem]]\n{heads}sequences = 1\ncontext = [64, 128]\nwindow = 32\n"
    found = workloads.parse_workload(text + "softcap = 30.5\nsinks = 1\n", path="own.toml")
    assert [(p.window, p.softcap, p.sinks) for p in found] == [(32, 30.5, 1)] * 2
    parsed = shapes.parse_shape(
        "paged_decode:sequences=1,context=4k,query_heads=8,kv_heads=2,head_size=64,window=1k"
    )
    assert isinstance(parsed, PagedDecodeProblem)
    assert parsed.window == 1024


# Operands


def test_caches_are_laid_out_as_the_indices_say() -> None:
    """A pool filled with the flat indices of the specification's formulae."""
    blocks, kv_heads, head_size, tokens, x = 3, 2, 16, 8, 4
    blk, g, off, d = np.ogrid[:blocks, :kv_heads, :tokens, :head_size]
    flat = blk * kv_heads * head_size * tokens + g * head_size * tokens
    keys = flat + d // x * tokens * x + off * x + d % x
    packed = pack_keys(keys, x)
    assert packed.shape == (blocks, kv_heads, head_size // x, tokens, x)
    np.testing.assert_array_equal(packed.ravel(), np.arange(packed.size))
    values = flat + d * tokens + off
    np.testing.assert_array_equal(values.swapaxes(-1, -2).ravel(), np.arange(values.size))
    with pytest.raises(UsageError, match="head size 16 does not fill whole packets of 3"):
        pack_keys(keys, 3)


@pytest.mark.parametrize("cache", [F32, F16], ids=["f32", "f16"])
@pytest.mark.parametrize("inputs", ["timing", *VALIDATION_INPUTS])
def test_shapes_scalars_and_poison_are_as_documented(cache: Any, inputs: str) -> None:
    of = problem(**SWITCHES)
    operands = make_operands(of, inputs, 0, cache)
    keys, values = operands.inputs["key_cache"], operands.inputs["value_cache"]
    assert keys.shape[1:] == (2, 16 // cache.packet, 8, cache.packet)
    assert values.shape[1:] == (2, 24, 8)
    assert keys.dtype == values.dtype == cache.dtype
    assert operands.outputs["out"][0] == (5, 6, 24)
    for name, value in SWITCHES.items():
        assert name == "value_head_size" or operands.scalars[name] == value
    if inputs == "timing":
        assert np.isfinite(keys).all()
        assert operands.scalars == dict(kernels.family(f"paged_decode_{cache.name}").scalars(of))  # type: ignore[misc]
        return
    table = operands.inputs["block_table"]
    live = np.zeros((len(keys), 8), bool)
    for sequence, tokens in enumerate(of.context_lens().tolist()):
        seen = range(max(0, tokens - 11), tokens)
        for token in seen:
            live[table[sequence, token // 8], token % 8] = True
        used = {token // 8 for token in seen}
        assert all(table[sequence, c] == NO_BLOCK for c in range(table.shape[1]) if c not in used)
    assert np.isfinite(keys).all(axis=(1, 2, 4)).tolist() == live.tolist()
    assert np.isnan(values).all(axis=(1, 2)).tolist() == (~live).tolist()


def test_switches_that_are_off_leave_poison_where_their_numbers_would_be() -> None:
    inputs = make_operands(problem(), "random", 0, F32).inputs
    assert np.isnan(inputs["sinks"]).all()
    assert np.isnan(inputs["slopes"]).all()


def test_validation_reaches_beyond_any_window() -> None:
    cases = validation_cases(problem(window=4096, softcap=30.0))
    assert {case.problem.softcap for case in cases} == {30.0}
    cut = [case.problem.context_lens().max() > case.problem.window > 0 for case in cases]
    assert sum(cut) >= 3
    assert not all(cut)


# The oracle


@pytest.mark.parametrize("name", names("s1_decode_f32_*"))
def test_decode_agrees_with_golden(name: str) -> None:
    golden = load(name)
    operands = golden_operands(golden)
    out = float_decode_reference(operands).outputs["out"]
    assert not golden.differences({"out": out}, bound=ORACLE)
    heads = np.arange(int(golden.attributes["num_kv_heads"]))
    for sequence in range(len(out)):
        part = attend(float_head_groups(operands, sequence, heads))
        np.testing.assert_allclose(part.peak.ravel(), golden.want["m"][sequence], rtol=ORACLE)
        np.testing.assert_allclose(part.weight.ravel(), golden.want["l"][sequence], rtol=ORACLE)


@given(switches)
@settings(max_examples=25, deadline=None)
def test_reference_is_the_definition_element_by_element(chosen: dict[str, Any]) -> None:
    """In loops that share nothing with the oracle."""
    of = problem(**chosen)
    operands = make_operands(of, "random", 1, F32)
    inputs, scalars = operands.inputs, operands.scalars
    out = float_decode_reference(operands).outputs["out"]
    for s, h in np.ndindex(of.sequences, of.query_heads):
        length, g = int(inputs["context_lens"][s]), h // 3
        query = inputs["query"][s, 16 * h : 16 * h + 16].astype(float)
        z, rows = [], []
        for t in range(length - min(length, of.window or length), length):
            block = inputs["block_table"][s, t // 8]
            key = [float(inputs["key_cache"][block, g, d // 4, t % 8, d % 4]) for d in range(16)]
            logit = scalars["softmax_scale"] * sum(q * k for q, k in zip(query, key, strict=True))
            if of.softcap:
                logit = np.tanh(logit / of.softcap) * of.softcap
            if of.alibi:
                logit += float(inputs["slopes"][h]) * (t - length + 1)
            z.append(logit)
            rows.append(inputs["value_cache"][block, g, :, t % 8].astype(float))
        sink = [float(inputs["sinks"][h])] if of.sinks else []
        top = max([*z, *sink, -1e30])
        weights = np.exp(np.array(z) - top)
        wanted = sum((w * r for w, r in zip(weights, rows, strict=True)), np.zeros(of.value_size))
        total = weights.sum() + sum(np.exp(x - top) for x in sink)
        np.testing.assert_allclose(out[s, h], wanted / (total + 1e-6), rtol=1e-9, atol=1e-300)


def out_of(operands: Operands, **scalars: float) -> np.ndarray:
    changed = replace(operands, scalars=operands.scalars | scalars)
    return np.asarray(float_decode_reference(changed).outputs["out"])


@given(st.sampled_from(sorted(VALIDATION_INPUTS)), st.integers(37, 2000), st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_switches_at_their_limits_are_off(inputs: str, window: int, seed: int) -> None:
    operands = make_operands(problem(), inputs, seed, F32)
    plain = out_of(operands)
    np.testing.assert_array_equal(out_of(operands, window=window), plain)
    np.testing.assert_allclose(out_of(operands, softcap=1e9), plain, rtol=1e-9, atol=1e-12)
    none = np.zeros(6, np.float32)
    flat = replace(operands, inputs=operands.inputs | {"slopes": none})
    np.testing.assert_array_equal(out_of(flat, alibi=1), plain)
    for sink in (-1e30, -np.inf):
        sinks = np.full(6, sink, np.float32)
        away = replace(operands, inputs=operands.inputs | {"sinks": sinks})
        np.testing.assert_array_equal(out_of(away, sinks=1), plain)


def test_a_large_sink_takes_all_the_weight_and_a_short_window_gives_the_last_value() -> None:
    operands = make_operands(problem(), "random", 0, F32)
    sinks = replace(operands, inputs=operands.inputs | {"sinks": np.full(6, 1e4, np.float32)})
    assert not out_of(sinks, sinks=1).any()
    last = out_of(operands, window=1)
    values = operands.inputs["value_cache"][operands.inputs["block_table"][0, 4], :, :, 4]
    np.testing.assert_allclose(last[0], np.repeat(values, 3, axis=0), rtol=2e-6)


def test_sample_is_part_of_the_whole() -> None:
    operands = make_operands(problem(**SWITCHES), "random", 1, F16)
    whole = float_decode_reference(operands)
    sample = sampled_float_decode_reference(operands, 5)
    rows = sample.names["out"]
    assert len(rows) == 15
    got = whole.outputs["out"].reshape(30, 24)[rows]
    np.testing.assert_allclose(sample.outputs["out"], got, rtol=1e-12)
    bounds = whole.bounds("f32")["out"].ravel()[rows]
    np.testing.assert_allclose(sample.bounds("f32")["out"], bounds, rtol=1e-5)


# The bounds


def in_float32(heads: HeadGroups) -> np.ndarray:
    """A kernel's float32 arithmetic, one operation after the other; outputs [N, G, Dv]."""
    one, keys = np.float32, heads.key_codes.astype(np.float32)
    products = heads.query.astype(one)[..., None, :] * keys[:, None]
    z = chained_sum(products, -1, one) * one(heads.softmax_scale)
    if heads.softcap:
        doubled = np.exp(z * one(2 / heads.softcap), dtype=one)
        z = one(heads.softcap) * (one(1) - one(2) / (doubled + one(1)))
    if heads.biases is not None:
        z = z + heads.biases.astype(one)
    top = z.max(axis=-1, initial=one(-3e38))
    if heads.sinks is not None:
        top = np.maximum(top, heads.sinks.astype(one))
    weights = np.exp(z - top[..., None], dtype=one)
    total = chained_sum(weights, -1, one)
    if heads.sinks is not None:
        total = total + np.exp(heads.sinks.astype(one) - top, dtype=one)
    products = weights[..., None] * heads.value_codes.astype(one)[:, None]
    return np.asarray(chained_sum(products, -2, one) / (total + one(1e-6))[..., None])


@pytest.mark.parametrize("chosen", [{}, *({n: v} for n, v in SWITCHES.items()), SWITCHES], ids=str)
def test_correct_kernels_stay_below_their_bound_and_those_without_the_switch_do_not(
    chosen: dict[str, Any],
) -> None:
    shares, caught = [], 0
    for case in validation_cases(problem(head_size=64, **chosen)):
        operands = make_operands(case.problem, case.inputs, case.seed, F32)  # type: ignore[arg-type]
        reference = float_decode_reference(operands)
        heads = np.arange(2)
        got = np.stack(
            [
                in_float32(float_head_groups(operands, s, heads))
                for s in range(len(reference.outputs["out"]))
            ]
        ).reshape(reference.outputs["out"].shape)
        verdict = judge({"out": got}, reference, "f32", case.name)
        assert verdict.ok, verdict.message
        shares.append(verdict.check.error / verdict.check.bound if verdict.check.bound else 0)
        for name in chosen.keys() - {"value_head_size", "window"}:
            without = {"out": out_of(operands, **{name: 0})}
            caught += not judge(without, reference, "f32", case.name).ok
    assert 0.01 < max(shares) < 0.8
    assert caught >= 3 * len(chosen.keys() - {"value_head_size", "window"})
