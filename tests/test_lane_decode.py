"""Decode by groups of lanes: what is refused and why, and what every legal variant keeps to."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.made_devices import gpu, narrow_cpu
from tuner.device_info import DeviceInfo
from tuner.kernels import lane_decode as lanes
from tuner.kernels.base import Candidate, Values
from tuner.kernels.paged_decode_q8 import PAGED_DECODE_Q8
from tuner.kernels.selection import Variants
from tuner.kernels.space import canonical, legal, reasons
from tuner.problems import PagedDecodeProblem

NEUTRAL = {p.name: p.values[0] for p in PAGED_DECODE_Q8.parameters}
PLAIN: Values = {
    **NEUTRAL,
    "strategy": "scalar_f32",
    "subgroup_size": 32,
    "subgroups": 4,
    "lanes_per_token": 8,
    "tokens_unrolled": 4,
    "split": "count:4",
}
STAGED: Values = {**PLAIN, "staging": "shared", "tile_tokens": 128, "head_slices": 2}


def problem(head_size: int = 128, group: int = 4, block_size: int = 16) -> PagedDecodeProblem:
    return PagedDecodeProblem(
        query_heads=2 * group,
        kv_heads=2,
        head_size=head_size,
        block_size=block_size,
        sequences=2,
        context=4096,
    )


def why(
    values: Values, of: PagedDecodeProblem | None = None, device: DeviceInfo | None = None
) -> str:
    """All reasons against a variant in one text; empty for a legal one."""
    return "; ".join(reasons(PAGED_DECODE_Q8, values, of or problem(), device or gpu()))


@pytest.mark.parametrize("values", [PLAIN, STAGED])
def test_what_the_bad_variants_start_from_is_legal(values: Values) -> None:
    assert why(values) == ""


@pytest.mark.parametrize(
    ("base", "changes", "reason"),
    [
        (PLAIN, {"subgroup_size": 8, "lanes_per_token": 16}, "16 lanes per token are more than"),
        (PLAIN, {"tokens_unrolled": 8, "lanes_per_token": 2}, "would hold 768 words of query"),
        (STAGED, {"subgroups": 1}, "2 head slices need as many subgroups (here 1)"),
        (STAGED, {"tile_tokens": 16}, "a tile of 16 tokens is no multiple of the 32 of one step"),
        (STAGED, {"subgroups": 16, "head_slices": 4}, ""),
        (PLAIN, {"head_slices": 2}, "head_slices=2 means nothing beside the other values"),
    ],
)
def test_a_bad_choice_of_parameters_is_refused_with_its_numbers(
    base: Values, changes: dict[str, Any], reason: str
) -> None:
    found = why({**base, **changes})
    assert reason in found
    assert bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("values", "of", "reason"),
    [
        (PLAIN, problem(head_size=80), "8 lanes cannot share the 20 words of a token evenly"),
        (PLAIN, problem(head_size=130), "head size 130 is no multiple of 4"),
        ({**STAGED, "head_slices": 4}, problem(group=3), "query heads per KV head (here 3)"),
        ({**STAGED, "head_slices": 4}, problem(group=5), "leave one without any of the group's 5"),
        (
            {**STAGED, "subgroups": 12, "head_slices": 8},
            problem(group=8),
            "12 subgroups are not dealt out evenly to 8 slices",
        ),
        (
            {**PLAIN, "strategy": "int_dot", "tokens_unrolled": 8},
            problem(group=8),
            "one step would unroll 256 words times heads, the limit is 128",
        ),
        ({**STAGED, "load_words": 4}, problem(block_size=1), "1 x 33 words is no multiple of 16"),
        ({**STAGED, "load_words": 4}, problem(block_size=20), "no multiple of the block of 20"),
        (STAGED, problem(head_size=256), "bytes of shared memory, the device has 49152"),
    ],
)
def test_a_problem_that_does_not_suit_is_named(
    values: Values, of: PagedDecodeProblem, reason: str
) -> None:
    assert reason in why(values, of)


@pytest.mark.parametrize(
    ("values", "changes", "reason"),
    [
        ({**PLAIN, "strategy": "packed_f16"}, {"float16": False}, "shaderFloat16"),
        ({**PLAIN, "strategy": "int_dot"}, {"integer_dot_product": False}, "IntegerDotProduct"),
        (PLAIN, {"subgroup_operations": ("basic",)}, "no subgroup operations of kind shuffle"),
        (PLAIN, {"subgroup_size_control": False, "subgroup_size": 64}, "have 64 lanes and no size"),
        (
            PLAIN,
            {"min_subgroup_size": 64, "max_subgroup_size": 64, "subgroup_size": 64},
            "64 to 64",
        ),
        (PLAIN, {"max_workgroup_invocations": 64}, "128 threads a workgroup, the device allows 64"),
        ({**PLAIN, "combine_slices": 8}, {"max_workgroup_invocations": 128}, "256 threads to com"),
        (
            PLAIN,
            {"max_workgroup_count": (65535, 65535, 1)},
            "2 workgroups in z, the device allows 1",
        ),
        ({**PLAIN, "split": "device:4"}, {"compute_units": None}, "number of compute units"),
        (STAGED, {"max_shared_memory_bytes": 16384}, "33792 bytes of shared memory"),
    ],
)
def test_a_device_that_cannot_is_named(
    values: Values, changes: dict[str, Any], reason: str
) -> None:
    assert reason in why(values, device=gpu(**changes))
    assert why(values) == ""


def test_too_many_splits_are_refused() -> None:
    long = PagedDecodeProblem(
        query_heads=8, kv_heads=2, head_size=128, sequences=1, context=1_000_000
    )
    assert "makes 3907 splits, the limit is 1024" in why({**PLAIN, "split": "tokens:256"}, long)


GEOMETRIES = (
    (problem(64, 4), narrow_cpu()),
    (problem(80, 7, 20), narrow_cpu()),
    (problem(256, 1, 8), narrow_cpu(float16=False)),
    (problem(64, 71, 32), narrow_cpu()),
)


@functools.cache
def space(number: int) -> Variants:
    of, device = GEOMETRIES[number]
    return legal(PAGED_DECODE_Q8, of, device)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(0, len(GEOMETRIES) - 1))
def test_legal_variants_keep_every_promise(data: st.DataObject, number: int) -> None:
    variants = space(number)
    values = variants[data.draw(st.integers(0, len(variants) - 1))]
    of, device = GEOMETRIES[number]
    assert why(values, of, device) == ""
    c = Candidate(values, of, device)
    if not lanes.by_lanes(values):
        return
    shared, step = c["lanes_per_token"], lanes.token_groups(c) * c["tokens_unrolled"]
    assert of.head_size // 4 % shared == 0
    assert device.subgroup_size % shared == 0
    assert lanes.granule(c) % step == 0
    assert lanes.granule(c) % c["tokens_unrolled"] == 0
    assert 4 * lanes.shared_words(c) <= device.max_shared_memory_bytes
    assert c["subgroups"] * c["subgroup_size"] <= device.max_workgroup_invocations
    heads = lanes.heads_per_slice(c)
    assert (c["head_slices"] - 1) * heads < of.group <= c["head_slices"] * heads
    assert c["subgroups"] % c["head_slices"] == 0
    assert values["strategy"] != "packed_f16" or device.float16
    assert values["load_words"] == 1 or c["tile_tokens"] % of.block_size == 0


@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries({p.name: st.sampled_from(p.values) for p in PAGED_DECODE_Q8.parameters}),
    st.integers(0, len(GEOMETRIES) - 1),
)
def test_a_variant_has_no_reasons_against_it_just_if_it_is_in_the_space(
    raw: Values, number: int
) -> None:
    values = canonical(PAGED_DECODE_Q8, {**raw, "subgroup_size": 8})
    of, device = GEOMETRIES[number]
    assert (why(values, of, device) == "") == (values in space(number))
