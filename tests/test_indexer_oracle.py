"""The indexer's oracle against golden vectors that were computed independently."""

from __future__ import annotations

import numpy as np
import pytest

from tests.golden_indexer import golden_operands, golden_problem, golden_results
from tests.golden_vectors import load, names
from tuner.kernels.index_append import INDEX_APPEND
from tuner.kernels.index_blocks import INDEX_BLOCKS
from tuner.kernels.index_q import INDEX_Q
from tuner.kernels.index_score import INDEX_SCORE
from tuner.kernels.index_select import INDEX_SELECT
from tuner.kernels.indexer_operands import block_table, rope_table
from tuner.oracle import indexer_references as references

ORACLE = 1e-9
"""What the vectors' README asks of a float64 oracle, relative 2-norm."""


@pytest.mark.parametrize("name", names("s3_index_append_*"))
def test_appended_keys_are_equal(name: str) -> None:
    golden = load(name)
    operands = golden_operands(golden, INDEX_APPEND)
    after = references.append_reference(operands).outputs["index_keys"].astype(np.uint16)
    assert golden.differences({"ikc_bits": after}, bound=ORACLE) == []


@pytest.mark.parametrize("name", names("s3_index_blocks_*"))
def test_block_keys_agree(name: str) -> None:
    golden = load(name)
    blocks, exact, _ = references.new_block_keys(golden_operands(golden, INDEX_BLOCKS))
    problem = golden_problem(golden)
    assert blocks.tolist() == list(range(golden.attributes["b0"], golden.attributes["b1"]))
    assert (problem.first_block, problem.end_block) == (
        golden.attributes["b0"],
        golden.attributes["b1"],
    )
    after = golden.inputs["blk_bits"].copy()
    after[blocks] = exact.astype(np.float16).view(np.uint16)
    got = {"blk_keys": exact, "blk_bits": after}
    assert golden.differences(got, bound=ORACLE) == []


@pytest.mark.parametrize("name", names("s3_index_q_*"))
def test_queries_agree(name: str) -> None:
    golden = load(name)
    got = {"iq": references.queries(golden_operands(golden, INDEX_Q))}
    assert golden.differences(got, bound=ORACLE) == []


@pytest.mark.parametrize("name", names("s3_index_score*"))
def test_scores_agree(name: str) -> None:
    golden = load(name)
    operands = golden_operands(golden, INDEX_SCORE)
    counts = references.complete_blocks(operands)
    assert counts.tolist() == golden.want["n_blocks"].tolist()
    got = np.full(golden.want["score"].shape, np.nan)
    for row, count in enumerate(counts):
        got[row, :count] = references.row_scores(operands, row, np.arange(count))
    assert golden.differences({"score": got}, bound=ORACLE) == []


@pytest.mark.parametrize("name", names("s3_index_select_*"))
def test_selections_are_equal(name: str) -> None:
    golden = load(name)
    found = references.selection(golden_operands(golden, INDEX_SELECT))
    assert golden.differences(golden_results(golden, found), bound=ORACLE) == []


def test_sizes_are_those_of_the_files() -> None:
    for name in names("s3_index_*"):
        golden = load(name)
        problem = golden_problem(golden)
        assert problem.max_blocks == golden.attributes["max_blocks"]
        assert problem.kept_blocks == golden.attributes["k"]
        assert problem.visible_stride == golden.attributes["vis_stride"]
        assert problem.mask_words == golden.attributes["mask_words"]


def test_tables_are_float64_angles_rounded_once() -> None:
    table = rope_table(np.array([0, 262_143]), 64, 1e7)
    assert table.shape == (2, 32, 2)
    assert table[0].tolist() == [[1.0, 0.0]] * 32
    angle = 262_143 * 1e7 ** (-2 * 5 / 64)
    assert table[1, 5].tolist() == [np.float32(np.cos(angle)), np.float32(np.sin(angle))]
    problem = golden_problem(load("s3_index_blocks_r2"))
    first = block_table(problem)[0]
    np.testing.assert_array_equal(first, rope_table(np.array([10]), 16, 1e7)[0])
