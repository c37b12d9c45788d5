"""The oracle against plain definitions, its bounds against emulated devices and broken kernels."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import decode_emulations as emulations
from tuner.kernels.base import ArithmeticClass, Operands, Reference, ValidationCase
from tuner.kernels.decode_operands import make_operands, validation_cases
from tuner.kernels.decode_values import float_pool
from tuner.oracle import (
    decode_reference,
    judge,
    sampled_decode_reference,
    unquantised_decode_reference,
    worst_of,
)
from tuner.oracle.attention import LOWEST, HeadGroups, Partial, attend, merge
from tuner.oracle.paged_decode import decode_partial
from tuner.oracle.tolerance import ROUNDINGS, error_bounds
from tuner.problems import PagedDecodeProblem
from tuner.quant import unpack_cache
from tuner.records import Check

CLASSES = tuple(ROUNDINGS)
GEOMETRIES = {"gqa4": (16, 4, 128, 16), "gqa7": (14, 2, 64, 8), "mqa71": (71, 1, 80, 32)}


@lru_cache(maxsize=32)
def prepared(geometry: str) -> tuple[tuple[ValidationCase, Operands, Reference], ...]:
    heads, kv_heads, head_size, block_size = GEOMETRIES[geometry]
    problem = PagedDecodeProblem(
        sequences=1,
        context=4096,
        query_heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        block_size=block_size,
    )
    made = []
    for case in validation_cases(problem):
        operands = make_operands(case.problem, case.inputs, case.seed)
        made.append((case, operands, decode_reference(operands)))
    return tuple(made)


def small_problem(**changes: int | str) -> PagedDecodeProblem:
    fields: dict[str, int | str] = {
        "sequences": 4,
        "context": 37,
        "query_heads": 6,
        "kv_heads": 2,
        "head_size": 8,
        "block_size": 4,
        "lengths": "list:37,0,1,9",
    }
    return PagedDecodeProblem(**(fields | changes))  # type: ignore[arg-type]


def share(got: np.ndarray, reference: Reference, arithmetic: ArithmeticClass) -> float:
    """The largest error in units of its bound, over the groups that are not wanted zero."""
    wanted, bound = reference.outputs["out"], reference.bounds(arithmetic)["out"]
    error, nonzero = np.linalg.norm(got - wanted, axis=-1), wanted.any(axis=-1)
    assert not got[~nonzero].any()
    return float((error[nonzero] / bound[nonzero]).max())


# The reference


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


# Splits


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


# Bounds


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


def test_bounds_are_computed_once() -> None:
    reference = decode_reference(make_operands(small_problem(), "random", 1))
    assert reference.bounds("f32")["out"] is reference.bounds("f32")["out"]


# Against the values before quantisation


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


# Verdicts


def a_reference(wanted: np.ndarray, bound: float) -> Reference:
    return Reference(
        outputs={"out": wanted},
        bounds=lambda _: {"out": np.full(wanted.shape[:-1], bound)},
    )


WANTED = np.arange(24, dtype=float).reshape(2, 3, 4)


def test_the_worst_element_is_named_with_its_figures() -> None:
    got = WANTED.astype(np.float32)
    got[1, 2, 3] += 0.5
    got[0, 1, 0] -= 0.25
    verdict = judge({"out": got}, a_reference(WANTED, 0.1), "f32", "ragged")
    norm = np.linalg.norm(WANTED[1, 2])
    assert not verdict.ok
    assert verdict.check == Check(
        cases=1, error=float(0.5 / norm), bound=float(0.1 / norm), worst="case ragged: out[1, 2]"
    )
    assert verdict.message == (
        "case ragged: out[1, 2] is off by 1.16e-02 (relative 2-norm over 4 elements), 2.32e-03 is "
        "allowed; worst element [1, 2, 3]: got 23.5, wanted 23; 2 of 6 groups are wrong"
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_never_passes(value: float) -> None:
    got = WANTED.astype(np.float32)
    got[0, 2, 1] = value
    verdict = judge({"out": got}, a_reference(WANTED, 1e30), "f32", "x")
    assert not verdict.ok
    assert "out[0, 2] is off by NaN or infinity" in verdict.message
    assert "worst element [0, 2, 1]" in verdict.message
    assert msgspec.json.decode(msgspec.json.encode(verdict.check), type=Check) == verdict.check


def test_zeros_must_be_zeros() -> None:
    wanted = WANTED.copy()
    wanted[1, 0] = 0
    got = wanted.astype(np.float32)
    assert judge({"out": got}, a_reference(wanted, 0.1), "f32", "x").ok
    got[1, 0, 2] = 1e-30
    verdict = judge({"out": got}, a_reference(wanted, 0.1), "f32", "x")
    assert not verdict.ok
    assert "out[1, 0] is off by 1.00e-30 (absolute" in verdict.message


def test_an_error_at_its_bound_passes_and_beyond_it_does_not() -> None:
    got = WANTED.copy()
    got[0, 0, 0] += 0.5
    assert judge({"out": got}, a_reference(WANTED, 0.5), "f32", "x").ok
    assert not judge({"out": got}, a_reference(WANTED, np.nextafter(0.5, 0)), "f32", "x").ok


def test_groups_of_a_sample_go_by_their_index_in_the_whole() -> None:
    got = WANTED.reshape(6, 4).copy()
    got[4] += 1
    reference = replace(a_reference(WANTED.reshape(6, 4), 0.1), names={"out": np.arange(100, 106)})
    verdict = judge({"out": got}, reference, "f32", "timed")
    assert verdict.check.worst == "case timed: out[104]"


def test_outputs_of_another_shape_are_a_bug() -> None:
    with pytest.raises(ValueError, match=r"out is of shape \(2, 3\), wanted \(2, 3, 4\)"):
        judge({"out": WANTED[..., 0]}, a_reference(WANTED, 1), "f32", "x")
    with pytest.raises(ValueError, match="out is missing"):
        judge({}, a_reference(WANTED, 1), "f32", "x")


def test_worst_of_checks_is_the_one_nearest_its_bound() -> None:
    checks = [
        Check(cases=1, error=0.1, bound=1.0, worst="a"),
        Check(cases=2, error=0.01, bound=0.02, worst="b"),
        Check(cases=1, error=0.0, bound=0.0, worst="c"),
    ]
    assert worst_of(checks) == Check(cases=4, error=0.01, bound=0.02, worst="b")
    broken = Check(cases=1, error=1e-9, bound=0.0, worst="d")
    assert worst_of([*checks, broken]).worst == "d"
