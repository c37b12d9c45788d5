"""The cache writers: golden vectors, the rounding rule, strides, pads, grids, broken kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.family_kernels import Mistake, assert_caught, assert_right, launched
from tests.golden_decode import decode_operands, decode_problem
from tests.golden_vectors import Golden, load, names
from tuner.errors import UsageError
from tuner.evaluate import ResidentCases
from tuner.kernels.base import Family, Operands
from tuner.kernels.cache_write_f32 import CACHE_WRITE_F32
from tuner.kernels.cache_write_operands import f32_operands, q8_operands
from tuner.kernels.cache_write_q8 import CACHE_WRITE_Q8
from tuner.kernels.paged_decode_q8 import PAGED_DECODE_Q8
from tuner.oracle import judge
from tuner.oracle.rounding import codes_near_boundaries
from tuner.problems import CacheWriteProblem
from tuner.quant import PADDING_SLOT

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

CACHES = ("key_cache", "value_cache")
F32 = [
    "baseline",
    "direct threads=64 tile_tokens=4 unroll=2 width=4 sides=apart",
    "direct threads=128",
    "staged threads=64 tile_tokens=8 width=4",
    "staged threads=128 tile_tokens=32",
]
Q8 = [
    "baseline",
    "teams subgroups=2 lanes=8 width=4",
    "teams subgroups=1 lanes=4 order=tokens sides=apart",
]
GOLDEN = (
    (CACHE_WRITE_F32, names("s1_write_f32_*"), F32),
    (CACHE_WRITE_Q8, names("s1_write_q8_*"), Q8),
)
PROBLEM = CacheWriteProblem(tokens=30, kv_heads=2, head_size=64)


def golden_case(golden: Golden) -> tuple[CacheWriteProblem, Operands]:
    attributes, inputs = golden.attributes, golden.inputs
    fields = ("kv_heads", "head_size", "block_size", "key_stride", "value_stride")
    sizes = {name: int(attributes[name.replace("kv_h", "num_kv_h")]) for name in fields}
    pack = int(attributes.get("x", 4))
    problem = CacheWriteProblem(tokens=int(attributes["num_tokens"]), pack=pack, **sizes)
    arrays = {name: inputs[name] for name in ("key", "value", "slots", *CACHES)}
    outputs = {name: (inputs[name].shape, inputs[name].dtype) for name in CACHES}
    scalars = {"tokens": problem.tokens, **{name: sizes[name] for name in fields[-2:]}}
    return problem, Operands(inputs=arrays, outputs=outputs, scalars=scalars)


EVERY = [
    pytest.param(family, name, text, id=f"{name}-{text}")
    for family, files, texts in GOLDEN
    for name in files
    for text in texts
]


@pytest.mark.parametrize(("family", "name", "text"), EVERY)
def test_kernels_agree_with_golden(
    vulkan_runner: VulkanRunner, family: Family, name: str, text: str
) -> None:
    golden = load(name)
    problem, operands = golden_case(golden)
    outputs = launched(vulkan_runner, family, problem, operands, text).outputs
    assert golden.differences(outputs) == []
    verdict = judge(outputs, family.reference(operands), "f32", name)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, files, _ in GOLDEN for name in files]
)
def test_the_oracles_agree_with_golden(family: Family, name: str) -> None:
    golden = load(name)
    _, operands = golden_case(golden)
    wanted = {key: golden.want[key] for key in CACHES}
    for reference in (family.reference(operands), family.sampled_reference(operands, 4)):
        verdict = judge(wanted, reference, "f32", name)
        assert verdict.ok, verdict.message
        assert verdict.check.error == 0


def test_no_vector_is_missing() -> None:
    assert [len(files) for _, files, _ in GOLDEN] == [2, 3]


# The rounding rule


@pytest.mark.parametrize("name", names("s1_quantise_*"))
@pytest.mark.parametrize("text", Q8)
def test_kernels_quantise_single_vectors_as_golden(
    vulkan_runner: VulkanRunner, name: str, text: str
) -> None:
    golden = load(name)
    x = golden.inputs["x"]
    count, size = x.shape
    text = "teams lanes=1 width=4" if size == 4 and text != "baseline" else text
    problem = CacheWriteProblem(tokens=count, kv_heads=1, head_size=size, block_size=8)
    made = q8_operands(problem, "zeros", 0)
    inputs = made.inputs | {"key": x, "value": -x, "slots": np.arange(count, dtype=np.uint32)}
    operands = Operands(inputs=inputs, outputs=made.outputs, scalars=made.scalars)
    outputs = launched(vulkan_runner, CACHE_WRITE_Q8, problem, operands, text).outputs
    words = outputs["key_cache"].reshape(-1, size // 4 + 1)[:count]
    codes = np.ascontiguousarray(words[:, :-1]).view(np.int8)
    found = {"words": words[:, :-1], "codes": codes, "scale_bits": words[:, -1]}
    assert golden.differences(found) == []
    negated = outputs["value_cache"].reshape(-1, size // 4 + 1)[:count, :-1]
    np.testing.assert_array_equal(np.ascontiguousarray(negated).view(np.int8), -codes)


@pytest.mark.parametrize("name", names("s1_write_q8_*"))
def test_the_oracle_allows_what_golden_allows_and_no_more(name: str) -> None:
    golden = load(name)
    problem, operands = golden_case(golden)
    written = np.flatnonzero(golden.inputs["slots"] != PADDING_SLOT)
    block, offset = np.divmod(golden.inputs["slots"][written].astype(int), problem.block_size)
    for side in ("key", "value"):
        rows = operands.inputs[side][written, : problem.row]
        near = codes_near_boundaries(rows.reshape(len(written), -1, problem.head_size))
        flags = golden.want[f"{side}_near"]
        np.testing.assert_array_equal(near, flags[block, :, offset])


def test_decode_over_what_was_written_agrees_with_golden(vulkan_runner: VulkanRunner) -> None:
    golden = load("s1_write_decode_q8")
    problem, operands = golden_case(golden)
    caches = launched(vulkan_runner, CACHE_WRITE_Q8, problem, operands, Q8[1]).outputs
    decode = decode_operands(golden, **caches)
    out = launched(
        vulkan_runner,
        PAGED_DECODE_Q8,
        decode_problem(golden),
        decode,
        "scalar_f32 lanes_per_token=8 split=count:2",
    ).outputs["out"]
    assert golden.differences({**caches, "out": out, "out_unquantised": out}) == []


# Geometries and grids


@pytest.fixture(scope="module")
def cases(vulkan_runner: VulkanRunner) -> Iterator[dict[str, ResidentCases]]:
    resident = {family.name: ResidentCases(vulkan_runner, family) for family, _, _ in GOLDEN}
    yield resident
    for each in resident.values():
        each.close()


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        (CACHE_WRITE_F32, {"pack": 2, "head_size": 70, "block_size": 3}, "direct tile_tokens=16"),
        (CACHE_WRITE_F32, {"pack": 2, "head_size": 12}, "staged tile_tokens=4 width=4"),
        (CACHE_WRITE_F32, {"pack": 1, "head_size": 7}, "baseline"),
        (CACHE_WRITE_Q8, {"head_size": 80, "kv_heads": 3}, "teams lanes=8 width=4 order=tokens"),
        (CACHE_WRITE_Q8, {"head_size": 112, "value_stride": 301}, "teams lanes=4 sides=apart"),
        (CACHE_WRITE_Q8, {"head_size": 512, "block_size": 1}, "baseline"),
    ],
)
def test_odd_geometries_are_right(
    vulkan_runner: VulkanRunner,
    cases: dict[str, ResidentCases],
    family: Family,
    changes: dict[str, int],
    text: str,
) -> None:
    problem = CacheWriteProblem(**{"tokens": 9, "kv_heads": 2, **changes})
    assert_right(vulkan_runner, family, problem, text, cases[family.name])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (CACHE_WRITE_F32, "baseline"),
        (CACHE_WRITE_F32, "direct threads=64 sides=apart"),
        (CACHE_WRITE_Q8, "baseline"),
        (CACHE_WRITE_Q8, "teams subgroups=1 lanes=8"),
    ],
)
def test_more_tokens_than_workgroups_in_one_direction(
    vulkan_runner: VulkanRunner, family: Family, text: str
) -> None:
    problem = CacheWriteProblem(tokens=65_601, kv_heads=1, head_size=32)
    operands = family.operands(problem, "random", 3)
    execution = launched(vulkan_runner, family, problem, operands, text)
    verdict = judge(execution.outputs, family.sampled_reference(operands, 20_000), "f32", text)
    assert verdict.ok, verdict.message


# Broken on purpose

F32_MISTAKES = {
    "pads written to the first slot": Mistake(
        variant=F32[0],
        right="slots[token] : NO_SLOT;",
        wrong="min(slots[token], slots[token] + 1u) : NO_SLOT;",
        says="bits",
    ),
    "values like keys": Mistake(
        variant=F32[1], right="first + i * BLOCK_SIZE", wrong="first + i", says="bits"
    ),
    "one stride for both": Mistake(
        variant=F32[2], right="push.value_stride", wrong="push.key_stride", says="bits"
    ),
    "stale tile": Mistake(
        variant=F32[3],
        right="side == 0u ? load_key(first + row, at) : load_value(first + row, at)",
        wrong="load_key(first + row, at)",
        says="bits",
    ),
    "last token left out": Mistake(
        variant=F32[4], right="first + i < push.tokens", wrong="first + i + 1u < push.tokens"
    ),
    "through a float": Mistake(
        variant=F32[0],
        right="= key[token * push.key_stride + i]",
        wrong="= floatBitsToUint(uintBitsToFloat(key[token * push.key_stride + i]) * 1.0000001)",
    ),
}
Q8_MISTAKES = {
    "halves to even": Mistake(
        variant=Q8[1],
        right="abs(scaled - whole) >= 0.5 ? whole + sign(scaled) : whole",
        wrong="roundEven(scaled)",
        says="codes",
    ),
    "half added": Mistake(
        variant=Q8[0],
        right="abs(scaled - whole) >= 0.5 ? whole + sign(scaled) : whole",
        wrong="sign(scaled) * floor(abs(scaled) + 0.5)",
        says="codes",
    ),
    "scale of zeros is zero": Mistake(
        variant=Q8[2],
        right="divided(largest, 127.0) : 1.0",
        wrong="divided(largest, 127.0) : 0.0",
        says="scales",
    ),
    "code of -128": Mistake(variant=Q8[1], right="-127, 127)", wrong="-128, 126)", says="codes"),
    "peak of half the lanes": Mistake(
        variant=Q8[1], right="value = max(value, subgroupShuffleXor(value, 1u << bit));", wrong=""
    ),
    "pads written to the first slot": Mistake(
        variant=Q8[2],
        right="if (slot == NO_SLOT) {",
        wrong="slot = slot == NO_SLOT ? 0u : slot;\n    if (false) {",
    ),
    "values twice": Mistake(
        variant=Q8[0],
        right="largest = max(largest, abs(key[",
        wrong="largest = max(largest, abs(value[",
    ),
    "scale one word early": Mistake(
        variant=Q8[0], right="_cache[row + CODE_WORDS]", wrong="_cache[row + CODE_WORDS - 1u]"
    ),
}


@pytest.mark.parametrize(
    ("family", "mistake"),
    [
        pytest.param(family, mistake, id=f"{family.name}: {name}")
        for family, mistakes in ((CACHE_WRITE_F32, F32_MISTAKES), (CACHE_WRITE_Q8, Q8_MISTAKES))
        for name, mistake in mistakes.items()
    ],
)
def test_a_broken_kernel_is_caught(
    vulkan_runner: VulkanRunner, cases: dict[str, ResidentCases], family: Family, mistake: Mistake
) -> None:
    assert_caught(vulkan_runner, family, PROBLEM, mistake, cases[family.name])


def test_operands_have_distinct_slots_within_the_pool() -> None:
    for sequences, tokens in ((1, 40), (8, 8), (3, 51)):
        problem = CacheWriteProblem(tokens=tokens, sequences=sequences, kv_heads=1, head_size=8)
        for operands in (f32_operands(problem, "timing", 0), q8_operands(problem, "timing", 0)):
            slots = operands.inputs["slots"]
            assert len(set(slots.tolist())) == tokens
            assert slots.max() < len(operands.inputs["key_cache"]) * 16


def test_a_launch_works_for_all_its_tokens() -> None:
    made = CacheWriteProblem(tokens=64, sequences=8, kv_heads=1, head_size=8)
    assert made.step_tokens == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "tokens is 0"),
        ({"sequences": 3}, "tokens \\(4\\) must be a multiple of sequences \\(3\\)"),
        ({"key_stride": 100}, "key_stride is 100, must be 0 or at least"),
        ({"tokens": 2**24}, "write them in several"),
    ],
)
def test_bad_problems_are_refused(changes: dict[str, int], message: str) -> None:
    fields = {"tokens": 4, "kv_heads": 2, "head_size": 64}
    with pytest.raises(UsageError, match=message):
        CacheWriteProblem(**(fields | changes))
