"""index_append, index_blocks and index_q on the device: right on every geometry, as golden, and
broken on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from tests.family_kernels import COMPILER, Mistake, assert_caught, assert_right, launched, variant
from tests.golden_indexer import golden_operands, golden_problem, golden_results
from tests.golden_vectors import load, names
from tests.made_devices import gpu, narrow_cpu
from tests.spirv_tools import spirv_val
from tuner import workloads
from tuner.evaluate import ResidentCases, render_passes
from tuner.kernels.base import Family
from tuner.kernels.index_append import INDEX_APPEND
from tuner.kernels.index_blocks import INDEX_BLOCKS
from tuner.kernels.index_q import INDEX_Q
from tuner.kernels.space import legal, reasons
from tuner.oracle import judge
from tuner.problems import IndexerStepProblem

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

FAMILIES = (INDEX_APPEND, INDEX_BLOCKS, INDEX_Q)
VARIANTS = {
    "index_append": ("baseline", "packed words=1", "packed words=2", "packed threads=64 words=4"),
    "index_blocks": (
        "baseline",
        "lanes lanes=8 subgroups=2",
        "lanes lanes=4 widening=integer",
        "lanes lanes=8 widening=integer subgroups=4",
    ),
    "index_q": ("baseline", "lanes lanes=8", "lanes lanes=4 subgroups=4"),
}
GEOMETRIES = workloads.geometries("indexer_step")
PAIRS = [
    pytest.param(family, text, id=f"{family.name} {text}")
    for family in FAMILIES
    for text in VARIANTS[family.name]
]
COVERED = [
    pytest.param(family, text, of, id=f"{family.name} {text} {of.label}")
    for family in FAMILIES
    for number, text in enumerate(VARIANTS[family.name])
    for place, of in enumerate(GEOMETRIES)
    if (number + place) % 2 == 0
]
"""Every other geometry for each variant, so that each has a baseline or two tuned ones."""
SMALL = IndexerStepProblem(
    rows=4, context=40, index_heads=2, index_dim=32, ratio=4, budget=16, rotary=16
)


@pytest.fixture(scope="module")
def cases(vulkan_runner: VulkanRunner) -> Iterator[dict[str, ResidentCases]]:
    """Validation cases that the variants of one geometry share."""
    resident = {family.name: ResidentCases(vulkan_runner, family) for family in FAMILIES}
    yield resident
    for each in resident.values():
        each.close()


@pytest.mark.parametrize(("family", "text", "of"), COVERED)
def test_every_geometry_is_right(
    vulkan_runner: VulkanRunner,
    cases: dict[str, ResidentCases],
    family: Family,
    text: str,
    of: IndexerStepProblem,
) -> None:
    assert isinstance(of, IndexerStepProblem)
    assert_right(vulkan_runner, family, of, text, cases[family.name])


@pytest.mark.parametrize(("family", "text"), PAIRS)
def test_kernels_are_as_golden(vulkan_runner: VulkanRunner, family: Family, text: str) -> None:
    values = variant(family, text, vulkan_runner.info)
    files = names(f"s3_{family.name}_*")
    assert len(files) == {"index_append": 2, "index_blocks": 3, "index_q": 2}[family.name]
    for name in files:
        golden = load(name)
        operands = golden_operands(golden, family)
        found = launched(vulkan_runner, family, golden_problem(golden), operands, values)
        verdict = judge(found.outputs, family.reference(operands), "f32", name)
        assert verdict.ok, verdict.message
        # The keys before rounding are the oracle's: no kernel has them.
        exact = {"blk_keys": golden.want["blk_keys"]} if "blk_keys" in golden.want else {}
        assert golden.differences(golden_results(golden, found.outputs) | exact) == []


def test_a_rewind_inside_a_block_recomputes_it(vulkan_runner: VulkanRunner) -> None:
    """Rejected drafts: the next step begins inside a block that is complete already."""
    operands = INDEX_BLOCKS.operands(replaced(base=20, rows=4), "random", 1)
    again = INDEX_BLOCKS.operands(replaced(base=22, rows=2), "random", 2)
    keys = operands.inputs["index_keys"].copy()
    keys[22:24] = again.inputs["index_keys"][22:24]
    for text in VARIANTS["index_blocks"]:
        values = variant(INDEX_BLOCKS, text, vulkan_runner.info)
        first = launched(vulkan_runner, INDEX_BLOCKS, replaced(20, 4), operands, values)
        inputs = {
            **again.inputs,
            "index_key_weight": operands.inputs["index_key_weight"],
            "index_keys": keys,
            "block_keys": first.outputs["block_keys"],
        }
        rewound = replace(again, inputs=inputs)
        second = launched(vulkan_runner, INDEX_BLOCKS, replaced(22, 2), rewound, values)
        verdict = judge(second.outputs, INDEX_BLOCKS.reference(rewound), "f32", "rewind")
        assert verdict.ok, verdict.message
        changed = (first.outputs["block_keys"] != second.outputs["block_keys"]).any(axis=-1)
        assert np.flatnonzero(changed).tolist() == [5]


def replaced(base: int, rows: int) -> IndexerStepProblem:
    return IndexerStepProblem(
        rows=rows,
        context=base + rows,
        capacity=32,
        index_heads=2,
        index_dim=32,
        ratio=4,
        budget=16,
        rotary=16,
    )


# Broken on purpose


def mistake(family: Family, *texts: str) -> tuple[Family, Mistake]:
    """A family and, in one of its variants, a `wrong` text for a `right` one; what is said then."""
    text, right, wrong, says = texts
    return family, Mistake(variant=text, right=right, wrong=wrong, says=says)


LANES = "lanes lanes=8"
FIRST_HEAD = "uint source = (row * (INDEX_HEADS + 1u) + head) * INDEX_DIM;"
MISTAKES = {
    "halves are rounded up": mistake(
        INDEX_APPEND, "packed words=2", "(kept & 1u) == 1u", "true", "index_keys"
    ),
    "subnormals are flushed": mistake(
        INDEX_APPEND, "baseline", "size < 0x33000000u", "size < 0x38800000u", "index_keys"
    ),
    "appended one row late": mistake(
        INDEX_APPEND,
        "packed words=4",
        "(push.base_pos + row) *",
        "(push.base_pos + row + 1u) *",
        "index_keys",
    ),
    "a query for the key": mistake(
        INDEX_APPEND, "baseline", "+ INDEX_HEADS) * INDEX_DIM", ") * INDEX_DIM", "index_keys"
    ),
    "subnormal keys are lost": mistake(
        INDEX_BLOCKS,
        "lanes lanes=8 widening=integer",
        "float(size) * 5.9604644775390625e-8",
        "0.0",
        "block_keys",
    ),
    "an incomplete block": mistake(
        INDEX_BLOCKS,
        LANES,
        "block < (push.base_pos + push.rows) / RATIO",
        "block <= (push.base_pos + push.rows) / RATIO",
        "untouched",
    ),
    "blocks begun before are left out": mistake(
        INDEX_BLOCKS,
        LANES,
        "bool complete = block <",
        "bool complete = block * RATIO >= push.base_pos && block <",
        "block_keys",
    ),
    "turned by another entry": mistake(
        INDEX_BLOCKS,
        LANES,
        "vec4(rope_blocks[turn]",
        "vec4(rope_blocks[0]",
        "keys",
    ),
    "not turned at all": mistake(
        INDEX_BLOCKS, "baseline", "if (dim < ROTARY)", "if (dim < 0u)", "block_keys"
    ),
    "the mean of too few": mistake(
        INDEX_BLOCKS, "baseline", "token < RATIO;", "token < RATIO - 1u;", "block_keys"
    ),
    "the other weight convention": mistake(
        INDEX_Q, LANES, "[i] + WEIGHT_OFFSET)", "[i] + 1.0 - WEIGHT_OFFSET)", "index_query"
    ),
    "no eps": mistake(INDEX_Q, LANES, "+ EPS)", ")", "index_query"),
    "heads without the key between": mistake(
        INDEX_Q, LANES, FIRST_HEAD, "uint source = vector * INDEX_DIM;", "index_query"
    ),
    "turned the other way": mistake(
        INDEX_Q, LANES, "entries.xz - quad.zw", "entries.xz + quad.zw", "index_query"
    ),
    "turned by another row's position": mistake(
        INDEX_Q, LANES, "uint turn = row *", "uint turn = 0u *", "index_query"
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_broken_kernel_is_caught(
    vulkan_runner: VulkanRunner, cases: dict[str, ResidentCases], name: str
) -> None:
    family, wrong = MISTAKES[name]
    assert_caught(vulkan_runner, family, SMALL, wrong, cases[family.name])


# Without a device


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_kernels_are_valid_spirv(family: Family) -> None:
    for device in (narrow_cpu(), gpu()):
        kernels = set()
        for of in GEOMETRIES:
            for values in legal(family, of, device):
                for each in render_passes(family, values, of, device):
                    kernels.add(COMPILER.compile(each.rendered, values=values).spirv)
        for spirv in sorted(kernels)[:: max(1, len(kernels) // 12)]:
            spirv_val(spirv)
        assert len(kernels) >= 15


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_is_timed_is_what_is_validated(family: Family) -> None:
    device = gpu()
    for of in workloads.default_problems("indexer_step", on_cpu=False):
        for values in legal(family, of, device):
            timed = render_passes(family, values, of, device)
            case = family.validation_cases(of)[-1].problem
            assert not reasons(family, values, case, device)
            small = render_passes(family, values, case, device)
            assert [p.rendered.text for p in timed] == [p.rendered.text for p in small]


def test_shapes_that_do_not_fit_have_a_reason() -> None:
    device = gpu(max_storage_buffer_bytes=2**20)
    big = replace_context(SMALL, 2**20)
    for family in (INDEX_APPEND, INDEX_BLOCKS):
        assert "index_keys takes 67108864 bytes" in " ".join(
            reasons(family, family.baseline, big, device)
        )
    odd = IndexerStepProblem(rows=1, context=9, index_dim=32, rotary=6, budget=16)
    said = reasons(INDEX_Q, variant(INDEX_Q, LANES, gpu()), odd, gpu())
    assert said == ("rotary is 6, two neighbours and two partners need a multiple of 4",)


def replace_context(problem: IndexerStepProblem, context: int) -> IndexerStepProblem:
    return msgspec.structs.replace(problem, context=context)
