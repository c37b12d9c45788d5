"""The spaces of the families over caches of floats, without a device: valid SPIR-V, and reasons."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest

from tests.family_kernels import COMPILER
from tests.float_variants import FAMILIES, SLICED, WHOLE, chosen, problem
from tests.golden_floats import F16, F32
from tests.made_devices import gpu, narrow_cpu
from tests.spirv_tools import spirv_val
from tuner.device_info import DeviceInfo
from tuner.evaluate import RenderedPass, render_passes
from tuner.kernels.base import Candidate, Family, ValidationCase, Values
from tuner.kernels.space import legal, pairwise, reasons
from tuner.problems import PagedDecodeProblem

ON_PAPER = {
    "f32, narrow CPU": (F32, narrow_cpu(), problem((64, 16, 4, 2))),
    "f32, GPU": (F32, gpu(), problem((128, 16, 8, 2), window=100, sinks=1)),
    "f16, narrow CPU": (F16, narrow_cpu(), problem((64, 16, 4, 2), softcap=30.0)),
    "f16, GPU": (F16, gpu(), problem((128, 16, 8, 2))),
}
on_paper = pytest.mark.parametrize(
    ("family", "device", "of"), ON_PAPER.values(), ids=list(ON_PAPER)
)


@functools.cache
def pairs(name: str, device: DeviceInfo, of: PagedDecodeProblem) -> tuple[Values, ...]:
    """Variants that between them hold every pair of parameter values."""
    return pairwise(legal(FAMILIES[name], of, device))


def rendered(
    family: Family, values: Values, of: PagedDecodeProblem, device: DeviceInfo
) -> tuple[RenderedPass, ...]:
    return render_passes(family, values, of, device, scalars=family.timing_scalars(of))


@on_paper
def test_kernels_are_valid_spirv(
    family: Family, device: DeviceInfo, of: PagedDecodeProblem
) -> None:
    variants = pairs(family.name[-3:], device, of)
    strategies = set(family.parameter("strategy").values)
    assert {v["strategy"] for v in variants} == strategies - (
        set() if device.matrix_layouts else {"matrix"}
    )
    sources = {
        each.rendered.text: (each.rendered, values)
        for values in variants[::4]
        for each in rendered(family, values, of, device)
    }
    assert len(sources) > 12
    for text, values in sources.values():
        spirv_val(COMPILER.compile(text, values=values).spirv)


@on_paper
def test_the_kernels_that_are_timed_are_the_kernels_that_are_validated(
    family: Family, device: DeviceInfo, of: PagedDecodeProblem
) -> None:
    timed = msgspec.structs.replace(of, context=16384)
    cases = sorted(family.validation_cases(timed), key=_context)
    passes = set()
    for values in pairs(family.name[-3:], device, of)[::3]:
        if reasons(family, values, timed, device):
            continue
        wanted = [each.rendered.text for each in rendered(family, values, timed, device)]
        passes.add(len(wanted))
        candidate = Candidate(values, timed, device)
        for case in (cases[0], cases[-1]):
            validated = family.validation_values(candidate, case)
            assert not reasons(family, validated, case.problem, device)
            got = rendered(family, validated, case.problem, device)
            assert [each.rendered.text for each in got] == wanted
        parts = int(got[0].declared.push["num_splits"])
        assert (parts > 1) == (len(got) > 1)
    assert passes == {1, 2}


def _context(case: ValidationCase) -> int:
    assert isinstance(case.problem, PagedDecodeProblem)
    return case.problem.context


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_some_start_is_legal_for_every_device_and_head_size(family: Family) -> None:
    for device in (
        gpu(),
        gpu(subgroup_size=64, min_subgroup_size=64, max_subgroup_size=64),
        gpu(subgroup_size=16, min_subgroup_size=16, max_subgroup_size=16),
        narrow_cpu(),
    ):
        for head_size in (64, 80, 96, 112, 128, 192, 256, 512):
            for group in (1, 4, 8):
                of = problem((head_size, 16, group, 2))
                good = [v for v in family.starts if not reasons(family, v, of, device)]
                if head_size == 512 and device.subgroup_size < 32:
                    continue  # more words than a lane has, more products than a step
                assert good, (device.subgroup_size, head_size, group)


def test_bytes_that_must_move_are_those_of_the_tokens_seen() -> None:
    plain, seen = problem(context=1024), problem(context=1024, window=256, value_head_size=48)
    vectors, tables = 2 * 6 * 4 * (32 + 32), 4 * 2 * 64 + 4 * 2
    assert F16.bytes_moved(plain) == 2 * 1024 * 2 * (32 + 32) * 2 + vectors + tables
    assert F32.bytes_moved(plain) == 2 * 1024 * 2 * (32 + 32) * 4 + vectors + tables
    vectors, tables = 2 * 6 * 4 * (32 + 48), 4 * 2 * 16 + 4 * 2
    assert F16.bytes_moved(seen) == 2 * 256 * 2 * (32 + 48) * 2 + vectors + tables
    switched = problem(context=1024, window=256, value_head_size=48, sinks=1, alibi=1)
    assert F16.bytes_moved(switched) == F16.bytes_moved(seen) + 2 * 4 * 6


@pytest.mark.parametrize(
    ("of", "text", "told"),
    [
        (problem((60, 16, 4, 2)), "f16 baseline", "head size 60 is no multiple of 8"),
        (problem((1024, 16, 4, 2)), "f32 baseline", "head size 1024 is more than the 512"),
        (problem((64, 5, 4, 2)), f"f32 scalar_f32 {WHOLE}", "blocks of 5 tokens do not hold whole"),
        (problem((64, 24, 4, 2)), "f32 scalar_f32 token_lanes=16", "16 tokens and blocks of 24"),
        (
            problem((80, 16, 4, 2)),
            "f16 scalar_f32 token_lanes=4",
            "8 lanes cannot share the 10 loads",
        ),
        (problem(), "f32 scalar_f32 token_lanes=8 value_lanes=4", "4 lanes cannot share 8 tokens"),
        (
            problem(value_head_size=24),
            "f32 scalar_f32 token_lanes=8",
            "32 rows side by side do not",
        ),
        (problem((64, 16, 1, 2)), f"f16 packed_f16 {SLICED}", "query heads per KV head (here 1)"),
        (
            problem((512, 16, 8, 2)),
            "f32 scalar_f32 token_lanes=8",
            "words of sums, keys and values",
        ),
        (problem(value_head_size=30), f"f32 scalar_f32 {SLICED}", "do not combine in vectors of 4"),
    ],
)
def test_what_does_not_suit_is_refused_with_its_numbers(
    of: PagedDecodeProblem, text: str, told: str
) -> None:
    family, values = chosen(text, gpu())
    assert told in "; ".join(reasons(family, values, of, gpu()))


MANY_HEADS = PagedDecodeProblem(
    sequences=1,
    context=64,
    query_heads=65_536,
    kv_heads=65_536,
    head_size=32,
    block_size=16,
)


@pytest.mark.parametrize(
    ("of", "text", "changes", "told"),
    [
        (MANY_HEADS, "f32 baseline", {}, "baseline: 65536 workgroups in x"),
        (MANY_HEADS, f"f32 scalar_f32 {WHOLE}", {}, "attend: 65536 workgroups in y"),
        (
            problem(),
            f"f32 scalar_f32 {SLICED} combine_slices=8",
            {"max_workgroup_size": (4, 32, 32)},
            "8 columns to combine, the device allows 4",
        ),
        (
            problem(),
            f"f32 scalar_f32 {SLICED} combine_slices=8",
            {"max_workgroup_size": (128, 4, 4)},
            "8 slices to combine, the device allows 4",
        ),
        (
            problem(),
            f"f32 scalar_f32 {SLICED} combine_slices=8",
            {"max_shared_memory_bytes": 1024},
            "needs 1088 bytes of shared memory to combine, the device has 1024",
        ),
    ],
)
def test_a_device_that_cannot_launch_a_pass_is_named(
    of: PagedDecodeProblem, text: str, changes: dict[str, Any], told: str
) -> None:
    device = msgspec.structs.replace(gpu(), **changes)
    family, values = chosen(text, device)
    assert told in "; ".join(reasons(family, values, of, device))
