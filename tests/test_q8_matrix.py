"""Partial attention over the planar q8 cache on matrix units: what is legal, and what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from tests.family_kernels import Mistake, assert_caught, assert_right, launched, variant
from tests.golden_q8 import DENSE, SELECTED, partials_operands, written_parts
from tests.golden_vectors import load, names
from tests.made_devices import LANES_8, LANES_32, gpu, narrow_cpu
from tuner.device_info import DeviceInfo, MatrixLayout
from tuner.evaluate import ResidentCases
from tuner.kernels.base import Candidate, Family
from tuner.kernels.fragments import FragmentPlan
from tuner.kernels.q8_matrix import plan_of
from tuner.kernels.q8_operands import make_operands
from tuner.kernels.q8_parts import parts
from tuner.kernels.space import canonical, legal, parse_values, reasons
from tuner.oracle import judge
from tuner.oracle.q8_decode import partials_reference
from tuner.problems import GROUP_CODES, Q8DecodeProblem, Q8SelectedProblem
from tuner.workloads import geometries

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

ON_CPU = narrow_cpu(cooperative_matrix=True, matrix_layouts=(LANES_8,))
VARIANTS = {
    "ahead": "subgroups=4 prefetch=1 exchange=convert split=count:3",
    "lagging": "subgroups=2 rescale=lagging split=count:2",
    "sliced": "subgroups=4 head_slices=2 prefetch=1 split=count:3",
}


def problem(
    query_heads: int = 12, kv_heads: int = 1, head_size: int = 64, tokens: int = 400
) -> Q8DecodeProblem:
    return Q8DecodeProblem(
        tokens=tokens, query_heads=query_heads, kv_heads=kv_heads, head_size=head_size
    )


@pytest.fixture
def matrices(matrix_shape: str) -> str:
    """How variants on the device's matrices begin."""
    return f"matrix matrix_shape={matrix_shape}"


# What is legal


@pytest.mark.parametrize(
    ("text", "device", "of", "reason"),
    [
        ("", gpu(), problem(), ""),
        ("prefetch=1 subgroups=8", gpu(), problem(24, 2, 256), ""),
        ("head_slices=2 subgroups=12 prefetch=1", gpu(), problem(24, 2, 256), ""),
        ("prefetch=1 exchange=convert", gpu(), problem(32, 8, 128), ""),
        ("matrix_shape=8x8x8 head_slices=2 subgroups=2", ON_CPU, problem(24, 2, 256), ""),
        ("matrix_shape=8x8x8", ON_CPU, problem(64, 2, 256), "of 256 products of matrices takes"),
        ("", gpu(), problem(6, 2, 80), "heads of 80 do not hold whole groups of 32 codes"),
        ("", gpu(), problem(16, 1, 256), ""),
        ("prefetch=1", gpu(), problem(24, 1, 256), "would hold 280 words"),
        ("", gpu(), problem(71), "slices of 71 query heads need 9 matrices of 8, the limit is 4"),
        ("head_slices=3 subgroups=6", gpu(), problem(71), ""),
        ("head_slices=3 subgroups=6", gpu(), problem(12), "leave half of the 8 columns empty"),
        ("matrix_shape=8x8x8", gpu(), problem(), "the device has: 16x8x16"),
        ("", gpu(subgroup_size=16, min_subgroup_size=16), problem(), "subgroups of 32 lanes"),
        ("", gpu(cooperative_matrix=False), problem(), "needs KHR cooperative matrices"),
        ("", gpu(matrix_layouts=()), problem(), "the device has: none"),
        ("", gpu(subgroup_operations=("basic", "shuffle")), problem(), "kind arithmetic, vote"),
        ("exchange=convert", gpu(cooperative_matrix2=()), problem(), "NV cooperative matrix 2"),
        ("subgroups=12", gpu(max_shared_memory_bytes=16384), problem(), "the device has 16384"),
    ],
)
def test_matrices_are_legal_or_have_a_reason(
    text: str, device: DeviceInfo, of: Q8DecodeProblem, reason: str
) -> None:
    size = f"subgroup_size={device.subgroup_size}"
    chosen = ["strategy=matrix", size, "split=count:4", *text.split()]
    found = reasons(DENSE, parse_values(DENSE, chosen, DENSE.baseline), of, device)
    if reason:
        assert reason in "; ".join(found)
    else:
        assert found == ()


def test_the_other_cpu_driver_has_no_matrices() -> None:
    of = geometries(DENSE.kind)[0]
    assert {v["strategy"] for v in legal(DENSE, of, narrow_cpu())} == {
        "baseline",
        "scalar_f32",
        "packed_f16",
        "int_dot",
    }


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(24, 2, 256), (32, 8, 128), (8, 8, 64)])
def test_some_start_suits_every_geometry(heads: int, kv_heads: int, size: int) -> None:
    of = problem(heads, kv_heads, size, 65_536)
    starts = [start for start in DENSE.starts if start["strategy"] == "matrix"]
    suited = [each for each in starts if not reasons(DENSE, canonical(DENSE, each), of, gpu())]
    assert len(suited) >= 4


@pytest.mark.parametrize("layout", [LANES_32, LANES_8], ids=["32 lanes", "8 lanes"])
@pytest.mark.parametrize("head_size", range(32, 257, 32))
def test_each_step_of_matrices_stays_under_one_scale(layout: MatrixLayout, head_size: int) -> None:
    plan = plan_of(layout, head_size)
    assert isinstance(plan, FragmentPlan), plan
    groups = np.array(plan.query_dims).reshape(plan.steps, -1) // GROUP_CODES
    assert (groups == groups[:, :1]).all()
    assert sorted(plan.output_dims) == list(range(head_size))


# What comes out


@pytest.fixture(scope="module")
def cases(vulkan_runner: VulkanRunner) -> Iterator[dict[str, ResidentCases]]:
    """Validation cases that the variants of one geometry share."""
    resident = {of.name: ResidentCases(vulkan_runner, of) for of in (DENSE, SELECTED)}
    yield resident
    for each in resident.values():
        each.close()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, VARIANTS["ahead"]) for name in names("s3_partials_*") if "d256" not in name),
        ("s3_partials_selected", VARIANTS["lagging"]),
        ("s3_partials_selected_d256", VARIANTS["sliced"]),
    ],
)
def test_partials_by_matrices_are_as_golden(
    vulkan_runner: VulkanRunner, matrices: str, name: str, text: str
) -> None:
    of, operands = partials_operands(load(name))
    family = SELECTED if isinstance(of, Q8SelectedProblem) else DENSE
    text = f"{matrices} {text}"
    execution = launched(vulkan_runner, family, of, operands, text)
    values = variant(family, text, vulkan_runner.info)
    verdict = judge(
        execution.outputs, partials_reference(operands), family.arithmetic(values), name
    )
    assert verdict.ok, verdict.message
    assert written_parts(execution, parts(Candidate(values, of, vulkan_runner.info))).size


def test_an_identity_list_gives_matrices_the_bits_of_the_dense_kernel(
    vulkan_runner: VulkanRunner,
    matrices: str,
) -> None:
    text = f"{matrices} {VARIANTS['sliced']}"
    dense = Q8DecodeProblem(rows=2, tokens=100, query_heads=12, kv_heads=1, head_size=64, step=40)
    operands = make_operands(dense, "random", 0)
    listed = Q8SelectedProblem(**msgspec.structs.asdict(dense), visible=100)
    identity = np.tile(np.arange(100, dtype=np.uint32), (2, 1))
    with_list = replace(operands, inputs=operands.inputs | {"visible": identity})
    got = launched(vulkan_runner, DENSE, dense, operands, text).outputs["partials"]
    same = launched(vulkan_runner, SELECTED, listed, with_list, text).outputs["partials"]
    assert np.array_equal(got.view(np.uint32), same.view(np.uint32))
    assert np.isfinite(got[:, :, 0]).all()


@pytest.mark.parametrize(
    ("of", "place", "text"),
    [
        (DENSE, 1, "ahead"),
        (DENSE, 3, "lagging"),
        (DENSE, 4, "sliced"),
        (SELECTED, 0, "sliced"),
        (SELECTED, 5, "ahead"),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_matrices_are_right_in_every_geometry(
    vulkan_runner: VulkanRunner,
    matrices: str,
    cases: dict[str, ResidentCases],
    of: Family,
    place: int,
    text: str,
) -> None:
    problem = geometries(of.kind)[place]
    assert_right(vulkan_runner, of, problem, f"{matrices} {VARIANTS[text]}", cases[of.name])


# Mistakes

MISTAKES = {
    "one token short": ("min(CHUNK, seen - last);", "min(CHUNK, seen - last) - 1u;"),
    "tokens past the end": ("< count;\n            vec2", "< count + 1u;\n            vec2"),
    "subgroups walk the same tiles": ("walker * TILE", "0u * TILE"),
    "scales of the first KV head": ("+ kv_head * SCALES + first_scale()", "+ first_scale()"),
    "octave left out of the weight": ("valid ? octave.x", "valid ? 0.0"),
    "octave left in the sum": ("valid ? octave.y", "valid ? 1.0"),
    "same octave for all": ("float(int(power >> 23) - 127), inverse", "-6.0, 64.0"),
    "ratio left out": ("float16_t(value_scale[0] * inverse)", "float16_t(1.0)"),
    "ratio of the next scale": ("SCALES + group + 0u) * TILE", "SCALES + 1u) * TILE"),
    "sums are not rescaled": ("sums[0][i][0] *= rescale_0[0];", ""),
    "slices are not told apart": ("of_slice * SLICE_HEADS + column", "column"),
    "query not put in order": ("start + query_dim(place)", "start + place"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_matrix_kernel_broken_on_purpose_is_found(
    vulkan_runner: VulkanRunner, matrices: str, cases: dict[str, ResidentCases], name: str
) -> None:
    text = f"{matrices} subgroups=4 head_slices=2"
    right, wrong = MISTAKES[name]
    mistake = Mistake(variant=text, right=right, wrong=wrong, says="")
    of = problem(24, 2, 64, 100)
    assert_caught(vulkan_runner, DENSE, of, mistake, cases[DENSE.name])


def test_a_matrix_kernel_that_ignores_the_list_is_found(
    vulkan_runner: VulkanRunner, matrices: str, cases: dict[str, ResidentCases]
) -> None:
    mistake = Mistake(
        variant=f"{matrices} prefetch=1",
        right="visible[row * push.visible_stride + place]",
        wrong="place",
    )
    of = Q8SelectedProblem(tokens=100, query_heads=4, kv_heads=2, head_size=64, visible=60)
    assert_caught(vulkan_runner, SELECTED, of, mistake, cases[SELECTED.name])
