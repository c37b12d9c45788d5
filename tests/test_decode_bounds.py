"""The bounds of decoding: emulated devices stay well below them, broken kernels exceed them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests import decode_emulations as emulations
from tests.decode_cases import CLASSES, GEOMETRIES, prepared, small_problem
from tuner.kernels.base import ArithmeticClass, Reference
from tuner.kernels.decode_operands import make_operands
from tuner.kernels.decode_values import float_pool
from tuner.oracle import decode_reference, judge, unquantised_decode_reference
from tuner.oracle.attention import HeadGroups, attend
from tuner.oracle.tolerance import error_bounds


def share(got: np.ndarray, reference: Reference, arithmetic: ArithmeticClass) -> float:
    """The largest error in units of its bound, over the groups that are not wanted zero."""
    wanted, bound = reference.outputs["out"], reference.bounds(arithmetic)["out"]
    error, nonzero = np.linalg.norm(got - wanted, axis=-1), wanted.any(axis=-1)
    assert not got[~nonzero].any()
    return float((error[nonzero] / bound[nonzero]).max())


@pytest.mark.parametrize("arithmetic", CLASSES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_correct_kernels_stay_well_below_their_bound(
    geometry: str, arithmetic: ArithmeticClass
) -> None:
    shares, medians = [], []
    for case, operands, reference in prepared(geometry):
        got = emulations.emulate(operands, arithmetic)
        verdict = judge({"out": got}, reference, arithmetic, case.name)
        assert verdict.ok, verdict.message
        shares.append(share(got, reference, arithmetic))
        error = np.linalg.norm(got - reference.outputs["out"], axis=-1)
        bound = reference.bounds(arithmetic)["out"]
        medians.append(np.median(error[bound > 0] / bound[bound > 0]))
    assert max(shares) < 0.8
    assert max(medians) < 1 / 3
    assert max(shares) > 0.02, "the bound would be so loose that it says nothing"


BROKEN = {
    function.__name__: function
    for function in (
        emulations.skipped_partial_block,
        emulations.one_token_short,
        emulations.first_token_missing,
        emulations.neighbours_key_scale,
        emulations.neighbours_value_scale,
        emulations.wrong_kv_head,
        emulations.interleaved_kv_heads,
        emulations.lost_split,
    )
}


@pytest.mark.parametrize("arithmetic", CLASSES)
@pytest.mark.parametrize("broken", BROKEN)
def test_broken_kernels_exceed_their_bound(broken: str, arithmetic: ArithmeticClass) -> None:
    """Even where the rest of such a kernel computes exactly."""
    caught = []
    for case, operands, reference in prepared("gqa4"):
        got = decode_reference(BROKEN[broken](operands)).outputs["out"]
        if not judge({"out": got}, reference, arithmetic, case.name).ok:
            caught.append(case.name)
    assert len(caught) >= 3, f"only {caught}"


@pytest.mark.parametrize("arithmetic", ["f16", "f16_matrix", "int8_one_term", "int8_two_terms"])
def test_coarser_arithmetic_is_not_taken_for_f32(arithmetic: ArithmeticClass) -> None:
    worst = max(
        share(emulations.emulate(operands, arithmetic), reference, "f32")
        for _, operands, reference in prepared("gqa4")
    )
    assert worst > 1


def test_a_token_read_past_the_context_is_caught() -> None:
    case, operands, reference = prepared("gqa4")[0]
    lengths = operands.inputs["context_lens"]
    block = operands.inputs["key_cache"].shape[2]
    longer = np.where(lengths % block, lengths + 1, lengths).astype(np.uint32)
    operands = replace(
        operands,
        inputs=operands.inputs | {"context_lens": longer},
        scalars=operands.scalars | {"max_context_len": int(longer.max())},
    )
    got = decode_reference(operands).outputs["out"]
    assert np.isnan(got).any()
    assert not judge({"out": got}, reference, "f16", case.name).ok


@pytest.mark.parametrize("arithmetic", CLASSES)
def test_bounds_scale_with_the_values_and_not_with_the_keys_scale(
    arithmetic: ArithmeticClass,
) -> None:
    """Units of V scale the output; a factor that moves from the queries to the keys does not."""
    rng = np.random.default_rng(2)
    heads = HeadGroups(
        query=rng.standard_normal((2, 3, 16)),
        key_codes=rng.integers(-127, 128, (2, 50, 16), np.int8),
        key_scales=rng.uniform(0.01, 0.02, (2, 50)),
        value_codes=rng.integers(-127, 128, (2, 50, 16), np.int8),
        value_scales=rng.uniform(0.01, 0.02, (2, 50)),
        softmax_scale=0.25,
    )
    bound = error_bounds(arithmetic, heads)
    louder = error_bounds(arithmetic, replace(heads, value_scales=8 * heads.value_scales))
    moved = replace(heads, query=heads.query * 8, key_scales=heads.key_scales / 8)
    np.testing.assert_allclose(louder, 8 * bound, rtol=1e-4)
    np.testing.assert_allclose(error_bounds(arithmetic, moved), bound, rtol=1e-4)


@pytest.mark.parametrize(("arithmetic", "allowed"), [("f16", True), ("f32", False)])
def test_weights_below_the_range_of_float16_may_vanish(
    arithmetic: ArithmeticClass, allowed: bool
) -> None:
    """4,000 tokens of 2^-15 each, an eighth of the whole, flushed to zero beside one large one."""
    tokens, low = 4001, np.log(2.0**-15)
    keys = np.zeros((1, tokens, 4), np.int8)
    keys[0, 1:, 0] = 1
    heads = HeadGroups(
        query=np.array([[[low, 0.0, 0.0, 0.0]]]),
        key_codes=keys,
        key_scales=np.ones((1, tokens)),
        value_codes=np.random.default_rng(1).integers(1, 128, (1, tokens, 4), np.int8),
        value_scales=np.ones((1, tokens)),
        softmax_scale=1.0,
    )
    whole, large = attend(heads), attend(heads.tokens(0, 1))
    flushed = large.mixture / whole.weight[..., None]
    error = np.linalg.norm(flushed - whole.out, axis=-1)
    assert (error <= error_bounds(arithmetic, heads)).all() == allowed


@pytest.mark.parametrize("inputs", ["random", "large_logits"])
def test_answer_to_a_rounded_query_is_well_estimated(
    inputs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = make_operands(small_problem(head_size=128), inputs, 1)
    estimated = decode_reference(operands).bounds("int8_one_term")["out"][0]
    monkeypatch.setattr("tuner.oracle.tolerance.DIRECTIONS", 128)
    monkeypatch.setattr("tuner.oracle.tolerance.TOKEN_CHUNK", 5)
    exact = decode_reference(operands).bounds("int8_one_term")["out"][0]
    np.testing.assert_allclose(estimated, exact, rtol=0.4)
    assert (estimated != exact).any()


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_quantisation_stays_within_its_bound(geometry: str) -> None:
    shares = []
    for case, operands, reference in prepared(geometry):
        pool = float_pool(case.problem, case.inputs, case.seed)  # type: ignore[arg-type]
        plain = unquantised_decode_reference(operands, pool)
        verdict = judge(reference.outputs, plain, "f32", case.name)
        assert verdict.ok, verdict.message
        shares.append(verdict.check.error / verdict.check.bound)
    assert max(shares) < 0.8
    assert max(shares) > 0.1


@pytest.mark.parametrize("broken", BROKEN)
def test_the_looser_check_catches_broken_kernels_too(broken: str) -> None:
    verdicts = []
    for case, operands, _ in prepared("gqa4"):
        pool = float_pool(case.problem, case.inputs, case.seed)  # type: ignore[arg-type]
        got = decode_reference(BROKEN[broken](operands)).outputs["out"]
        plain = unquantised_decode_reference(operands, pool)
        verdicts.append(judge({"out": got}, plain, "f16", case.name).ok)
    assert not all(verdicts)


def test_the_looser_check_sees_an_error_of_the_cache_format() -> None:
    """Scales halved in cache and oracle alike: invisible to the first check."""
    case, operands, _ = prepared("gqa4")[0]
    words = operands.inputs["value_cache"].copy()
    words[..., -1] = (words[..., -1].view(np.float32) / 2).view(np.uint32)
    wrong = replace(operands, inputs=operands.inputs | {"value_cache": words})
    pool = float_pool(case.problem, case.inputs, case.seed)  # type: ignore[arg-type]
    got = decode_reference(wrong).outputs
    assert judge(got, decode_reference(wrong), "f32", case.name).ok
    assert not judge(got, unquantised_decode_reference(operands, pool), "f32", case.name).ok
