"""What an engine launches by `best-config.json` alone (`published_launches`) on batches that were
never tuned: right answers, for every kernel family."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import tuner
from tests.family_kernels import COMPILER, launch
from tests.made_records import made_record
from tests.published_launches import Engine
from tuner import kernels
from tuner.cli.report import export_best
from tuner.device_info import DeviceInfo
from tuner.errors import UsageError
from tuner.evaluate import Currency
from tuner.evaluate.building import named
from tuner.expressions import FUNCTIONS
from tuner.kernels.base import Family, Operands, ValidationCase, Values
from tuner.kernels.space import parse_values, reasons
from tuner.oracle import judge
from tuner.problems import Problem
from tuner.results import Store
from tuner.workloads import geometries

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

OWN = (
    "max_blocks",
    "q_stride",
    "key_stride",
    "value_stride",
    "visible_stride",
    "max_parts",
    "blocks",
)
"""Push constants that say how an engine has laid out its buffers; docs/engine.md names them."""


def exported(
    folder: Path, family: Family, tuned: Problem, values: Values, info: DeviceInfo
) -> Engine:
    """The engine over an export in which this variant is the best."""
    key = named(family, values, tuned, info, COMPILER.identity).key
    record = msgspec.structs.replace(
        made_record(values=dict(values), device=info),
        problem=tuned,
        variant=key,
        family=family.name,
        compiler=COMPILER.identity,
    )
    with Store(folder) as store:
        store.append(record)
        export_best(store, info, COMPILER, Currency(info, COMPILER.identity))
    return Engine(folder=folder)


def sizes(problem: Problem) -> dict[str, int]:
    """What an engine knows of its batch."""
    fields = msgspec.to_builtins(problem).items()
    return {**{k: v for k, v in fields if isinstance(v, int)}, **problem.counts}


def of_buffers(operands: Operands) -> dict[str, int]:
    """What an engine knows of its buffers: strides, and tokens that its cache has room for."""
    scalars: Mapping[str, Any] = operands.scalars
    own = {name: int(scalars[name]) for name in OWN if name in scalars}
    return own | ({"max_tokens": int(scalars["capacity"])} if "capacity" in scalars else {})


def chosen(family: Family, text: str, info: DeviceInfo) -> Values:
    """A variant by what matters, for subgroups of the device's size."""
    size = f"subgroup_size={info.subgroup_size}"
    words = text.split()
    found = parse_values(family, words, family.baseline)
    if "subgroup_size" in family.meaningful(found):
        found = parse_values(family, [size, *words], family.baseline)
    return found


def tuned_for(cases: Sequence[ValidationCase], sizes_of: Problem) -> Problem:
    """A problem of these sizes, and of the geometry that most of the cases have."""
    free = (*sizes_of.SIZES, "lengths")
    found = [
        {name: v for name, v in msgspec.structs.asdict(case.problem).items() if name not in free}
        for case in cases
    ]
    return msgspec.structs.replace(sizes_of, **max(found, key=found.count))


def others(engine: Engine, family: Family, cases: Sequence[ValidationCase]) -> list[ValidationCase]:
    """Those that the entry can be launched on by its rule."""
    config, found = tuner.load_best_config(engine.folder), []
    for case in cases:
        try:
            match = config.lookup(family.name, case.problem)
        except UsageError:
            continue
        if match.how == "nearest":
            found.append(case)
    return found


def check(runner: VulkanRunner, engine: Engine, family: Family, case: ValidationCase) -> None:
    """The entry answers a case rightly, and the tuner's own reader launches it likewise."""
    operands = family.operands(case.problem, case.inputs, case.seed)
    own = of_buffers(operands)
    job = engine.job(family.name, sizes(case.problem), own)
    (entry,) = tuner.load_best_config(engine.folder).families[family.name].entries
    launch_ = entry.dispatch.launch(case.problem, own)
    assert launch_.groups == {each.name: each.groups for each in job.passes}
    assert launch_.scratch_bytes == job.scratch_bytes
    execution = launch(runner, job, operands)
    arithmetic = family.arithmetic(entry.values)
    verdict = judge(execution.outputs, family.reference(operands), arithmetic, case.name)
    assert verdict.ok, verdict.message
    assert execution.dirty_counters == ()


CUTS = {
    "parts": "strategy=packed_f16 lanes_per_token=8 split=count:4",
    "tokens": "strategy=packed_f16 subgroups=2 lanes_per_token=8 split=tokens:256 combine_slices=2",
    "device": "strategy=int_dot staging=shared lanes_per_token=8 split=device:4",
    "whole": "strategy=scalar_f32 staging=shared lanes_per_token=8",
    "baseline": "strategy=baseline",
}
DEALT = ("none", "count:2", "tokens:2048", "device:1", "fit:2")


def launch_everywhere(
    runner: VulkanRunner,
    folder: Path,
    family: Family,
    values: Values,
    tuned: Problem,
    cases: Sequence[ValidationCase],
) -> None:
    engine = exported(folder, family, tuned, values, runner.info)
    launched = others(engine, family, cases)
    assert launched
    for case in launched:
        check(runner, engine, family, case)


@pytest.mark.parametrize("cut", CUTS)
def test_int8_decode_is_cut_for_batches_that_were_not_tuned(
    vulkan_runner: VulkanRunner, tmp_path: Path, cut: str
) -> None:
    family = kernels.family("paged_decode_q8")
    values = chosen(family, CUTS[cut], vulkan_runner.info)
    tuned = geometries(family.kind)[0]
    cases = family.validation_cases(tuned)
    launch_everywhere(vulkan_runner, tmp_path, family, values, tuned, cases)


@pytest.mark.parametrize("split", DEALT)
def test_int8_decode_on_matrix_units_is_dealt_out_to_them(
    vulkan_runner: VulkanRunner, matrix_shape: str, tmp_path: Path, split: str
) -> None:
    family = kernels.family("paged_decode_q8")
    text = f"strategy=matrix matrix_shape={matrix_shape} staging=shared split={split}"
    values = chosen(family, text, vulkan_runner.info)
    tuned = geometries(family.kind)[0]
    cases = family.validation_cases(tuned)
    launch_everywhere(vulkan_runner, tmp_path, family, values, tuned, cases)


@pytest.mark.parametrize("family", kernels.families(), ids=lambda family: family.name)
def test_every_family_is_launched_on_what_was_not_tuned(
    vulkan_runner: VulkanRunner, tmp_path: Path, family: Family
) -> None:
    for problem in geometries(family.kind):
        cases = family.validation_cases(problem)
        tuned = tuned_for(cases, problem)
        for values in family.starts:
            if not reasons(family, values, tuned, vulkan_runner.info):
                launch_everywhere(vulkan_runner, tmp_path, family, values, tuned, cases)
                return
    raise AssertionError("no start is legal on any geometry")


PAGE = (Path(__file__).parents[1] / "docs" / "engine.md").read_text()


@pytest.mark.parametrize("family", kernels.families(), ids=lambda family: family.name)
def test_the_page_says_what_every_buffer_and_push_constant_is(family: Family) -> None:
    named_ = set(re.findall(r"`([a-z0-9_]+)`", PAGE[PAGE.index("## What the buffers hold") :]))
    assert {*family.buffers, *(each.name for each in family.push_fields)} <= named_


def test_the_page_has_the_whole_language() -> None:
    assert set(re.findall(r"`([a-z_]+)\(a, b\)`", PAGE)) | {"min", "max"} == set(FUNCTIONS)
    assert "`min` and `max`" in PAGE
