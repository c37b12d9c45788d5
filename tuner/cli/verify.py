"""`verify`: run many variants of a family on the device against the oracle."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli import options
from tuner.cli.output import print_json, print_table, say
from tuner.errors import IllegalVariantError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.cli.session import Opened
    from tuner.device_info import DeviceInfo
    from tuner.evaluate import Findings
    from tuner.kernels.base import Family, Values
    from tuner.problems import Problem

FEW = 4
MOST_THREADS = 8
MOST_CPU_DEVICES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Variants of one family to verify on one problem."""

    family: Family
    problem: Problem
    variants: Sequence[Values]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    batch: _Batch
    values: Values
    findings: Findings


class _Bench:
    """A device and what stays on it: any thread prepares variants, one at a time runs them."""

    def __init__(self, device: Opened, batches: Sequence[_Batch]) -> None:
        from tuner.evaluate import Evaluator, ResidentCases

        self._device = device
        self._turn = threading.Lock()
        cases = {b.family.name: ResidentCases(device.runner, b.family) for b in batches}
        self._evaluators = {
            id(b): Evaluator(
                device.runner, device.compiler, b.family, b.problem, cases=cases[b.family.name]
            )
            for b in batches
        }

    def judge(self, batch: _Batch, values: Values) -> _Finding:
        """Validate one variant.

        Raises:
            DeviceLostError: the device is gone for good, so nothing more can be found.
        """
        evaluator = self._evaluators[id(batch)]
        trial = evaluator.prepare(evaluator.draft(values))
        with self._turn:
            try:
                findings = evaluator.validate(trial)
            finally:
                evaluator.release(trial)
        failure = findings.failure
        if failure and failure.lost and self._device.runner.losses is None:
            raise failure.lost
        return _Finding(batch=batch, values=values, findings=findings)


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

    Without --shape or --model they are run on the first of the family's small geometries (workload
    KIND-geometries), and a few of them on each of the others. Exit code 1 if any answer is wrong.
    """
    from tuner import kernels

    if (family is None) != all_families:
        raise UsageError("give one FAMILY or --all-families")
    count = _count(variants)
    chosen = kernels.families() if family is None else (kernels.family(family),)
    choice = options.ProblemChoice(shapes=shape, models=model, sequences=sequences, context=context)
    with ExitStack() as stack:
        devices = _open_devices(
            stack, device, cache=cache, validation=validation, in_process=in_process
        )
        info = devices[0].info
        batches = [
            batch for each in chosen for batch in _batches(each, choice, info, count, seed=seed)
        ]
        found = _run(batches, devices)
        messages = tuple(said for each in devices for said in each.runner.messages)
    failed = [each for each in found if each.findings.failure is not None]
    if json:
        _print_json(info, batches, failed, messages)
    else:
        _print_text(info, batches, failed, messages)
    if failed or messages:
        raise typer.Exit(1)


def _open_devices(
    stack: ExitStack,
    selector: str | None,
    *,
    cache: Path | None,
    validation: bool,
    in_process: bool,
) -> list[Opened]:
    """The device; a CPU driver's once for each core, since it compiles in the thread that runs."""
    from tuner.cli.session import opened

    def one() -> Opened:
        entered = opened(selector, cache=cache, validation=validation, in_process=in_process)
        return stack.enter_context(entered)

    first = one()
    more = min(MOST_CPU_DEVICES, os.cpu_count() or 1) - 1 if first.info.is_cpu else 0
    return [first, *(one() for _ in range(more))]


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

    problem, *others = (
        (choice.one(family, on_cpu=info.is_cpu),)
        if choice.said
        else workloads.geometries(family.kind)
    )
    if error := misfit(family, problem, info) or _refusal(family, problem, info):
        raise error
    batches = [_batch(family, problem, info, count, seed)]
    if count != "all":
        suited = [other for other in others if not _refusal(family, other, info)]
        batches += [_batch(family, other, info, FEW, seed) for other in suited]
    return batches


def _refusal(family: Family, problem: Problem, info: DeviceInfo) -> IllegalVariantError | None:
    """Why no variant of the family is legal for a problem; None if one is."""
    from tuner.kernels import space

    found = space.reasons(family, family.baseline, problem, info)
    if not found or len(space.legal(family, problem, info)):
        return None
    return IllegalVariantError(family.name, space.describe(family.baseline), found)


def _batch(
    family: Family, problem: Problem, info: DeviceInfo, count: int | str, seed: int
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


def _run(batches: Sequence[_Batch], devices: Sequence[Opened]) -> list[_Finding]:
    """Findings of all variants, those that failed and those that passed, with live progress."""
    from tuner.cli.progress import counting

    total = sum(len(batch.variants) for batch in batches)
    found: list[_Finding] = []
    failures = 0
    with counting("verified", total) as update:
        for finding in _judged(batches, [_Bench(device, batches) for device in devices]):
            found.append(finding)
            failures += finding.findings.failure is not None
            update(len(found), f"{failures} failed" if failures else finding.batch.problem.label)
    return found


def _judged(batches: Sequence[_Batch], benches: Sequence[_Bench]) -> Iterator[_Finding]:
    """Findings as they come in; while one variant runs, others are compiled.

    Raises:
        DeviceLostError: a device is gone for good.
    """
    threads = max(len(benches), min(MOST_THREADS, os.cpu_count() or 1))
    seats: SimpleQueue[_Bench] = SimpleQueue()
    for number in range(threads):
        seats.put(benches[number % len(benches)])

    def judge(batch: _Batch, values: Values) -> _Finding:
        bench = seats.get()
        try:
            return bench.judge(batch, values)
        finally:
            seats.put(bench)

    waiting: set[Future[_Finding]] = set()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for batch in batches:
                for values in batch.variants:
                    waiting.add(pool.submit(judge, batch, values))
                    if len(waiting) > threads:
                        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                        yield from (future.result() for future in done)
            yield from (future.result() for future in waiting)
        finally:
            pool.shutdown(cancel_futures=True)


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
