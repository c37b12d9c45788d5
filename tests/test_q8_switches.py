"""Window, soft cap, ALiBi and sinks over the int8 cache: oracle and kernels of all strategies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.family_kernels import COMPILER, Mistake, assert_caught, assert_right
from tests.made_devices import gpu, narrow_cpu
from tests.spirv_tools import spirv_val
from tuner import kernels
from tuner.device_info import DeviceInfo
from tuner.evaluate import RenderedPass, ResidentCases, render_passes
from tuner.kernels.base import Candidate
from tuner.kernels.decode_operands import make_operands
from tuner.kernels.decode_values import NO_BLOCK
from tuner.kernels.space import legal, reasons
from tuner.oracle import decode_reference
from tuner.problems import PagedDecodeProblem
from tuner.quant import unpack_cache

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

FAMILY, PLAIN = (kernels.family(f"paged_decode_q8{more}") for more in ("_switched", ""))
ALL: dict[str, Any] = {"window": 100, "softcap": 3.5, "alibi": 1, "sinks": 1}


def problem(**changes: Any) -> PagedDecodeProblem:
    fields: dict[str, Any] = {
        "sequences": 2,
        "context": 1024,
        "query_heads": 6,
        "kv_heads": 2,
        "head_size": 64,
        "block_size": 16,
    }
    return PagedDecodeProblem(**(fields | changes))


# The oracle

switches = st.fixed_dictionaries(
    {},
    optional={
        "window": st.integers(0, 45),
        "softcap": st.sampled_from((0.0, 0.5, 3.5)),
        "alibi": st.integers(0, 1),
        "sinks": st.integers(0, 1),
    },
)


@given(switches, st.sampled_from(("token_major", "planar")))
@settings(max_examples=20, deadline=None)
def test_reference_is_the_definition_element_by_element(
    chosen: dict[str, Any], layout: str
) -> None:
    """In loops that share nothing with the oracle but the unpacking of words."""
    sizes = {"sequences": 5, "context": 37, "head_size": 16, "block_size": 8}
    of = problem(**sizes, lengths="list:37,0,1,9,16", **chosen)
    inputs = (operands := make_operands(of, "random", 1, layout=layout)).inputs
    out = decode_reference(operands).outputs["out"]
    rows = make_operands(of, "random", 1).inputs
    (keys, key_scales), (values, value_scales) = (
        unpack_cache(rows[name]) for name in ("key_cache", "value_cache")
    )
    for s, h in np.ndindex(of.sequences, of.query_heads):
        length, g = int(inputs["context_lens"][s]), h // 3
        query = inputs["query"][s, 16 * h : 16 * h + 16].astype(float)
        z, seen = [], []
        for t in range(length - min(length, of.window or length), length):
            at = inputs["block_table"][s, t // 8], g, t % 8
            logit = float(key_scales[at]) * float(query @ keys[at].astype(float))
            logit *= operands.scalars["softmax_scale"]
            if of.softcap:
                logit = np.tanh(logit / of.softcap) * of.softcap
            if of.alibi:
                logit += float(inputs["slopes"][h]) * (t - length + 1)
            z.append(logit)
            seen.append(float(value_scales[at]) * values[at].astype(float))
        sink = [float(inputs["sinks"][h])] if of.sinks else []
        top = max([*z, *sink, -1e30])
        weights = np.exp(np.array(z) - top)
        wanted = sum((w * v for w, v in zip(weights, seen, strict=True)), np.zeros(16))
        total = weights.sum() + sum(np.exp(x - top) for x in sink)
        np.testing.assert_allclose(out[s, h], wanted / (total + 1e-6), rtol=1e-9, atol=1e-300)


def test_blocks_before_a_window_are_no_longer_the_sequences() -> None:
    of = problem(sequences=2, context=100, lengths="list:100,20", window=30)
    table = make_operands(of, "random", 0).inputs["block_table"]
    assert (table[0, :4] == NO_BLOCK).all()
    assert (table[0, 4:7] != NO_BLOCK).all()
    assert (table[1, :2] != NO_BLOCK).all()


@pytest.mark.parametrize(
    "name", ["paged_decode_q8_switched", "paged_decode_f32", "paged_decode_f16"]
)
def test_what_is_timed_is_no_larger_than_what_a_window_lets_be_read(name: str) -> None:
    """Else copies of memory that nothing reads fill the device, and few are left to rotate over."""
    family, of = kernels.family(name), problem(sequences=3, context=65536, window=100)
    inputs = family.operands(of, "timing", 0).inputs
    used = inputs["block_table"] != NO_BLOCK
    assert used.sum(axis=1).tolist() == [7, 7, 7]
    assert used[:, -7:].all()
    assert len(inputs["key_cache"]) == len(inputs["value_cache"]) == 21
    ragged = problem(sequences=3, context=4000, lengths="list:4000,0,33", window=40)
    table = family.operands(ragged, "timing", 0).inputs["block_table"]
    assert [np.flatnonzero(row != NO_BLOCK).tolist() for row in table] == [
        [247, 248, 249],
        [],
        [0, 1, 2],
    ]


def test_only_what_is_seen_has_to_move() -> None:
    vectors = 2 * 2 * 6 * 64 * 4
    assert PLAIN.bytes_moved(problem()) == 2 * 2048 * 2 * 68 + vectors + 4 * (2 * 64 + 2)
    windowed = 2 * 200 * 2 * 68 + vectors + 4 * (2 * 7 + 2)
    assert FAMILY.bytes_moved(problem(window=100)) == windowed
    assert FAMILY.bytes_moved(problem(**ALL)) == windowed + 4 * 12


# The kernels

EACH: dict[str, dict[str, Any]] = {
    "window": {"window": 100},
    "cap": {"softcap": 3.5},
    "alibi": {"alibi": 1},
    "sinks": {"sinks": 1},
    "all": ALL,
}
each_switch = pytest.mark.parametrize("chosen", EACH.values(), ids=list(EACH))
LANES = "staging=registers subgroups=2 lanes_per_token=8"
STAGED = "staging=shared prefetch=all subgroups=2 rescale=exact"
TILES = "staging=shared subgroups=2 lanes_per_token=8 tile_tokens=32 load_words=4"


@pytest.fixture(scope="module")
def cases(vulkan_runner: VulkanRunner) -> Iterator[ResidentCases]:
    """Validation cases that variants share."""
    resident = ResidentCases(vulkan_runner, FAMILY)
    yield resident
    resident.close()


@each_switch
@pytest.mark.parametrize(
    "text",
    [
        "baseline",
        f"scalar_f32 {LANES} tokens_unrolled=4 split=count:4",
        f"packed_f16 {LANES} tokens_unrolled=2 split=none",
        f"int_dot {TILES} head_slices=2 query_terms=2 split=count:8",
    ],
    ids=lambda text: text.split()[0],
)
def test_every_strategy_has_every_switch(
    vulkan_runner: VulkanRunner,
    cases: ResidentCases,
    text: str,
    chosen: dict[str, Any],
) -> None:
    assert_right(vulkan_runner, FAMILY, problem(**chosen), text, cases)


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        (f"matrix {STAGED} split=none", {"window": 100}),
        (f"matrix {STAGED} split=count:4", {"softcap": 3.5, "alibi": 1}),
        (f"matrix {STAGED} split=count:4", {"sinks": 1}),
        ("matrix split=count:4", ALL),
        ("matrix staging=shared prefetch=keys exchange=convert key_operand=int8 split=fit:1", ALL),
    ],
    ids=("window", "cap and alibi", "sinks", "rows, all", "int8 keys, all"),
)
def test_matrices_have_every_switch(
    vulkan_runner: VulkanRunner,
    matrix_shape: str,
    cases: ResidentCases,
    text: str,
    chosen: dict[str, Any],
) -> None:
    text = f"{text} matrix_shape={matrix_shape}"
    assert_right(vulkan_runner, FAMILY, problem(**chosen), text, cases)


@pytest.mark.parametrize(
    ("block_size", "text"),
    [
        (5, f"scalar_f32 {LANES} tokens_unrolled=4 split=none"),
        (24, "scalar_f32 staging=shared subgroups=4 lanes_per_token=8 tile_tokens=32 split=none"),
        (32, f"packed_f16 {LANES} tokens_unrolled=8 split=count:16"),
    ],
    ids=("single tokens", "tiles across blocks", "groups of tokens"),
)
def test_a_walk_begins_where_blocks_allow(
    vulkan_runner: VulkanRunner,
    cases: ResidentCases,
    block_size: int,
    text: str,
) -> None:
    for window in (1, 33, 100):
        of = problem(block_size=block_size, window=window)
        assert_right(vulkan_runner, FAMILY, of, text, cases)


# Kernels broken on purpose

SCALAR = f"scalar_f32 {LANES} split=count:8"
MATRIX = f"matrix {STAGED} split=count:4"
MISTAKES: dict[str, tuple[dict[str, Any], Mistake]] = {
    "window one too wide": (
        {"window": 100},
        Mistake(variant=SCALAR, right="push.window)", wrong="push.window + 1u)"),
    ),
    "tokens before the window": (
        {"window": 100},
        Mistake(
            variant=f"{SCALAR} tokens_unrolled=4",
            right=" && token + u >= first_seen(length)",
            wrong="",
            passes=("attend",),
        ),
    ),
    "another cap": (
        {"softcap": 3.5},
        Mistake(variant=SCALAR, right="(2.0 * 1.44", wrong="(2.04 * 1.44"),
    ),
    "distance off by one": (
        {"alibi": 1, "sinks": 1},
        Mistake(variant=SCALAR, right="- int(length) + 1)", wrong="- int(length))"),
    ),
    "the slope of another head": (
        {"alibi": 1},
        Mistake(
            variant=SCALAR,
            right="slopes[first_head + ",
            wrong="slopes[0u * ",
            passes=("attend",),
        ),
    ),
    "sink not in the sum": (
        {"sinks": 1},
        Mistake(variant=SCALAR, right=" + exp2(sink - highest)", wrong="", passes=("combine",)),
    ),
    "sink in another base": (
        {"sinks": 1},
        Mistake(variant="baseline", right="sinks[head] * 1.0", wrong="sinks[head] * 1.4427"),
    ),
}
MATRIX_MISTAKES: dict[str, tuple[dict[str, Any], Mistake]] = {
    "tokens before the window": (
        {"window": 100},
        Mistake(variant=MATRIX, right=" && token >= first_seen(length)", wrong=""),
    ),
    "dealt as without a window": (
        {"window": 100},
        Mistake(
            variant=MATRIX,
            right="- first_seen(tokens) / TILE",
            wrong="",
            says="wrote past the end of",
        ),
    ),
    "the slope of another column": (
        {"alibi": 1},
        Mistake(variant=MATRIX, right="slopes[now.kv_head * GROUP + min(", wrong="slopes[min("),
    ),
    "sinks of another KV head where parts are joined": (
        {"sinks": 1},
        Mistake(variant=MATRIX, right="pair % push.num_kv_heads * GROUP + head", wrong="head"),
    ),
    "sinks of another KV head where none are": (
        {"sinks": 1},
        Mistake(
            variant=MATRIX.replace("count:4", "none"),
            right="now.kv_head * GROUP + head)",
            wrong="head)",
        ),
    ),
}


@pytest.mark.parametrize(("chosen", "mistake"), MISTAKES.values(), ids=list(MISTAKES))
def test_a_broken_kernel_is_caught(
    vulkan_runner: VulkanRunner,
    cases: ResidentCases,
    chosen: dict[str, Any],
    mistake: Mistake,
) -> None:
    assert_caught(vulkan_runner, FAMILY, problem(**chosen), mistake, cases)


@pytest.mark.parametrize(("chosen", "mistake"), MATRIX_MISTAKES.values(), ids=list(MATRIX_MISTAKES))
def test_a_broken_matrix_kernel_is_caught(
    vulkan_runner: VulkanRunner,
    matrix_shape: str,
    cases: ResidentCases,
    chosen: dict[str, Any],
    mistake: Mistake,
) -> None:
    on_device = replace(mistake, variant=f"{mistake.variant} matrix_shape={matrix_shape}")
    assert_caught(vulkan_runner, FAMILY, problem(**chosen), on_device, cases)


# Without a device


def texts(candidate: Candidate) -> list[str]:
    return [each.rendered.text for each in rendered(candidate)]


def rendered(candidate: Candidate) -> tuple[RenderedPass, ...]:
    of = candidate.problem
    scalars = FAMILY.timing_scalars(of)
    return render_passes(FAMILY, candidate.values, of, candidate.device, scalars=scalars)


@pytest.mark.parametrize("device", [narrow_cpu(), gpu()], ids=("narrow CPU", "GPU"))
def test_kernels_are_valid_and_are_timed_as_they_are_validated(device: DeviceInfo) -> None:
    timed = problem(head_size=128, query_heads=16, context=16384, **(ALL | {"window": 4096}))
    variants = legal(FAMILY, timed, device)
    compared = 0
    for place in range(0, len(variants), max(1, len(variants) // 24)):
        candidate = Candidate(variants[place], timed, device)
        for each in rendered(candidate):
            spirv_val(COMPILER.compile(each.rendered, values=candidate.values).spirv)
        for case in FAMILY.validation_cases(timed):
            validated = FAMILY.validation_values(candidate, case)
            if not reasons(FAMILY, validated, case.problem, device):
                assert texts(Candidate(validated, case.problem, device)) == texts(candidate)
                compared += 1
    assert compared > 100


def test_each_family_refuses_what_the_other_is_for() -> None:
    of = problem(window=128, sinks=1)
    (told,) = reasons(PLAIN, PLAIN.baseline, of, gpu())
    assert "this family has no window, sinks: use paged_decode_q8_switched" in told
    assert not reasons(FAMILY, FAMILY.baseline, of, gpu())
    (told,) = reasons(FAMILY, FAMILY.baseline, problem(), gpu())
    assert "no switch is on: use paged_decode_q8" in told
    (told,) = reasons(FAMILY, FAMILY.baseline, problem(value_head_size=48), gpu())
    assert "value_head_size is 48: use paged_decode_f16 or paged_decode_f32" in told


def test_validation_begins_walks_within_what_is_loaded_together() -> None:
    for window, odd in ((0, 0), (1, 1), (2, 1), (128, 127), (4096, 151)):
        found = {case.problem.window for case in FAMILY.validation_cases(problem(window=window))}
        assert found == {odd}
