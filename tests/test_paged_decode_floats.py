"""The families over caches of floats: their kernels are right on every geometry and switch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from tests.family_kernels import COMPILER, assert_right, judged, launch, launched
from tests.float_variants import FAMILIES, SLICED, WHOLE, Geometry, chosen, problem
from tests.golden_decode import decode_problem
from tests.golden_floats import golden_operands, with_inputs
from tests.golden_vectors import load, names
from tests.made_devices import narrow_cpu
from tuner import templates
from tuner.evaluate import ResidentCases, build_job
from tuner.kernels.base import Candidate
from tuner.kernels.space import reasons
from tuner.oracle.float_decode import float_decode_reference
from tuner.problems import PagedDecodeProblem
from tuner.templates import Rendered

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

COVERED: dict[Geometry, tuple[str, ...]] = {
    (64, 8, 71, 1): ("f32 baseline",),
    (64, 8, 7, 1): (f"f16 packed_f16 {WHOLE} subgroups=8 head_slices=4",),
    (80, 16, 2, 2): (f"f32 scalar_f32 {WHOLE} subgroups=4 head_slices=2 prefetch=1",),
    (96, 32, 1, 3): ("f16 packed_f16 token_lanes=4 tokens_unrolled=4 value_lanes=2 subgroups=2",),
    (112, 20, 2, 2): ("f32 scalar_f32 token_lanes=4 head_slices=2 subgroups=2 split=tokens:256",),
    (128, 16, 8, 1): (f"f16 scalar_f32 {WHOLE} subgroups=8 head_slices=8",),
    (192, 8, 1, 1): (f"f32 scalar_f32 {WHOLE} subgroups=12 split=count:16", "f16 baseline"),
    (256, 32, 1, 1): (f"f16 packed_f16 {WHOLE} split=device:4",),
    (512, 16, 1, 1): ("f16 baseline",),
}
VARIANTS = [(geometry, text) for geometry, texts in COVERED.items() for text in texts]
EVERYTHING = {"window": 200, "softcap": 20.0, "alibi": 1, "sinks": 1, "value_head_size": 48}
SWITCHED: dict[str, tuple[dict[str, Any], ...]] = {
    # A few where a context is cut, all of them wherever outputs are written.
    "f32 scalar_f32 token_lanes=8 value_lanes=2 subgroups=2 split=count:8": (
        {"window": 200, "value_head_size": 16},
        {"softcap": 20.0},
        {"alibi": 1, "sinks": 1},
    ),
    f"f16 packed_f16 {WHOLE} subgroups=4": (EVERYTHING,),
    f"f16 scalar_f32 {SLICED}": (EVERYTHING,),
    "f32 scalar_f32 token_lanes=4 combine_slices=2 split=count:8": (
        {"geometry": (512, 16, 1, 1), "value_head_size": 128},
    ),
    "f16 baseline": (EVERYTHING,),
    "f32 baseline": (EVERYTHING, {"window": 1}),
}


@pytest.fixture(scope="module")
def cases(vulkan_runner: VulkanRunner) -> Iterator[Mapping[str, ResidentCases]]:
    """Validation cases that the variants of one family and geometry share."""
    resident = {f.name: ResidentCases(vulkan_runner, f) for f in FAMILIES.values()}
    yield resident
    for each in resident.values():
        each.close()


@pytest.fixture
def matrix_variant(vulkan_runner: VulkanRunner, matrix_shape: str) -> str:
    """How variants on the device's matrices begin, for `chosen`."""
    width = 2 if vulkan_runner.info.is_cpu else 8
    return f"f16 matrix matrix_shape={matrix_shape} value_width={width}"


def check(
    runner: VulkanRunner,
    cases: Mapping[str, ResidentCases],
    of: PagedDecodeProblem,
    text: str,
) -> None:
    family, values = chosen(text, runner.info)
    if found := reasons(family, values, of, runner.info):
        pytest.skip("; ".join(found))
    assert_right(runner, family, of, values, cases[family.name])


@pytest.mark.parametrize(("geometry", "text"), VARIANTS)
def test_every_geometry_is_right(
    vulkan_runner: VulkanRunner,
    cases: Mapping[str, ResidentCases],
    geometry: Geometry,
    text: str,
) -> None:
    check(vulkan_runner, cases, problem(geometry), text)


@pytest.mark.parametrize(
    ("text", "changes"),
    [(text, changes) for text, each in SWITCHED.items() for changes in each],
)
def test_every_switch_is_right(
    vulkan_runner: VulkanRunner,
    cases: Mapping[str, ResidentCases],
    text: str,
    changes: dict[str, Any],
) -> None:
    check(vulkan_runner, cases, problem(**changes), text)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("split=count:4 subgroups=2", {}),
        ("prefetch=1 exchange=convert rescale=exact", EVERYTHING),
        ("feed=matrices split=count:8 combine_slices=2", EVERYTHING),
    ],
)
def test_matrices_are_right_where_the_device_has_them(
    vulkan_runner: VulkanRunner,
    matrix_variant: str,
    cases: Mapping[str, ResidentCases],
    text: str,
    changes: dict[str, Any],
) -> None:
    of = problem((64, 16, 3, 2), **({"value_head_size": 16} | changes))
    check(vulkan_runner, cases, of, f"{matrix_variant} {text}")


@pytest.mark.parametrize(("geometry", "text"), VARIANTS)
def test_what_is_run_is_legal_on_narrow_devices(geometry: Geometry, text: str) -> None:
    family, values = chosen(text, narrow_cpu())
    assert not reasons(family, values, problem(geometry), narrow_cpu())


@pytest.mark.parametrize("name", names("s1_decode_f32_*"))
@pytest.mark.parametrize("text", ["baseline", f"scalar_f32 {WHOLE} subgroups=8 split=count:4"])
def test_decode_is_as_golden(vulkan_runner: VulkanRunner, name: str, text: str) -> None:
    golden = load(name)
    operands, of = golden_operands(golden), decode_problem(golden)
    dealt = f"{text} head_slices={of.group}" if of.group > 1 and "scalar" in text else text
    family, values = chosen(f"f32 {dealt}", vulkan_runner.info)
    if found := reasons(family, values, of, vulkan_runner.info):
        pytest.skip("; ".join(found))
    execution = launched(vulkan_runner, family, of, operands, values)
    assert golden.differences(execution.outputs) == []


def test_no_vector_is_missing() -> None:
    assert len(names("s1_decode_f32_*")) == 4


def assert_serves_any_length(runner: VulkanRunner, text: str) -> None:
    """Half values, permuted blocks; 40 tokens, then a capacity of 128 with 17 and 96 of them."""
    golden = load("s1_decode_f32_recipe")
    exact = golden_operands(golden)
    halves = {c: exact.inputs[c].astype(np.float16) for c in ("key_cache", "value_cache")}
    for cache, values in halves.items():
        live = np.isfinite(exact.inputs[cache])
        np.testing.assert_array_equal(values[live].astype(np.float32), exact.inputs[cache][live])
    capacity = replace(
        with_inputs(exact, **halves), scalars=exact.scalars | {"max_context_len": 128}
    )
    of = msgspec.structs.replace(decode_problem(golden), context=128)
    family, values = chosen(text, runner.info)
    candidate = Candidate(values, of, runner.info)
    job = build_job(family, candidate, capacity.scalars, COMPILER).job
    for lengths in ((40, 17, 96), (17, 96, 40)):
        operands = with_inputs(capacity, context_lens=np.uint32(lengths))
        got = launch(runner, job, operands).outputs["out"]
        wanted = float_decode_reference(operands).outputs["out"]
        assert (np.abs(got - wanted) <= 2e-2 + 2e-2 * np.abs(wanted)).all()
    # The file's own answer, for its own order of lengths.
    first = launch(runner, job, capacity).outputs["out"]
    assert (np.abs(first - golden.want["out"]) <= 2e-2 + 2e-2 * np.abs(first)).all()


@pytest.mark.parametrize("text", ["baseline", f"scalar_f32 {WHOLE}", f"packed_f16 {WHOLE}"])
def test_one_launch_serves_any_length_in_device_memory(
    vulkan_runner: VulkanRunner, text: str
) -> None:
    assert_serves_any_length(vulkan_runner, f"f16 {text}")


def test_one_launch_of_matrices_serves_any_length_in_device_memory(
    vulkan_runner: VulkanRunner, matrix_variant: str
) -> None:
    assert_serves_any_length(vulkan_runner, f"{matrix_variant} split=count:8")


LANES = "f32 scalar_f32 token_lanes=8 value_lanes=2 subgroups=2 split=count:8"
LENGTH = "return min(context_lens[sequence], push.max_context_len);"
MISTAKES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # What is right in the kernel, what is wrong, and the switches that it takes to notice.
    "one token too many": (
        LENGTH,
        f"uint l = {LENGTH[7:]} return l + uint(l % BLOCK_SIZE != 0u);",
        {},
    ),
    "the neighbour's key": ("token % BLOCK_SIZE];", "(token % BLOCK_SIZE ^ 1u)];", {}),
    "poisoned values of masked tokens": ("mask_values(tile, seen, end);", "", {}),
    "weights not rescaled": ("weight_sum[h] *= correction;", "", {}),
    "walker lost in the merge": ("walker < WALKERS;", "walker < WALKERS - 1u;", {}),
    "window one too wide": (
        "min(length, push.window)",
        "min(length, push.window + 1u)",
        {"window": 200},
    ),
    "another cap": ("(2.0 * LOG2_E / push", "(2.02 * LOG2_E / push", {"softcap": 20.0}),
    "distance off by one": ("- int(length) + 1)", "- int(length))", {"alibi": 1, "sinks": 1}),
    "sink not in the sum": ("+ exp2(sink - highest)", "", {"sinks": 1}),
    "sink in another base": ("sinks[head] * LOG2_E", "sinks[head]", {"sinks": 1}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_broken_kernel_is_caught(
    vulkan_runner: VulkanRunner, cases: Mapping[str, ResidentCases], mistake: str
) -> None:
    right, wrong, changes = MISTAKES[mistake]
    replaced = 0

    def render(template: str, context: Mapping[str, Any]) -> Rendered:
        nonlocal replaced
        rendered = templates.render(template, context)
        replaced += right in rendered.text
        return replace(rendered, text=rendered.text.replace(right, wrong))

    family, values = chosen(LANES, vulkan_runner.info)
    of = problem(**changes)
    found = judged(vulkan_runner, family, of, values, cases=cases[family.name], render=render)
    assert replaced, f"no longer in the template: {right}"
    assert found.failure is not None
    assert found.failure.state == "correctness"
