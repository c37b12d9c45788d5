"""Queries and scales so small that they have no inverse: answers are numbers, and right."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.family_kernels import COMPILER, Mistake, launch, variant
from tuner import kernels, templates
from tuner.evaluate import Render, build_job
from tuner.kernels.base import Candidate, Family, Operands
from tuner.kernels.space import require_legal
from tuner.oracle import Verdict, judge
from tuner.problems import (
    IndexerStepProblem,
    PagedDecodeProblem,
    PagedSelectedProblem,
    Problem,
    Q8DecodeProblem,
    Q8SelectedProblem,
)

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

Array = npt.NDArray[Any]

HEADS: dict[str, Any] = {"query_heads": 6, "kv_heads": 2, "head_size": 64}
PAGED = PagedDecodeProblem(sequences=3, context=70, lengths="list:70,1,33", **HEADS)
Q8 = {"rows": 2, "tokens": 70, "step": 37, **HEADS}
PROBLEMS: dict[str, Problem] = {
    "paged_decode_q8": PAGED,
    "paged_decode_f32": PAGED,
    "paged_decode_f16": PAGED,
    "paged_selected_q8": PagedSelectedProblem(
        sequences=2, context=300, selected=3, ratio=16, **HEADS
    ),
    "attn_partials_q8": Q8DecodeProblem(**Q8),
    "attn_partials_selected_q8": Q8SelectedProblem(visible=70, **Q8),
    "index_score": IndexerStepProblem(rows=6, context=400, index_heads=1),
}
LANES = "lanes_per_token=8 head_slices=1"
VARIANTS = [
    ("paged_decode_q8", "baseline"),
    ("paged_decode_q8", f"scalar_f32 {LANES}"),
    ("paged_decode_q8", f"packed_f16 {LANES} tokens_unrolled=2"),
    ("paged_decode_q8", f"int_dot {LANES}"),
    ("paged_decode_q8", f"int_dot {LANES} query_terms=2"),
    ("paged_decode_f32", "baseline"),
    ("paged_decode_f32", "scalar_f32 token_lanes=8 value_lanes=1"),
    ("paged_decode_f16", "scalar_f32 token_lanes=8 value_lanes=1"),
    ("paged_decode_f16", "packed_f16 token_lanes=8 value_lanes=1"),
    ("paged_selected_q8", f"packed_f16 {LANES}"),
    ("attn_partials_q8", "baseline"),
    ("attn_partials_q8", f"scalar_f32 {LANES}"),
    ("attn_partials_q8", f"packed_f16 {LANES}"),
    ("attn_partials_q8", f"int_dot {LANES}"),
    ("attn_partials_q8", f"int_dot {LANES} query_terms=2"),
    ("attn_partials_selected_q8", f"packed_f16 {LANES}"),
    ("index_score", "baseline"),
    ("index_score", "scalar_f32 lanes=8 row_tile=2"),
    ("index_score", "packed_f16 lanes=8 row_tile=2"),
    ("index_score", "packed_f16 lanes=8 row_tile=2 query_in=shared"),
]
MATRICES = [
    ("paged_decode_q8", "matrix staging=registers"),
    ("paged_decode_q8", "matrix staging=shared key_operand=int8"),
    ("paged_decode_f16", "matrix value_width={width}"),
    ("paged_selected_q8", "matrix staging=shared"),
    ("attn_partials_q8", "matrix"),
]
"""Strategies that scale a query; that of `index_score` takes it as it is."""


def small(vectors: Array) -> Array:
    """Vectors [N, D] of normal values made, in turn, ordinary, zero but for the smallest subnormal
    number, all subnormal, subnormal in part, around the smallest unit, and zero."""
    sizes = np.array([1.0, 0.0, 1e-40, 1e-38, 1e-36, 0.0])[np.arange(len(vectors)) % 6]
    made = (vectors * sizes[:, None]).astype(np.float32)
    made[1::6, 3] = np.finfo(np.float32).smallest_subnormal
    return made


def with_small_queries(family: Family, of: Problem) -> Operands:
    """Random operands with `small` queries, and with cached vectors whose scale and codes are 0."""
    operands = family.operands(of, "random", 0)
    inputs = {name: array.copy() for name, array in operands.inputs.items()}
    if isinstance(of, IndexerStepProblem):
        queries = inputs["index_query"]
    elif isinstance(of, Q8DecodeProblem):
        queries = inputs["query_gate"][..., : of.head_size]
    else:
        rows = inputs["query"][:, : of.query_heads * of.head_size]
        queries = rows.reshape(len(rows), of.query_heads, of.head_size)
    queries[...] = small(queries.reshape(-1, queries.shape[-1])).reshape(queries.shape)
    if family.name in ("paged_decode_q8", "paged_selected_q8"):
        inputs["key_cache"][:, :, ::3] = 0
        inputs["value_cache"][:, :, 1::3] = 0
        inputs["value_cache"][:, 0] = 0  # Outputs of the first KV head must be exactly zero.
    return replace(operands, inputs=inputs)


def found(
    runner: VulkanRunner, family_name: str, text: str, render: Render = templates.render
) -> Verdict:
    family, of = kernels.family(family_name), PROBLEMS[family_name]
    operands = with_small_queries(family, of)
    values = variant(family, text, runner.info)
    require_legal(family, values, of, runner.info)
    candidate = Candidate(values, of, runner.info)
    job = build_job(family, candidate, operands.scalars, COMPILER, render=render).job
    outputs = launch(runner, job, operands).outputs
    return judge(outputs, family.reference(operands), family.arithmetic(values), text)


@pytest.mark.parametrize(("family_name", "text"), VARIANTS)
def test_queries_are_right_however_small(
    vulkan_runner: VulkanRunner, family_name: str, text: str
) -> None:
    verdict = found(vulkan_runner, family_name, text)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize(("family_name", "text"), MATRICES)
def test_queries_on_matrices_are_right_however_small(
    vulkan_runner: VulkanRunner, matrix_shape: str, family_name: str, text: str
) -> None:
    text = text.format(width=2 if vulkan_runner.info.is_cpu else 8)
    verdict = found(vulkan_runner, family_name, f"{text} matrix_shape={matrix_shape}")
    assert verdict.ok, verdict.message


@pytest.mark.parametrize(
    ("family_name", "text"),
    [(name, text) for name, text in VARIANTS if text.startswith("packed") and "index" not in name],
)
def test_without_a_smallest_unit_answers_are_wrong(
    vulkan_runner: VulkanRunner, family_name: str, text: str
) -> None:
    """Not with integers, nor with scores: what becomes of a NaN there is left open, 0 as a rule."""
    mistake = Mistake(variant=text, right="SMALLEST = 7.52316384526264e-37", wrong="SMALLEST = 0.0")
    assert not found(vulkan_runner, family_name, text, mistake.render).ok
