"""Appending to the planar int8 cache: golden vectors, shared scale words, broken kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.family_kernels import Mistake, assert_caught, judged, launched
from tests.golden_vectors import Golden, load, names
from tuner.errors import UsageError
from tuner.evaluate import ResidentCases
from tuner.kernels.base import Operands
from tuner.kernels.kv_append import KV_APPEND_Q8, make_operands
from tuner.oracle import judge
from tuner.oracle.kv_append import kv_append_reference
from tuner.oracle.rounding import codes_near_boundaries, half_scales_near_boundaries
from tuner.problems import KvAppendProblem
from tuner.quant import append_rows, planar_layout, quantise_groups

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

GOLDEN = names("s3_kv_append_*")
ORACLE = 1e-9
ODD = KvAppendProblem(rows=3, context=7, kv_heads=1, head_size=96)
EVEN = KvAppendProblem(rows=2, context=4, kv_heads=2, head_size=64)
IN_TURN = "teams subgroups=2 lanes=4 halves=1"
SIDE_BY_SIDE = "teams subgroups=1 lanes=8 halves=2"


def golden_case(golden: Golden) -> tuple[KvAppendProblem, Operands]:
    attributes, inputs = golden.attributes, golden.inputs
    rows, row = int(attributes["nb"]), int(attributes["row"])
    problem = KvAppendProblem(
        rows=rows,
        context=int(attributes["base_pos"]),
        kv_heads=int(attributes["num_kv_heads"]),
        head_size=int(attributes["head_dim"]),
    )
    operands = Operands(
        inputs={
            "key": inputs["k"].reshape(rows, row),
            "value": inputs["v"].reshape(rows, row),
            "key_cache": inputs["kc"],
            "value_cache": inputs["vc"],
        },
        outputs={
            f"{side}_cache": (inputs["kc"].shape, np.dtype(np.uint32)) for side in ("key", "value")
        },
        scalars={
            "first_row": problem.context,
            "rows": rows,
            "scale_offset": attributes["scale_off"],
        },
    )
    return problem, operands


def compared(
    golden: Golden, key_cache: np.ndarray, value_cache: np.ndarray
) -> dict[str, np.ndarray]:
    """The arrays of the file, from both buffers."""
    attributes = golden.attributes
    rows, row = int(attributes["nb"]), int(attributes["row"])
    first, offset = int(attributes["base_pos"]), int(attributes["scale_off"]) // 2
    found = {"kc": key_cache, "vc": value_cache}
    for side, buffer in (("k", key_cache), ("v", value_cache)):
        codes = buffer.view(np.int8)[first * row : (first + rows) * row]
        scales = buffer.view(np.uint16)[offset:][first * row // 32 : (first + rows) * row // 32]
        found[f"{side}_codes"] = codes.reshape(rows, row)
        found[f"{side}_scale_bits"] = scales.reshape(rows, row // 32)
    return found


@pytest.mark.parametrize("name", GOLDEN)
def test_packing_agrees_with_golden(name: str) -> None:
    golden = load(name)
    problem, operands = golden_case(golden)
    caches = [operands.inputs[f"{side}_cache"].copy() for side in ("key", "value")]
    for side, cache in zip(("key", "value"), caches, strict=True):
        append_rows(
            cache,
            operands.inputs[side],
            first=problem.context,
            scale_offset=int(golden.attributes["scale_off"]),
        )
    assert golden.differences(compared(golden, *caches), bound=ORACLE) == []
    max_tokens = int(golden.attributes["max_t"])
    assert planar_layout(max_tokens, problem.row) == (
        golden.attributes["scale_off"],
        golden.attributes["buffer_bytes"],
    )


@pytest.mark.parametrize("name", GOLDEN)
def test_the_oracle_allows_what_golden_allows_and_no_more(name: str) -> None:
    golden = load(name)
    _, operands = golden_case(golden)
    for side, full in (("k", "key"), ("v", "value")):
        groups = operands.inputs[full].reshape(-1, 32)
        near, scale_near = (golden.want[f"{side}_{flags}"] for flags in ("near", "scale_near"))
        np.testing.assert_array_equal(codes_near_boundaries(groups), near.reshape(-1, 32))
        np.testing.assert_array_equal(half_scales_near_boundaries(groups), scale_near.ravel())
    right = {"key_cache": golden.want["kc"], "value_cache": golden.want["vc"]}
    verdict = judge(right, kv_append_reference(operands), "f32", name)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("text", ["baseline", IN_TURN, SIDE_BY_SIDE])
def test_kernels_agree_with_golden(vulkan_runner: VulkanRunner, name: str, text: str) -> None:
    golden = load(name)
    problem, operands = golden_case(golden)
    outputs = launched(vulkan_runner, KV_APPEND_Q8, problem, operands, text).outputs
    found = compared(golden, outputs["key_cache"], outputs["value_cache"])
    assert golden.differences(found) == []
    verdict = judge(outputs, kv_append_reference(operands), "f32", name)
    assert verdict.ok, verdict.message


def test_no_vector_is_missing() -> None:
    assert len(GOLDEN) == 2


@pytest.fixture(scope="module")
def cases(vulkan_runner: VulkanRunner) -> Iterator[ResidentCases]:
    resident = ResidentCases(vulkan_runner, KV_APPEND_Q8)
    yield resident
    resident.close()


@pytest.mark.parametrize("text", ["baseline", IN_TURN, SIDE_BY_SIDE])
@pytest.mark.parametrize("problem", [ODD, EVEN], ids=["odd", "even"])
def test_geometries_are_right(
    vulkan_runner: VulkanRunner, cases: ResidentCases, problem: KvAppendProblem, text: str
) -> None:
    assert judged(vulkan_runner, KV_APPEND_Q8, problem, text, cases=cases).failure is None


@pytest.mark.parametrize("text", ["baseline", IN_TURN, SIDE_BY_SIDE])
@pytest.mark.parametrize("context", [0, 1])
def test_rows_appended_one_by_one_are_rows_appended_together(
    vulkan_runner: VulkanRunner, text: str, context: int
) -> None:
    """Each step finds half a scale word written by the step before, and must leave it."""
    whole = KvAppendProblem(rows=3, context=context, kv_heads=1, head_size=96)
    operands = make_operands(whole, "random", 5)
    together = launched(vulkan_runner, KV_APPEND_Q8, whole, operands, text).outputs
    caches = {name: operands.inputs[name] for name in operands.outputs}
    for step in range(3):
        one = msgspec.structs.replace(whole, rows=1, context=context + step)
        rows = {side: operands.inputs[side][step : step + 1] for side in ("key", "value")}
        scalars = operands.scalars | {"rows": 1, "first_row": context + step}
        part = Operands(inputs=rows | caches, outputs=operands.outputs, scalars=scalars)
        caches = launched(vulkan_runner, KV_APPEND_Q8, one, part, text).outputs
    for name, cache in caches.items():
        np.testing.assert_array_equal(cache, together[name])


MISTAKES = {
    "half away from zero": Mistake(
        variant=IN_TURN,
        right="roundEven(divided(values[w][i], scale))",
        wrong="sign(values[w][i]) * floor(abs(divided(values[w][i], scale)) + 0.5)",
        says="codes",
    ),
    "codes from the rounded scale": Mistake(
        variant=SIDE_BY_SIDE,
        right="float scale = divided(largest, 127.0);",
        wrong="float scale = unpackHalf2x16(half_bits(divided(largest, 127.0))).x;",
        says="codes",
    ),
    "scale of the other side": Mistake(
        variant=IN_TURN,
        right="uint before = side == 0u ?",
        wrong="uint before = side == 1u ?",
        says="rest",
    ),
    "neighbour's scale lost": Mistake(
        variant=SIDE_BY_SIDE, right="if (!(low && high)) {", wrong="if (false) {", says="rest"
    ),
    "neighbour's scale lost in the baseline": Mistake(
        variant="baseline", right="keep == 0u ?", wrong="true ?", says="rest"
    ),
    "subnormal scales flushed": Mistake(
        variant=IN_TURN,
        right="if (size < 0x33000000u) {",
        wrong="if (size < 0x38800000u) {",
        says="scales",
    ),
    "scales rounded down": Mistake(
        variant="baseline", right="rest > middle ||", wrong="false ||", says="scales"
    ),
    "values for keys": Mistake(
        variant=IN_TURN, right="values[w] = key_quads", wrong="values[w] = value_quads"
    ),
    "one row too many": Mistake(
        variant="baseline", right="push.rows * GROUPS;", wrong="(push.rows + 1u) * GROUPS;"
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_a_broken_kernel_is_caught(
    vulkan_runner: VulkanRunner, cases: ResidentCases, mistake: Mistake
) -> None:
    assert_caught(vulkan_runner, KV_APPEND_Q8, ODD, mistake, cases)


# Packing


@given(st.floats(0, 2.0**127, width=32), st.floats(0, 1, width=32))
def test_codes_and_scales_reconstruct_what_float16_can(peak: float, share: float) -> None:
    group = np.full(32, peak, np.float32) * np.float32(share)
    group[5] = -np.float32(peak)
    codes, scales = quantise_groups(group)
    scale = float(scales[0])
    if not np.isfinite(scale):
        assert peak > 65504 * 127 * 0.999
    elif scale < 2.0**-14:
        assert peak < 2.0**-14 * 127 * 1.001
    else:
        assert np.abs(codes * scale - group).max() <= 0.00443 * peak


def test_groups_with_no_number_are_refused() -> None:
    with pytest.raises(UsageError, match="infinite or NaN"):
        quantise_groups(np.full(32, np.nan, np.float32))


def test_a_planar_buffer_is_as_large_as_the_specification_says() -> None:
    assert planar_layout(8192, 512) == (4_194_304, 4_456_448)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_size": 40}, "kv_heads \\* head_size is 80, must be a multiple"),
        ({"rows": 0}, "rows is 0"),
        ({"context": -1}, "context is -1"),
    ],
)
def test_bad_problems_are_refused(changes: dict[str, int], message: str) -> None:
    fields = {"rows": 1, "context": 0, "kv_heads": 2, "head_size": 64}
    with pytest.raises(UsageError, match=message):
        KvAppendProblem(**(fields | changes))
