"""`verify`: run many variants of a family on the device against the oracle."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli import options
from tuner.cli.output import print_json, print_table, say
from tuner.errors import UsageError

if TYPE_CHECKING:
    from tuner.cli.session import Opened
    from tuner.device_info import DeviceInfo
    from tuner.evaluate import Evaluator, Findings, PreparedTrial, ResidentCases
    from tuner.kernels.base import Family, Values
    from tuner.problems import PagedDecodeProblem

GEOMETRIES = "geometries"
"""The named workload of unusual geometries, each of which a few variants are run on."""
FEW = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Variants of one family to verify on one problem."""

    family: Family
    problem: PagedDecodeProblem
    variants: Sequence[Values]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    batch: _Batch
    values: Values
    findings: Findings


def verify(
    family: Annotated[
        str | None, typer.Argument(metavar="[FAMILY]", help="A kernel family.")
    ] = None,
    *,
    all_families: Annotated[bool, typer.Option("--all-families", help="Every family.")] = False,
    variants: Annotated[
        str,
        typer.Option(
            "--variants",
            metavar="N|pairwise|all",
            help="N at random, all, or so many that every pair of parameter values occurs.",
        ),
    ] = "pairwise",
    seed: Annotated[int, typer.Option("--seed", help="Of the variants chosen at random.")] = 0,
    validation: Annotated[
        bool,
        typer.Option(
            "--validation", help="Have the Khronos layer check; what it says is a failure."
        ),
    ] = False,
    device: options.Device = None,
    shape: options.Shape = None,
    model: options.Model = None,
    sequences: options.Sequences = "1",
    context: options.Context = "1024",
    cache: options.Cache = None,
    in_process: options.InProcess = False,
    json: options.Json = False,
) -> None:
    """Check variants on the device against the oracle.

    Without --shape or --model a few variants are run on unusual geometries, too: other head sizes,
    block sizes and numbers of query heads per KV head. Exit code 1 if any answer is wrong.
    """
    from tuner import kernels
    from tuner.cli.session import opened

    if (family is None) != all_families:
        raise UsageError("give one FAMILY or --all-families")
    count = _count(variants)
    chosen = kernels.families() if family is None else (kernels.family(family),)
    choice = options.ProblemChoice(shapes=shape, models=model, sequences=sequences, context=context)
    with opened(device, cache=cache, validation=validation, in_process=in_process) as open_device:
        info = open_device.info
        batches = [
            batch for each in chosen for batch in _batches(each, choice, info, count, seed=seed)
        ]
        found = _run(batches, open_device)
        messages = tuple(open_device.runner.messages)
    failed = [each for each in found if each.findings.failure is not None]
    if json:
        _print_json(info, batches, failed, messages)
    else:
        _print_text(info, batches, failed, messages)
    if failed or messages:
        raise typer.Exit(1)


def _count(text: str) -> int | str:
    if text in ("pairwise", "all"):
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(f"--variants {text!r}: give a number above 0, pairwise or all")


def _batches(
    family: Family, choice: options.ProblemChoice, info: DeviceInfo, count: int | str, *, seed: int
) -> list[_Batch]:
    from tuner import workloads
    from tuner.cli.session import misfit

    problem = choice.one(on_cpu=info.is_cpu)
    if error := misfit(family, problem, info):
        raise error
    batches = [_batch(family, problem, info, count, seed)]
    if not choice.said and count != "all" and isinstance(problem, family.problem_type):
        batches += [
            _batch(family, other, info, FEW, seed) for other in workloads.load_workload(GEOMETRIES)
        ]
    return batches


def _batch(
    family: Family, problem: PagedDecodeProblem, info: DeviceInfo, count: int | str, seed: int
) -> _Batch:
    """The variants that `count` means; a number always has the baseline and a start among them."""
    import numpy as np

    from tuner.cli.variants import starting_variant
    from tuner.kernels import space

    legal = space.legal(family, problem, info)
    if count == "all":
        return _Batch(family=family, problem=problem, variants=legal)
    if count == "pairwise":
        return _Batch(family=family, problem=problem, variants=space.pairwise(legal))
    assert isinstance(count, int)
    rng = np.random.default_rng(seed)
    drawn = [legal[int(place)] for place in rng.permutation(len(legal))[:count]]
    known = [space.canonical(family, family.baseline), starting_variant(family, problem, info)]
    picked = [values for values in known if values in legal]
    picked += [values for values in drawn if values not in picked]
    return _Batch(family=family, problem=problem, variants=picked[:count])


def _run(batches: Sequence[_Batch], device: Opened) -> list[_Finding]:
    """Findings of all variants, those that failed and those that passed, with live progress."""
    from tuner.cli.progress import counting
    from tuner.evaluate import Evaluator, ResidentCases

    total = sum(len(batch.variants) for batch in batches)
    found: list[_Finding] = []
    failures = 0
    cases: dict[str, ResidentCases] = {}
    with counting("verified", total) as update:
        for batch in batches:
            shared = cases.setdefault(batch.family.name, ResidentCases(device.runner, batch.family))
            evaluator = Evaluator(
                device.runner, device.compiler, batch.family, batch.problem, cases=shared
            )
            for values, findings in _judged(evaluator, batch.variants):
                found.append(_Finding(batch=batch, values=values, findings=findings))
                failures += findings.failure is not None
                update(len(found), f"{failures} failed" if failures else batch.problem.label)
            evaluator.close()
    return found


def _judged(evaluator: Evaluator, variants: Sequence[Values]) -> Iterator[tuple[Values, Findings]]:
    """Each variant with what validation found; the next are compiled meanwhile.

    Raises:
        DeviceLostError: the device is gone for good, so nothing more can be found.
    """
    threads = min(8, os.cpu_count() or 1)
    waiting: deque[Future[PreparedTrial]] = deque()
    ahead = iter(variants)
    with ThreadPoolExecutor(threads) as pool:
        try:
            for values in variants:
                while len(waiting) <= threads and (following := next(ahead, None)) is not None:
                    waiting.append(pool.submit(_prepared, evaluator, following))
                trial = waiting.popleft().result()
                findings = evaluator.validate(trial)
                evaluator.release(trial)
                yield values, findings
                failure = findings.failure
                if failure and failure.lost and evaluator.runner.losses is None:
                    raise failure.lost
        finally:
            for future in waiting:
                if not future.cancel():
                    evaluator.release(future.result())


def _prepared(evaluator: Evaluator, values: Values) -> PreparedTrial:
    return evaluator.prepare(evaluator.draft(values))


def _print_text(
    info: DeviceInfo, batches: Sequence[_Batch], failed: Sequence[_Finding], messages: Sequence[str]
) -> None:
    from tuner.cli.variants import describe

    say(f"Verified on {info.name} ({info.driver}):")
    print_table(
        ("family", "problem", "variants", "failed"),
        [
            (
                batch.family.name,
                batch.problem.label,
                len(batch.variants),
                sum(each.batch is batch for each in failed),
            )
            for batch in batches
        ],
        right=("variants", "failed"),
    )
    for each in failed:
        failure = each.findings.failure
        assert failure is not None
        say(f"\n{failure.state}: {each.batch.family.name} on {each.batch.problem.label}")
        say(f"  {failure.error}")
        say(f"  {describe(each.batch.family, each.values)}")
    for message in messages:
        say(f"\nvalidation layer: {message}")
    if not failed and not messages:
        say("all answers are right")


def _print_json(
    info: DeviceInfo, batches: Sequence[_Batch], failed: Sequence[_Finding], messages: Sequence[str]
) -> None:
    print_json(
        {
            "device": info.name,
            "driver": info.driver,
            "batches": [
                {
                    "family": batch.family.name,
                    "problem": batch.problem,
                    "variants": len(batch.variants),
                    "failures": [
                        {
                            "values": dict(each.values),
                            "state": each.findings.failure.state,
                            "error": each.findings.failure.error,
                        }
                        for each in failed
                        if each.batch is batch and each.findings.failure is not None
                    ],
                }
                for batch in batches
            ],
            "validation_messages": messages,
        }
    )
