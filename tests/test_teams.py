"""Families whose vectors are taken by teams of lanes: on paper, for devices that are not here."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.family_kernels import COMPILER
from tests.made_devices import gpu, narrow_cpu
from tests.spirv_tools import spirv_val
from tuner.device_info import DeviceInfo
from tuner.evaluate import render_passes
from tuner.export.chosen import published
from tuner.kernels.base import Candidate, Family
from tuner.kernels.cache_write_f32 import CACHE_WRITE_F32
from tuner.kernels.cache_write_q8 import CACHE_WRITE_Q8
from tuner.kernels.kv_append import KV_APPEND_Q8
from tuner.kernels.norm_rope import QK_NORM_ROPE
from tuner.kernels.space import legal, pairwise, reasons
from tuner.kernels.teams import grid_reason, linear_grid
from tuner.problems import CacheWriteProblem, KvAppendProblem, NormRopeProblem, Problem

LARGE = {
    QK_NORM_ROPE.name: NormRopeProblem(
        rows=9000, query_heads=24, kv_heads=2, head_size=256, rotary=64
    ),
    KV_APPEND_Q8.name: KvAppendProblem(rows=70_001, context=3, kv_heads=1, head_size=96),
    CACHE_WRITE_F32.name: CacheWriteProblem(tokens=100_000, kv_heads=8, head_size=128),
    CACHE_WRITE_Q8.name: CacheWriteProblem(tokens=100_000, kv_heads=8, head_size=80),
}
FAMILIES = (QK_NORM_ROPE, KV_APPEND_Q8, CACHE_WRITE_F32, CACHE_WRITE_Q8)
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
WIDE = {"subgroup_size": 64, "min_subgroup_size": 32, "max_subgroup_size": 64}


@every_family
@pytest.mark.parametrize("device", [gpu(), gpu(**WIDE), narrow_cpu()], ids=["32", "64", "8"])
def test_kernels_are_valid_spirv(family: Family, device: DeviceInfo) -> None:
    problem = LARGE[family.name]
    variants = pairwise(legal(family, problem, device))
    kernels = {
        COMPILER.compile(each.rendered, values=values).spirv
        for values in variants[:8]
        for each in render_passes(family, values, problem, device)
    }
    assert len(kernels) > 5
    for kernel in kernels:
        spirv_val(kernel)


@every_family
def test_grids_stay_within_the_limits_and_hold_everything(family: Family) -> None:
    device = gpu()
    problem = LARGE[family.name]
    for values in legal(family, problem, device):
        candidate = Candidate(values, problem, device)
        launched = family.passes(candidate, {})
        for each in launched:
            assert all(map(int.__le__, each.groups, device.max_workgroup_count))
        assert family.dispatch is not None
        groups = published(family.dispatch(candidate)).launch(problem).groups
        assert groups == {each.name: each.groups for each in launched}


@pytest.mark.parametrize("workgroups", [0, 1, 65_535, 65_536, 131_071, 10**7])
def test_a_linear_grid_has_few_workgroups_too_many(workgroups: int) -> None:
    x, y, z = linear_grid(workgroups, gpu())
    assert max(x, y) <= 65_535
    assert z == 1
    assert max(1, workgroups) <= x * y < workgroups + y + (workgroups == 0)


def test_a_grid_is_no_larger_than_a_device_allows() -> None:
    small = gpu(max_workgroup_count=(4, 3, 1))
    assert grid_reason(small, 12, "heads") is None
    assert grid_reason(small, 13, "heads") == "13 heads, the device allows 12 workgroups"
    assert linear_grid(12, small) == (4, 3, 1)


REASONS: list[tuple[Family, Problem, dict[str, Any], dict[str, Any], str]] = [
    (
        QK_NORM_ROPE,
        LARGE["qk_norm_rope"],
        {"strategy": "teams", "subgroup_size": 32, "lanes": 64},
        {},
        "a team of 64 lanes is more than the subgroup's 32",
    ),
    (
        QK_NORM_ROPE,
        LARGE["qk_norm_rope"],
        {"strategy": "teams", "subgroup_size": 32, "lanes": 2},
        {},
        "a lane would hold 128 numbers, the limit is 64",
    ),
    (
        QK_NORM_ROPE,
        NormRopeProblem(rows=1, query_heads=1, kv_heads=1, head_size=64, rotary=12),
        {"strategy": "teams", "subgroup_size": 32, "lanes": 8, "width": 4},
        {},
        "vectors of 4 need a head size that is a multiple of 4",
    ),
    (
        QK_NORM_ROPE,
        LARGE["qk_norm_rope"],
        {},
        {"max_shared_memory_bytes": 1024},
        "needs 4608 bytes of shared memory, the device has 1024",
    ),
    (
        KV_APPEND_Q8,
        LARGE["kv_append_q8"],
        {"strategy": "teams", "subgroup_size": 32, "lanes": 16, "halves": 1},
        {},
        "16 lanes in 1 halves cannot share the 8 words",
    ),
    (
        KV_APPEND_Q8,
        LARGE["kv_append_q8"],
        {"strategy": "teams", "subgroup_size": 16, "lanes": 8},
        {"subgroup_size_control": False},
        "the device's subgroups have 32 lanes and no size control",
    ),
    (
        KV_APPEND_Q8,
        LARGE["kv_append_q8"],
        {},
        {"max_workgroup_count": (65_535, 2, 1)},
        "420006 groups, the device allows 131070 workgroups",
    ),
    (
        CACHE_WRITE_F32,
        CacheWriteProblem(tokens=1, kv_heads=1, head_size=70, pack=4),
        {},
        {},
        "4 packed dimensions do not divide a head of 70",
    ),
    (
        CACHE_WRITE_F32,
        CacheWriteProblem(tokens=1, kv_heads=1, head_size=64, key_stride=65),
        {"strategy": "direct", "width": 4},
        {},
        "strides that are multiples of 4, not 64 and 65/64",
    ),
    (
        CACHE_WRITE_F32,
        CacheWriteProblem(tokens=1, kv_heads=1, head_size=512),
        {"strategy": "staged", "tile_tokens": 64},
        {},
        "bytes of shared memory, the device has 49152",
    ),
    (
        CACHE_WRITE_Q8,
        CacheWriteProblem(tokens=1, kv_heads=1, head_size=70, pack=2),
        {},
        {},
        "head size 70 is no multiple of 4, the codes of one word",
    ),
    (
        CACHE_WRITE_Q8,
        LARGE["cache_write_q8"],
        {"strategy": "teams", "subgroup_size": 32, "lanes": 32},
        {"subgroup_operations": ("basic",)},
        "the device has no subgroup operations of kind shuffle",
    ),
]


@pytest.mark.parametrize(("family", "problem", "values", "device", "message"), REASONS)
def test_what_is_not_supported_gets_a_reason(
    family: Family,
    problem: Problem,
    values: dict[str, Any],
    device: dict[str, Any],
    message: str,
) -> None:
    found = reasons(family, {**family.baseline, **values}, problem, gpu(**device))
    assert any(message in each for each in found), found


@every_family
def test_the_kernels_that_are_timed_are_the_kernels_that_are_validated(family: Family) -> None:
    device, timed = gpu(), LARGE[family.name]
    variants = legal(family, timed, device)
    cases = [case.problem for case in family.validation_cases(timed)]
    for place in np.random.default_rng(2).permutation(len(variants))[:20]:
        values = variants[int(place)]
        wanted = [each.rendered.text for each in render_passes(family, values, timed, device)]
        for case in cases:
            assert not reasons(family, values, case, device)
            got = render_passes(family, values, case, device)
            assert [each.rendered.text for each in got] == wanted
    assert all(msgspec.to_builtins(case)["kind"] == family.kind for case in cases)
