"""How matrix units are fed from float16 caches: the plans, emulated lane by lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.family_kernels import variant
from tests.golden_floats import F16
from tests.made_devices import LANES_8, LANES_32, gpu
from tuner.device_info import DeviceInfo, Fragment, MatrixLayout, MatrixShape
from tuner.kernels.float_matrix import PACKET, FeedPlan, feed_plan
from tuner.kernels.space import reasons
from tuner.problems import PagedDecodeProblem

HEAD_SIZE = 128


def narrow_terms() -> MatrixLayout:
    """16x8x8 over 32 lanes: half of the terms of 16x8x16."""
    a, b, shape = LANES_32.a, LANES_32.b, LANES_32.shape
    half = [e for e, column in enumerate(a.element_column) if column < 8]
    return MatrixLayout(
        shape=MatrixShape(
            m=16,
            n=8,
            k=8,
            a_type="float16",
            b_type="float16",
            c_type="float32",
            result_type=shape.result_type,
        ),
        a=Fragment(
            lane_row=a.lane_row,
            lane_column=a.lane_column,
            element_row=tuple(a.element_row[e] for e in half),
            element_column=tuple(a.element_column[e] for e in half),
        ),
        b=Fragment(
            lane_row=b.lane_row,
            lane_column=b.lane_column,
            element_row=b.element_row[:2],
            element_column=b.element_column[:2],
        ),
        c=LANES_32.c,
    )


LAYOUTS = {"16x8x16": LANES_32, "8x8x8": LANES_8, "16x8x8": narrow_terms()}
Planned = tuple[MatrixLayout, int, str, str]


def plan_of(layout: MatrixLayout, width: int, feed: str, exchange: str) -> FeedPlan | str:
    return feed_plan(layout, head_size=HEAD_SIZE, value_width=width, feed=feed, exchange=exchange)


CHOICES: dict[str, Planned] = {
    f"{name} {width} {feed} {exchange}": (layout, width, feed, exchange)
    for name, layout in LAYOUTS.items()
    for width in (8, 4, 2)
    for feed in ("registers", "matrices")
    for exchange in ("shared", "convert")
}
PLANS = {name: plan for name, plan in CHOICES.items() if isinstance(plan_of(*plan), FeedPlan)}


def planned(name: str) -> tuple[FeedPlan, MatrixLayout, int, str, str]:
    plan = plan_of(*PLANS[name])
    assert isinstance(plan, FeedPlan)
    return plan, *PLANS[name]


def assembled(plan: FeedPlan, layout: MatrixLayout, element: Any) -> np.ndarray:
    """The first operand [M, K] in which lane l holds `element(lane, j, p)` where the plan says."""
    fragment, matrix = layout.a, np.full((layout.shape.m, layout.shape.k), np.nan)
    for lane in range(len(fragment.lane_row)):
        for j, row in enumerate(plan.elements):
            for p, e in enumerate(row):
                place = (
                    fragment.lane_row[lane] + fragment.element_row[e],
                    fragment.lane_column[lane] + fragment.element_column[e],
                )
                assert place[0] == plan.rows[j][lane]
                matrix[place] = element(lane, j, p)
    assert np.isfinite(matrix).all()
    return matrix


@pytest.mark.parametrize("name", PLANS)
def test_scores_are_keys_times_query(name: str) -> None:
    plan, layout, _, feed, _ = planned(name)
    shape = layout.shape
    rng = np.random.default_rng(1)
    keys, query = rng.standard_normal((plan.span, HEAD_SIZE)), rng.standard_normal(HEAD_SIZE)
    staged = query[list(plan.query_dims)]
    own = len(plan.elements[0])
    for tile in range(plan.span // shape.m):
        total = np.zeros(shape.m)
        for step in range(HEAD_SIZE // shape.k):

            def element(lane: int, j: int, p: int, tile: int = tile, step: int = step) -> float:
                token = plan.tokens[tile * shape.m + plan.rows[j][lane]]
                slot, of_packet = divmod(step * own + p, PACKET)
                packet = plan.lane_class[lane] + plan.classes * slot
                return float(keys[token, packet * PACKET + of_packet])

            if feed == "registers":
                operand = assembled(plan, layout, element)
            else:
                rows = list(plan.tokens[tile * shape.m : (tile + 1) * shape.m])
                assert rows == list(range(rows[0], rows[0] + shape.m)), "rows of a matrix in order"
                operand = keys[rows, step * shape.k : (step + 1) * shape.k]
            total += operand @ staged[step * shape.k : (step + 1) * shape.k]
        rows = list(plan.tokens[tile * shape.m : (tile + 1) * shape.m])
        np.testing.assert_allclose(total, keys[rows] @ query, rtol=1e-12)


@pytest.mark.parametrize("name", PLANS)
def test_outputs_are_values_times_weights(name: str) -> None:
    plan, layout, width, feed, exchange = planned(name)
    shape = layout.shape
    rng = np.random.default_rng(2)
    values, weights = rng.standard_normal((shape.m, plan.span)), rng.random(plan.span)
    terms = np.full(plan.span, np.nan)
    for row, token in enumerate(plan.tokens):
        terms[plan.places[row]] = weights[token]
        # What an accumulator converts to has its rows for terms.
        assert exchange == "shared" or plan.places[row] == row
    own, total = len(plan.elements[0]), np.zeros(shape.m)
    for step in range(plan.span // shape.k):

        def element(lane: int, j: int, p: int, step: int = step) -> float:
            token = width * plan.lane_class[lane] + step * own + p
            return float(values[plan.rows[j][lane], token])

        part = slice(step * shape.k, (step + 1) * shape.k)
        operand = assembled(plan, layout, element) if feed == "registers" else values[:, part]
        total += operand @ terms[part]
    np.testing.assert_allclose(total, values @ weights, rtol=1e-12)


def test_plans_exist_where_spans_suit_the_matrices() -> None:
    counts = {shape: sum(name.startswith(f"{shape} ") for name in PLANS) for shape in LAYOUTS}
    assert counts == {"16x8x16": 4, "8x8x8": 12, "16x8x8": 4}


GPU_32 = gpu(matrix_layouts=(LANES_32, narrow_terms()))


def problem(**changes: Any) -> PagedDecodeProblem:
    fields = {"sequences": 8, "context": 16384, "query_heads": 64, "kv_heads": 8, "head_size": 128}
    return PagedDecodeProblem(**(fields | changes))


@pytest.mark.parametrize(
    ("text", "changes", "device", "told"),
    [
        ("matrix", {}, GPU_32, ""),
        ("matrix prefetch=1 subgroups=4", {"query_heads": 32}, GPU_32, ""),
        ("matrix feed=matrices matrix_shape=16x8x8", {}, GPU_32, ""),
        ("matrix feed=matrices", {}, GPU_32, "packets of 8 are no matrices of 16 terms"),
        ("matrix", {"head_size": 80}, GPU_32, "4 lanes cannot share the 10 packets"),
        ("matrix", {"value_head_size": 24}, GPU_32, "leave matrices of 16 empty"),
        ("matrix", {"block_size": 4}, GPU_32, "blocks of 4 tokens do not hold whole loads of 8"),
        ("matrix", {"block_size": 24}, GPU_32, "steps of 32 tokens and blocks of 24"),
        ("matrix prefetch=1", {"head_size": 256}, GPU_32, "do without prefetch"),
        ("matrix exchange=convert matrix_shape=16x8x8", {}, GPU_32, "16 rows do not convert to"),
        ("matrix value_width=2", {}, GPU_32, "spans of 8 tokens, 4 terms a lane, do not suit"),
        ("matrix", {"query_heads": 320}, GPU_32, "need 5 matrices of 8, the limit is 4"),
        ("matrix matrix_shape=8x8x8", {}, GPU_32, "the device has: 16x8x16, 16x8x8"),
        ("matrix", {}, gpu(cooperative_matrix=False), "needs KHR cooperative matrices"),
        ("matrix exchange=convert", {}, gpu(cooperative_matrix2=()), "NV cooperative matrix 2"),
        ("matrix", {}, gpu(subgroup_operations=("basic", "shuffle")), "of kind arithmetic, vote"),
        ("matrix subgroups=16", {}, gpu(max_shared_memory_bytes=16384), "the device has 16384"),
    ],
)
def test_what_does_not_suit_is_refused_with_its_numbers(
    text: str, changes: dict[str, Any], device: DeviceInfo, told: str
) -> None:
    found = "; ".join(reasons(F16, variant(F16, text, device), problem(**changes), device))
    assert told in found
    assert bool(found) == bool(told)
