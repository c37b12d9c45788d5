"""index_select: lists equal to the oracle's under all kinds of ties, golden, broken on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.family_kernels import COMPILER, Mistake, assert_caught, assert_right, launched, variant
from tests.golden_indexer import golden_operands, golden_problem, golden_results
from tests.golden_vectors import load, names
from tests.made_devices import gpu, narrow_cpu
from tests.spirv_tools import spirv_val
from tuner import workloads
from tuner.device_info import DeviceInfo
from tuner.evaluate import ResidentCases, render_passes
from tuner.kernels.index_select import INDEX_SELECT
from tuner.kernels.space import legal, pairwise, reasons
from tuner.oracle import judge
from tuner.oracle.indexer import block_mask, selected_blocks, visible_tokens
from tuner.problems import IndexerStepProblem

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

GEOMETRIES: tuple[IndexerStepProblem, ...] = workloads.geometries("indexer_step")  # type: ignore[assignment]
RELEASED, TWOS, EIGHTS, ONES, THREES = GEOMETRIES
VARIANTS = {
    "baseline": "baseline",
    "workgroup": "workgroup subgroups=16 digit_bits=11 items=8 listed=1024",
    "held": "workgroup subgroups=32 digit_bits=9 held=8 items=8 listed=2048",
    "parts": "parts subgroups=16 digit_bits=11 items=2 held=8 parts=8 listed=1024",
    "many parts": "parts subgroups=4 digit_bits=9 items=1 parts=32 listed=2048",
}
COVERED = [
    pytest.param(text, of, id=f"{name} {of.label}")
    for place, (name, text) in enumerate(VARIANTS.items())
    for number, of in enumerate(GEOMETRIES)
    if (place + number) % 3 == 0
]
"""Every third geometry for each variant, so that each has a baseline or one by subgroups."""
STRATEGIES = ("baseline", "held", "parts")


@pytest.fixture(scope="module")
def cases(vulkan_runner: VulkanRunner) -> Iterator[ResidentCases]:
    """Validation cases that the variants of one geometry share."""
    resident = ResidentCases(vulkan_runner, INDEX_SELECT)
    yield resident
    resident.close()


@pytest.mark.parametrize(("text", "of"), COVERED)
def test_every_geometry_is_right(
    vulkan_runner: VulkanRunner, cases: ResidentCases, text: str, of: IndexerStepProblem
) -> None:
    assert_right(vulkan_runner, INDEX_SELECT, of, text, cases)


@pytest.mark.parametrize("name", names("s3_index_select_*"))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lists_are_as_golden(vulkan_runner: VulkanRunner, name: str, strategy: str) -> None:
    golden = load(name)
    of, operands = golden_problem(golden), golden_operands(golden, INDEX_SELECT)
    values = variant(INDEX_SELECT, VARIANTS[strategy], vulkan_runner.info)
    found = launched(vulkan_runner, INDEX_SELECT, of, operands, values)
    assert found.dirty_counters == ()
    verdict = judge(found.outputs, INDEX_SELECT.reference(operands), "f32", name)
    assert verdict.ok, verdict.message
    assert golden.differences(golden_results(golden, found.outputs)) == []


def test_no_vector_is_missing() -> None:
    assert len(names("s3_index_select_*")) == 7


def step(context: int, *, rows: int = 1, kept: int = 512, ratio: int = 4) -> IndexerStepProblem:
    return IndexerStepProblem(
        rows=rows,
        context=context,
        capacity=context + 50,
        index_heads=2,
        index_dim=32,
        rotary=16,
        ratio=ratio,
        budget=kept * ratio,
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_become_selective_at_2052_tokens(vulkan_runner: VulkanRunner, strategy: str) -> None:
    """p + 1 = 2048 and 2051 tokens are dense, 2052 is not and sees 2,048, 2055 sees 3 more."""
    values = variant(INDEX_SELECT, VARIANTS[strategy], vulkan_runner.info)
    of = step(2055, rows=8)
    operands = INDEX_SELECT.operands(of, "random", 1)
    found = launched(vulkan_runner, INDEX_SELECT, of, operands, values).outputs
    assert found["visible_count"].tolist() == [0xFFFFFFFF] * 4 + [2048, 2049, 2050, 2051]
    assert (found["visible"][:4] == 0xFFFFFFFF).all()
    assert (found["block_mask"][:4] == 0xFFFFFFFF).all()
    assert found["visible"][7, 2048:].tolist() == [2052, 2053, 2054, 0xFFFFFFFF]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("context", "kept", "ratio", "inputs"),
    [(262_144, 512, 4, "timing"), (262_144, 2048, 4, "ties"), (262_144, 2048, 1, "ties")],
)
def test_long_contexts(
    vulkan_runner: VulkanRunner, context: int, kept: int, ratio: int, inputs: str, strategy: str
) -> None:
    of = step(context, kept=kept, ratio=ratio)
    operands = INDEX_SELECT.operands(of, inputs, 7)
    values = variant(INDEX_SELECT, VARIANTS[strategy], vulkan_runner.info)
    found = launched(vulkan_runner, INDEX_SELECT, of, operands, values)
    verdict = judge(found.outputs, INDEX_SELECT.reference(operands), "f32", "long")
    assert verdict.ok, verdict.message


# The oracle


@given(
    scores=st.lists(st.sampled_from([0.0, 0.25, 1.0, 1.5]), min_size=5, max_size=80),
    kept=st.integers(1, 5),
    tail=st.integers(0, 3),
)
def test_the_oracle_is_a_stable_sort(scores: list[float], kept: int, tail: int) -> None:
    order = sorted(range(len(scores)), key=lambda block: (-scores[block], block))[:kept]
    chosen = selected_blocks(np.array(scores, np.float32), kept)
    assert chosen.tolist() == sorted(order)
    tokens = visible_tokens(chosen, ratio=4, position=4 * len(scores) + tail - 1).tolist()
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 4 * kept + tail
    mask = block_mask(chosen, 3)
    assert [j for j in range(96) if mask[j // 32] >> (j % 32) & 1] == sorted(order)


# Broken on purpose

WORKGROUP = VARIANTS["workgroup"]
PARTS = VARIANTS["parts"]
MISTAKES = {
    "ties to the highest block": Mistake(
        variant=WORKGROUP, right="findMSB(at)", wrong="findLSB(at)", says=""
    ),
    "-0.0 above all": Mistake(variant="baseline", right=" & 0x7FFFFFFFu", wrong="", says="visible"),
    "all ties": Mistake(variant="baseline", right="equal < wanted)", wrong="true)", says="visible"),
    "ranks of one subgroup only": Mistake(
        variant=WORKGROUP,
        right="return subgroupAdd(before) + through - value;",
        wrong="return through - value;",
        says="",
    ),
    "ranks of one window only": Mistake(
        variant=VARIANTS["held"],
        right="above += total & 0xFFFFu;",
        wrong="",
        says="visible",
    ),
    "ties of one window only": Mistake(
        variant=VARIANTS["held"],
        right="at += total >> 16u;",
        wrong="",
        says="",
    ),
    "the bound is too high": Mistake(
        variant=WORKGROUP,
        right="find_digit(KEPT_BLOCKS);",
        wrong="find_digit(KEPT_BLOCKS / 4u);",
        says="",
    ),
    "the bound of one part only": Mistake(
        variant=PARTS,
        passes=("maxima",),
        right="(row * PARTS + part) * PART_GROUPS",
        wrong="row * PARTS * PART_GROUPS",
        says="",
    ),
    "candidates of one part only": Mistake(
        variant=PARTS,
        passes=("select",),
        right="row * LISTED + first_candidate + i",
        wrong="row * LISTED + i",
        says="",
    ),
    "the list has room for all": Mistake(
        variant=WORKGROUP,
        right="if (candidate_count <= LISTED) {",
        wrong="if (candidate_count != 0u) {",
        says="",
    ),
    "keys that are not held are left out": Mistake(
        variant=VARIANTS["held"],
        right="start < run.end; start += ITEMS * THREADS",
        wrong="start < 0u; start += ITEMS * THREADS",
        says="",
    ),
    "dense rows are selected, too": Mistake(
        variant=WORKGROUP,
        right="if (blocks <= KEPT_BLOCKS) {",
        wrong="if (blocks == 0u) {",
        says="",
    ),
    "rows of just one block more are left out": Mistake(
        variant="baseline",
        right="if (blocks <= KEPT_BLOCKS) {",
        wrong="if (blocks <= KEPT_BLOCKS + 1u) {",
        says="",
    ),
    "the tail is left out": Mistake(
        variant=WORKGROUP, right="token < tail;", wrong="token + 1u < tail;", says="visible"
    ),
    "the tail is not counted": Mistake(
        variant=WORKGROUP,
        right="KEPT_BLOCKS * RATIO + tail;",
        wrong="KEPT_BLOCKS * RATIO;",
        says="visible_count",
    ),
    "one token too many": Mistake(
        variant=WORKGROUP, right="token < tail;", wrong="token <= tail;", says="visible"
    ),
    "the mask is not cleared behind the blocks": Mistake(
        variant=WORKGROUP,
        right="block_mask[row * MASK_WORDS + word] = 0u;",
        wrong="",
        says="block_mask",
    ),
    "the mask has the tail in it": Mistake(
        variant=WORKGROUP,
        right="emit_tail(row, blocks);\n    }\n}",
        wrong="emit_tail(row, blocks);\n        "
        "block_mask[row * MASK_WORDS + blocks / 32u] |= 1u << (blocks % 32u);\n    }\n}",
        says="block_mask",
    ),
    "the last digit is not looked at": Mistake(
        variant=WORKGROUP,
        right="wanted < inside && bits > 0u",
        wrong="wanted < inside && bits > DIGIT_BITS",
        says="",
    ),
    "counters are not left zero": Mistake(
        variant=PARTS,
        passes=("select",),
        right="row_counters[counter_of(row, thread())] = 0u;",
        wrong="",
        says="left row_counters other than zero",
    ),
    "a row's neighbour's scores": Mistake(
        variant=PARTS, right="return Run(row * push.max_blocks,", wrong="return Run(0u,", says=""
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_broken_kernel_is_caught(
    vulkan_runner: VulkanRunner, cases: ResidentCases, name: str
) -> None:
    assert_caught(vulkan_runner, INDEX_SELECT, RELEASED, MISTAKES[name], cases)


# Without a device


ON_PAPER = {"narrow CPU": narrow_cpu(), "wide": gpu(max_subgroup_size=64)}


@pytest.mark.parametrize("device", ON_PAPER.values(), ids=list(ON_PAPER))
def test_kernels_are_valid_spirv(device: DeviceInfo) -> None:
    kernels = set()
    for values in pairwise(legal(INDEX_SELECT, RELEASED, device))[::2]:
        for each in render_passes(INDEX_SELECT, values, RELEASED, device):
            kernels.add(COMPILER.compile(each.rendered, values=values).spirv)
    assert len(kernels) > 20
    for spirv in sorted(kernels)[::8]:
        spirv_val(spirv)


def test_threads_go_by_subgroup_and_lane() -> None:
    """Vulkan promises no order of gl_LocalInvocationIndex, so kernels by subgroups do without."""
    for text in set(VARIANTS.values()) - {"baseline"}:
        for each in render_passes(
            INDEX_SELECT, variant(INDEX_SELECT, text, gpu()), RELEASED, gpu()
        ):
            code = [line.partition("//")[0] for line in each.rendered.text.splitlines()]
            assert not [line for line in code if "gl_LocalInvocation" in line]


def test_what_is_timed_is_what_is_validated() -> None:
    device = gpu()
    for of in workloads.default_problems("indexer_step", on_cpu=False)[1::4]:
        for values in pairwise(legal(INDEX_SELECT, of, device))[::2]:
            timed = render_passes(INDEX_SELECT, values, of, device)
            case = INDEX_SELECT.validation_cases(of)[3].problem
            assert not reasons(INDEX_SELECT, values, case, device)
            small = render_passes(INDEX_SELECT, values, case, device)
            assert [p.rendered.text for p in timed] == [p.rendered.text for p in small]
            assert max(max(p.declared.groups) for p in timed) <= 65_535


def test_a_narrow_device_gets_a_narrow_baseline() -> None:
    device = narrow_cpu(max_workgroup_invocations=256, max_workgroup_size=(256, 256, 64))
    (launch,) = render_passes(INDEX_SELECT, INDEX_SELECT.baseline, RELEASED, device)
    assert launch.declared.constants["threads"] == 256
