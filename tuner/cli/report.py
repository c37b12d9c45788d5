"""`export` and `plot`: stored results as files for engines, tables and pictures."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli import options
from tuner.cli.currency import Earlier
from tuner.cli.folders import every_device
from tuner.cli.output import note, print_json, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from matplotlib.figure import Figure

    from tuner.compile import Compiler
    from tuner.device_info import DeviceInfo
    from tuner.errors import ResultsError
    from tuner.evaluate import Currency
    from tuner.export import Build, Exported
    from tuner.records import Record
    from tuner.results import Store

BEST_CONFIG, MARKDOWN = "best-config", "markdown"
FORMATS = (BEST_CONFIG, "t4", "csv", MARKDOWN)
PLOTS_FOLDER = "plots"

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="RESULTS|DEVICE",
        help="A folder of results, or a device with results below --out. Default: every device "
        "below --out.",
    ),
]


def export(
    source: Source = None,
    *,
    format_name: Annotated[
        str, typer.Option("--format", metavar="|".join(FORMATS), help="What to write.")
    ] = BEST_CONFIG,
    out: options.Out = options.RESULTS,
    earlier: Earlier = False,
    cache: options.Cache = None,
    json: options.Json = False,
) -> None:
    """Write stored results in another format.

    The files are written beside the results and their paths printed. Needs no device. If the
    results of one device cannot be exported, those of the others are exported all the same. t4 and
    csv have all records; best-config and markdown choose among those of today's kernels.
    """
    from tuner.errors import ResultsError, UsageError

    options.one_of("format", format_name, FORMATS)
    if earlier and format_name == BEST_CONFIG:
        raise UsageError(
            "--earlier: kernels of earlier sources cannot be made any more, so no configuration "
            "can name them: `tuner tune` measures those of today"
        )
    written: list[Path] = []
    failed: list[ResultsError] = []
    for store in _stores(every_device(source, out)):
        try:
            written += _written(store, format_name, cache, earlier=earlier)
        except ResultsError as error:
            failed.append(error)
    if json:
        print_json({"format": format_name, "files": written})
    else:
        for path in written:
            say(str(path))
    _tell(failed)


def _tell(failed: Sequence[ResultsError]) -> None:
    """What went wrong with some of the files, once the others are written.

    Raises:
        ResultsError: the last of them.
    """
    for each in failed[:-1]:
        note(f"tuner: {each}")
    if failed:
        raise failed[-1]


def _written(
    store: Store, format_name: str, cache: Path | None, *, earlier: bool
) -> tuple[Path, ...]:
    from tuner.cli.currency import shown_records
    from tuner.compile import Compiler
    from tuner.errors import ResultsError
    from tuner.evaluate import Currency
    from tuner.export import export_table

    if format_name == MARKDOWN:
        return export_table(store, format_name, records=shown_records(store, earlier=earlier))
    if format_name != BEST_CONFIG:
        return export_table(store, format_name)
    info, compiler = store.device(), Compiler(spirv_cache(cache))
    if info is None:
        raise ResultsError(store.folder, "has no device.json to tell whose results these are")
    currency = Currency(info, compiler.identity)
    return (export_best(store, info, compiler, currency).path,)


def plot(
    source: Source = None,
    *,
    out: options.Out = options.RESULTS,
    earlier: Earlier = False,
    json: options.Json = False,
) -> None:
    """Draw stored results as PNG files.

    Prints their paths. Needs no device.
    """
    from tuner.cli.currency import shown_records

    drawn = [
        save_plots(store, shown_records(store, earlier=earlier))
        for store in _stores(every_device(source, out))
    ]
    written = [path for each in drawn for path in each.paths]
    if json:
        print_json({"files": written})
    else:
        for path in written:
            say(str(path))
    _tell([error for each in drawn for error in each.errors])


def _stores(folders: Iterable[Path]) -> Iterator[Store]:
    """The results to read, one after the other.

    Raises:
        ResultsError: they are damaged.
    """
    from tuner.results import Store

    for each in folders:
        store = Store(each, read_only=True)
        for repair in store.repairs:
            note(f"note: {repair}")
        yield store


def export_best(store: Store, info: DeviceInfo, compiler: Compiler, currency: Currency) -> Exported:
    """Write `best-config.json`; says on standard error what had to be left out, and why.

    Raises:
        ResultsError: nothing can be exported, or the folder cannot be written to.
    """
    from tuner.export import export_best_config

    exported = export_best_config(
        store, info=info, build=_builder(info, compiler), objection=currency.objection
    )
    for reason in exported.left_out:
        note(f"left out: {reason}")
    return exported


@dataclass(frozen=True, slots=True)
class Drawn:
    """The pictures of a store, and what kept others from being drawn."""

    paths: tuple[Path, ...]
    errors: tuple[ResultsError, ...]


def save_plots(store: Store, records: Sequence[Record]) -> Drawn:
    """Draw all plots of a store, with these of its records, into the folder `plots` beside them.

    One that cannot be drawn does not hinder the others.

    Raises:
        NoResultsError: there is nothing to draw.
        ResultsError: the folder cannot be written to.
    """
    from tuner.errors import NoResultsError, ResultsError
    from tuner.plots import save

    if not records:
        raise NoResultsError(store.folder, "no records to plot: tune first")
    paths, errors = [], []
    for name, draw in _drawings(store, records).items():
        path = store.folder / PLOTS_FOLDER / f"{name}.png"
        try:
            paths.append(save(draw(), path))
        except ResultsError:
            raise
        except Exception as bug:  # noqa: BLE001 - a picture must not cost what was measured for it
            error = ResultsError(path, f"cannot be drawn: {type(bug).__name__}: {bug}")
            error.__cause__ = bug
            errors.append(error)
    return Drawn(tuple(paths), tuple(errors))


def _drawings(store: Store, records: Sequence[Record]) -> dict[str, Callable[[], Figure]]:
    """What draws each picture that there is something for, by its name."""
    from tuner.plots import PLOTS, bandwidth_curves, energy_against_time, utilisation_by_context
    from tuner.results import read_peers

    device = store.device()
    by_context = functools.partial(utilisation_by_context, peers=read_peers(store.folder))
    known = PLOTS | {"context": by_context}
    drawings: dict[str, Callable[[], Figure]] = {
        name: functools.partial(draw, records, device) for name, draw in known.items()
    }
    if any(record.energy for record in records):
        drawings["energy"] = functools.partial(energy_against_time, records, device)
    whole = [each for each in store.calibrations() if each.is_full]
    if whole:
        last = max(whole, key=lambda each: each.time)
        drawings["bandwidth"] = functools.partial(bandwidth_curves, last, device)
    return drawings


def spirv_cache(cache: Path | None) -> Path:
    """Where compiled kernels are kept."""
    from tuner.cli.session import default_cache

    return (cache or default_cache()) / "spirv"


def _builder(info: DeviceInfo, compiler: Compiler) -> Build:
    """How an export makes a variant's job anew."""
    from tuner.evaluate import build_job
    from tuner.kernels.base import Candidate, Family, Values
    from tuner.kernels.space import canonical, require_legal
    from tuner.problems import Problem
    from tuner.runner.protocol import Job

    def build(family: Family, problem: Problem, values: Values) -> Job:
        require_legal(family, values, problem, info)
        candidate = Candidate(canonical(family, values), problem, info)
        return build_job(family, candidate, family.timing_scalars(problem), compiler).job

    return build
