"""Every strategy on the device against golden vectors that were computed independently."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from tests.family_kernels import COMPILER, launch, launched, variant
from tests.golden_decode import decode_operands, decode_problem
from tests.golden_vectors import Golden, load, names
from tuner.evaluate import build_job
from tuner.evaluate.building import pack_push
from tuner.kernels.base import Candidate, Values
from tuner.kernels.paged_decode_q8 import PAGED_DECODE_Q8 as FAMILY
from tuner.kernels.space import reasons
from tuner.oracle import decode_reference, judge
from tuner.problems import PagedDecodeProblem

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

GOLDEN = [*names("s1_decode_q8_*"), *names("s1_split_q8_*")]
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
        # Kernels cut a context in their own way, so a file's partial results are not theirs.
        own = {name: golden.want[name] for name in golden.want if name.startswith("part_")}
        assert golden.differences(own | execution.outputs) == []


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


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_the_join_of_splits_is_as_golden(vulkan_runner: VulkanRunner, slices: int) -> None:
    """The pass `combine` alone, given the partial results of the file."""
    golden = load("s1_split_combine")
    peak, weight, mixture = (golden.inputs[f"part_{name}"] for name in ("m", "l", "o"))
    sequences, heads, splits, size = mixture.shape
    problem = PagedDecodeProblem(
        sequences=sequences, context=16 * splits, query_heads=heads, kv_heads=1, head_size=size
    )
    text = f"scalar_f32 split=count:2 combine_slices={slices}"
    values = variant(FAMILY, text, vulkan_runner.info)
    operands = FAMILY.operands(problem, "timing", 0)
    job = build_job(
        FAMILY, Candidate(values, problem, vulkan_runner.info), operands.scalars, COMPILER
    ).job
    scalars = dict(operands.scalars) | {"num_splits": splits, "tokens_per_split": 16}
    combine = msgspec.structs.replace(job.passes[1], push=pack_push(FAMILY, scalars))
    alone = msgspec.structs.replace(job, passes=(combine,), scratch_bytes={"counters": 4})
    # Logits of base 2; an empty split has the lowest float.
    bits = np.maximum(peak * np.log2(np.e, dtype=np.float64), np.finfo(np.float32).min)
    statistics = np.stack([bits.astype(np.float32), weight], axis=-1)
    partials = np.concatenate([mixture.ravel(), statistics.ravel()])
    given = replace(operands, inputs=operands.inputs | {"partials": partials})
    assert golden.differences(launch(vulkan_runner, alone, given).outputs) == []


def test_no_vector_is_missing() -> None:
    assert len(GOLDEN) == 7
