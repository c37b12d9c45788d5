"""The families over caches of floats: their kernels are right on every geometry and switch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from tests.family_kernels import COMPILER, assert_right, judged, launch, launched, variant
from tests.golden_decode import decode_problem
from tests.golden_floats import F16, F32, golden_operands, with_inputs
from tests.golden_vectors import load, names
from tests.made_devices import gpu, narrow_cpu
from tests.spirv_tools import spirv_val
from tuner import templates
from tuner.device_info import DeviceInfo
from tuner.evaluate import RenderedPass, ResidentCases, build_job, render_passes
from tuner.kernels.base import Candidate, Family, ValidationCase, Values
from tuner.kernels.space import legal, pairwise, reasons
from tuner.oracle.float_decode import float_decode_reference
from tuner.problems import PagedDecodeProblem
from tuner.templates import Rendered

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

FAMILIES = {"f32": F32, "f16": F16}
Geometry = tuple[int, int, int, int]
"""Head size, block size, query heads per KV head, KV heads."""


def problem(geometry: Geometry = (32, 16, 3, 2), **changes: Any) -> PagedDecodeProblem:
    head_size, block_size, group, kv_heads = geometry
    sizes = {"sequences": 2, "context": 1024, **changes}
    return PagedDecodeProblem(
        query_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        block_size=block_size,
        **sizes,
    )


WHOLE = "token_lanes=8 value_lanes=1"
SLICED = "token_lanes=8 value_lanes=1 prefetch=1 subgroups=4 head_slices=2 split=count:4"
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


def chosen(text: str, device: DeviceInfo) -> tuple[Family, Values]:
    """A family and a variant of it from "f16 packed_f16 token_lanes=8 …"."""
    cache, rest = text.split(" ", 1)
    return FAMILIES[cache], variant(FAMILIES[cache], rest, device)


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


# Golden vectors, and the one attention test that the first system has


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
    of = replace_context(decode_problem(golden), 128)
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


def replace_context(of: PagedDecodeProblem, context: int) -> PagedDecodeProblem:
    """The same geometry with another longest context."""
    return msgspec.structs.replace(of, context=context)


# Kernels broken on purpose

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


# Without a device

ON_PAPER = {
    "f32, narrow CPU": (F32, narrow_cpu(), problem((64, 16, 4, 2))),
    "f32, GPU": (F32, gpu(), problem((128, 16, 8, 2), window=100, sinks=1)),
    "f16, narrow CPU": (F16, narrow_cpu(), problem((64, 16, 4, 2), softcap=30.0)),
    "f16, GPU": (F16, gpu(), problem((128, 16, 8, 2))),
}
on_paper = pytest.mark.parametrize(
    ("family", "device", "of"), ON_PAPER.values(), ids=list(ON_PAPER)
)


@functools.cache
def pairs(name: str, device: DeviceInfo, of: PagedDecodeProblem) -> tuple[Values, ...]:
    """Variants that between them hold every pair of parameter values."""
    return pairwise(legal(FAMILIES[name], of, device))


def rendered(
    family: Family, values: Values, of: PagedDecodeProblem, device: DeviceInfo
) -> tuple[RenderedPass, ...]:
    return render_passes(family, values, of, device, scalars=family.timing_scalars(of))


@on_paper
def test_kernels_are_valid_spirv(
    family: Family, device: DeviceInfo, of: PagedDecodeProblem
) -> None:
    variants = pairs(family.name[-3:], device, of)
    strategies = set(family.parameter("strategy").values)
    assert {v["strategy"] for v in variants} == strategies - (
        set() if device.matrix_layouts else {"matrix"}
    )
    sources = {
        each.rendered.text: (each.rendered, values)
        for values in variants[::4]
        for each in rendered(family, values, of, device)
    }
    assert len(sources) > 12
    for text, values in sources.values():
        spirv_val(COMPILER.compile(text, values=values).spirv)


@on_paper
def test_the_kernels_that_are_timed_are_the_kernels_that_are_validated(
    family: Family, device: DeviceInfo, of: PagedDecodeProblem
) -> None:
    timed = replace_context(of, 16384)
    cases = sorted(family.validation_cases(timed), key=_context)
    passes = set()
    for values in pairs(family.name[-3:], device, of)[::3]:
        if reasons(family, values, timed, device):
            continue
        wanted = [each.rendered.text for each in rendered(family, values, timed, device)]
        passes.add(len(wanted))
        candidate = Candidate(values, timed, device)
        for case in (cases[0], cases[-1]):
            validated = family.validation_values(candidate, case)
            assert not reasons(family, validated, case.problem, device)
            got = rendered(family, validated, case.problem, device)
            assert [each.rendered.text for each in got] == wanted
        parts = int(got[0].declared.push["num_splits"])
        assert (parts > 1) == (len(got) > 1)
    assert passes == {1, 2}


def _context(case: ValidationCase) -> int:
    assert isinstance(case.problem, PagedDecodeProblem)
    return case.problem.context


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_some_start_is_legal_for_every_device_and_head_size(family: Family) -> None:
    for device in (
        gpu(),
        gpu(subgroup_size=64, min_subgroup_size=64, max_subgroup_size=64),
        gpu(subgroup_size=16, min_subgroup_size=16, max_subgroup_size=16),
        narrow_cpu(),
    ):
        for head_size in (64, 80, 96, 112, 128, 192, 256, 512):
            for group in (1, 4, 8):
                of = problem((head_size, 16, group, 2))
                good = [v for v in family.starts if not reasons(family, v, of, device)]
                if head_size == 512 and device.subgroup_size < 32:
                    continue  # more words than a lane has, more products than a step
                assert good, (device.subgroup_size, head_size, group)


def test_bytes_that_must_move_are_those_of_the_tokens_seen() -> None:
    plain, seen = problem(context=1024), problem(context=1024, window=256, value_head_size=48)
    vectors, tables = 2 * 6 * 4 * (32 + 32), 4 * 2 * 64 + 4 * 2
    assert F16.bytes_moved(plain) == 2 * 1024 * 2 * (32 + 32) * 2 + vectors + tables
    assert F32.bytes_moved(plain) == 2 * 1024 * 2 * (32 + 32) * 4 + vectors + tables
    vectors, tables = 2 * 6 * 4 * (32 + 48), 4 * 2 * 16 + 4 * 2
    assert F16.bytes_moved(seen) == 2 * 256 * 2 * (32 + 48) * 2 + vectors + tables


@pytest.mark.parametrize(
    ("of", "text", "told"),
    [
        (problem((60, 16, 4, 2)), "f16 baseline", "head size 60 is no multiple of 8"),
        (problem((1024, 16, 4, 2)), "f32 baseline", "head size 1024 is more than the 512"),
        (problem((64, 5, 4, 2)), f"f32 scalar_f32 {WHOLE}", "blocks of 5 tokens do not hold whole"),
        (problem((64, 24, 4, 2)), "f32 scalar_f32 token_lanes=16", "16 tokens and blocks of 24"),
        (
            problem((80, 16, 4, 2)),
            "f16 scalar_f32 token_lanes=4",
            "8 lanes cannot share the 10 loads",
        ),
        (problem(), "f32 scalar_f32 token_lanes=8 value_lanes=4", "4 lanes cannot share 8 tokens"),
        (
            problem(value_head_size=24),
            "f32 scalar_f32 token_lanes=8",
            "32 rows side by side do not",
        ),
        (problem((64, 16, 1, 2)), f"f16 packed_f16 {SLICED}", "query heads per KV head (here 1)"),
        (
            problem((512, 16, 8, 2)),
            "f32 scalar_f32 token_lanes=8",
            "words of sums, keys and values",
        ),
        (problem(value_head_size=30), f"f32 scalar_f32 {SLICED}", "do not combine in vectors of 4"),
    ],
)
def test_what_does_not_suit_is_refused_with_its_numbers(
    of: PagedDecodeProblem, text: str, told: str
) -> None:
    family, values = chosen(text, gpu())
    assert told in "; ".join(reasons(family, values, of, gpu()))
