"""An engine in miniature: it knows `best-config.json` and docs/engine.md alone, no family, and
launches what was tuned for one batch on batches of its own."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

import tuner
from tests.family_kernels import COMPILER, launch, variant
from tests.made_records import made_record
from tuner import kernels
from tuner.cli.report import export_best
from tuner.device_info import DeviceInfo
from tuner.evaluate import Currency
from tuner.evaluate.building import named
from tuner.export.best_config import BestConfig, Entry
from tuner.kernels.base import Operands
from tuner.oracle import judge
from tuner.problems import PagedDecodeProblem
from tuner.results import Store
from tuner.runner.protocol import Execution, Job, JobPass

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

FAMILY = kernels.family("paged_decode_q8")
TUNED = PagedDecodeProblem(sequences=4, context=512, query_heads=8, kv_heads=2, head_size=64)
BATCHES = {
    "ragged": {"sequences": 5, "context": 700, "lengths": "list:1,0,700,33,256"},
    "one long": {"sequences": 1, "context": 900},
    "many": {"sequences": 19, "context": 48, "lengths": "uniform:0"},
}
OF_A_BATCH = ("num_sequences", "max_context_len", "max_blocks", "q_stride")
"""Push constants that an engine knows, whatever the kernel."""
PACKED = {"uint": "I", "int": "i", "float": "f"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What an engine does with a folder that the tuner has exported."""

    folder: Path

    @property
    def config(self) -> BestConfig:
        return tuner.load_best_config(self.folder)

    def job(self, problem: PagedDecodeProblem, batch: Mapping[str, int | float]) -> Job:
        """What to launch for a batch; `batch` has its push constants."""
        family = self.config.families["paged_decode_q8"]
        entry = self.config.lookup("paged_decode_q8", problem).entry
        cut = (
            dealt(entry, problem) if entry.values["strategy"] == "matrix" else split(entry, problem)
        )
        push = {
            **entry.passes[0].push_constants,
            **{name: batch[name] for name in OF_A_BATCH},
            **{name: cut[name] for name in ("num_splits", "tokens_per_split")},
        }
        layout = "<" + "".join(PACKED[each.type] for each in family.abi.push_constants)
        packed = struct.pack(layout, *(push[each.name] for each in family.abi.push_constants))
        known = {**msgspec.to_builtins(problem), **push}
        by_number = sorted(family.abi.bindings, key=lambda each: each.binding)
        return Job(
            passes=tuple(
                JobPass(
                    name=each.name,
                    spirv=each.read_spirv(self.folder),
                    push=packed,
                    groups=groups(entry.dispatch.groups[each.name], known),
                    subgroup_size=each.subgroup_size,
                )
                for each in entry.passes
            ),
            bindings=tuple(each.buffer for each in by_number),
            scratch_bytes={"partials": cut["partials"], "counters": cut["counters"]},
            counters=tuple(each.buffer for each in by_number if each.role == "counter"),
        )


def groups(terms: tuple[str, str, str], known: Mapping[str, int]) -> tuple[int, int, int]:
    x, y, z = (int(term) if term.isdecimal() else int(known[term]) for term in terms)
    return x, y, z


def policy(entry: Entry) -> tuple[str, int]:
    name, _, number = entry.dispatch.policy.partition(":")
    return name, int(number or 0)


def split(entry: Entry, problem: PagedDecodeProblem) -> dict[str, int]:
    """The dispatch rule of kernels whose workgroups take a part of a context each, by its text."""
    name, number = policy(entry)
    pairs = problem.sequences * problem.kv_heads
    wanted = {
        "none": lambda: 1,
        "count": lambda: number,
        "tokens": lambda: math.ceil(problem.context / number),
        "device": lambda: number * entry.dispatch.facts["compute_units"] // pairs,
    }[name]()
    granule = entry.dispatch.facts.get("granule_tokens", 1)
    tokens = math.ceil(math.ceil(problem.context / max(1, wanted)) / granule) * granule
    parts = math.ceil(problem.context / tokens)
    rows = problem.sequences * problem.query_heads * parts
    return {
        "num_splits": parts,
        "tokens_per_split": tokens,
        "partials": 4 * rows * (problem.head_size + 2),
        "counters": 4,
    }


def dealt(entry: Entry, problem: PagedDecodeProblem) -> dict[str, int]:
    """The dispatch rule of kernels that deal out all tokens evenly, by its text."""
    name, number = policy(entry)
    pairs = problem.sequences * problem.kv_heads
    assert name == "count"
    rows = (pairs + number * pairs) * (problem.query_heads // problem.kv_heads)
    return {
        "num_splits": number * pairs,
        "tokens_per_split": 0,
        "partials": 4 * rows * (problem.head_size + 4),
        "counters": 4 * pairs,
    }


def exported(folder: Path, info: DeviceInfo, text: str) -> Engine:
    """The engine over an export in which this variant is the best."""
    values = variant(FAMILY, text, info)
    key = named(FAMILY, values, TUNED, info, COMPILER.identity).key
    identity = {"variant": key, "compiler": COMPILER.identity, "device": info}
    with Store(folder) as store:
        store.append(made_record(TUNED, dict(values), **identity))
        export_best(store, info, COMPILER, Currency(info, COMPILER.identity))
    return Engine(folder=folder)


def attended(
    runner: VulkanRunner, engine: Engine, problem: PagedDecodeProblem
) -> tuple[Operands, Execution]:
    operands = FAMILY.operands(problem, "random", 7)
    return operands, launch(runner, engine.job(problem, operands.scalars), operands)


def check(runner: VulkanRunner, engine: Engine, batch: str) -> None:
    problem = msgspec.structs.replace(TUNED, **BATCHES[batch])
    match = engine.config.lookup("paged_decode_q8", problem)
    assert match.how == "nearest"
    operands, execution = attended(runner, engine, problem)
    arithmetic = FAMILY.arithmetic(match.entry.values)
    verdict = judge(execution.outputs, FAMILY.reference(operands), arithmetic, batch)
    assert verdict.ok, verdict.message
    assert execution.dirty_counters == ()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "text",
    [
        "scalar_f32 lanes_per_token=8 split=count:4",
        "packed_f16 subgroups=2 lanes_per_token=8 split=tokens:256 combine_slices=2",
        "int_dot staging=shared lanes_per_token=8 split=device:4",
        "scalar_f32 staging=shared lanes_per_token=4",
    ],
)
def test_batches_that_were_not_tuned_are_answered_by_the_published_rule(
    vulkan_runner: VulkanRunner, tmp_path: Path, text: str, batch: str
) -> None:
    check(vulkan_runner, exported(tmp_path, vulkan_runner.info, text), batch)


@pytest.mark.parametrize("batch", BATCHES)
def test_matrix_kernels_are_launched_by_the_published_rule(
    vulkan_runner: VulkanRunner, matrix_shape: str, tmp_path: Path, batch: str
) -> None:
    text = f"matrix matrix_shape={matrix_shape} staging=shared split=count:2"
    check(vulkan_runner, exported(tmp_path, vulkan_runner.info, text), batch)
