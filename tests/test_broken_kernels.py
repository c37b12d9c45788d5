"""Kernels broken on purpose, one mistake each: validation catches every one of them.

The mistakes are put into the rendered GLSL of real variants, so that a mistake that no longer
applies to the templates fails here, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.family_kernels import Mistake, assert_caught, judged
from tuner.evaluate import ResidentCases
from tuner.kernels.paged_decode_q8 import PAGED_DECODE_Q8 as FAMILY
from tuner.problems import PagedDecodeProblem

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

PROBLEM = PagedDecodeProblem(
    query_heads=4, kv_heads=2, head_size=64, block_size=16, sequences=2, context=1024
)
BASELINE = "baseline"
SPLIT = "scalar_f32 subgroups=2 lanes_per_token=8 tokens_unrolled=4 split=count:4"
WHOLE = "scalar_f32 subgroups=2 lanes_per_token=8 tokens_unrolled=4 split=none"
DEALT = "matrix staging=shared prefetch=all subgroups=2 split=none"
STAGED = "scalar_f32 staging=shared subgroups=2 lanes_per_token=8 head_slices=2 load_words=4"


SEEN = "min(context_lens[sequence], push.max_context_len)"
LENGTH = f"uint length = {SEEN};"
KEY_SCALE = "key_words[scale_of_row(row)]"
VALUE_SCALE = "value_words[scale_of_row(row)]"
BEFORE = "scale_of_row(row - (row / ROW_WORDS % BLOCK_SIZE > 0u ? ROW_WORDS : 0u))"
MAIN = "void main() {"


def everywhere(right: str, wrong: str, says: str = "is off by") -> dict[str, Mistake]:
    """The same mistake in the baseline and in a kernel that splits the context."""
    return {
        "baseline": Mistake(
            variant=BASELINE, passes=("baseline",), right=right, wrong=wrong, says=says
        ),
        "split": Mistake(variant=SPLIT, passes=("attend",), right=right, wrong=wrong, says=says),
    }


def _past_the_end(variant: str, name_of_pass: str, buffer: str, elements: str) -> Mistake:
    write = f"{MAIN}\n    if (gl_LocalInvocationIndex == 0u) {{ {buffer}[{elements}] = 0.0; }}"
    name = {"attention": "out"}.get(buffer, buffer)
    says = f"past the end of {name}"
    return Mistake(variant=variant, passes=(name_of_pass,), right=MAIN, wrong=write, says=says)


MISTAKES = {
    "skipped last partial block": everywhere(
        LENGTH, f"uint length = {SEEN} / BLOCK_SIZE * BLOCK_SIZE;"
    ),
    "wrong KV head": {
        "baseline": Mistake(
            variant=BASELINE,
            passes=("baseline",),
            right="uint kv_head = head / GROUP;",
            wrong="uint kv_head = head % push.num_kv_heads;",
        ),
        "split": Mistake(
            variant=SPLIT,
            passes=("attend",),
            right="uint first_head = kv_head * GROUP",
            wrong="uint first_head = (push.num_kv_heads - 1u - kv_head) * GROUP",
        ),
    },
    "key scale of the neighbouring token": everywhere(KEY_SCALE, f"key_words[{BEFORE}]"),
    "value scale of the neighbouring token": everywhere(VALUE_SCALE, f"value_words[{BEFORE}]"),
    "split lost in the combine": {
        "last": Mistake(
            variant=SPLIT,
            passes=("combine",),
            right="part < parts;",
            wrong="part < (parts > 1u ? parts - 1u : parts);",
        ),
        "all but one of a slice": Mistake(
            variant=f"{SPLIT} combine_slices=2",
            passes=("combine",),
            right="part < parts; part += SLICES",
            wrong="part < min(parts, SLICES); part += SLICES",
        ),
        "another slice": Mistake(
            variant=f"{SPLIT} combine_slices=4",
            passes=("combine",),
            right="other < SLICES;",
            wrong="other < SLICES - 1u;",
        ),
    },
    "one token short": everywhere(LENGTH, f"uint length = max({SEEN}, 1u) - 1u;"),
    "one token too many": everywhere(
        LENGTH, f"uint length = {SEEN}; length += uint(length % BLOCK_SIZE != 0u);"
    ),
    "write past the output": {
        "baseline": _past_the_end(
            BASELINE, "baseline", "attention", "gl_NumWorkGroups.y * push.num_heads * HEAD_SIZE"
        ),
        "whole": _past_the_end(
            WHOLE, "attend", "attention", "gl_NumWorkGroups.z * push.num_heads * HEAD_SIZE"
        ),
        "partials": _past_the_end(
            SPLIT,
            "attend",
            "partials",
            "gl_NumWorkGroups.z * push.num_heads * push.num_splits * (HEAD_SIZE + 2u)",
        ),
    },
    "output not written": {
        "baseline": Mistake(
            variant=BASELINE,
            passes=("baseline",),
            right="attention[(sequence",
            wrong="if (dim != 5u) attention[(sequence",
            says="NaN",
        ),
        "whole": Mistake(
            variant=WHOLE,
            passes=("attend",),
            right="attention[first + i]",
            wrong="if (first % HEAD_SIZE != 4u) attention[first + i]",
            says="NaN",
        ),
        "combine": Mistake(
            variant=SPLIT,
            passes=("combine",),
            right="attention[first + i]",
            wrong="if (i != 3u) attention[first + i]",
            says="NaN",
        ),
    },
    "partial result not written": {
        "split": Mistake(
            variant=SPLIT,
            passes=("attend",),
            right="partials[statistics + 1u] = sum;",
            wrong="",
            says="NaN",
        ),
    },
    "poisoned scale of a masked token": {
        "split": Mistake(
            variant=SPLIT,
            passes=("attend",),
            right="weight[u] = valid[u] ? weight[u] * value_scale[u] : 0.0;",
            wrong="weight[u] = weight[u] * value_scale[u];",
            says="NaN",
        ),
        "staged": Mistake(
            variant=STAGED,
            passes=("attend",),
            right="weight[u] = valid[u] ? weight[u] * value_scale[u] : 0.0;",
            wrong="weight[u] = weight[u] * value_scale[u];",
            says="NaN",
        ),
    },
    "tile staged too early": {
        "staged": Mistake(
            variant=STAGED,
            passes=("attend",),
            right="stage_tile(sequence, kv_head, first, end);",
            wrong="stage_tile(sequence, kv_head, min(first + TILE, end - 1u) / TILE * TILE, end);",
        ),
    },
}


ANYTHING = ""
"""Said of mistakes that show in ways that depend on how many workgroups the device is given."""


def _dealt(right: str, wrong: str, says: str = "is off by") -> Mistake:
    return Mistake(variant=DEALT, passes=("attend",), right=right, wrong=wrong, says=says)


DEALT_MISTAKES = {
    "part lost in the join": _dealt("first <= last_part;", "first < last_part;"),
    "part in the row of another": _dealt(
        "(pair + gl_WorkGroupID.x) * GROUP", "(pair + gl_WorkGroupID.x + 1u) * GROUP", ANYTHING
    ),
    "counter left as it was": _dealt("counters[pair] = 0u;", "", "left counters other than zero"),
    "nobody clears sequences without tokens": _dealt("    clear_empty_sequences();\n}", "}", "NaN"),
    "next pair begins where the last began": _dealt(
        "segment.pair_tile + segment.pair_tiles", "segment.pair_tile", ANYTHING
    ),
    "tile of the last round lost": _dealt("round < now.end;", "round + ROUND < now.end;"),
    "query of the pair before": _dealt(
        "next.sequence * push.q_stride", "now.sequence * push.q_stride"
    ),
    "one token too many": _dealt("score_token_0 < now.end", "score_token_0 <= now.end"),
}
"""Mistakes in dealing out work, for devices with cooperative matrices."""


@pytest.fixture(scope="module")
def cases(vulkan_runner: VulkanRunner) -> Iterator[ResidentCases]:
    """Validation cases that all kernels here share."""
    resident = ResidentCases(vulkan_runner, FAMILY)
    yield resident
    resident.close()


@pytest.mark.parametrize("text", [BASELINE, SPLIT, WHOLE, STAGED])
def test_what_is_broken_here_was_right(
    vulkan_runner: VulkanRunner, cases: ResidentCases, text: str
) -> None:
    assert judged(vulkan_runner, FAMILY, PROBLEM, text, cases=cases).failure is None


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(mistake, id=f"{name}: {where}")
        for name, places in MISTAKES.items()
        for where, mistake in places.items()
    ],
)
def test_a_broken_kernel_is_caught(
    vulkan_runner: VulkanRunner, cases: ResidentCases, mistake: Mistake
) -> None:
    assert_caught(vulkan_runner, FAMILY, PROBLEM, mistake, cases)


@pytest.fixture
def dealt(matrix_shape: str) -> str:
    """A variant that deals out the work."""
    return f"{DEALT} matrix_shape={matrix_shape}"


def test_dealing_was_right_before_it_was_broken(
    vulkan_runner: VulkanRunner, cases: ResidentCases, dealt: str
) -> None:
    assert judged(vulkan_runner, FAMILY, PROBLEM, dealt, cases=cases).failure is None


@pytest.mark.parametrize("mistake", DEALT_MISTAKES.values(), ids=DEALT_MISTAKES)
def test_a_mistake_in_dealing_is_caught(
    vulkan_runner: VulkanRunner, cases: ResidentCases, dealt: str, mistake: Mistake
) -> None:
    assert_caught(vulkan_runner, FAMILY, PROBLEM, replace(mistake, variant=dealt), cases)
