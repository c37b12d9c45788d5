"""The toy family exported: jobs with made-up SPIR-V, records, a configuration."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tuner
from tests.made_records import gpu, made_record
from tests.toy_family import FACTOR, TOY, toy_problem
from tuner.errors import UnknownNameError
from tuner.export import Exported, export_best_config
from tuner.export.best_config import BestConfig
from tuner.kernels.base import DispatchRule, Family, Values
from tuner.problems import PagedDecodeProblem, Problem
from tuner.records import Record
from tuner.results import Store
from tuner.runner.protocol import Job, JobPass

PROBLEM = toy_problem(2, 64)
BASE: dict[str, int | str] = dict(TOY.baseline)
FAST: dict[str, int | str] = {**BASE, "width": 64, "split": 2}


def family_of(name: str) -> Family:
    if name != "toy":
        raise UnknownNameError("family", name, ["toy"])
    return TOY


def toy_rule(main: tuple[str, str, str] = ("sequences", "1", "1")) -> DispatchRule:
    """A rule for the variant `FAST` on other batches."""
    return DispatchRule(
        policy="count:2",
        facts={"granule": 16},
        terms=(("rows", "sequences * query_heads"),),
        groups={"main": main, "join": ("1", "1", "1")},
        push={"rows": "rows"},
        scratch={"partial": "8"},
        text="one workgroup a sequence",
    )


def with_rule(main: tuple[str, str, str] = ("sequences", "1", "1")) -> Callable[[str], Family]:
    """The toy family with `toy_rule`, as an export asks for it."""
    return lambda _name: dataclasses.replace(TOY, dispatch=lambda _candidate: toy_rule(main))


def build(family: Family, problem: Problem, values: Values) -> Job:
    """A job with made-up SPIR-V that depends on the values."""
    assert isinstance(problem, PagedDecodeProblem)
    push = struct.pack("<If", problem.sequences * problem.query_heads, FACTOR)
    names = ("main", "join")[: int(values["split"])]
    return Job(
        passes=tuple(
            JobPass(
                name=name,
                spirv=f"{name} {sorted(values.items())}".encode(),
                push=push,
                groups=(problem.sequences, 1, 1) if name == "main" else (1, 1, 1),
                subgroup_size=32 if name == "main" else None,
            )
            for name in names
        ),
        bindings=tuple(binding.buffer for binding in family.bindings),
        scratch_bytes={"partial": 4 * int(values["split"])},
    )


def toy_record(values: dict[str, int | str], median_us: float = 10.0, **changes: Any) -> Record:
    fields = {"problem": PROBLEM, "family": "toy", **changes}
    return made_record(values=values, median_us=median_us, **fields)


def export(folder: Path, made: list[Record], **options: Any) -> tuple[BestConfig, Exported]:
    with Store(folder) as store:
        store.extend(made)
        arguments = {"info": gpu(), "build": build, "family_of": family_of, **options}
        exported = export_best_config(store, **arguments)
    return tuner.load_best_config(exported.path), exported
