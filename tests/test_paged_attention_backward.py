"""Gradients of paged attention: right on every geometry and golden vector, and reproducible."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from tests.attention_variants import problem as forward_problem
from tests.family_kernels import (
    COMPILER,
    Mistake,
    assert_caught,
    assert_right,
    judged,
    launched,
    variant,
)
from tests.golden_attention import golden_gradient_operands, golden_problem
from tests.golden_vectors import load, names
from tests.made_devices import gpu, narrow_cpu
from tests.spirv_tools import spirv_val
from tuner.device_info import DeviceInfo
from tuner.evaluate import ResidentCases, render_passes
from tuner.kernels.base import Candidate
from tuner.kernels.gradient_operands import make_operands
from tuner.kernels.paged_attention_backward import PAGED_ATTENTION_BACKWARD as FAMILY
from tuner.kernels.paged_attention_backward import bytes_moved
from tuner.kernels.space import legal, pairwise, reasons
from tuner.oracle import judge
from tuner.oracle.paged_attention_backward import backward_reference
from tuner.problems import AttentionGradientProblem

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

GOLDEN = names("s2_backward_*")
OWNED = "deterministic threads=64 key_tile_rows=8"
ADDED = "atomic threads=64 key_tile_tokens=8 row_parts=2"


def problem(*geometry: int, **changes: Any) -> AttentionGradientProblem:
    fields = msgspec.structs.asdict(forward_problem(*geometry, **changes))
    return AttentionGradientProblem(**fields)


@pytest.fixture(scope="module")
def cases(vulkan_runner: VulkanRunner) -> Iterator[ResidentCases]:
    """Validation cases that the variants of one geometry share."""
    resident = ResidentCases(vulkan_runner, FAMILY)
    yield resident
    resident.close()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, OWNED) for name in GOLDEN),
        *((name, text) for name in GOLDEN[:3] for text in ("baseline", ADDED)),
    ],
    ids=lambda value: value.split()[0],
)
def test_golden_vectors(vulkan_runner: VulkanRunner, name: str, text: str) -> None:
    golden = load(name)
    operands = golden_gradient_operands(golden)
    done = launched(vulkan_runner, FAMILY, golden_problem(golden), operands, text)
    verdict = judge(done.outputs, backward_reference(operands), "f32", name)
    assert verdict.ok, verdict.message
    got = {
        "dq": done.outputs["query_gradient"],
        "dk_blocks": done.outputs["key_gradient"],
        "dv_blocks": done.outputs["value_gradient"],
    }
    assert golden.differences(got) == []


COVERED = {
    # head size, block size, query heads per KV head, KV heads, element type
    (64, 8, 2, 2, "f16"): """
    baseline
    deterministic threads=128 key_tile_tokens=8 key_tile_rows=16 query_tile_rows=16
    atomic threads=256 key_tile_tokens=16 key_tile_rows=8 query_tile_tokens=16 row_parts=4
    """,
    (80, 5, 3, 1, "bf16"): """
    deterministic threads=128 key_tile_tokens=8 query_tile_tokens=8
    """,
    (96, 16, 1, 2, "f32"): """
    atomic threads=64 key_tile_tokens=8 query_tile_tokens=8 row_parts=8
    """,
    (128, 32, 2, 1, "f32"): """
    deterministic threads=256 key_tile_tokens=16 key_tile_rows=4 query_tile_rows=8
    """,
    (192, 16, 2, 1, "f16"): """
    deterministic threads=64
    """,
    (256, 16, 1, 1, "f32"): """
    atomic threads=128 key_tile_rows=8
    """,
}
"""Geometries with every head size and element type that must work."""
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


@pytest.mark.parametrize("atomics", ["compare_swap", "native"])
def test_both_ways_to_add_floats_are_right_where_the_device_has_them(
    vulkan_runner: VulkanRunner, cases: ResidentCases, atomics: str
) -> None:
    of, text = problem(64, 8, 2, 2, element="f16"), f"{ADDED} atomics={atomics}"
    if found := reasons(FAMILY, variant(FAMILY, text, vulkan_runner.info), of, vulkan_runner.info):
        pytest.skip("; ".join(found))
    assert judged(vulkan_runner, FAMILY, of, text, cases=cases).failure is None


def test_a_deterministic_kernel_gives_the_same_bits_each_time(vulkan_runner: VulkanRunner) -> None:
    of = problem(64, 8, 2, 2, batch=4, query_tokens=24, context=44, causal="bottom_right")
    operands = make_operands(of, "shared", 9)
    first, second = (launched(vulkan_runner, FAMILY, of, operands, OWNED).outputs for _ in range(2))
    for name, array in first.items():
        np.testing.assert_array_equal(array.view(np.uint32), second[name].view(np.uint32))


def test_sequences_that_share_all_blocks_add_up(vulkan_runner: VulkanRunner) -> None:
    """Twice the same sequence: the pool's gradients are twice those of one."""
    of = problem(64, 8, 2, 1, batch=1, query_tokens=9, context=20, causal="bottom_right")
    one = make_operands(of, "random", 4)
    rows = ("query", "block_table", "out", "out_gradient", "lse")
    twice = replace(
        one,
        inputs=one.inputs
        | {name: np.concatenate([one.inputs[name]] * 2) for name in rows}
        | {"user_starts": 2 * one.inputs["user_starts"]}
        | {"users": np.repeat(one.inputs["users"], 2, axis=0)},
        outputs=one.outputs
        | {"query_gradient": ((2, *one.outputs["query_gradient"][0][1:]), np.dtype(np.float32))},
        scalars=one.scalars | {"batch": 2},
    )
    twice.inputs["users"][1::2, 0] = 1
    both = msgspec.structs.replace(of, batch=2)
    for text in (OWNED, ADDED):
        single = launched(vulkan_runner, FAMILY, of, one, text).outputs
        double = launched(vulkan_runner, FAMILY, both, twice, text).outputs
        for name in ("key_gradient", "value_gradient"):
            assert single[name].any()
            np.testing.assert_allclose(double[name], 2 * single[name], rtol=1e-4, atol=1e-6)


# Kernels broken on purpose

MISTAKES = {
    "weights not masked": Mistake(
        variant=OWNED, passes=("keys",), right="= seen ? share : 0.0", wrong="= share"
    ),
    "no delta": Mistake(
        variant=OWNED,
        passes=("queries",),
        right="share_gradient[n] - row_delta[scored]",
        wrong="share_gradient[n]",
    ),
    "scale forgotten": Mistake(
        variant=ADDED,
        passes=("queries",),
        right="row_delta[scored]) * push.softmax_scale",
        wrong="row_delta[scored])",
    ),
    "only the first user of a block": Mistake(
        variant=OWNED,
        passes=("keys",),
        right="user < user_starts[block + 1u]",
        wrong="user < min(user_starts[block] + 1u, user_starts[block + 1u])",
    ),
    "shared blocks overwritten": Mistake(
        variant=ADDED,
        passes=("keys",),
        right="floatBitsToUint(uintBitsToFloat(expected) + share)",
        wrong="floatBitsToUint(share)",
    ),
    "pool not zeroed": Mistake(
        variant=ADDED, passes=("zero",), right="value_gradient[i] = 0.0;", wrong="", says="NaN"
    ),
    "unused blocks not written": Mistake(
        variant=OWNED,
        passes=("keys",),
        right="slot < slots) {",
        wrong="slot < slots && user_starts[block] < user_starts[block + 1u]) {",
        says="NaN",
    ),
    "a part of the rows lost": Mistake(
        variant=ADDED,
        passes=("keys",),
        right="(part + 1u) * rows_per_part)",
        wrong="(part + 1u) * rows_per_part - 1u)",
    ),
    "first row that sees a key": Mistake(
        variant=OWNED,
        passes=("keys",),
        right="int(base) - push.q_offset",
        wrong="int(base) + 1 - push.q_offset",
    ),
    "poisoned keys multiplied by zero": Mistake(
        variant=OWNED,
        passes=("queries",),
        right="live ? keys[place] : uvec4(0u)",
        wrong="keys[place + (live ? 0u : push.kv_heads * CHUNKS)]",
        says="NaN",
    ),
    "heads of a group in the wrong place": Mistake(
        variant="baseline",
        passes=("baseline",),
        right="token_chunk(sequence, head / GROUP, token)",
        wrong="token_chunk(sequence, head % push.kv_heads, token)",
    ),
    "write past the pool": Mistake(
        variant=ADDED,
        passes=("zero",),
        right="* HEAD_SIZE;",
        wrong="* HEAD_SIZE + 1u;",
        says="past the end of key_gradient",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_a_broken_kernel_is_caught(
    vulkan_runner: VulkanRunner, cases: ResidentCases, mistake: Mistake
) -> None:
    of = problem(64, 8, 2, 2, element="f16")
    assert_caught(vulkan_runner, FAMILY, of, mistake, cases)


@pytest.mark.parametrize("text", [OWNED, ADDED], ids=["deterministic", "atomic"])
def test_what_is_broken_here_was_right(
    vulkan_runner: VulkanRunner, cases: ResidentCases, text: str
) -> None:
    of = problem(64, 8, 2, 2, element="f16")
    assert judged(vulkan_runner, FAMILY, of, text, cases=cases).failure is None


# Without a device

ON_PAPER = {
    "narrow CPU": (narrow_cpu(), problem(64, context=1024)),
    "GPU": (gpu(atomic_float_add=True), problem(128, query_tokens=64, element="f16")),
}
on_paper = pytest.mark.parametrize(("device", "of"), ON_PAPER.values(), ids=list(ON_PAPER))


@on_paper
def test_kernels_are_valid_spirv_and_those_that_are_validated(
    device: DeviceInfo, of: AttentionGradientProblem
) -> None:
    sources: dict[str, Any] = {}
    for values in pairwise(legal(FAMILY, of, device)):
        scalars = FAMILY.timing_scalars(of)
        timed = render_passes(FAMILY, values, of, device, scalars=scalars)
        case = FAMILY.validation_cases(of)[1]
        validated = FAMILY.validation_values(Candidate(values, of, device), case)
        assert not reasons(FAMILY, validated, case.problem, device)
        scalars = FAMILY.timing_scalars(case.problem)
        small = render_passes(FAMILY, validated, case.problem, device, scalars=scalars)
        assert [each.rendered.text for each in small] == [each.rendered.text for each in timed]
        sources |= {each.rendered.text: each.rendered for each in timed}
    kernels = {COMPILER.compile(each, values={}).spirv for each in sources.values()}
    assert len(kernels) > 40
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(spirv_val, kernels))


def test_spaces_are_large_and_every_strategy_is_in_them() -> None:
    found = {name: legal(FAMILY, of, device) for name, (device, of) in ON_PAPER.items()}
    for variants in found.values():
        assert {v["strategy"] for v in variants} == {"baseline", "deterministic", "atomic"}
        assert len(variants) > 500
    assert {v["atomics"] for v in found["GPU"]} == {"compare_swap", "native"}
    assert {v["atomics"] for v in found["narrow CPU"]} == {"compare_swap"}


@pytest.mark.parametrize(
    ("text", "of", "says"),
    [
        ("atomic atomics=native", problem(), "VK_EXT_shader_atomic_float"),
        ("deterministic key_tile_tokens=32", problem(64, 8), "use fewer key_tile_tokens"),
        ("atomic threads=64", problem(512), "needs 128 threads"),
        ("atomic key_tile_tokens=32 key_tile_rows=32", problem(128), "shared memory"),
        ("baseline", problem(36, element="bf16"), "no multiple of 8"),
        ("atomic", problem(batch=40_000), "workgroups in z"),
    ],
)
def test_what_is_not_supported_has_a_reason(
    text: str, of: AttentionGradientProblem, says: str
) -> None:
    device = narrow_cpu()
    assert says in "; ".join(reasons(FAMILY, variant(FAMILY, text, device), of, device))


def test_threads_in_x_may_be_limited_more_than_those_of_a_workgroup() -> None:
    device, of = narrow_cpu(max_workgroup_size=(64, 64, 64)), problem(64)
    said = reasons(FAMILY, variant(FAMILY, "deterministic threads=128", device), of, device)
    assert "256 threads a workgroup, the device allows 64" in said
    assert "128 threads a workgroup, the device allows 64" in said


def test_launches_stay_within_the_limit_of_each_axis() -> None:
    device = narrow_cpu()
    of = problem(64, batch=1, query_tokens=1, context=3_000_000)
    for text in ("baseline", OWNED, ADDED):
        values = variant(FAMILY, text, device)
        candidate = Candidate(values, of, device)
        for each in FAMILY.passes(candidate, FAMILY.timing_scalars(of)):
            assert all(
                n <= most for n, most in zip(each.groups, device.max_workgroup_count, strict=True)
            )
        assert not reasons(FAMILY, values, of, device)


def test_bytes_moved_count_inputs_and_gradients_once() -> None:
    of = problem(64, query_tokens=4, context=40, element="f16")
    rows, cache, pool = 2 * 8 * 4 * 64, 2 * 40 * 2 * 64, 2 * 48 * 2 * 64
    read = 2 * (3 * rows + 2 * cache) + 4 * 2 * 8 * 4
    assert bytes_moved(of) == read + 4 * rows + 8 * pool + 4 * 2 * 3
