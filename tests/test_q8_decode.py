"""Partial attention over the planar q8 cache, and the gated combine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from tests.family_kernels import COMPILER, Mistake, assert_caught, assert_right, launched, variant
from tests.golden_q8 import (
    COMBINE,
    DENSE,
    SELECTED,
    combine_operands,
    partials_operands,
    written_parts,
)
from tests.golden_vectors import load, names
from tests.made_devices import LANES_32, LANES_32_WIDE, gpu, narrow_cpu
from tests.spirv_tools import spirv_val
from tuner.device_info import DeviceInfo
from tuner.errors import UsageError
from tuner.evaluate import ResidentCases, render_passes
from tuner.kernels.base import Candidate, Family
from tuner.kernels.q8_operands import make_operands
from tuner.kernels.q8_parts import parts
from tuner.kernels.space import legal, pairwise, reasons
from tuner.oracle import judge
from tuner.oracle.q8_decode import combine_reference, partial_results, partials_reference
from tuner.problems import GatedCombineProblem, Problem, Q8DecodeProblem, Q8SelectedProblem
from tuner.workloads import geometries

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

ORACLE = 1e-9
PARTIALS = [*names("s3_partials_*")]
STRATEGIES = {
    "baseline": "baseline",
    "scalar_f32": "scalar_f32 subgroups=4 head_slices={slices} lanes_per_token={lanes}",
    "scalar_f32, staged": "scalar_f32 subgroups=4 head_slices={slices} lanes_per_token={wide} "
    "tokens_unrolled=2 staging=shared tile_tokens=32",
    "packed_f16": "packed_f16 subgroups=4 head_slices={slices} lanes_per_token={lanes} "
    "tokens_unrolled=2",
    "int_dot": "int_dot subgroups=4 head_slices={slices} lanes_per_token={lanes} query_terms=2",
}
COMBINES = {
    "baseline": "baseline",
    "sliced": "sliced combine_dims=4 combine_slices=4",
    "sliced, several workgroups": "sliced combine_dims=2 combine_groups=4 combine_slices=8",
}


def family_of(problem: Problem) -> Family:
    return SELECTED if isinstance(problem, Q8SelectedProblem) else DENSE


def filled(text: str, problem: Q8DecodeProblem) -> str:
    """The variant with the query group dealt out as far as four slices go, and a token to as many
    lanes as its words allow; `wide` leaves each lane 16-byte loads."""
    words = problem.head_size // 4
    return text.format(
        slices=next(n for n in (4, 2, 1) if problem.group % n == 0),
        lanes=8 if words % 8 == 0 else 4,
        wide=8 if words % 32 == 0 else 4,
    )


# Golden vectors


@pytest.mark.parametrize("name", PARTIALS)
def test_the_oracle_agrees_part_by_part(name: str) -> None:
    golden = load(name)
    _, operands = partials_operands(golden)
    part = partial_results(operands, 0, int(golden.attributes["n_wg"]))
    assert golden.differences({"part": part}, bound=ORACLE) == []


SLOW = "s3_partials_selected_d256"
"""Twelve heads of 256: lavapipe takes ten seconds to compile the packed kernels for them."""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(name, text, id=f"{strategy}-{name}")
        for name in PARTIALS
        for strategy, text in STRATEGIES.items()
        if name != SLOW or strategy in ("baseline", "scalar_f32")
    ],
)
def test_partials_are_as_golden(vulkan_runner: VulkanRunner, name: str, text: str) -> None:
    golden = load(name)
    problem, operands = partials_operands(golden)
    of, count = family_of(problem), int(golden.attributes["n_wg"])
    values = variant(of, filled(text, problem), vulkan_runner.info)
    if text != "baseline":
        values = {**values, "split": f"count:{count}"}
    execution = launched(vulkan_runner, of, problem, operands, values)
    arithmetic = of.arithmetic(values)
    verdict = judge(execution.outputs, partials_reference(operands), arithmetic, name)
    assert verdict.ok, verdict.message
    cut = parts(Candidate(values, problem, vulkan_runner.info))
    got = written_parts(execution, cut)
    if arithmetic == "f32" and cut == count:
        # The files' own rule is meant for float32; coarser classes have the oracle's bounds.
        assert golden.differences({"part": got}) == []


@pytest.mark.parametrize("name", names("s3_combine_*"))
def test_the_oracle_combines_as_golden(name: str) -> None:
    golden = load(name)
    _, operands = combine_operands(golden)
    out = combine_reference(operands).outputs["out"]
    assert golden.differences({"out": out}, bound=ORACLE) == []


@pytest.mark.parametrize("name", names("s3_combine_*"))
@pytest.mark.parametrize("text", COMBINES.values(), ids=list(COMBINES))
def test_combined_is_as_golden(vulkan_runner: VulkanRunner, name: str, text: str) -> None:
    golden = load(name)
    problem, operands = combine_operands(golden)
    values = variant(COMBINE, text, vulkan_runner.info)
    execution = launched(vulkan_runner, COMBINE, problem, operands, values)
    assert golden.differences({"out": execution.outputs["out"][0]}) == []
    verdict = judge(execution.outputs, combine_reference(operands), "f32", name)
    assert verdict.ok, verdict.message


def test_no_vector_is_missing() -> None:
    assert len(PARTIALS) == 6
    assert len(names("s3_combine_*")) == 2


# Dense and selected


@pytest.mark.parametrize("text", STRATEGIES.values(), ids=list(STRATEGIES))
def test_an_identity_list_gives_the_bits_of_the_dense_kernel(
    vulkan_runner: VulkanRunner, text: str
) -> None:
    dense = Q8DecodeProblem(rows=2, tokens=100, query_heads=12, kv_heads=1, head_size=64, step=40)
    operands = make_operands(dense, "random", 0)
    listed = Q8SelectedProblem(**msgspec.structs.asdict(dense), visible=100)
    identity = np.tile(np.arange(100, dtype=np.uint32), (2, 1))
    with_list = replace(operands, inputs=operands.inputs | {"visible": identity})
    values = variant(DENSE, filled(text, dense), vulkan_runner.info)
    got = launched(vulkan_runner, DENSE, dense, operands, values).outputs["partials"]
    same = launched(vulkan_runner, SELECTED, listed, with_list, values).outputs["partials"]
    assert np.array_equal(got.view(np.uint32), same.view(np.uint32))
    assert np.isfinite(got[:, :, 0]).all()


# Every geometry


COVERED = {
    0: ("scalar_f32, staged",),
    6: ("scalar_f32",),
    1: ("int_dot",),
    2: ("baseline", "scalar_f32", "packed_f16", "int_dot"),
    3: ("baseline", "scalar_f32", "packed_f16", "int_dot"),
    4: ("scalar_f32, staged",),
    5: ("baseline", "scalar_f32"),
}
"""Strategies by the place of a geometry: all of them where scales lie oddly."""
GEOMETRIES = [
    pytest.param(of, place, STRATEGIES[name], id=f"{of.kind}-{place}-{name}")
    for of in (DENSE, SELECTED)
    for place, strategies in COVERED.items()
    for name in strategies
]


def test_every_geometry_is_covered() -> None:
    assert all(len(geometries(of.kind)) == len(COVERED) for of in (DENSE, SELECTED))


@pytest.fixture(scope="module")
def cases(vulkan_runner: VulkanRunner) -> Iterator[dict[str, ResidentCases]]:
    """Validation cases that the variants of one geometry share."""
    resident = {of.name: ResidentCases(vulkan_runner, of) for of in (DENSE, SELECTED, COMBINE)}
    yield resident
    for each in resident.values():
        each.close()


@pytest.mark.parametrize(("of", "place", "text"), GEOMETRIES)
def test_every_geometry_is_right(
    vulkan_runner: VulkanRunner,
    cases: dict[str, ResidentCases],
    of: Family,
    place: int,
    text: str,
) -> None:
    problem = geometries(of.kind)[place]
    assert isinstance(problem, Q8DecodeProblem)
    assert_right(vulkan_runner, of, problem, filled(text, problem), cases[of.name])


# Mistakes


SMALL: dict[str, Problem] = {
    DENSE.name: Q8DecodeProblem(tokens=100, query_heads=4, kv_heads=2, head_size=64),
    SELECTED.name: Q8SelectedProblem(
        tokens=100, query_heads=4, kv_heads=2, head_size=64, visible=60
    ),
    COMBINE.name: GatedCombineProblem(parts=5, query_heads=4, head_size=64),
}
MISTAKES = {
    "one token short": (DENSE, "min(CHUNK, seen - last);", "min(CHUNK, seen - last) - 1u;"),
    "one token too many": (DENSE, "min(CHUNK, seen - last);", "min(CHUNK, seen - last) + 1u;"),
    "scale of the wrong group": (DENSE, "ROW_SCALES + word / 8u;", "ROW_SCALES + word / 16u;"),
    "halves exchanged": (DENSE, "int(number & 1u) * 16", "16 - int(number & 1u) * 16"),
    "wrong KV head": (DENSE, "first_head = kv_head * GROUP", "first_head = (1u - kv_head) * GROUP"),
    "wrong row": (DENSE, "row = gl_WorkGroupID.z;", "row = 0u;"),
    "natural base": (
        DENSE,
        "logit_scale[h] = push.base2_scale",
        "logit_scale[h] = 0.69 * push.base2_scale",
    ),
    "a chunk twice": (
        DENSE,
        "at / CHUNK * push.num_parts + part",
        "at / CHUNK * (push.num_parts - 1u) + part",
    ),
    "stale maximum": (DENSE, "weight_sum[h] *= correction;", ""),
    "gate read as a query": (DENSE, "2u * HEAD_SIZE;", "2u * HEAD_SIZE + HEAD_SIZE;"),
    "list ignored": (SELECTED, "visible[row * push.visible_stride + place]", "place"),
    "list of the first row": (SELECTED, "row * push.visible_stride + place", "place"),
    "gate forgotten": (COMBINE, " * gates[i]", ""),
    "gate of the query": (COMBINE, "+ HEAD_SIZE + dim", "+ dim"),
    "last part lost": (COMBINE, "CHUNK - 1u) / CHUNK, push", "CHUNK - 1u) / CHUNK - 1u, push"),
    "maximum forgotten": (COMBINE, "- highest)", "- 0.0)"),
    "a part without tokens": (COMBINE, "has_tokens ? outputs[b][i] : vec2(0.0)", "outputs[b][i]"),
    "earlier parts not rescaled": (
        COMBINE,
        "float old = exp2(joined.x - highest)",
        "float old = 1.0",
    ),
    "slices not joined": (COMBINE, "+ i], sums[i])", "+ i] * 0.0, sums[i])"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_kernel_broken_on_purpose_is_found(
    vulkan_runner: VulkanRunner, cases: dict[str, ResidentCases], name: str
) -> None:
    of, right, wrong = MISTAKES[name]
    problem, text = SMALL[of.name], COMBINES["sliced"]
    if isinstance(problem, Q8DecodeProblem):
        text = filled(STRATEGIES["scalar_f32"], problem)
    mistake = Mistake(variant=text, right=right, wrong=wrong, says="")
    assert_caught(vulkan_runner, of, problem, mistake, cases[of.name])


# Without a device


@pytest.mark.parametrize("of", [DENSE, SELECTED, COMBINE], ids=lambda of: of.name)
@pytest.mark.parametrize("device", [gpu(), narrow_cpu()], ids=["gpu", "cpu"])
def test_kernels_are_valid_spirv_and_timed_as_validated(of: Family, device: DeviceInfo) -> None:
    problem = geometries(of.kind)[0]
    first = of.validation_cases(problem)[0]
    case = first.problem
    sources = {}
    for values in pairwise(legal(of, problem, device)):
        timed = render_passes(of, values, problem, device, scalars=of.timing_scalars(problem))
        checked = of.validation_values(Candidate(values, problem, device), first)
        assert not reasons(of, checked, case, device)
        small = render_passes(of, checked, case, device, scalars=of.timing_scalars(case))
        assert [each.rendered.text for each in small] == [each.rendered.text for each in timed]
        sources |= {each.rendered.text: (each.rendered, values) for each in timed}
    kernels = {COMPILER.compile(text, values=values).spirv for text, values in sources.values()}
    assert len(kernels) > 15
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(spirv_val, sorted(kernels)[:: 1 + len(kernels) // 30]))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(24, 2, 256), (32, 8, 128), (16, 1, 96)])
def test_what_gpus_run_on_large_shapes_is_valid_spirv(heads: int, kv_heads: int, size: int) -> None:
    problem = Q8DecodeProblem(tokens=65_536, query_heads=heads, kv_heads=kv_heads, head_size=size)
    device = gpu(matrix_layouts=(LANES_32, LANES_32_WIDE))
    variants = legal(DENSE, problem, device).having({"strategy": ["matrix"], "split": ["device:1"]})
    assert {values["matrix_shape"] for values in variants} == {"16x8x16", "16x16x16"}
    scalars, kernels = DENSE.timing_scalars(problem), []
    for values in pairwise(variants):
        (attend,) = render_passes(DENSE, values, problem, device, scalars=scalars)
        kernels.append(COMPILER.compile(attend.rendered, values=values).spirv)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(spirv_val, kernels[::4]))


def test_problems_say_what_they_refuse() -> None:
    with pytest.raises(UsageError, match="must be a multiple of 32"):
        Q8DecodeProblem(tokens=4, query_heads=1, kv_heads=1, head_size=80)
    with pytest.raises(UsageError, match="visible is 5, must be from 1 to tokens"):
        Q8SelectedProblem(tokens=4, query_heads=1, kv_heads=1, head_size=32, visible=5)
    with pytest.raises(UsageError, match="parts is 0"):
        GatedCombineProblem(parts=0, query_heads=1, head_size=32)


def test_rows_see_fewer_tokens_the_earlier_they_are() -> None:
    problem = Q8DecodeProblem(rows=4, tokens=70, query_heads=1, kv_heads=1, head_size=32, step=30)
    assert problem.row_tokens().tolist() == [1, 10, 40, 70]
