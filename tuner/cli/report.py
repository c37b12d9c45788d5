"""`export` and `plot`: stored results as files for engines, tables and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli import options
from tuner.cli.output import note, print_json, say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tuner.compile import Compiler
    from tuner.device_info import DeviceInfo
    from tuner.export import Build, Exported, Identify
    from tuner.results import Store

BEST_CONFIG = "best-config"
FORMATS = (BEST_CONFIG, "t4", "csv", "markdown")
PLOTS_FOLDER = "plots"

Folder = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FOLDER]", help="One device's results; default: every device below --out."
    ),
]


def export(
    folder: Folder = None,
    *,
    format_name: Annotated[
        str, typer.Option("--format", metavar="|".join(FORMATS), help="What to write.")
    ] = BEST_CONFIG,
    out: options.Out = options.RESULTS,
    cache: options.Cache = None,
    json: options.Json = False,
) -> None:
    """Write stored results in another form.

    The files go beside the results; their paths are printed. Needs no device. Of several devices,
    one whose results cannot be written so does not hinder the others.
    """
    from tuner.compile import Compiler
    from tuner.errors import ResultsError, UnknownNameError

    if format_name not in FORMATS:
        raise UnknownNameError("format", format_name, FORMATS)
    compiler = Compiler(spirv_cache(cache)) if format_name == BEST_CONFIG else None
    written: list[Path] = []
    failed: list[ResultsError] = []
    for store in _stores(folder, out):
        try:
            written += _written(store, format_name, compiler)
        except ResultsError as error:
            failed.append(error)
    if json:
        print_json({"format": format_name, "files": written})
    else:
        for path in written:
            say(str(path))
    for each in failed[:-1]:
        note(f"tuner: {each}")
    if failed:
        raise failed[-1]


def _written(store: Store, format_name: str, compiler: Compiler | None) -> tuple[Path, ...]:
    from tuner.errors import ResultsError
    from tuner.export import export_table

    if compiler is None:
        return export_table(store, format_name)
    info = store.device()
    if info is None:
        raise ResultsError(store.folder, "has no device.json to tell whose results these are")
    return (export_best(store, info, compiler).path,)


def plot(
    folder: Folder = None, *, out: options.Out = options.RESULTS, json: options.Json = False
) -> None:
    """Draw stored results as PNG files.

    Prints their paths. Needs no device.
    """
    written = [path for store in _stores(folder, out) for path in save_plots(store)]
    if json:
        print_json({"files": written})
    else:
        for path in written:
            say(str(path))


def _stores(folder: Path | None, out: Path) -> Iterator[Store]:
    """The results to read, one after the other.

    Raises:
        ResultsError: there are none, or they are damaged.
    """
    from tuner.errors import ResultsError
    from tuner.results import Store, device_folders

    # A folder of several devices' results will do as well.
    folders = device_folders(out) if folder is None else device_folders(folder) or (folder,)
    if not folders:
        raise ResultsError(out, "no results here: run `tuner tune` first, or name another --out")
    for each in folders:
        store = Store(each, read_only=True)
        for repair in store.repairs:
            note(f"note: {repair}")
        yield store


def export_best(store: Store, info: DeviceInfo, compiler: Compiler) -> Exported:
    """Write `best-config.json`; says on standard error what had to be left out, and why.

    Raises:
        ResultsError: nothing can be exported, or the folder cannot be written to.
    """
    from tuner.export import export_best_config

    build, identify = _makers(info, compiler)
    exported = export_best_config(store, info=info, build=build, identify=identify)
    for reason in exported.left_out:
        note(f"left out: {reason}")
    return exported


def save_plots(store: Store) -> list[Path]:
    """Draw all plots of a store into the folder `plots` beside its records.

    Raises:
        ResultsError: there is nothing to draw, or the folder cannot be written to.
    """
    from tuner.errors import ResultsError
    from tuner.plots import (
        PLOTS,
        bandwidth_curves,
        energy_against_time,
        save,
        utilisation_by_context,
    )
    from tuner.results import read_peers

    if not store.records():
        raise ResultsError(store.folder, "no records to plot: tune first")
    folder, device = store.folder / PLOTS_FOLDER, store.device()
    figures = {name: draw(store.records(), device) for name, draw in PLOTS.items()}
    if peers := read_peers(store.folder):
        figures["context"] = utilisation_by_context(store.records(), device, peers=peers)
    if any(record.energy for record in store.records()):
        figures["energy"] = energy_against_time(store.records(), device)
    whole = [each for each in store.calibrations() if each.is_full]
    if whole:
        last = max(whole, key=lambda each: each.time)
        figures["bandwidth"] = bandwidth_curves(last, device)
    return [save(figure, folder / f"{name}.png") for name, figure in figures.items()]


def spirv_cache(cache: Path | None) -> Path:
    """Where compiled kernels are kept."""
    from tuner.cli.session import default_cache

    return (cache or default_cache()) / "spirv"


def _makers(info: DeviceInfo, compiler: Compiler) -> tuple[Build, Identify]:
    """How an export makes a variant's job anew, and tells its identity of today."""
    import msgspec

    from tuner.evaluate import build_job, render_passes, variant_key
    from tuner.kernels.base import Candidate, Family, Values
    from tuner.kernels.space import canonical, require_legal
    from tuner.problems import Problem
    from tuner.records import Record
    from tuner.runner.protocol import Job

    def candidate_of(family: Family, problem: Problem, values: Values) -> Candidate:
        require_legal(family, values, problem, info)
        return Candidate(canonical(family, values), problem, info)

    def build(family: Family, problem: Problem, values: Values) -> Job:
        candidate = candidate_of(family, problem, values)
        return build_job(family, candidate, family.timing_scalars(problem), compiler).job

    def identify(family: Family, record: Record) -> str:
        candidate = candidate_of(family, record.problem, record.values)
        scalars = family.timing_scalars(record.problem)
        passes = render_passes(family, candidate.values, record.problem, info, scalars=scalars)
        its_card = msgspec.structs.replace(info, uuid=record.device_uuid)
        there = Candidate(candidate.values, record.problem, its_card)
        return variant_key(family, there, passes, compiler.identity)

    return build, identify
