"""Paged attention broken on purpose: every mistake is caught, in every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.attention_variants import lane_matrix_variant, matrix_variant, problem
from tests.family_kernels import Mistake, assert_caught, judged
from tuner.evaluate import ResidentCases
from tuner.kernels.paged_attention import PAGED_ATTENTION as FAMILY

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

LANES = "lanes subgroups=2 tile_rows=4 lanes_per_token=8 split=count:4"
TILES = "tiles subgroups=4 tile_rows=16 tile_tokens=8 lanes_per_row=8"
SEEN = "int(row / GROUP) + 1 + push.q_offset"
MISTAKES = {
    "mask one key short": Mistake(
        variant=TILES, right=SEEN, wrong="int(row / GROUP) + push.q_offset"
    ),
    "mask from the corner, whatever the offset": Mistake(
        variant=LANES, passes=("attend",), right=SEEN, wrong="int(row / GROUP) + 1"
    ),
    "mask of rows instead of query tokens": Mistake(
        variant=TILES, right=SEEN, wrong="int(row) + 1 + push.q_offset"
    ),
    "not cut at the context": Mistake(
        variant="baseline",
        passes=("baseline",),
        right="0, int(push.context)",
        wrong="0, int(push.context) + 1",
    ),
    "heads of a group interleaved": Mistake(
        variant=LANES,
        passes=("attend",),
        right="kv_head * GROUP + row % GROUP",
        wrong="row % GROUP * push.kv_heads + kv_head",
    ),
    "neighbouring token": Mistake(
        variant=TILES,
        right="token % BLOCK_SIZE)",
        wrong="(token % BLOCK_SIZE > 0u ? token % BLOCK_SIZE - 1u : 0u))",
    ),
    "log-sum-exp in base 2": Mistake(
        variant=LANES,
        passes=("combine",),
        right="peak * 0.6931471805599453",
        wrong="peak",
        says="lse",
    ),
    "log-sum-exp of an empty row": Mistake(
        variant=TILES,
        right="float total = max(weight, 1e-10)",
        wrong="float total = max(weight, 1e-9)",
        says="lse",
    ),
    "split lost in the combine": Mistake(
        variant=LANES,
        passes=("combine",),
        right="part < parts;",
        wrong="part < (parts > 1u ? parts - 1u : parts);",
    ),
    "lanes: sums not rescaled": Mistake(
        variant=LANES, passes=("attend",), right="sums[r][c][v] *= correction;", wrong=""
    ),
    "lanes: weights counted by every replica": Mistake(
        variant=LANES,
        passes=("attend",),
        right="weight /= float(REPLICAS);",
        wrong="",
    ),
    "lanes: the wrong half of the scores": Mistake(
        variant=LANES, passes=("attend",), right="upper ? score[i] :", wrong="!upper ? score[i] :"
    ),
    "weight of one lane": Mistake(
        variant=TILES, right="weight[r] += subgroupShuffleXor(weight[r], step);", wrong=""
    ),
    "poisoned tail of a block": Mistake(
        variant=TILES,
        right="token < end ? values",
        wrong="token < push.context + 1u ? values",
        says="NaN",
    ),
    "rows not written": Mistake(
        variant=TILES, right="own_first + r < rows", wrong="own_first + r < rows - 1u", says="NaN"
    ),
    "write past the output": Mistake(
        variant=TILES,
        right="void main() {",
        wrong="void main() {\n    if (gl_LocalInvocationIndex == 0u) { attention[push.batch * "
        "push.query_heads * push.query_tokens * CHUNKS] = uvec4(0u); }",
        says="past the end of out",
    ),
}


@pytest.fixture(scope="module")
def cases(vulkan_runner: VulkanRunner) -> Iterator[ResidentCases]:
    """Validation cases that all mistakes share."""
    resident = ResidentCases(vulkan_runner, FAMILY)
    yield resident
    resident.close()


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_a_broken_kernel_is_caught(
    vulkan_runner: VulkanRunner, cases: ResidentCases, mistake: Mistake
) -> None:
    assert_caught(vulkan_runner, FAMILY, problem(), mistake, cases)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("sums[0][0] *= correction[0];", ""),
        ("first + LANE_COLUMN[lane]", "first + 1u + LANE_COLUMN[lane]"),
        ("(TOKENS + ", "("),
        ("row < rows ? query", "row < rows - 1u ? query"),
    ],
    ids=["not rescaled", "mask one key short", "keys for values", "last row missing"],
)
def test_a_broken_matrix_kernel_is_caught(
    vulkan_runner: VulkanRunner, matrix_shape: str, cases: ResidentCases, right: str, wrong: str
) -> None:
    text = matrix_variant(matrix_shape, "split=none")
    mistake = Mistake(variant=text, right=right, wrong=wrong, says="")
    assert_caught(vulkan_runner, FAMILY, problem(element="f16"), mistake, cases)


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("sums[0][i][0] *= correction_0[0];", "", ""),
        ("score_row + 0u < seen", "score_row + 1u < seen", ""),
        ("= values[chunk +", "= keys[chunk +", ""),
        ("min(start + within, end - 1u)", "start + within", "NaN"),
        ("slot < SUBGROUPS * MERGED;", "slot < MERGED;", ""),
        ("merged = min(MERGED, rows - first)", "merged = 1u", "NaN"),
    ],
    ids=[
        *("not rescaled", "mask one key short", "keys for values", "poisoned tail of a block"),
        *("one subgroup's tokens", "rows not written"),
    ],
)
def test_a_broken_kernel_fed_by_lanes_is_caught(
    vulkan_runner: VulkanRunner,
    matrix_shape: str,
    cases: ResidentCases,
    right: str,
    wrong: str,
    says: str,
) -> None:
    text = lane_matrix_variant(matrix_shape, "subgroups=2 split=none")
    mistake = Mistake(variant=text, right=right, wrong=wrong, says=says)
    assert_caught(vulkan_runner, FAMILY, problem(element="f16"), mistake, cases)


@pytest.mark.parametrize("text", ["baseline", LANES, TILES], ids=["baseline", "lanes", "tiles"])
def test_what_is_broken_here_was_right(
    vulkan_runner: VulkanRunner, cases: ResidentCases, text: str
) -> None:
    assert judged(vulkan_runner, FAMILY, problem(), text, cases=cases).failure is None
