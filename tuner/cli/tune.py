"""`tune`: calibrate, search, export, plot, sum up."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli import choosing, options
from tuner.cli.output import bandwidth, note, print_json
from tuner.cli.summary import Ran, Written, as_data, print_result

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tuner.cli.session import Opened
    from tuner.device_info import DeviceInfo
    from tuner.evaluate import Session
    from tuner.kernels.base import Value
    from tuner.results import Outcome, Store
    from tuner.search import ProblemResult, Settings, Task

CPU_SECONDS, GPU_SECONDS = 30.0, 40.0
"""Seconds for each problem where no budget is given."""
SWITCH_SECONDS = 0.0005
"""How long a thread may keep the interpreter from others, by default ten times as long. The device
thread asks for it dozens of times a trial, and shares it with those that prepare variants."""
INTERRUPTED = 130
EVERY = "all"
STUDIES = "studies.jsonl"


def tune(
    *,
    device: options.Device = None,
    family: Annotated[
        list[str] | None,
        typer.Option(
            "--family",
            metavar="FAMILY",
            help=f"Family to tune, or {EVERY}. Repeatable. Default: for each problem the first of "
            f"{', '.join(choosing.DEFAULT_FAMILIES)} that solves it.",
        ),
    ] = None,
    shape: options.Shape = None,
    model: options.Model = None,
    sequences: options.Sequences = None,
    context: options.Context = None,
    lengths: options.Lengths = None,
    block_size: options.BlockSize = None,
    workload: options.Workload = None,
    only: options.Only = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            metavar="N",
            min=1,
            help="How many variants to try; the problems share them.",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            metavar="SECONDS",
            help="How long to search; the problems share the time. The first trials of each are "
            "always made. Without --trials and --seconds each problem has "
            f"{GPU_SECONDS:.0f} seconds, on a CPU driver {CPU_SECONDS:.0f}.",
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
            help="What to minimise. With both, the result is every variant that no other beats in "
            "time and energy.",
        ),
    ] = "time",
    seed: Annotated[int, typer.Option("--seed", help="Random seed of the sampler.")] = 0,
    storage: Annotated[
        Path | None,
        typer.Option(
            "--storage",
            metavar="FILE",
            help=f"Journal of Optuna's studies. Default: {STUDIES} in the results.",
        ),
    ] = None,
    out: options.Out = options.RESULTS,
    cache: options.Cache = None,
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed",
            help="Try variants again that hung, crashed or lost the device in earlier runs.",
        ),
    ] = False,
    in_process: options.InProcess = False,
    json: options.Json = False,
) -> None:
    """Search for the fastest variant of each problem.

    The results are exported and plotted. If a run was stopped, the same command continues it;
    nothing is measured twice. Ctrl-C ends the search after the current trial, exports the best so
    far, and the exit code is 130. A second Ctrl-C quits at once; all measurements are kept. A
    search with --only has its own budget, and always measures the baseline, too.
    """
    from tuner.cli.session import opened
    from tuner.search import require_meter

    choice = options.ProblemChoice(
        shapes=shape,
        models=model,
        sequences=sequences,
        context=context,
        lengths=lengths,
        block_size=block_size,
        workload=workload,
        usual_sequences="1,8",
    )
    allowed = _allowed(family, only or (), choice)
    settings = _settings(
        trials, seconds, sampler, objective, seed, retry_failed=retry_failed, only=allowed
    )
    sys.setswitchinterval(SWITCH_SECONDS)
    with opened(device, cache=cache, in_process=in_process) as open_device:
        info = open_device.info
        tasks = _tasks(family, allowed, choice, info)
        fitting, too_large = _by_size(tasks, info)
        require_meter(open_device.runner, settings.objective)
        if seconds is not None:
            note(_sharing(seconds, problems=len(fitting)))
        settings = _with_budget(settings, problems=len(fitting), info=info)
        ran, interrupted = _search(open_device, fitting, settings, out, storage)
        ran = ran.beside(too_large, order=tasks)
    if json:
        print_json(as_data(ran))
    else:
        print_result(ran)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if not ran.ok:
        raise typer.Exit(1)


def _allowed(
    names: Sequence[str] | None, only: Sequence[str], choice: options.ProblemChoice
) -> dict[str, dict[str, list[Value]]]:
    """By family that is meant, the values that `--only` lets parameters have.

    Raises:
        UnknownNameError, UsageError: no such family, parameter or value.
    """
    from tuner import kernels
    from tuner.cli.batches import having, parse_only, wanted_values

    wanted = parse_only(only)
    if not names:
        parts = having(choosing.default_families(said=choice.said), wanted)
    elif EVERY in names:
        parts = having(kernels.families(), wanted)
    else:
        parts = tuple((kernels.family(name), wanted) for name in dict.fromkeys(names))
    return {family.name: wanted_values(family, part) for family, part in parts}


def _tasks(
    names: Sequence[str] | None,
    allowed: Iterable[str],
    choice: options.ProblemChoice,
    info: DeviceInfo,
) -> list[Task]:
    """What to tune: the allowed families with their problems, no work twice. Where no `names` were
    given, each problem has one family.

    Raises:
        UsageError: what the user named is for none of these families.
    """
    from tuner import kernels

    families = [kernels.family(name) for name in allowed]
    pairing: choosing.Pairing = "asked" if names else "first"
    if EVERY in (names or ()):
        pairing = "every"
    return choosing.paired(families, choice, info, pairing, once=True)


def _by_size(
    tasks: Sequence[Task], info: DeviceInfo
) -> tuple[list[Task], tuple[ProblemResult, ...]]:
    """What fits on the device, and the results of what does not.

    Raises:
        OutOfMemoryError: nothing fits.
    """
    from tuner.cli.session import misfit
    from tuner.search import ProblemResult

    errors = [misfit(family, problem, info) for family, problem in tasks]
    found = [error for error in errors if error is not None]
    if found and len(found) == len(tasks):
        raise found[0]
    for error in found:
        note(f"left out: {error}")
    return (
        [task for task, error in zip(tasks, errors, strict=True) if error is None],
        tuple(
            ProblemResult(family=family, problem=problem, ended="does not fit", error=str(error))
            for (family, problem), error in zip(tasks, errors, strict=True)
            if error is not None
        ),
    )


def _settings(
    trials: int | None,
    seconds: float | None,
    sampler: str,
    objective: str,
    seed: int,
    *,
    retry_failed: bool,
    only: dict[str, dict[str, list[Value]]],
) -> Settings:
    from tuner.search import OBJECTIVES, SAMPLERS, Settings

    return Settings(
        trials=trials,
        seconds=seconds,
        sampler=options.one_of("sampler", sampler, SAMPLERS),
        objective=options.one_of("objective", objective, OBJECTIVES),
        seed=seed,
        retry_failed=retry_failed,
        only=only,
    )


def _sharing(seconds: float, *, problems: int) -> str:
    """What to say of the time beforehand."""
    from tuner.search import LEAST_TRIALS

    shared = "1 problem has" if problems == 1 else f"{problems} problems share"
    return (
        f"{shared} {seconds:g} s; the first {LEAST_TRIALS} trials of a problem are made in any "
        "case, even if that takes longer"
    )


def _with_budget(settings: Settings, *, problems: int, info: DeviceInfo) -> Settings:
    """The settings with so many seconds a problem, if they have no budget."""
    if settings.trials is not None or settings.seconds is not None:
        return settings
    each = CPU_SECONDS if info.is_cpu else GPU_SECONDS
    return replace(settings, seconds=problems * each)


def _search(
    device: Opened, tasks: Sequence[Task], settings: Settings, out: Path, storage: Path | None
) -> tuple[Ran, bool]:
    """Search, export and plot; also tells whether the user has interrupted it."""
    from tuner import search
    from tuner.cli.progress import TuneProgress
    from tuner.cli.session import open_store, warn_of_cpu

    progress = TuneProgress()
    with (
        open_store(out, device.info) as store,
        progress,
        search.Interrupts(
            first=progress.stopping, second=lambda: _quit(store.folder)
        ) as interrupts,
    ):
        warn_of_cpu(device.info)
        result = search.tune(
            device.runner,
            device.compiler,
            tasks,
            store,
            storage=storage or store.folder / STUDIES,
            settings=settings,
            session=lambda: _calibrated(device, store),
            progress=progress,
            interrupts=interrupts,
        )
        ran = Ran(
            info=device.info,
            result=result,
            written=_write(store, device),
            calibration=store.calibration(device.info.driver),
            folder=store.folder,
        )
        return ran, interrupts.asked


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


def _write(store: Store, device: Opened) -> Written:
    """Export, then plot. What cannot be exported is told, not raised: the summary must come."""
    from tuner.cli.currency import current_records
    from tuner.cli.report import export_best, save_plots
    from tuner.errors import ResultsError
    from tuner.evaluate import Currency
    from tuner.results import outcomes

    if not store.records():
        return Written(error="nothing was measured, so there is nothing to export")
    best_config: Path | None = None
    plots: tuple[Path, ...] = ()
    found: tuple[Outcome, ...] = ()
    errors: list[str] = []
    currency = Currency(device.info, device.compiler.identity)
    try:
        best_config = export_best(store, device.info, device.compiler, currency).path
    except ResultsError as refused:
        errors.append(str(refused))
    try:
        current = current_records(store, currency, option="`tuner plot --earlier`")
        found = outcomes(current)
        drawn = save_plots(store, current)
        plots = drawn.paths
        errors += map(str, drawn.errors)
    except ResultsError as refused:
        if not errors:
            errors.append(str(refused))
    error = "; ".join(errors) or None
    return Written(best_config=best_config, plots=plots, outcomes=found, error=error)
