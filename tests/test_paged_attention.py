"""Paged attention with log-sum-exp: right on every geometry and golden vector, and valid SPIR-V."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.attention_variants import lane_matrix_variant, matrix_variant, problem
from tests.family_kernels import COMPILER, assert_right, judged, launched, variant
from tests.golden_attention import golden_operands, golden_problem
from tests.golden_vectors import load, names
from tests.made_devices import gpu, narrow_cpu
from tests.spirv_tools import spirv_val
from tuner.device_info import DeviceInfo
from tuner.evaluate import ResidentCases, render_passes
from tuner.export.chosen import published
from tuner.kernels.base import Candidate, Values
from tuner.kernels.paged_attention import PAGED_ATTENTION as FAMILY
from tuner.kernels.paged_attention import bytes_moved
from tuner.kernels.space import legal, pairwise, reasons
from tuner.oracle import judge
from tuner.oracle.paged_attention import forward_reference
from tuner.problems import PagedAttentionProblem

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

GOLDEN = names("s2_forward_*")


@pytest.fixture(scope="module")
def cases(vulkan_runner: VulkanRunner) -> Iterator[ResidentCases]:
    """Validation cases that the variants of one geometry share."""
    resident = ResidentCases(vulkan_runner, FAMILY)
    yield resident
    resident.close()


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize(
    "text",
    [
        "baseline",
        "lanes tile_rows=2 lanes_per_token=8 split=count:4 combine_slices=2",
        "tiles subgroups=4 tile_rows=16 tile_tokens=8 lanes_per_row=8",
    ],
    ids=lambda text: text.split()[0],
)
def test_golden_vectors(vulkan_runner: VulkanRunner, name: str, text: str) -> None:
    golden = load(name)
    operands = golden_operands(golden)
    done = launched(vulkan_runner, FAMILY, golden_problem(golden), operands, text)
    assert done.broken_guards == ()
    verdict = judge(done.outputs, forward_reference(operands), "f32", name)
    assert verdict.ok, verdict.message
    assert golden.differences(done.outputs) == []


def test_no_vector_is_missing() -> None:
    assert len(GOLDEN) == 12


COVERED = {
    # head size, block size, query heads per KV head, KV heads, element type
    (64, 8, 8, 1, "bf16"): """
    baseline
    lanes tile_rows=4 lanes_per_token=8 tokens_unrolled=2 split=count:8 combine_slices=4
    tiles subgroups=8 tile_rows=32 tile_tokens=16 lanes_per_row=4 split=tokens:512
    """,
    (80, 16, 7, 2, "f16"): """
    baseline
    lanes subgroups=2 tile_rows=2 lanes_per_token=2 tokens_unrolled=2
    tiles subgroups=2 tile_rows=16 tile_tokens=16 lanes_per_row=4 kv_buffers=2
    """,
    (96, 5, 1, 3, "f32"): """
    lanes tile_rows=1 lanes_per_token=8 tokens_unrolled=4 prefetch=1 split=device:8
    tiles subgroups=4 tile_rows=16 tile_tokens=8 lanes_per_row=8
    """,
    (128, 32, 4, 2, "bf16"): """
    lanes subgroups=8 tile_rows=2 lanes_per_token=8 prefetch=1 split=count:4
    tiles subgroups=4 tile_rows=16 tile_tokens=16 lanes_per_row=8 kv_buffers=2 split=count:2
    """,
    (192, 16, 2, 1, "f16"): """
    lanes tile_rows=2 lanes_per_token=8
    tiles subgroups=4 tile_rows=16 tile_tokens=16 lanes_per_row=4
    """,
    (256, 16, 2, 1, "f32"): """
    baseline
    lanes tile_rows=1 lanes_per_token=8 split=count:2
    tiles subgroups=4 tile_rows=16 tile_tokens=8 lanes_per_row=8
    """,
}
"""Geometries with every head size and element type that must work, and variants that between them
hold most values of the parameters."""
VARIANTS = [
    pytest.param(geometry, line.strip(), id=f"d{geometry[0]}-{geometry[4]}-{line.split()[0]}")
    for geometry, lines in COVERED.items()
    for line in lines.strip().splitlines()
]


@pytest.mark.parametrize(("geometry", "text"), VARIANTS)
def test_every_geometry_is_right(
    vulkan_runner: VulkanRunner,
    cases: ResidentCases,
    geometry: tuple[int, int, int, int, str],
    text: str,
) -> None:
    *sizes, element = geometry
    assert_right(vulkan_runner, FAMILY, problem(*sizes, element=element), text, cases)


@pytest.mark.parametrize("geometry", [(64, 16, 4, 2), (96, 5, 1, 1)])
@pytest.mark.parametrize(
    "text", ["split=none", "prefetch=1 exchange=convert split=none", "prefetch=1 split=count:4"]
)
def test_matrices_are_right_where_the_device_has_them(
    vulkan_runner: VulkanRunner,
    matrix_shape: str,
    cases: ResidentCases,
    geometry: tuple[int, int, int, int],
    text: str,
) -> None:
    info, of = vulkan_runner.info, problem(*geometry, element="f16")
    whole = matrix_variant(matrix_shape, text)
    if found := reasons(FAMILY, variant(FAMILY, whole, info), of, info):
        pytest.skip("; ".join(found))
    assert judged(vulkan_runner, FAMILY, of, whole, cases=cases).failure is None


@pytest.mark.parametrize(
    ("geometry", "text"),
    [
        ((64, 16, 4, 2), "subgroups=4 prefetch=1 split=count:4 combine_slices=2"),
        ((64, 5, 1, 1), "subgroups=2 exchange=convert prefetch=1 split=none"),
        ((64, 16, 12, 1), "subgroups=2 split=count:2"),
        ((64, 32, 7, 2), "subgroups=1 exchange=convert split=none"),
    ],
)
def test_lane_fed_matrices_are_right_where_the_device_has_them(
    vulkan_runner: VulkanRunner,
    matrix_shape: str,
    cases: ResidentCases,
    geometry: tuple[int, int, int, int],
    text: str,
) -> None:
    info, of = vulkan_runner.info, problem(*geometry, element="f16")
    whole = lane_matrix_variant(matrix_shape, text, tiles=2 if geometry[2] > 8 else 1)
    if found := reasons(FAMILY, variant(FAMILY, whole, info), of, info):
        pytest.skip("; ".join(found))
    assert judged(vulkan_runner, FAMILY, of, whole, cases=cases).failure is None


ON_PAPER = {
    "narrow CPU": (narrow_cpu(), problem(64, context=1024)),
    "GPU": (gpu(), problem(128, query_tokens=64, context=1024, element="f16")),
    "GPU bf16": (gpu(), problem(80, query_tokens=64, context=1024, element="bf16")),
}
on_paper = pytest.mark.parametrize(("device", "of"), ON_PAPER.values(), ids=list(ON_PAPER))


@functools.cache
def pairs(device: DeviceInfo, of: PagedAttentionProblem) -> tuple[Values, ...]:
    """Variants that between them hold every pair of parameter values."""
    return pairwise(legal(FAMILY, of, device))


def sources(values: Values, of: PagedAttentionProblem, device: DeviceInfo) -> list[str]:
    scalars = FAMILY.timing_scalars(of)
    passes = render_passes(FAMILY, values, of, device, scalars=scalars)
    return [each.rendered.text for each in passes]


@on_paper
def test_kernels_are_valid_spirv(device: DeviceInfo, of: PagedAttentionProblem) -> None:
    rendered = {
        each.rendered.text: each.rendered
        for values in pairs(device, of)
        for each in render_passes(FAMILY, values, of, device, scalars=FAMILY.timing_scalars(of))
    }
    kernels = {COMPILER.compile(each, values={}).spirv for each in rendered.values()}
    assert len(kernels) > 40
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(spirv_val, kernels))


@on_paper
def test_the_kernels_that_are_timed_are_the_kernels_that_are_validated(
    device: DeviceInfo, of: PagedAttentionProblem
) -> None:
    for values in pairs(device, of)[::3]:
        wanted = sources(values, of, device)
        first, *_, last = FAMILY.validation_cases(of)
        for case in (first, last):
            validated = FAMILY.validation_values(Candidate(values, of, device), case)
            assert not reasons(FAMILY, validated, case.problem, device)
            assert sources(validated, case.problem, device) == wanted


def test_spaces_are_large_and_every_strategy_is_in_them() -> None:
    found = {name: legal(FAMILY, of, device) for name, (device, of) in ON_PAPER.items()}
    assert {values["strategy"] for values in found["GPU"]} == {
        "baseline",
        "lanes",
        "tiles",
        "matrix",
        "matrix_lanes",
    }
    assert {values["strategy"] for values in found["GPU bf16"]} == {"baseline", "lanes", "tiles"}
    assert all(len(variants) > 500 for variants in found.values())


@pytest.mark.parametrize(
    ("text", "of", "says"),
    [
        ("baseline", problem(36, element="f16"), "head size 36 is no multiple of 8"),
        ("lanes lanes_per_token=4", problem(80, element="f16"), "share the 10 chunks"),
        ("lanes tile_rows=8 lanes_per_token=1", problem(128), "use more lanes_per_token"),
        ("lanes tile_rows=32", problem(), "up to 16 rows"),
        ("matrix", problem(64, element="bf16"), "not bf16"),
        ("lanes", problem(batch=65_536), "65536 workgroups in z"),
        ("baseline", problem(batch=3000, query_tokens=1000), "workgroups in x"),
        ("tiles tile_rows=128 tile_tokens=64 lanes_per_row=8", problem(256), "shared memory"),
    ],
)
def test_what_is_not_supported_has_a_reason(
    text: str, of: PagedAttentionProblem, says: str
) -> None:
    device = narrow_cpu()
    assert says in "; ".join(reasons(FAMILY, variant(FAMILY, text, device), of, device))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_workgroup_size": (8, 32, 32)}, "16 columns to combine, the device allows 8"),
        ({"max_workgroup_size": (128, 2, 2)}, "4 slices to combine, the device allows 2"),
        (
            {"max_shared_memory_bytes": 1024},
            "needs 1056 bytes of shared memory to combine, the device has 1024",
        ),
    ],
)
def test_a_device_that_cannot_combine_is_named(changes: dict[str, Any], says: str) -> None:
    device = msgspec.structs.replace(narrow_cpu(), **changes)
    values = variant(FAMILY, "lanes split=count:4 combine_slices=4", device)
    assert says in "; ".join(reasons(FAMILY, values, problem(64), device))


@on_paper
def test_the_dispatch_rule_gives_what_is_launched(
    device: DeviceInfo, of: PagedAttentionProblem
) -> None:
    assert FAMILY.dispatch is not None
    for values in pairs(device, of):
        candidate = Candidate(values, of, device)
        launch = published(FAMILY.dispatch(candidate)).launch(of)
        launched = FAMILY.passes(candidate, FAMILY.timing_scalars(of))
        assert launch.groups == {each.name: each.groups for each in launched}
        assert launch.scratch_bytes == FAMILY.scratch_bytes(candidate)


def test_bytes_moved_count_what_some_row_sees_once() -> None:
    decode = problem(128, query_tokens=1, context=100, element="f16")
    vectors = 2 * 8 * 2 * 128
    assert bytes_moved(decode) == 2 * (2 * 100 * 2 * 128 * 2 + vectors) + 2 * 8 * 4 + 4 * 2 * 7
    corner = problem(128, query_tokens=1, context=100, element="f16", causal="top_left")
    assert bytes_moved(corner) == 2 * (2 * 1 * 2 * 128 * 2 + vectors) + 2 * 8 * 4 + 4 * 2
