"""`verify`: run many variants of a family on the device against the oracle."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli import options
from tuner.cli.batches import Batch, Pick, chosen_batches, having, parse_count, parse_only
from tuner.cli.output import note, print_json, print_table, say
from tuner.errors import UsageError

if TYPE_CHECKING:
    from tuner.cli.session import Opened
    from tuner.device_info import DeviceInfo
    from tuner.evaluate import Findings
    from tuner.kernels.base import Value, Values

MOST_THREADS = 8
MOST_CPU_DEVICES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    batch: Batch
    values: Values
    findings: Findings


class _Bench:
    """A device and what stays on it: any thread prepares variants, one at a time runs them."""

    def __init__(self, device: Opened, batches: Sequence[Batch]) -> None:
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

    def judge(self, batch: Batch, values: Values) -> _Finding:
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
            metavar="N|values|pairwise|all",
            help="N at random, all, or so few that every parameter value occurs, or every pair.",
        ),
    ] = "pairwise",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="NAME=VALUE",
            help="Only variants with this value; several of one name are alternatives.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the variants chosen at random.")] = 0,
    validation: Annotated[
        bool,
        typer.Option(
            "--validation", help="Have the Khronos layer check; what it says is a failure."
        ),
    ] = False,
    launch_timeout: Annotated[
        float | None,
        typer.Option(
            "--launch-timeout",
            metavar="SECONDS",
            min=1,
            help="Of one launch, in which a CPU driver compiles; default 20, 90 on a CPU driver.",
        ),
    ] = None,
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
    KIND-geometries), and a few of them on each of the others. With --all-families, those that do
    not solve the problem or lack what --only names are left out. Exit code 1: an answer is wrong.
    """
    from tuner import kernels
    from tuner.cli.session import opened

    if (family is None) != all_families:
        raise UsageError("give one FAMILY or --all-families")
    pick = Pick(count=parse_count(variants), only=parse_only(only or ()), seed=seed)
    chosen = kernels.families() if family is None else (kernels.family(family),)
    chosen = having(chosen, pick.only)
    choice = options.ProblemChoice(shapes=shape, models=model, sequences=sequences, context=context)
    with ExitStack() as stack:
        open_one = partial(
            opened,
            device,
            cache=cache,
            validation=validation,
            in_process=in_process,
            launch_s=launch_timeout,
        )
        devices = _open_devices(stack, open_one)
        info = devices[0].info
        if all_families and choice.said:
            able = tuple(each for each in chosen if choice.problems(each, on_cpu=info.is_cpu))
            chosen = able or chosen
        todo: list[Batch] = []
        for each in chosen:
            found, refused = chosen_batches(each, choice, info, pick)
            todo += found
            if refused:
                labels = "; ".join(problem.label for problem in refused)
                note(f"{each.name}: no such variant is legal for {labels}")
        findings = _run(todo, devices)
        messages = tuple(said for each in devices for said in each.runner.messages)
    failed = [each for each in findings if each.findings.failure is not None]
    if json:
        _print_json(info, todo, failed, messages)
    else:
        _print_text(info, todo, failed, messages, show_covered=bool(pick.only))
    if failed or messages:
        raise typer.Exit(1)


def _open_devices(
    stack: ExitStack, open_one: Callable[[], AbstractContextManager[Opened]]
) -> list[Opened]:
    """The device; a CPU driver's once for each core, since it compiles in the thread that runs."""
    first = stack.enter_context(open_one())
    more = min(MOST_CPU_DEVICES, os.cpu_count() or 1) - 1 if first.info.is_cpu else 0
    return [first, *(stack.enter_context(open_one()) for _ in range(more))]


def _run(batches: Sequence[Batch], devices: Sequence[Opened]) -> list[_Finding]:
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


def _judged(batches: Sequence[Batch], benches: Sequence[_Bench]) -> Iterator[_Finding]:
    """Findings as they come in; while one variant runs, others are compiled.

    Raises:
        DeviceLostError: a device is gone for good.
    """
    threads = max(len(benches), min(MOST_THREADS, os.cpu_count() or 1))
    seats: SimpleQueue[_Bench] = SimpleQueue()
    for number in range(threads):
        seats.put(benches[number % len(benches)])

    def judge(batch: Batch, values: Values) -> _Finding:
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


def _covered(batches: Sequence[Batch]) -> dict[str, dict[str, list[Value]]]:
    """By family, the values of each parameter that were tried where it has a meaning."""
    tried: dict[str, dict[str, list[Value]]] = {}
    for family in {batch.family.name: batch.family for batch in batches}.values():
        mine = [values for each in batches if each.family is family for values in each.variants]
        held = {item for values in mine for item in family.meaningful(values).items()}
        tried[family.name] = {
            of.name: [value for value in of.values if (of.name, value) in held]
            for of in family.parameters
            if any((of.name, value) in held for value in of.values)
        }
    return tried


def _print_text(
    info: DeviceInfo,
    batches: Sequence[Batch],
    failed: Sequence[_Finding],
    messages: Sequence[str],
    *,
    show_covered: bool,
) -> None:
    from tuner.cli.variants import describe

    say(f"Verified on {info.name} ({info.driver}), subgroups of {info.subgroup_size}:")
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
    for name, tried in _covered(batches).items() if show_covered else ():
        say(f"\n{name} was tried with")
        for parameter, values in tried.items():
            say(f"  {parameter} = {' '.join(str(value) for value in values)}")
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
    info: DeviceInfo, batches: Sequence[Batch], failed: Sequence[_Finding], messages: Sequence[str]
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
            "covered": _covered(batches),
            "validation_messages": messages,
        }
    )
