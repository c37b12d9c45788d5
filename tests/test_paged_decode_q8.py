"""The int8 paged decode family: its kernels are right on every geometry, and valid SPIR-V."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.decode_cases import problem
from tests.family_kernels import COMPILER, assert_right, judged, variant
from tests.made_devices import gpu, narrow_cpu
from tests.spirv_tools import spirv_val
from tuner.device_info import DeviceInfo
from tuner.evaluate import Evaluator, RenderedPass, ResidentCases, render_passes
from tuner.kernels.base import Candidate, Values
from tuner.kernels.paged_decode_q8 import PAGED_DECODE_Q8 as FAMILY
from tuner.kernels.paged_decode_q8 import PAGED_DECODE_Q8_PLANAR
from tuner.kernels.space import legal, pairwise, reasons
from tuner.oracle import decode_reference
from tuner.problems import PagedDecodeProblem
from tuner.quant import planar

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner


COVERED = {
    # head size, block size, query heads per KV head, KV heads
    (64, 8, 71, 1): """
    baseline
    scalar_f32 staging=shared subgroups=8 lanes_per_token=8 tokens_unrolled=2 head_slices=8
    packed_f16 staging=shared subgroups=8 lanes_per_token=8 load_words=4 head_slices=8 split=count:4
    int_dot staging=shared subgroups=8 lanes_per_token=8 tile_tokens=32 head_slices=8 query_terms=2
    """,
    (80, 16, 7, 2): """
    baseline
    scalar_f32 staging=shared subgroups=4 lanes_per_token=4 load_words=4 head_slices=4 split=count:8
    packed_f16 staging=shared subgroups=4 lanes_per_token=4 tile_tokens=32 head_slices=4
    int_dot lanes_per_token=4 tokens_unrolled=2 split=device:8 combine_slices=8
    """,
    (96, 32, 1, 3): """
    baseline
    scalar_f32 subgroups=16 lanes_per_token=2 tokens_unrolled=4 split=tokens:512
    packed_f16 staging=shared subgroups=2 lanes_per_token=8 tile_tokens=32 load_words=4
    int_dot subgroups=4 query_terms=2 split=count:2
    """,
    (112, 20, 2, 2): """
    baseline
    scalar_f32 subgroups=2 lanes_per_token=4 tokens_unrolled=4
    packed_f16 subgroups=12 lanes_per_token=4 tokens_unrolled=4 split=count:16 combine_slices=8
    int_dot staging=shared subgroups=4 lanes_per_token=4 tile_tokens=32 head_slices=2 split=count:4
    """,
    (128, 16, 8, 2): """
    baseline
    scalar_f32 staging=shared subgroups=4 lanes_per_token=8 load_words=4 head_slices=4
    packed_f16 subgroups=4 lanes_per_token=8 tokens_unrolled=2 split=tokens:256 combine_slices=2
    int_dot staging=shared subgroups=8 lanes_per_token=8 tile_tokens=32 head_slices=8 query_terms=2
    """,
    (192, 8, 16, 1): """
    baseline
    scalar_f32 staging=shared subgroups=4 lanes_per_token=8 head_slices=4 split=count:4
    packed_f16 staging=shared subgroups=8 lanes_per_token=8 load_words=4 head_slices=8
    int_dot staging=shared subgroups=8 lanes_per_token=8 head_slices=8 split=device:4
    """,
    (256, 32, 4, 1): """
    baseline
    scalar_f32 staging=shared subgroups=4 lanes_per_token=8 tile_tokens=32 head_slices=4
    packed_f16 staging=shared subgroups=4 lanes_per_token=8 head_slices=4 split=count:4
    int_dot staging=shared subgroups=2 lanes_per_token=8 tile_tokens=32 load_words=4 head_slices=2
    """,
}
"""Geometries with every head size, block size and group that must work, and for each of them one
variant of each strategy, so that between them they hold most values of the parameters."""
VARIANTS = [
    pytest.param(geometry, line.strip(), id=f"d{geometry[0]}-{line.split()[0]}")
    for geometry, lines in COVERED.items()
    for line in lines.strip().splitlines()
]


@pytest.fixture(scope="module")
def cases(vulkan_runner: VulkanRunner) -> Iterator[ResidentCases]:
    """Validation cases that the variants of one geometry share."""
    resident = ResidentCases(vulkan_runner, FAMILY)
    yield resident
    resident.close()


@pytest.mark.parametrize(("geometry", "text"), VARIANTS)
def test_every_geometry_is_right_with_every_strategy(
    vulkan_runner: VulkanRunner,
    cases: ResidentCases,
    geometry: tuple[int, int, int, int],
    text: str,
) -> None:
    values = variant(FAMILY, text, vulkan_runner.info)
    assert_right(vulkan_runner, FAMILY, problem(*geometry), values, cases)


@pytest.mark.parametrize("tokens_unrolled", [1, 2])
def test_one_subgroup_goes_through_all_heads_of_a_thousand_tokens(
    vulkan_runner: VulkanRunner, cases: ResidentCases, tokens_unrolled: int
) -> None:
    """Two sums a head and token: on a driver that ends a kernel's loops together at 65,535 rounds
    this is right only if it unrolls those across lanes."""
    text = "int_dot staging=shared lanes_per_token=8 tile_tokens=32 query_terms=2"
    values = variant(FAMILY, f"{text} tokens_unrolled={tokens_unrolled}", vulkan_runner.info)
    assert_right(vulkan_runner, FAMILY, problem(64, 16, 8, 2), values, cases)


def test_the_table_covers_what_must_work() -> None:
    heads, blocks, groups, _ = (set(column) for column in zip(*COVERED, strict=True))
    assert heads == {64, 80, 96, 112, 128, 192, 256}
    assert blocks == {8, 16, 20, 32}
    assert groups == {1, 2, 4, 7, 8, 16, 71}
    for lines in COVERED.values():
        strategies = [line.split()[0] for line in lines.strip().splitlines()]
        assert strategies == ["baseline", "scalar_f32", "packed_f16", "int_dot"]
    said = set(" ".join(COVERED.values()).split())
    assert said >= {"staging=shared", "load_words=4", "query_terms=2", "head_slices=8"}
    policies = {word.partition(":")[0] for word in said if word.startswith("split=")}
    assert policies == {"split=count", "split=tokens", "split=device"}


@pytest.mark.parametrize("geometry", [(64, 16, 2, 2), (96, 16, 1, 2), (256, 16, 4, 1)])
@pytest.mark.parametrize(
    "text",
    [
        "matrix split=count:4",
        "matrix staging=shared prefetch=all subgroups=2 rescale=exact split=none",
        "matrix staging=shared prefetch=keys exchange=convert split=fit:1",
        "matrix staging=shared tiles_unrolled=2 exchange=convert key_operand=int8 split=none",
    ],
)
def test_matrices_are_right_where_the_device_has_them(
    vulkan_runner: VulkanRunner,
    matrix_shape: str,
    cases: ResidentCases,
    geometry: tuple[int, int, int, int],
    text: str,
) -> None:
    info = vulkan_runner.info
    values = variant(FAMILY, f"{text} matrix_shape={matrix_shape}", info)
    if found := reasons(FAMILY, values, problem(*geometry), info):
        pytest.skip("; ".join(found))
    assert judged(vulkan_runner, FAMILY, problem(*geometry), values, cases=cases).failure is None


# The planar layout


def assert_right_planar(
    runner: VulkanRunner, geometry: tuple[int, int, int, int], text: str
) -> None:
    values = variant(PAGED_DECODE_Q8_PLANAR, text, runner.info)
    of = problem(*geometry)
    if found := reasons(PAGED_DECODE_Q8_PLANAR, values, of, runner.info):
        pytest.skip("; ".join(found))
    assert judged(runner, PAGED_DECODE_Q8_PLANAR, of, values).failure is None


@pytest.mark.parametrize("geometry", [(64, 16, 2, 2), (80, 8, 4, 1)])
@pytest.mark.parametrize(
    "text", ["baseline", "scalar_f32 lanes_per_token=4 tokens_unrolled=2 split=count:4"]
)
def test_scales_in_a_plane_of_their_own(
    vulkan_runner: VulkanRunner, geometry: tuple[int, int, int, int], text: str
) -> None:
    assert_right_planar(vulkan_runner, geometry, text)


@pytest.mark.parametrize("geometry", [(64, 16, 2, 2), (80, 8, 4, 1)])
@pytest.mark.parametrize(
    "text",
    [
        "matrix staging=shared prefetch=all subgroups=2 split=none",
        "matrix staging=registers split=count:2",
    ],
)
def test_matrices_take_scales_from_their_plane(
    vulkan_runner: VulkanRunner,
    matrix_shape: str,
    geometry: tuple[int, int, int, int],
    text: str,
) -> None:
    assert_right_planar(vulkan_runner, geometry, f"{text} matrix_shape={matrix_shape}")


def test_a_layout_has_the_same_operands_as_the_other() -> None:
    of = problem(64, 16, 2, 2)
    rows, planes = (f.operands(of, "random", 3) for f in (FAMILY, PAGED_DECODE_Q8_PLANAR))
    for name in ("key_cache", "value_cache"):
        np.testing.assert_array_equal(planes.inputs[name], planar(rows.inputs[name]))
    want, got = (decode_reference(each).outputs["out"] for each in (rows, planes))
    np.testing.assert_array_equal(got, want)


# One part, several parts


@pytest.mark.parametrize("context", [1, 16])
def test_a_context_too_short_to_be_cut_goes_through_the_combine_pass_all_the_same(
    vulkan_runner: VulkanRunner, context: int
) -> None:
    of = problem(64, 16, 2, 2, sequences=3, context=context)
    values = variant(
        FAMILY,
        "scalar_f32 subgroups=4 lanes_per_token=8 tokens_unrolled=4 split=count:8",
        vulkan_runner.info,
    )
    evaluator = Evaluator(vulkan_runner, COMPILER, FAMILY, of)
    trial = evaluator.prepare(evaluator.draft(values))
    assert trial.job is not None
    assert [each.name for each in trial.job.passes] == ["attend", "combine"]
    assert trial.job.passes[0].groups[0] == 1
    found = evaluator.check_sampled(trial)
    evaluator.release(trial)
    evaluator.close()
    assert found.failure is None


@pytest.mark.parametrize(
    ("text", "pipelines"),
    [("scalar_f32 lanes_per_token=8 split=device:8", 2), ("baseline", 1)],
)
def test_a_trial_makes_each_of_its_pipelines_once(
    vulkan_runner: VulkanRunner, text: str, pipelines: int
) -> None:
    programs = vulkan_runner._pipelines.programs
    before = len(programs)
    evaluator = Evaluator(vulkan_runner, COMPILER, FAMILY, problem(64, 16, 2, 2))
    trial = evaluator.prepare(evaluator.draft(variant(FAMILY, text, vulkan_runner.info)))
    assert len(trial.jobs) == 7
    assert len(programs) == before + pipelines
    evaluator.release(trial)
    evaluator.close()
    assert len(programs) == before


# Without a device

ON_PAPER = {
    "narrow CPU": (narrow_cpu(), problem(64, 16, 4, 2)),
    "GPU": (gpu(), problem(128, 16, 8, 2)),
}
on_paper = pytest.mark.parametrize(("device", "of"), ON_PAPER.values(), ids=list(ON_PAPER))


@functools.cache
def pairs(device: DeviceInfo, of: PagedDecodeProblem) -> tuple[Values, ...]:
    """Variants that between them hold every pair of parameter values."""
    return pairwise(legal(FAMILY, of, device))


def rendered(
    values: Values, of: PagedDecodeProblem, device: DeviceInfo
) -> tuple[RenderedPass, ...]:
    return render_passes(FAMILY, values, of, device, scalars=FAMILY.timing_scalars(of))


@on_paper
def test_kernels_are_valid_spirv(device: DeviceInfo, of: PagedDecodeProblem) -> None:
    sources = {
        each.rendered.text: (each.rendered, values)
        for values in pairs(device, of)
        for each in rendered(values, of, device)
    }
    kernels = {COMPILER.compile(text, values=values).spirv for text, values in sources.values()}
    assert len(kernels) > 90
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(spirv_val, kernels))


def test_every_strategy_is_among_the_pairs() -> None:
    strategies = FAMILY.parameter("strategy").values
    for device, of in ON_PAPER.values():
        found = {values["strategy"] for values in pairs(device, of)}
        assert found == set(strategies) - (set() if device.matrix_layouts else {"matrix"})


@on_paper
@pytest.mark.parametrize(("sequences", "context"), [(1, 16), (8, 16384)])
def test_the_kernels_that_are_timed_are_the_kernels_that_are_validated(
    device: DeviceInfo, of: PagedDecodeProblem, sequences: int, context: int
) -> None:
    timed = problem(
        of.head_size, of.block_size, of.group, of.kv_heads, sequences=sequences, context=context
    )
    cases = sorted(FAMILY.validation_cases(timed), key=lambda case: case.problem.context)
    kinds = set()
    for values in pairs(device, of):
        candidate = Candidate(values, timed, device)
        if reasons(FAMILY, values, timed, device):
            continue
        wanted = [each.rendered.text for each in rendered(values, timed, device)]
        kinds.add(len(wanted))
        for case in (cases[0], cases[-1]):
            validated = FAMILY.validation_values(candidate, case)
            assert not reasons(FAMILY, validated, case.problem, device)
            got = rendered(validated, case.problem, device)
            assert [each.rendered.text for each in got] == wanted
    assert kinds == {1, 2}


@on_paper
def test_validation_cuts_the_longest_case_of_kernels_made_for_parts(
    device: DeviceInfo, of: PagedDecodeProblem
) -> None:
    cases = {case.name: case for case in FAMILY.validation_cases(of)}
    for values in pairs(device, of):
        launched = {}
        for name in ("ragged", "single"):
            validated = FAMILY.validation_values(Candidate(values, of, device), cases[name])
            launched[name] = rendered(validated, cases[name].problem, device)
        first, *combine = launched["ragged"]
        workgroups = int(first.declared.push["num_splits"])
        if values["strategy"] != "matrix":
            assert (workgroups > 1) == bool(combine)
            continue
        # Each workgroup has several rounds and sequences of the one, of the other only a part.
        ragged = cases["ragged"].problem
        assert 1 < workgroups < ragged.sequences * ragged.kv_heads
        assert launched["single"][0].declared.groups[0] >= 8 * of.kv_heads
