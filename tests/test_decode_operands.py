from __future__ import annotations

import time

import numpy as np
import pytest

from tuner.errors import UnknownNameError, UsageError
from tuner.kernels.base import Operands
from tuner.kernels.decode_operands import WIDE_GROUP, make_operands, validation_cases
from tuner.kernels.decode_values import NO_BLOCK, VALIDATION_INPUTS, float_pool
from tuner.oracle.attention import logits
from tuner.oracle.paged_decode import head_groups
from tuner.problems import PagedDecodeProblem
from tuner.quant import dequantise, unpack_cache

CACHES = ("key_cache", "value_cache")


def decode_problem(**changes: int | str) -> PagedDecodeProblem:
    fields: dict[str, int | str] = {
        "sequences": 5,
        "context": 77,
        "query_heads": 8,
        "kv_heads": 2,
        "head_size": 64,
        "block_size": 16,
        "lengths": "list:77,0,16,17,33",
    }
    return PagedDecodeProblem(**(fields | changes))  # type: ignore[arg-type]


def live_tokens(operands: Operands, problem: PagedDecodeProblem) -> np.ndarray:
    """Tokens [NB, BS] that some sequence sees, counted one by one."""
    cache = operands.inputs["key_cache"]
    live = np.zeros((cache.shape[0], cache.shape[2]), bool)
    for sequence, tokens in enumerate(problem.context_lens().tolist()):
        for token in range(tokens):
            block = operands.inputs["block_table"][sequence, token // problem.block_size]
            live[block, token % problem.block_size] = True
    return live


@pytest.mark.parametrize("inputs", ["timing", *VALIDATION_INPUTS])
def test_shapes_and_scalars_are_as_documented(inputs: str) -> None:
    problem = decode_problem()
    operands = make_operands(problem, inputs, 0)
    shapes = {name: (array.shape, array.dtype.name) for name, array in operands.inputs.items()}
    blocks = shapes["key_cache"][0][0]
    stride = int(operands.scalars["q_stride"])
    assert shapes == {
        "query": ((5, stride), "float32"),
        "key_cache": ((blocks, 2, 16, 17), "uint32"),
        "value_cache": ((blocks, 2, 16, 17), "uint32"),
        "block_table": ((5, 5), "uint32"),
        "context_lens": ((5,), "uint32"),
        "sinks": ((8,), "float32"),
        "slopes": ((8,), "float32"),
    }
    assert stride >= 8 * 64
    assert operands.outputs == {"out": ((5, 8, 64), np.dtype(np.float32))}
    assert operands.scalars == {
        "q_stride": stride,
        "max_blocks": 5,
        "max_context_len": 77,
        "softmax_scale": 0.125,
        "num_kv_heads": 2,
        "num_heads": 8,
        "num_sequences": 5,
        "window": 0,
        "softcap": 0.0,
        "alibi": 0,
        "sinks": 0,
    }


@pytest.mark.parametrize("inputs", ["timing", *VALIDATION_INPUTS])
def test_equal_arguments_give_equal_arrays(inputs: str) -> None:
    first, second = (make_operands(decode_problem(), inputs, 3) for _ in range(2))
    other = make_operands(decode_problem(), inputs, 4)
    for name, array in first.inputs.items():
        assert array.tobytes() == second.inputs[name].tobytes()
    assert first.inputs["query"].tobytes() != other.inputs["query"].tobytes()


@pytest.mark.parametrize("inputs", VALIDATION_INPUTS)
def test_whatever_must_not_be_read_is_poison(inputs: str) -> None:
    problem = decode_problem()
    operands = make_operands(problem, inputs, 0)
    live = live_tokens(operands, problem)
    assert not live.all(axis=1).all(), "some blocks are partial"
    assert (~live.any(axis=1)).sum() >= 3, "some blocks are unused"
    for cache in CACHES:
        codes, scales = unpack_cache(operands.inputs[cache])
        dead = ~np.broadcast_to(live[:, None, :], scales.shape)
        assert np.isnan(scales[dead]).all()
        assert (codes[dead] == -128).all()
        assert np.isfinite(scales[~dead]).all()
        assert (codes[~dead] != -128).all()
    used = -(-problem.context_lens().astype(int) // 16)
    for row, count in zip(operands.inputs["block_table"], used, strict=True):
        assert (row[:count] < len(live)).all()
        assert (row[count:] == NO_BLOCK).all()


def test_query_rows_are_padded_with_nan_in_most_kinds() -> None:
    padded = []
    for inputs in VALIDATION_INPUTS:
        query = make_operands(decode_problem(), inputs, 0).inputs["query"]
        assert np.isfinite(query[:, : 8 * 64]).all()
        assert np.isnan(query[:, 8 * 64 :]).all()
        padded.append(query.shape[1] > 8 * 64)
    assert any(padded)
    assert not all(padded), "a contiguous query is what engines have"


@pytest.mark.parametrize("inputs", VALIDATION_INPUTS)
def test_sequences_share_blocks_but_not_their_last(inputs: str) -> None:
    problem = decode_problem(context=80, lengths="list:80,48,49,79,16")
    table = make_operands(problem, inputs, 0).inputs["block_table"]
    last = -(-problem.context_lens().astype(int) // 16) - 1
    ids, counts = np.unique(table[table != NO_BLOCK], return_counts=True)
    assert counts.max() == 4
    for row, column in zip(table, last, strict=True):
        assert counts[ids == row[column]] == 1
    assert (np.diff(table[0].astype(int)) != 1).any(), "blocks are not in order"


def test_caches_hold_the_quantised_floats() -> None:
    problem = decode_problem()
    pool, operands = float_pool(problem, "random", 7), make_operands(problem, "random", 7)
    np.testing.assert_array_equal(pool.live, live_tokens(operands, problem))
    for cache, floats in zip(CACHES, (pool.keys, pool.values), strict=True):
        got = dequantise(*unpack_cache(operands.inputs[cache]))
        error = np.abs(got - floats).max(axis=-1) / np.abs(floats).max(axis=-1)
        assert error[np.broadcast_to(pool.live[:, None, :], error.shape)].max() < 1 / 254 + 1e-6


def test_kinds_of_inputs_are_what_they_say() -> None:
    problem = decode_problem()

    def z(inputs: str, sequence: int) -> np.ndarray:
        operands = make_operands(problem, inputs, 0)
        return logits(head_groups(operands, sequence, np.arange(2)))

    assert 100 < max(np.abs(z("large_logits", s)).max(initial=0) for s in range(5)) < 151
    assert np.ptp(z("equal_logits", 0), axis=-1).max() < 1e-12
    assert np.abs(z("equal_logits", 0)).max() > 0.1
    for sequence, token in ((0, 76), (3, 16), (4, 32)):
        others = np.delete(z("dominating", sequence), token, axis=-1)
        assert (z("dominating", sequence)[..., token] > others.max(axis=-1) + 5).all()
    zeros = make_operands(problem, "zeros", 0)
    groups = [head_groups(zeros, s, np.arange(2)) for s in range(5)]
    assert not groups[0].query.any()
    assert not groups[4].value_codes.any()
    assert (~groups[2].key_codes.any(axis=-1)).any()


def test_timed_pool_is_as_large_as_needed_and_permuted() -> None:
    problem = decode_problem(sequences=4, context=1000, lengths="list:1000,3,0,160")
    operands = make_operands(problem, "timing", 0)
    table = operands.inputs["block_table"]
    used = table[table != NO_BLOCK]
    assert len(operands.inputs["key_cache"]) == 63 + 1 + 10
    np.testing.assert_array_equal(np.sort(used), np.arange(74))
    assert (np.diff(table[0].astype(int)) != 1).mean() > 0.9
    for cache in CACHES:
        codes, scales = unpack_cache(operands.inputs[cache])
        assert codes.min() == -127
        assert codes.max() == 127
        assert 0.015 <= scales.min() < scales.max() <= 0.0251
    assert operands.scalars["q_stride"] == 8 * 64


def test_large_timed_operands_are_made_fast() -> None:
    problem = decode_problem(
        sequences=8, context=12_000, kv_heads=8, head_size=128, lengths="equal"
    )
    start = time.process_time()
    operands = make_operands(problem, "timing", 0)
    seconds = time.process_time() - start
    gigabytes = sum(array.nbytes for array in operands.inputs.values()) / 2**30
    assert seconds < 1.5 + 3 * gigabytes
    cache = operands.inputs["key_cache"]
    assert cache.nbytes > 1.4 * 64 * 2**20, "larger than the slab it repeats"
    assert cache[-1].any()


def test_an_empty_batch_has_one_block() -> None:
    operands = make_operands(decode_problem(sequences=2, context=0, lengths="equal"), "timing", 0)
    assert operands.inputs["key_cache"].shape[0] == 1
    assert (operands.inputs["block_table"] == NO_BLOCK).all()


@pytest.mark.parametrize(
    "geometry",
    [(32, 8, 128, 16), (64, 8, 128, 16), (71, 1, 64, 32), (7, 1, 256, 8), (16, 16, 80, 13)],
)
def test_validation_cases_cover_what_they_must(geometry: tuple[int, int, int, int]) -> None:
    heads, kv_heads, head_size, block_size = geometry
    problem = PagedDecodeProblem(
        sequences=64,
        context=131_072,
        query_heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        block_size=block_size,
        lengths="uniform:1",
    )
    cases = validation_cases(problem)
    assert len({case.name for case in cases}) == len(cases) <= 6
    assert {case.inputs for case in cases} == set(VALIDATION_INPUTS)
    lengths = [case.problem.context_lens() for case in cases]
    tokens = set(np.concatenate(lengths).tolist())
    assert {0, 1, block_size, block_size + 1} <= tokens
    longest = 512 if heads // kv_heads > WIDE_GROUP else 700
    assert any(longest <= length <= 1100 and length % block_size for length in tokens)
    assert any(len(batch) == 1 for batch in lengths)
    for case in cases:
        got = case.problem
        assert (got.query_heads, got.kv_heads, got.head_size, got.block_size) == geometry
        operands = make_operands(got, case.inputs, case.seed)
        assert sum(array.nbytes for array in operands.inputs.values()) < 4 * 2**20


def test_unknown_inputs_name_the_nearest_kind() -> None:
    with pytest.raises(UnknownNameError, match="did you mean zeros"):
        make_operands(decode_problem(), "zeroes", 0)


def test_a_head_size_that_does_not_pack_is_refused() -> None:
    with pytest.raises(UsageError, match="head size 66"):
        make_operands(decode_problem(head_size=66), "timing", 0)
