"""Paged attention on matrix units fed straight from memory: the plan, emulated lane by lane."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tests.family_kernels import variant
from tests.made_devices import LANES_8, LANES_32, LANES_32_WIDE, gpu
from tests.test_float_matrix import narrow_terms
from tuner.device_info import MatrixLayout
from tuner.kernels.attention_matrix_lanes import CHUNK_HALVES, LanePlan, lane_plan
from tuner.kernels.paged_attention import PAGED_ATTENTION as FAMILY
from tuner.kernels.space import reasons
from tuner.problems import PagedAttentionProblem

LAYOUTS = {
    "16x8x16": LANES_32,
    "16x16x16": LANES_32_WIDE,
    "8x8x8": LANES_8,
    "16x8x8": narrow_terms(),
}
each_plan = pytest.mark.parametrize(
    ("layout", "head_size"),
    [(layout, size) for layout in LAYOUTS.values() for size in (64, 128, 256)],
    ids=[f"{name} d{size}" for name in LAYOUTS for size in (64, 128, 256)],
)

Floats = npt.NDArray[np.float64]


def plan_of(layout: MatrixLayout, head_size: int) -> LanePlan:
    plan = lane_plan(layout, head_size)
    assert not isinstance(plan, str), plan
    return plan


def operand(layout: MatrixLayout, plan: LanePlan, held: Floats) -> Floats:
    """The matrix [rows, terms] whose lanes hold `held` [lane, own row, own term]."""
    a = layout.a
    matrix = np.full((layout.shape.m, layout.shape.k), np.nan)
    for lane, of_lane in enumerate(held):
        for j, of_row in enumerate(plan.elements):
            for p, element in enumerate(of_row):
                row = a.lane_row[lane] + a.element_row[element]
                matrix[row, a.lane_column[lane] + a.element_column[element]] = of_lane[j, p]
    assert not np.isnan(matrix).any(), "an element that no lane holds"
    return matrix


def loaded(vector: Floats, number: int, classes: int, slots: int) -> Floats:
    """What a lane of class `number` loads of a vector: every `classes`-th chunk."""
    chunks = vector.reshape(-1, CHUNK_HALVES)
    return np.concatenate([chunks[number + classes * slot] for slot in range(slots)])


@each_plan
def test_scores_are_products_of_keys_and_query(layout: MatrixLayout, head_size: int) -> None:
    plan, (m, k) = plan_of(layout, head_size), (layout.shape.m, layout.shape.k)
    rng = np.random.default_rng(1)
    keys, query = rng.standard_normal((m, head_size)), rng.standard_normal(head_size)
    permuted = np.empty(head_size)
    permuted[list(plan.query_places)] = query
    rows, terms = plan.rows, plan.terms
    own, scores = len(terms.offsets), np.zeros(m)
    for step in range(head_size // k):
        held = np.empty((len(rows.lane_class), len(rows.offsets), own))
        for lane, number in enumerate(terms.lane_class):
            for j, offset in enumerate(rows.offsets):
                key = keys[rows.bases[rows.lane_class[lane]] + offset]
                halves = loaded(key, number, len(terms.bases), plan.key_slots)
                held[lane, j] = halves[step * own : (step + 1) * own]
        scores += operand(layout, plan, held) @ permuted[step * k : (step + 1) * k]
    np.testing.assert_allclose(scores, keys @ query)


@each_plan
def test_sums_are_values_times_weights(layout: MatrixLayout, head_size: int) -> None:
    plan, (m, k) = plan_of(layout, head_size), (layout.shape.m, layout.shape.k)
    rng = np.random.default_rng(2)
    values, weights = rng.standard_normal((k, head_size)), rng.standard_normal(k)
    rows, terms = plan.rows, plan.terms
    own, sums = len(rows.offsets), np.full(head_size, np.nan)
    for tile in range(head_size // m):
        held = np.empty((len(rows.lane_class), own, len(terms.offsets)))
        for lane, number in enumerate(rows.lane_class):
            for p, offset in enumerate(terms.offsets):
                value = values[terms.bases[terms.lane_class[lane]] + offset]
                halves = loaded(value, number, len(rows.bases), plan.value_slots)
                held[lane, :, p] = halves[tile * own : (tile + 1) * own]
        dims = list(plan.output_dims[tile * m : (tile + 1) * m])
        sums[dims] = operand(layout, plan, held) @ weights
    np.testing.assert_allclose(sums, weights @ values)


def problem(head_size: int = 128, element: str = "f16") -> PagedAttentionProblem:
    return PagedAttentionProblem(
        batch=8,
        query_tokens=1,
        context=16384,
        query_heads=32,
        kv_heads=8,
        head_size=head_size,
        element=element,
    )


@pytest.mark.parametrize(
    ("text", "of", "says"),
    [
        ("", problem(element="bf16"), "not bf16"),
        ("", problem(96), "8 lanes cannot share the 12 chunks of values evenly"),
        ("tile_rows=4", problem(), "4 rows do not fill matrices of 8"),
        ("tile_rows=64", problem(), "need more than 4 matrices of 8: use matrix"),
        ("tile_tokens=8", problem(), "8 tokens do not cut into matrices of 16 and 16"),
        ("tile_tokens=64", problem(), "use fewer tile_tokens or tile_rows"),
        ("matrix_shape=16x8x8", problem(), "no probed layout of shape 16x8x8"),
        ("exchange=convert", problem(), "needs NV cooperative matrix 2 with conversions"),
    ],
)
def test_what_cannot_be_has_a_reason(text: str, of: PagedAttentionProblem, says: str) -> None:
    whole = f"matrix_lanes subgroup_size=32 subgroups=4 tile_rows=8 tile_tokens=16 {text}"
    device = gpu(cooperative_matrix2=())
    assert says in "; ".join(reasons(FAMILY, variant(FAMILY, whole, device), of, device))


def test_the_first_starts_of_a_decode_step_are_fed_by_lanes() -> None:
    device = gpu()
    legal = [values for values in FAMILY.starts if not reasons(FAMILY, values, problem(), device)]
    assert {values["strategy"] for values in legal[:6]} == {"matrix_lanes"}
    assert legal[0]["tile_rows"] == 8
