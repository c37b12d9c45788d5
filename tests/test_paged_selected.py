"""Block-sparse decode over the paged int8 cache: lists, tails, identity lists, broken kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from tests.family_kernels import (
    COMPILER,
    Mistake,
    assert_caught,
    assert_right,
    judged,
    launched,
    variant,
)
from tests.made_devices import gpu, narrow_cpu
from tests.spirv_tools import spirv_val
from tuner.device_info import DeviceInfo
from tuner.errors import UsageError
from tuner.evaluate import ResidentCases, render_passes
from tuner.kernels.base import Candidate, Operands
from tuner.kernels.decode_operands import POISON_CODES
from tuner.kernels.decode_values import NO_BLOCK
from tuner.kernels.paged_decode_q8 import PAGED_DECODE_Q8
from tuner.kernels.selected_decode import PAGED_SELECTED_Q8
from tuner.kernels.selected_operands import make_selected_operands
from tuner.kernels.space import legal, reasons
from tuner.oracle.selected_decode import selected_reference, visible_tokens
from tuner.problems import PagedSelectedProblem
from tuner.quant import dequantise, unpack_cache
from tuner.workloads import default_problems

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner


def problem(**changes: int | str) -> PagedSelectedProblem:
    fields = {
        "sequences": 2,
        "context": 1024,
        "selected": 40,
        "query_heads": 4,
        "kv_heads": 2,
        "head_size": 64,
    }
    return PagedSelectedProblem(**{**fields, **changes})  # type: ignore[arg-type]


SPLIT = "scalar_f32 subgroups=2 lanes_per_token=8 tokens_unrolled=4 split=count:4"
WHOLE = "scalar_f32 subgroups=2 lanes_per_token=4 tokens_unrolled=2"
STAGED = "scalar_f32 staging=shared subgroups=2 lanes_per_token=8 head_slices=2 load_words=4"
INT_DOT = "int_dot subgroups=2 lanes_per_token=8 query_terms=2 split=count:8 combine_slices=2"
PACKED = "packed_f16 subgroups=4 lanes_per_token=8 tokens_unrolled=4 split=count:16"
COVERED = [
    ({}, "baseline"),
    ({}, STAGED),
    ({"ratio": 1}, INT_DOT),
    ({"ratio": 3, "block_size": 7, "query_heads": 6, "head_size": 80}, WHOLE),
    ({"ratio": 3, "block_size": 7, "query_heads": 14, "head_size": 80}, "baseline"),
    ({"ratio": 32, "query_heads": 2, "head_size": 96}, PACKED),
    ({"ratio": 64, "block_size": 8, "query_heads": 2}, SPLIT),
    (
        {"query_heads": 12, "kv_heads": 1, "head_size": 256},
        "scalar_f32 staging=shared subgroups=4 lanes_per_token=8 head_slices=4 split=count:4",
    ),
]


@pytest.fixture(scope="module")
def cases(vulkan_runner: VulkanRunner) -> Iterator[ResidentCases]:
    resident = ResidentCases(vulkan_runner, PAGED_SELECTED_Q8)
    yield resident
    resident.close()


@pytest.mark.parametrize(("changes", "text"), COVERED)
def test_geometries_are_right(
    vulkan_runner: VulkanRunner, cases: ResidentCases, changes: dict[str, int], text: str
) -> None:
    assert_right(vulkan_runner, PAGED_SELECTED_Q8, problem(**changes), text, cases)


@pytest.mark.parametrize(
    "text",
    [
        "matrix staging=shared prefetch=all subgroups=2 split=count:4",
        "matrix rescale=exact split=none",
    ],
)
@pytest.mark.parametrize("ratio", [16, 64])
def test_matrices_are_right_where_the_device_has_them(
    vulkan_runner: VulkanRunner, matrix_shape: str, cases: ResidentCases, text: str, ratio: int
) -> None:
    named, of = f"{text} matrix_shape={matrix_shape}", problem(ratio=ratio)
    values = variant(PAGED_SELECTED_Q8, named, vulkan_runner.info)
    if found := reasons(PAGED_SELECTED_Q8, values, of, vulkan_runner.info):
        pytest.skip("; ".join(found))
    assert judged(vulkan_runner, PAGED_SELECTED_Q8, of, named, cases=cases).failure is None


def test_matrices_need_blocks_as_long_as_their_tiles() -> None:
    values = {
        **PAGED_SELECTED_Q8.baseline,
        "strategy": "matrix",
        "subgroup_size": 32,
        "matrix_shape": "16x8x16",
    }
    found = reasons(PAGED_SELECTED_Q8, values, problem(ratio=4), gpu())
    assert "tiles of 16 tokens do not divide the block of 4" in found
    assert not reasons(PAGED_SELECTED_Q8, values, problem(ratio=16), gpu())


# Lists that name everything


def identity(ratio: int, lengths: str) -> tuple[PagedSelectedProblem, Operands]:
    """All tokens, said by a list of all complete blocks."""
    made = problem(
        sequences=4,
        context=181,
        selected=-(-181 // ratio),
        ratio=ratio,
        head_size=32,
        lengths=lengths,
    )
    return made, make_selected_operands(made, "random", 11)


@pytest.mark.parametrize(
    "text",
    [
        "baseline",
        "scalar_f32 subgroups=2 lanes_per_token=8 tokens_unrolled=2 split=count:4",
        "int_dot lanes_per_token=8",
    ],
)
def test_an_identity_list_gives_the_dense_answer_bit_for_bit(
    vulkan_runner: VulkanRunner, text: str
) -> None:
    lengths = "list:0,181,16,97"
    made, operands = identity(4, lengths)
    dense = Operands(
        inputs=operands.inputs | {"context_lens": operands.inputs["sequence_lens"]},
        outputs=operands.outputs,
        scalars=operands.scalars,
    )
    for name in ("sequence_lens", "selection", "visible_lens"):
        del dense.inputs[name]
    wanted = launched(vulkan_runner, PAGED_DECODE_Q8, made.dense, dense, text).outputs["out"]
    for ratio in (1, 4, 7, 64):
        made, operands = identity(ratio, lengths)
        assert (made.visible_lens() == made.dense.context_lens()).all()
        got = launched(vulkan_runner, PAGED_SELECTED_Q8, made, operands, text).outputs["out"]
        np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))


def test_a_list_of_tokens_says_the_same_as_a_list_of_blocks(vulkan_runner: VulkanRunner) -> None:
    made = problem(context=200, selected=10, lengths="list:200,173")
    operands = make_selected_operands(made, "random", 3)
    wanted = launched(vulkan_runner, PAGED_SELECTED_Q8, made, operands, SPLIT).outputs["out"]
    tokens = np.full((2, made.seen), NO_BLOCK, np.uint32)
    for row, blocks, length in zip(tokens, operands.inputs["selection"], (200, 173), strict=True):
        listed = (blocks[:, None] * 4 + np.arange(4)).ravel()
        tail = np.arange(length // 4 * 4, length)
        row[: len(listed) + len(tail)] = np.concatenate([listed, tail])
    singly = msgspec.structs.replace(made, ratio=1, selected=made.seen)
    assert singly.seen == made.seen
    other = Operands(
        inputs=operands.inputs | {"selection": tokens},
        outputs=operands.outputs,
        scalars=operands.scalars | {"ratio": 1, "max_selected": made.seen},
    )
    got = launched(vulkan_runner, PAGED_SELECTED_Q8, singly, other, SPLIT).outputs["out"]
    np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))


# The oracle and its operands


def test_the_oracle_is_softmax_over_what_is_visible() -> None:
    made = problem(context=90, selected=5, lengths="list:90,23")
    operands = make_selected_operands(made, "random", 2)
    out = selected_reference(operands).outputs["out"]
    caches = [dequantise(*unpack_cache(operands.inputs[f"{s}_cache"])) for s in ("key", "value")]
    for sequence, length in enumerate((90, 23)):
        blocks = operands.inputs["selection"][sequence].tolist()
        tail = length // 4
        seen = [t for t in range(length) if t // 4 in blocks or t // 4 == tail]
        assert len(seen) == made.visible_lens()[sequence]
        table = operands.inputs["block_table"][sequence]
        for head in range(4):
            keys, values = (
                np.array([cache[table[t // 16], head // 2, t % 16] for t in seen])
                for cache in caches
            )
            query = operands.inputs["query"][sequence, head * 64 : head * 64 + 64]
            z = keys @ query.astype(np.float64) * operands.scalars["softmax_scale"]
            weights = np.exp(z - z.max())
            expected = weights @ values / (weights.sum() + 1e-6)
            np.testing.assert_allclose(out[sequence, head], expected, rtol=1e-10)


def test_whatever_no_sequence_sees_is_poison() -> None:
    made = problem(context=300, selected=6, lengths="list:300,50")
    operands = make_selected_operands(made, "random", 0)
    for name in ("key_cache", "value_cache"):
        poisoned = (operands.inputs[name][..., :-1] == POISON_CODES).all(axis=(1, 3))
        for sequence in range(2):
            poisoned[visible_tokens(operands, sequence)] = ~poisoned[
                visible_tokens(operands, sequence)
            ]
        assert poisoned.all()


def test_lists_are_ascending_and_complete_where_all_fits() -> None:
    made = problem(sequences=3, context=400, selected=20, lengths="list:400,79,83")
    selection = make_selected_operands(made, "random", 0).inputs["selection"]
    assert (np.diff(selection[0].astype(np.int64)) > 0).all()
    assert selection[0].max() < 100
    assert selection[1].tolist() == [*range(19), NO_BLOCK]
    assert selection[2].tolist() == list(range(20))


@pytest.mark.parametrize(
    ("length", "visible"),
    [(0, 0), (3, 3), (4, 4), (2047, 2047), (2048, 2048), (2051, 2051), (2052, 2048), (2055, 2051)],
)
def test_what_is_visible_follows_the_budget(length: int, visible: int) -> None:
    made = problem(sequences=1, context=length, selected=512)
    assert made.visible_lens().tolist() == [visible]
    assert made.seen == visible


# Broken on purpose

MISTAKES = {
    "tail left out": Mistake(
        variant=SPLIT,
        right="uint length = min(context_lens[sequence], push.max_context_len);",
        wrong="uint length = context_lens[sequence] - sequence_lens[sequence] % RATIO;",
    ),
    "list left out": Mistake(variant=WHOLE, right="if (index < listed) {", wrong="if (false) {"),
    "first tokens for those listed": Mistake(
        variant="baseline",
        right="selection[sequence * push.max_selected + index / RATIO] * RATIO",
        wrong="index / RATIO * RATIO",
    ),
    "another sequence's list": Mistake(
        variant=SPLIT, right="selection[sequence *", wrong="selection[(sequence ^ 1u) *"
    ),
    "places within a block": Mistake(
        variant="baseline",
        right="* RATIO + index % RATIO",
        wrong="* RATIO + index % RATIO / 2u * 2u",
    ),
    "tail of the page, not of the block": Mistake(
        variant=WHOLE, right="tail = length % RATIO;", wrong="tail = length % PAGE_SIZE;"
    ),
    "one look-up for tokens of two blocks": Mistake(
        variant=SPLIT, right="min(token, (end - 1u) / UNROLL * UNROLL)", wrong="begin"
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_a_broken_kernel_is_caught(
    vulkan_runner: VulkanRunner, cases: ResidentCases, mistake: Mistake
) -> None:
    first = replace(mistake, passes=("attend", "baseline"))
    assert_caught(vulkan_runner, PAGED_SELECTED_Q8, problem(), first, cases)


# Without a device


def test_the_kernels_that_are_timed_are_the_kernels_that_are_validated() -> None:
    device = gpu()
    timed = problem(sequences=3, context=16384, selected=512, query_heads=16)
    variants = legal(PAGED_SELECTED_Q8, timed, device)
    small = PAGED_SELECTED_Q8.validation_cases(timed)[:2]
    kernels = set()
    for place in np.random.default_rng(1).permutation(len(variants))[:25]:
        values = variants[int(place)]
        wanted = [each.rendered for each in render_passes(PAGED_SELECTED_Q8, values, timed, device)]
        kernels |= {COMPILER.compile(text, values=values).spirv for text in wanted}
        for case in small:
            validated = PAGED_SELECTED_Q8.validation_values(Candidate(values, timed, device), case)
            assert not reasons(PAGED_SELECTED_Q8, validated, case.problem, device)
            got = render_passes(PAGED_SELECTED_Q8, validated, case.problem, device)
            assert [each.rendered.text for each in got] == [each.text for each in wanted]
    for kernel in kernels:
        spirv_val(kernel)


@pytest.mark.parametrize("device", [gpu(), narrow_cpu()], ids=["GPU", "narrow CPU"])
def test_every_default_problem_has_a_start(device: DeviceInfo) -> None:
    for each in default_problems("paged_selected", on_cpu=device.is_cpu):
        assert not all(
            reasons(PAGED_SELECTED_Q8, s, each, device) for s in PAGED_SELECTED_Q8.starts
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selected": 0}, "selected is 0"),
        ({"ratio": 0}, "ratio is 0"),
        ({"query_heads": 3}, "query_heads \\(3\\) must be a multiple"),
        ({"lengths": "long"}, "lengths 'long'"),
    ],
)
def test_bad_problems_are_refused(changes: dict[str, int | str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        problem(**changes)
