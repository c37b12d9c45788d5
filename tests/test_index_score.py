"""index_score: right on every geometry, as golden, within derived bounds, broken on purpose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.family_kernels import (
    COMPILER,
    Mistake,
    assert_caught,
    assert_right,
    judged,
    launched,
    variant,
)
from tests.golden_indexer import golden_operands, golden_problem, golden_results
from tests.golden_vectors import Golden, load, names
from tests.made_devices import gpu, narrow_cpu
from tests.spirv_tools import spirv_val
from tuner import workloads
from tuner.evaluate import ResidentCases, render_passes
from tuner.kernels.base import Values
from tuner.kernels.index_score import INDEX_SCORE
from tuner.kernels.space import legal, pairwise, reasons
from tuner.oracle import judge
from tuner.oracle.indexer_bounds import score_bounds
from tuner.problems import IndexerStepProblem

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

GEOMETRIES: tuple[IndexerStepProblem, ...] = workloads.geometries("indexer_step")  # type: ignore[assignment]
RELEASED, TWOS, ONE_HEAD, MANY_HEADS, WIDE = GEOMETRIES
COVERED: Mapping[str, tuple[IndexerStepProblem, ...]] = {
    "baseline": (RELEASED, MANY_HEADS),
    "scalar_f32 lanes=8 row_tile=2 unroll=2 subgroups=4": (RELEASED,),
    "scalar_f32 lanes=4 row_tile=1 unroll=2 tiles=4": (TWOS,),
    "scalar_f32 lanes=8 row_tile=1 unroll=1 tiles=4": (WIDE,),
    "scalar_f32 lanes=2 unroll=2 query_in=shared widening=integer tiles=16": (ONE_HEAD,),
    "scalar_f32 lanes=4 row_tile=1 unroll=1 query_in=shared subgroups=2": (MANY_HEADS,),
    "packed_f16 lanes=8 row_tile=4 unroll=2 tiles=4": (RELEASED,),
    "packed_f16 lanes=1 row_tile=2 unroll=2 query_in=shared subgroups=2": (TWOS,),
    "packed_f16 lanes=8 unroll=2 query_in=shared subgroups=8": (WIDE, ONE_HEAD),
    "packed_f16 lanes=4 row_tile=1 unroll=2 subgroups=2": (MANY_HEADS,),
}
MATRIX = {
    "matrix row_tile=4 unroll=1 subgroups=4 query_terms=2": (RELEASED,),
    "matrix row_tile=2 unroll=1 subgroups=2 key_in=shared query_terms=2": (RELEASED, MANY_HEADS),
    "matrix row_tile=1 unroll=1 query_terms=1 tiles=4": (TWOS, WIDE),
    "matrix row_tile=2 unroll=4 subgroups=2 query_terms=2": (ONE_HEAD,),
}


def flat(table: Mapping[str, tuple[IndexerStepProblem, ...]]) -> list[Any]:
    return [
        pytest.param(text, of, id=f"{text} {of.label}")
        for text, problems in table.items()
        for of in problems
    ]


@pytest.fixture(scope="module")
def cases(vulkan_runner: VulkanRunner) -> Iterator[ResidentCases]:
    """Validation cases that the variants of one geometry share."""
    resident = ResidentCases(vulkan_runner, INDEX_SCORE)
    yield resident
    resident.close()


def on_matrices(
    text: str, of: IndexerStepProblem, runner: VulkanRunner, shapes: tuple[str, ...]
) -> Values:
    """A variant with the first of the matrices with which it is legal."""
    for shape in shapes:
        if shape in INDEX_SCORE.parameter("matrix_shape").values:
            values = variant(INDEX_SCORE, f"{text} matrix_shape={shape}", runner.info)
            if not reasons(INDEX_SCORE, values, of, runner.info):
                return values
    pytest.skip(f"{text} is legal with none of the matrices {', '.join(shapes)}")


@pytest.mark.parametrize(("text", "of"), flat(COVERED))
def test_every_geometry_is_right(
    vulkan_runner: VulkanRunner, cases: ResidentCases, text: str, of: IndexerStepProblem
) -> None:
    assert_right(vulkan_runner, INDEX_SCORE, of, text, cases)


@pytest.mark.parametrize(("text", "of"), flat(MATRIX))
def test_matrices_are_right_where_the_device_has_them(
    vulkan_runner: VulkanRunner,
    matrix_shapes: tuple[str, ...],
    cases: ResidentCases,
    text: str,
    of: IndexerStepProblem,
) -> None:
    values = on_matrices(text, of, vulkan_runner, matrix_shapes)
    assert judged(vulkan_runner, INDEX_SCORE, of, values, cases=cases).failure is None


GOLDEN = names("s3_index_score*")


def assert_as_golden(runner: VulkanRunner, golden: Golden, values: Values) -> None:
    operands = golden_operands(golden, INDEX_SCORE)
    found = launched(runner, INDEX_SCORE, golden_problem(golden), operands, values)
    arithmetic = INDEX_SCORE.arithmetic(values)
    verdict = judge(found.outputs, INDEX_SCORE.reference(operands), arithmetic, golden.name)
    assert verdict.ok, verdict.message
    if arithmetic == "f32":
        assert golden.differences(golden_results(golden, found.outputs)) == []


@pytest.mark.parametrize(
    "text",
    [
        "baseline",
        "scalar_f32 lanes=4 row_tile=1 unroll=2",
        "packed_f16 lanes=4 row_tile=2 unroll=1 subgroups=2",
    ],
)
@pytest.mark.parametrize("name", GOLDEN)
def test_scores_are_as_golden(vulkan_runner: VulkanRunner, name: str, text: str) -> None:
    values = variant(INDEX_SCORE, text, vulkan_runner.info)
    assert_as_golden(vulkan_runner, load(name), values)


@pytest.mark.parametrize("name", GOLDEN)
def test_scores_of_matrices_are_as_golden(
    vulkan_runner: VulkanRunner, matrix_shapes: tuple[str, ...], name: str
) -> None:
    golden = load(name)
    text = "matrix row_tile=2 query_terms=2 subgroups=2 key_in=shared"
    values = on_matrices(text, golden_problem(golden), vulkan_runner, matrix_shapes)
    assert_as_golden(vulkan_runner, golden, values)


def test_no_vector_is_missing() -> None:
    assert GOLDEN == ["s3_index_score", "s3_index_score_small"]


@pytest.mark.parametrize("last", [2047, 2048, 2050, 2051, 2054])
def test_blocks_are_complete_from_their_last_token_on(
    vulkan_runner: VulkanRunner, last: int
) -> None:
    """The row at position p sees (p + 1) // 4 blocks: 2,048, 2,049, 2,051, 2,052, 2,055 tokens."""
    of = IndexerStepProblem(
        rows=1, context=last + 1, capacity=2100, index_heads=2, index_dim=32, rotary=16
    )
    operands = INDEX_SCORE.operands(of, "random", 3)
    values = variant(INDEX_SCORE, "scalar_f32 lanes=4 unroll=2", vulkan_runner.info)
    found = launched(vulkan_runner, INDEX_SCORE, of, operands, values)
    written = ~np.isnan(found.outputs["scores"][0])
    assert np.flatnonzero(written).tolist() == list(range((last + 1) // 4))


# Broken on purpose

LANES = "scalar_f32 lanes=4 row_tile=2 unroll=2 subgroups=2"
SHARED = "packed_f16 lanes=4 row_tile=2 unroll=2 query_in=shared"
MISTAKES = {
    "an incomplete block": Mistake(
        variant=LANES,
        right="block < complete_blocks(row)",
        wrong="block <= complete_blocks(row)",
        says="unwritten",
    ),
    "every row sees what the last sees": Mistake(
        variant=LANES,
        right="block < complete_blocks(row)",
        wrong="block < complete_blocks(last_row)",
        says="unwritten",
    ),
    "the last tile is left out": Mistake(
        variant=LANES,
        right="uint first = tile * KEY_GROUPS * KEYS + key_group;",
        wrong="uint first = tile * KEY_GROUPS * KEYS + key_group; "
        "if (tile > 0u && (tile + 1u) * KEY_GROUPS * KEYS >= end) break;",
        says="scores",
    ),
    "no ReLU": Mistake(
        variant=LANES,
        right="max(across_key_lanes(dots[r * INDEX_HEADS + h][u]), 0.0)",
        wrong="across_key_lanes(dots[r * INDEX_HEADS + h][u])",
        says="scores",
    ),
    "ReLU of the sum": Mistake(
        variant="baseline", right="max(dots[head], 0.0)", wrong="dots[head]", says="scores"
    ),
    "one head less": Mistake(
        variant=LANES, right="h < INDEX_HEADS;", wrong="h < INDEX_HEADS - 1u;", says="scores"
    ),
    "equal keys that score otherwise": Mistake(
        variant=LANES,
        right="score * SCORE_SCALE",
        wrong="score * (SCORE_SCALE + 4e-8 * float(block & 1u))",
        says="apart",
    ),
    "not divided": Mistake(
        variant="baseline", right=" / sqrt(float(INDEX_DIM))", wrong="", says="scores"
    ),
    "another row's queries": Mistake(
        variant=SHARED,
        right="min(first_row + vector / INDEX_HEADS, push.rows - 1u)",
        wrong="first_row",
        says="scores",
    ),
    "heads of another size": Mistake(
        variant=SHARED, right="query_size[r * INDEX_HEADS + h]", wrong="query_size[0]", says=""
    ),
    "lanes that see no piece of the key": Mistake(
        variant=LANES,
        right="value += subgroupShuffleXor(value, 1u << bit);",
        wrong="",
        says="scores",
    ),
    "float16 in a float32 kernel": Mistake(
        variant="baseline",
        right="max(dots[head], 0.0)",
        wrong="unpackHalf2x16(packHalf2x16(vec2(max(dots[head], 0.0)))).x",
        says="scores",
    ),
    "subnormals are lost": Mistake(
        variant="scalar_f32 lanes=4 widening=integer",
        right="float(size) * 5.9604644775390625e-8",
        wrong="0.0",
        says="scores",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_broken_kernel_is_caught(
    vulkan_runner: VulkanRunner, cases: ResidentCases, name: str
) -> None:
    assert_caught(vulkan_runner, INDEX_SCORE, TWOS, MISTAKES[name], cases)


# Without a device


def test_bounds_hold_for_emulated_arithmetic_and_tell_classes_apart() -> None:
    operands = INDEX_SCORE.operands(RELEASED, "random", 5)
    keys = operands.inputs["block_keys"].view(np.float16)[: RELEASED.end_block]
    query = operands.inputs["index_query"][0]
    exact = INDEX_SCORE.reference(operands).outputs["scores"][: len(keys) - 1, 0]

    def off(q: np.ndarray, k: np.ndarray, kind: type) -> np.ndarray:
        products = q.astype(kind)[:, None, :] * k.astype(kind)
        dots = np.zeros(products.shape[:2], np.float32)
        for first in range(0, q.shape[-1], 32):
            short = np.zeros(products.shape[:2], kind)
            for dim in range(first, first + 32):
                short = (short + products[..., dim]).astype(kind)
            dots += short.astype(np.float32)
        score = np.maximum(dots, 0).sum(axis=0) / np.sqrt(np.float32(q.shape[-1]))
        return np.abs(score[: len(exact)].astype(np.float64) - exact)

    for kind, arithmetic in ((np.float32, "f32"), (np.float16, "f16")):
        bound = score_bounds(arithmetic, query, keys)[: len(exact)]  # type: ignore[arg-type]
        share = off(query, keys, kind) / bound
        assert share.max() < 0.6
    assert (off(query, keys, np.float16) / score_bounds("f32", query, keys)[: len(exact)]).max() > 5


ON_PAPER = {"narrow CPU": narrow_cpu(), "GPU": gpu()}


@pytest.mark.parametrize("device", ON_PAPER.values(), ids=list(ON_PAPER))
def test_kernels_are_valid_spirv(device: Any) -> None:
    kernels = set()
    for of in (RELEASED, TWOS):
        for values in pairwise(legal(INDEX_SCORE, of, device)):
            (each,) = render_passes(INDEX_SCORE, values, of, device)
            kernels.add(COMPILER.compile(each.rendered, values=values).spirv)
    assert len(kernels) > 35
    for spirv in sorted(kernels)[::4]:
        spirv_val(spirv)


def test_every_strategy_is_legal_on_a_gpu() -> None:
    for of in workloads.default_problems("indexer_step", on_cpu=False):
        found = {values["strategy"] for values in legal(INDEX_SCORE, of, gpu())}
        assert found == set(INDEX_SCORE.parameter("strategy").values)
        assert any(not reasons(INDEX_SCORE, start, of, gpu()) for start in INDEX_SCORE.starts)


def test_what_is_timed_is_what_is_validated() -> None:
    device = gpu()
    for of in workloads.default_problems("indexer_step", on_cpu=False)[::3]:
        for values in pairwise(legal(INDEX_SCORE, of, device)):
            timed = render_passes(INDEX_SCORE, values, of, device)
            several = 0
            for case in INDEX_SCORE.validation_cases(of):
                assert not reasons(INDEX_SCORE, values, case.problem, device)
                small = render_passes(INDEX_SCORE, values, case.problem, device)
                assert [p.rendered.text for p in timed] == [p.rendered.text for p in small]
                several = max(several, small[0].declared.groups[0])
            assert several > 1


def test_the_workgroup_limit_is_respected() -> None:
    largest = IndexerStepProblem(rows=4, context=262_144)
    assert largest.max_blocks == 65_537
    device = gpu()
    for values in pairwise(legal(INDEX_SCORE, largest, device)):
        for each in render_passes(INDEX_SCORE, values, largest, device):
            assert max(each.declared.groups) <= 65_535
    small = gpu(max_workgroup_count=(255, 255, 255))
    said = reasons(INDEX_SCORE, INDEX_SCORE.baseline, largest, small)
    assert said == ("1028 workgroups in x, the device allows 255",)
