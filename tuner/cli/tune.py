"""`tune`: calibrate, search, export, plot, sum up."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli import options
from tuner.cli.output import bandwidth, microseconds, note, percent, print_json, print_table, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.cli.progress import TuneProgress
    from tuner.cli.session import Opened
    from tuner.device_info import DeviceInfo
    from tuner.evaluate import Session
    from tuner.records import Calibration, Record
    from tuner.results import Store
    from tuner.search import Interrupts, ProblemResult, RunResult, Settings, Task

CPU_SECONDS, GPU_SECONDS = 30.0, 40.0
"""Seconds for each problem where no budget is given."""
INTERRUPTED = 130
DEFAULT_FAMILY, EVERY = "paged_decode_q8", "all"
STUDIES = "studies.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """The files of a run beside its records; without a configuration `error` says why."""

    best_config: Path | None = None
    plots: tuple[Path, ...] = ()
    error: str | None = None


def tune(
    *,
    device: options.Device = None,
    family: Annotated[
        list[str] | None,
        typer.Option(
            "--family",
            metavar="FAMILY",
            help=f"Repeatable, or {EVERY}; default: {DEFAULT_FAMILY}.",
        ),
    ] = None,
    shape: options.Shape = None,
    model: options.Model = None,
    sequences: options.Sequences = "1,8",
    context: options.Context = "4096",
    lengths: options.Lengths = "equal",
    block_size: options.BlockSize = 16,
    workload: options.Workload = None,
    trials: Annotated[
        int | None,
        typer.Option("--trials", min=1, help="Variants to try in all, shared by the problems."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            help="Time to search in all, shared by the problems; with neither budget "
            f"{GPU_SECONDS:.0f} a problem, {CPU_SECONDS:.0f} on a CPU driver.",
        ),
    ] = None,
    sampler: Annotated[
        str, typer.Option("--sampler", metavar="tpe|random|grid|cmaes|gp", help="How to search.")
    ] = "tpe",
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            metavar="time|energy|both",
            help="What to minimise; both: the front of variants that none beats in both.",
        ),
    ] = "time",
    seed: Annotated[int, typer.Option("--seed", help="Of the sampler.")] = 0,
    storage: Annotated[
        Path | None,
        typer.Option(
            "--storage", metavar="FILE", help=f"Optuna journal; default: {STUDIES} in the results."
        ),
    ] = None,
    out: options.Out = options.RESULTS,
    cache: options.Cache = None,
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed", help="Try variants again that hung, crashed or lost the device."
        ),
    ] = False,
    in_process: options.InProcess = False,
    json: options.Json = False,
) -> None:
    """Search the fastest variant for each problem.

    What was found is exported and plotted. A run that was stopped goes on where it was, and nothing
    is measured twice. Ctrl-C ends the search after the trial at work, exports the best so far and
    exits with 130; a second one quits at once, with everything measured kept.
    """
    from tuner.cli.progress import TuneProgress
    from tuner.cli.session import open_store, opened, warn_of_cpu
    from tuner.search import Interrupts, require_meter

    choice = options.ProblemChoice(
        shapes=shape,
        models=model,
        sequences=sequences,
        context=context,
        lengths=lengths,
        block_size=block_size,
        workload=workload,
    )
    with opened(device, cache=cache, in_process=in_process) as open_device:
        info = open_device.info
        tasks = _tasks(family, choice, info)
        settings = _settings(
            trials,
            seconds,
            sampler,
            objective,
            seed,
            retry_failed=retry_failed,
            problems=len(tasks),
            info=info,
        )
        require_meter(open_device.runner, settings.objective)
        progress = TuneProgress()
        with (
            open_store(out, info) as store,
            progress,
            Interrupts(first=progress.stopping, second=lambda: _quit(store.folder)) as interrupts,
        ):
            warn_of_cpu(info)
            journal = storage or store.folder / STUDIES
            result = _search(open_device, tasks, store, journal, settings, progress, interrupts)
            written = _write(store, open_device)
            calibration, folder = store.calibration(info.driver), store.folder
    if json:
        print_json(_as_json(result, info, calibration, folder, written))
    else:
        _print_result(result, folder, written)
    if interrupts.asked:
        raise typer.Exit(INTERRUPTED)
    if result.error or written.error or any(each.best is None for each in result.problems):
        raise typer.Exit(1)


def _tasks(
    names: Sequence[str] | None, choice: options.ProblemChoice, info: DeviceInfo
) -> list[Task]:
    from tuner import kernels
    from tuner.cli.session import misfit

    if EVERY in (names or ()):
        families, problems_of = kernels.families(), choice.problems
    else:
        wanted = dict.fromkeys(names or (DEFAULT_FAMILY,))
        families, problems_of = tuple(map(kernels.family, wanted)), choice.required
    tasks: list[Task] = [
        (family, problem)
        for family in families
        for problem in problems_of(family, on_cpu=info.is_cpu)
    ]
    for family, problem in tasks:
        if error := misfit(family, problem, info):
            raise error
    return tasks


def _settings(
    trials: int | None,
    seconds: float | None,
    sampler: str,
    objective: str,
    seed: int,
    *,
    retry_failed: bool,
    problems: int,
    info: DeviceInfo,
) -> Settings:
    from tuner.errors import UnknownNameError
    from tuner.search import OBJECTIVES, SAMPLERS, Settings

    chosen = next((name for name in SAMPLERS if name == sampler), None)
    if chosen is None:
        raise UnknownNameError("sampler", sampler, SAMPLERS)
    goal = next((name for name in OBJECTIVES if name == objective), None)
    if goal is None:
        raise UnknownNameError("objective", objective, OBJECTIVES)
    if trials is None and seconds is None:
        seconds = problems * (CPU_SECONDS if info.is_cpu else GPU_SECONDS)
    return Settings(
        trials=trials,
        seconds=seconds,
        sampler=chosen,
        objective=goal,
        seed=seed,
        retry_failed=retry_failed,
    )


def _search(
    device: Opened,
    tasks: Sequence[Task],
    store: Store,
    journal: Path,
    settings: Settings,
    progress: TuneProgress,
    interrupts: Interrupts,
) -> RunResult:
    from tuner import search

    return search.tune(
        device.runner,
        device.compiler,
        tasks,
        store,
        storage=journal,
        settings=settings,
        session=lambda: _calibrated(device, store),
        progress=progress,
        interrupts=interrupts,
    )


def _calibrated(device: Opened, store: Store) -> Session:
    """A session with the read bandwidth of now, which goes into the store."""
    from tuner import calibration as calibrating
    from tuner.cli.session import session_name
    from tuner.evaluate import Session

    note(f"{device.info.name} ({device.info.driver}): measuring the read bandwidth")
    found = calibrating.up_to_date(device.runner, session_name(), store.calibrations())
    store.append_calibration(found)
    if found.is_full:
        note(f"calibrated in full: {found.reason}")
    note(f"read bandwidth {bandwidth(found.read_gb_s)} GB/s ({found.method})")
    return Session(name=found.session, read_gb_s=found.read_gb_s)


def _quit(folder: Path) -> None:
    """End this process now. Records are on the disk since they were made, as after `kill -9`; the
    worker ends with its parent. Called from a signal's handler, so not by way of any lock."""
    show_cursor = "\n\x1b[?25h" if sys.stderr.isatty() else ""
    text = (
        f"{show_cursor}tuner: quit; all that was measured is kept: run the same command again to "
        f"go on, or `tuner export {folder}` to export the best so far\n"
    )
    os.write(sys.stderr.fileno(), text.encode())
    os._exit(INTERRUPTED)


def _write(store: Store, device: Opened) -> _Written:
    """Export, then plot. What cannot be exported is told, not raised: the summary must come."""
    from tuner.cli.currency import current_records
    from tuner.cli.report import export_best, save_plots
    from tuner.errors import ResultsError
    from tuner.evaluate import Currency

    if not store.records():
        return _Written(error="nothing was measured, so there is nothing to export")
    best_config, plots, error = None, [], None
    currency = Currency(device.info, device.compiler.identity)
    try:
        best_config = export_best(store, device.info, device.compiler, currency).path
    except ResultsError as refused:
        error = str(refused)
    try:
        plots = save_plots(store, current_records(store, currency, option="`tuner plot --earlier`"))
    except ResultsError as refused:
        error = error or str(refused)
    return _Written(best_config=best_config, plots=tuple(plots), error=error)


def _print_result(result: RunResult, folder: Path, written: _Written) -> None:
    say()
    print_table(
        ("problem", "baseline µs", "best µs", "speed-up", "of read", "trials", "failed"),
        [_row(each) for each in result.problems],
        right=("baseline µs", "best µs", "speed-up", "of read", "trials", "failed"),
    )
    say()
    for each in result.problems:
        say(f"{each.problem.label}: {_variant(each)}")
        for record in each.front:
            say(f"  {_priced(each, record)}")
    say()
    variants = "1 variant" if result.measured == 1 else f"{result.measured} variants"
    say(f"{variants} measured in {result.seconds:.0f} s; results in {folder}/")
    for path in (written.best_config, *written.plots):
        if path is not None:
            say(f"  {path}")
    if written.error:
        note(f"not exported: {written.error}")
    if result.error:
        note(f"stopped early: {result.error}")
    if result.interrupted:
        note("interrupted: run the same command again to go on")


def _row(result: ProblemResult) -> tuple[str, ...]:
    best, baseline = result.best, result.baseline
    best_ns = None if best is None else best.median_ns
    baseline_ns = None if baseline is None else baseline.median_ns
    return (
        result.problem.label,
        microseconds(baseline_ns),
        microseconds(best_ns),
        f"{baseline_ns / best_ns:.1f}x" if best_ns and baseline_ns else "-",
        percent(None if best is None else best.utilisation),
        str(result.trials),
        str(sum(result.failures.values())),
    )


def _variant(result: ProblemResult) -> str:
    from tuner.cli.variants import describe

    if result.best is None:
        return result.error or "no correct variant"
    return describe(result.family, result.best.values)


def _priced(result: ProblemResult, record: Record) -> str:
    """A variant of the front of time and energy, in one line."""
    from tuner.cli.variants import describe

    joules = record.energy_j_per_token
    assert joules is not None
    price = f"{microseconds(record.median_ns)} µs, {1e3 * joules:.3g} mJ/token"
    return f"{price}: {describe(result.family, record.values)}"


def _as_json(
    result: RunResult,
    info: DeviceInfo,
    calibration: Calibration | None,
    folder: Path,
    written: _Written,
) -> dict[str, object]:
    return {
        "device": info.name,
        "driver": info.driver,
        "calibration": calibration,
        "interrupted": result.interrupted,
        "error": result.error or written.error,
        "seconds": result.seconds,
        "measured": result.measured,
        "busy": result.busy,
        "problems": [
            {
                "family": each.family.name,
                "problem": each.problem,
                "ended": each.ended,
                "error": each.error,
                "legal": each.legal,
                "trials": each.trials,
                "measured": each.measured,
                "known": each.known,
                "failures": each.failures,
                "baseline": each.baseline,
                "best": each.best,
                "front": each.front,
            }
            for each in result.problems
        ],
        "results": folder,
        "best_config": written.best_config,
        "plots": written.plots,
    }
