"""Where a search begins on devices that tell little and have little: with tuned variants there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.made_devices import SMALL, VENDORS, gpu, narrow_cpu, plain
from tests.toy_family import TOY, toy_device, toy_runner
from tests.toy_search import BASELINE, SPACE, Watch, run
from tuner import workloads
from tuner.cli.variants import starting_variant
from tuner.device_info import DeviceInfo
from tuner.kernels import families, family, space
from tuner.kernels.base import Family
from tuner.kernels.limits import buffers_reason, subgroup_size_reason
from tuner.problems import IndexerStepProblem, PagedDecodeProblem, Problem

DEVICES = {**VENDORS, **SMALL}
NOTHING_TUNED = {"paged_attention_backward", "qsa_chain", "index_select"}
"""Families of which nothing tuned may be legal with 128 threads a workgroup."""
PORTABLE = (
    {"mode": "half", "width": 64, "unroll": 1, "tile": 1, "split": 1},
    {"mode": "half", "width": 64, "unroll": 2, "tile": 1, "split": 1},
)
PORTABLE_TOY = replace(TOY, portable=PORTABLE)


def problems_of(of: Family) -> tuple[Problem, ...]:
    """What a user tunes a family for without saying more, where it has what these problems need."""
    on_cpu, on_gpu = (workloads.default_problems(of.kind, on_cpu=cpu) for cpu in (True, False))
    found = [p for p in (*on_cpu, *on_gpu) if not space.reasons(of, of.baseline, p, gpu())]
    assert found
    return tuple(found)


def has_start(of: Family, problem: Problem, device: DeviceInfo) -> bool:
    """Whether any start point but the baseline is legal."""
    baseline = space.canonical(of, of.baseline)
    firsts = (space.canonical(of, values) for values in (*of.portable, *of.starts))
    return any(v != baseline and not space.reasons(of, v, problem, device) for v in firsts)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES.keys())
@pytest.mark.parametrize("of", families(), ids=lambda of: of.name)
def test_every_family_has_tuned_starts_for_what_is_tuned_by_default(
    of: Family, device: DeviceInfo
) -> None:
    baseline = space.canonical(of, of.baseline)
    for problem in problems_of(of):
        if not has_start(of, problem, device):
            assert of.name in NOTHING_TUNED, problem.label
            assert device.max_workgroup_invocations == 128, problem.label
            assert set(map(str, space.legal(of, problem, device))) <= {str(baseline)}


DECODES = ["paged_decode_q8", "paged_decode_q8_switched", "paged_decode_f16", "paged_decode_f32"]


@pytest.mark.parametrize("device", VENDORS.values(), ids=VENDORS.keys())
@pytest.mark.parametrize("name", DECODES)
def test_decode_of_every_model_has_tuned_starts(name: str, device: DeviceInfo) -> None:
    of, asked = family(name), 0
    for model in workloads.models():
        for problem in workloads.model_problems(model.name, sequences=[8], contexts=[16384]):
            if not space.reasons(of, of.baseline, problem, gpu()):
                asked += 1
                assert has_start(of, problem, device), problem.label
    assert asked > 3


@pytest.mark.parametrize("kept", [512, 2048])
@pytest.mark.parametrize("device", [narrow_cpu(), VENDORS["Intel"], gpu()], ids=str)
def test_selections_of_thousands_of_blocks_have_starts(device: DeviceInfo, kept: int) -> None:
    problem = IndexerStepProblem(rows=1, context=100_000, budget=4 * kept)
    assert problem.kept_blocks == kept
    assert has_start(family("index_select"), problem, device)


def test_bench_and_set_start_from_a_tuned_variant() -> None:
    of = family("paged_decode_q8")
    problem = PagedDecodeProblem(
        sequences=8, context=4096, query_heads=32, kv_heads=8, head_size=128
    )
    for device in DEVICES.values():
        assert starting_variant(of, problem, device)["strategy"] != "baseline"


def test_on_a_cpu_bench_starts_from_a_variant_for_any_device() -> None:
    """One for GPUs, of 1,024 threads, took 16 times as long as the baseline there."""
    of = family("gated_combine")
    (problem, *_) = problems_of(of)
    portable = [space.canonical(of, values) for values in of.portable]
    assert starting_variant(of, problem, narrow_cpu()) in portable
    assert starting_variant(of, problem, gpu()) not in portable


def test_portable_starts_cost_no_trial_where_the_others_are_good() -> None:
    tells = toy_device(compute_units=4)
    assert space.starts(PORTABLE_TOY, SPACE, tells) == TOY.starts
    assert space.starts(PORTABLE_TOY, SPACE, toy_device()) == (*TOY.starts, *PORTABLE)
    only = SPACE.having({"mode": ["half", "plain"]})
    assert space.starts(PORTABLE_TOY, only, tells) == (*TOY.starts, *PORTABLE)


@pytest.mark.parametrize("units", [4, None])
def test_a_search_tries_portable_starts_first_where_no_unit_count_is_told(
    tmp_path: Path, units: int | None
) -> None:
    watch = Watch()
    runner = toy_runner(info=toy_device(compute_units=units))
    run(tmp_path / "log", family=PORTABLE_TOY, runner=runner, progress=watch, trials=4)
    expected = [BASELINE, *TOY.starts, *(() if units else PORTABLE)]
    assert watch.started[: len(expected)] == expected
    assert (PORTABLE[0] in watch.started[:3]) == (units is None)


# ------------------------------------------------------------------ limits


def test_sizes_that_may_vary_cannot_be_had_without_control() -> None:
    varying = plain(min_subgroup_size=8, subgroup_size_control=False)
    assert subgroup_size_reason(varying, 32) == (
        "the device's subgroups have 8 to 32 lanes and no size control"
    )
    assert subgroup_size_reason(plain(min_subgroup_size=8), 16) is None
    fixed = VENDORS["Apple"]
    assert subgroup_size_reason(fixed, 32) is None
    assert subgroup_size_reason(fixed, 16) is not None


@pytest.mark.parametrize("of", families(), ids=lambda of: of.name)
def test_nothing_is_legal_where_a_pipeline_has_too_few_buffers(of: Family) -> None:
    problem = problems_of(of)[0]
    count = len(of.slots)
    few = gpu(max_storage_buffers=count - 1)
    (reason, *_) = space.reasons(of, of.baseline, problem, few)
    assert reason == f"{count} storage buffers, the device allows {count - 1}"
    assert not space.legal(of, problem, few)
    assert reason in space.refusals(of, problem, few)
    assert buffers_reason(gpu(max_storage_buffers=count), count) is None


def test_workgroups_have_no_more_subgroups_than_the_device_allows() -> None:
    of = family("index_select")
    problem = problems_of(of)[0]
    few = gpu(max_workgroup_subgroups=8)
    kept = space.legal(of, problem, few)
    assert {values["subgroups"] for values in kept} == {4, 8}
    assert {values["subgroups"] for values in space.legal(of, problem, gpu())} == {4, 8, 16, 32}
    reasons = space.reasons(of, space.canonical(of, of.starts[0]), problem, few)
    assert "32 subgroups a workgroup, the device allows 8" in reasons
