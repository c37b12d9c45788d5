"""Every strategy on the device against golden vectors that were computed independently."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.family_kernels import launched, variant
from tests.golden_decode import decode_operands, decode_problem
from tests.golden_vectors import Golden, load, names
from tuner.kernels.base import Values
from tuner.kernels.paged_decode_q8 import PAGED_DECODE_Q8 as FAMILY
from tuner.kernels.space import reasons
from tuner.oracle import decode_reference, judge

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

GOLDEN = names("s1_decode_q8_*")
STRATEGIES = {
    "baseline": "baseline",
    "scalar_f32": "scalar_f32 staging=shared subgroups=4 lanes_per_token=8 split=count:4",
    "scalar_f32 whole": "scalar_f32 staging=shared subgroups=4 lanes_per_token=8 tokens_unrolled=2",
    "packed_f16": "packed_f16 subgroups=2 lanes_per_token=8 tokens_unrolled=2 split=count:8",
    "int_dot, one term": "int_dot subgroups=2 lanes_per_token=8 split=count:2 combine_slices=2",
    "int_dot, two terms": "int_dot subgroups=2 lanes_per_token=8 query_terms=2 split=count:16",
}
"""Enough splits for 4,000 tokens: lavapipe before Mesa 23 ends the loops of a kernel,
all together, after 65,535 rounds."""


def check(runner: VulkanRunner, golden: Golden, values: Values) -> None:
    operands = decode_operands(golden)
    execution = launched(runner, FAMILY, decode_problem(golden), operands, values)
    arithmetic = FAMILY.arithmetic(values)
    verdict = judge(execution.outputs, decode_reference(operands), arithmetic, golden.name)
    assert verdict.ok, verdict.message
    if arithmetic == "f32":
        # The files' own rule is meant for float32; coarser classes have the oracle's bounds.
        assert golden.differences(execution.outputs) == []


def slices(golden: Golden) -> str:
    """Deals the query group out over the workgroup as far as it goes."""
    return f"head_slices={min(4, decode_problem(golden).group)}"


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("text", STRATEGIES.values(), ids=list(STRATEGIES))
def test_decode_is_as_golden(vulkan_runner: VulkanRunner, name: str, text: str) -> None:
    golden = load(name)
    dealt = f"{text} {slices(golden)}" if "staging=shared" in text else text
    values = variant(FAMILY, dealt, vulkan_runner.info)
    check(vulkan_runner, golden, values)


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("key_operand", ["float16", "int8"])
def test_decode_with_matrices_is_as_golden(
    vulkan_runner: VulkanRunner, matrix_shape: str, name: str, key_operand: str
) -> None:
    info, golden = vulkan_runner.info, load(name)
    shaped = f"matrix matrix_shape={matrix_shape} key_operand={key_operand}"
    text = f"{shaped} staging=shared split=count:4"
    values = variant(FAMILY, text, info)
    if found := reasons(FAMILY, values, decode_problem(golden), info):
        pytest.skip("; ".join(found))
    check(vulkan_runner, golden, values)


def test_no_vector_is_missing() -> None:
    assert len(GOLDEN) == 6
