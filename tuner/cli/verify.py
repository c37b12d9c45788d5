"""`verify`: run many variants of a family on the device against the oracle."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli import choosing, options
from tuner.cli.batches import (
    Batch,
    Only,
    Pick,
    chosen_batches,
    having,
    parse_count,
    parse_only,
    unverified,
)
from tuner.cli.output import note, print_json
from tuner.cli.verdicts import Finding, Report, as_data, print_report
from tuner.errors import UsageError

if TYPE_CHECKING:
    from tuner.cli.session import Opened
    from tuner.device_info import DeviceInfo
    from tuner.kernels.base import Family, Values
    from tuner.problems import Problem

MOST_THREADS = 8
MOST_CPU_DEVICES = 4


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

    def judge(self, batch: Batch, values: Values) -> Finding:
        """Validate one variant.

        Raises:
            DeviceLostError: the device is gone for good, so nothing more can be found.
        """
        evaluator, started = self._evaluators[id(batch)], time.perf_counter()
        trial = evaluator.prepare(evaluator.draft(values))
        seconds = time.perf_counter() - started
        with self._turn:
            try:
                findings = evaluator.validate(trial)
            finally:
                evaluator.release(trial)
        failure = findings.failure
        if failure and failure.lost and self._device.runner.losses is None:
            raise failure.lost
        seconds += findings.seconds
        return Finding(batch=batch, values=values, findings=findings, seconds=seconds)


def verify(
    family: Annotated[
        str | None,
        typer.Argument(
            metavar="FAMILY",
            help="A kernel family. With --shape or --model, default: the one that tune takes for "
            "each problem.",
        ),
    ] = None,
    *,
    all_families: Annotated[
        bool, typer.Option("--all-families", help="Verify every family.")
    ] = False,
    variants: Annotated[
        str,
        typer.Option(
            "--variants",
            metavar="N|values|pairwise|all",
            help="How many variants: N at random, just enough to have every value of every "
            "parameter, just enough to have every pair of values, or all.",
        ),
    ] = "pairwise",
    only: options.Only = None,
    seed: Annotated[int, typer.Option("--seed", help="Random seed of the choice.")] = 0,
    validation: Annotated[
        bool,
        typer.Option(
            "--validation",
            help="Use the Khronos validation layer; every message of it is a failure.",
        ),
    ] = False,
    launch_timeout: Annotated[
        float | None,
        typer.Option(
            "--launch-timeout",
            metavar="SECONDS",
            min=1,
            help="How long one launch may take. Default: 20; on a CPU driver, which compiles in "
            "the launch, 90 of processor time.",
        ),
    ] = None,
    device: options.Device = None,
    shape: options.Shape = None,
    model: options.Model = None,
    sequences: options.Sequences = None,
    context: options.Context = None,
    cache: options.Cache = None,
    in_process: options.InProcess = False,
    json: options.Json = False,
) -> None:
    """Check variants on the device against the oracle.

    Without --shape or --model, the variants run on the first of the family's small geometries
    (workload KIND-geometries), and a few of them on each of the others. --all-families leaves out
    families that solve none of the problems or have no variant that --only allows. The exit code
    is 1 if an answer is wrong.
    """
    from tuner.cli.session import opened

    count, wanted = parse_count(variants), parse_only(only or ())
    choice = options.ProblemChoice(
        shapes=shape,
        models=model,
        sequences=sequences,
        context=context,
        usual_context="1024",
    )
    chosen, pairing = _chosen(family, choice, wanted, every=all_families)
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
        todo: list[Batch] = []
        for each, part, problems in _with_problems(chosen, choice, info, pairing):
            pick = Pick(count=count, only=part, seed=seed)
            found, refused = chosen_batches(each, problems, info, pick)
            todo += found
            for line in unverified(each, refused, part):
                note(line)
        findings = _run(todo, devices)
        messages = tuple(said for each in devices for said in each.runner.messages)
    report = Report(info=info, batches=todo, findings=findings, messages=messages)
    if json:
        print_json(as_data(report))
    else:
        print_report(report, show_covered=bool(wanted))
    if not report.ok:
        raise typer.Exit(1)


def _chosen(
    asked: str | None, choice: options.ProblemChoice, wanted: Only, *, every: bool
) -> tuple[Sequence[tuple[Family, Only]], choosing.Pairing]:
    """The families that are meant, each with its part of what `--only` names, and how problems are
    given to them.

    Raises:
        UsageError: none are, or a family and every one; no family has what `--only` names.
    """
    from tuner import kernels

    if (asked and every) or not (asked or every or choice.said):
        raise UsageError("give one FAMILY or --all-families, or problems by --shape or --model")
    if asked:
        return ((kernels.family(asked), wanted),), "asked"
    if every:
        return having(kernels.families(), wanted), "every"
    return having(choosing.default_families(), wanted), "first"


def _with_problems(
    chosen: Sequence[tuple[Family, Only]],
    choice: options.ProblemChoice,
    info: DeviceInfo,
    pairing: choosing.Pairing,
) -> list[tuple[Family, Only, list[Problem]]]:
    """The families with their problems: none where the user named none.

    Raises:
        UsageError: what the user named is for none of these families.
    """
    if not choice.said:
        return [(*each, []) for each in chosen]
    families = [family for family, _ in chosen]
    tasks = choosing.paired(families, choice, info, pairing)
    problems = {family.name: [p for f, p in tasks if f is family] for family in families}
    return [(f, part, problems[f.name]) for f, part in chosen if problems[f.name]]


def _open_devices(
    stack: ExitStack, open_one: Callable[[], AbstractContextManager[Opened]]
) -> list[Opened]:
    """The device; a CPU driver's once for each core, since it compiles in the thread that runs."""
    first = stack.enter_context(open_one())
    more = min(MOST_CPU_DEVICES, os.cpu_count() or 1) - 1 if first.info.is_cpu else 0
    return [first, *(stack.enter_context(open_one()) for _ in range(more))]


def _run(batches: Sequence[Batch], devices: Sequence[Opened]) -> list[Finding]:
    """Findings of all variants, those that failed and those that passed, with live progress."""
    from tuner.cli.progress import counting

    total = sum(len(batch.variants) for batch in batches)
    found: list[Finding] = []
    failures = 0
    with counting("verified", total) as update:
        for finding in _judged(batches, [_Bench(device, batches) for device in devices]):
            found.append(finding)
            if finding.failure is not None:
                failures += 1
                note(f"  {finding.heading}: {finding.variant}")
            update(len(found), f"{failures} failed" if failures else finding.batch.problem.label)
    return found


def _judged(batches: Sequence[Batch], benches: Sequence[_Bench]) -> Iterator[Finding]:
    """Findings as they come in; while one variant runs, others are compiled.

    Raises:
        DeviceLostError: a device is gone for good.
    """
    threads = max(len(benches), min(MOST_THREADS, os.cpu_count() or 1))
    seats: SimpleQueue[_Bench] = SimpleQueue()
    for number in range(threads):
        seats.put(benches[number % len(benches)])

    def judge(batch: Batch, values: Values) -> Finding:
        bench = seats.get()
        try:
            return bench.judge(batch, values)
        finally:
            seats.put(bench)

    waiting: set[Future[Finding]] = set()
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
