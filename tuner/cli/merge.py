"""`merge`: results of several runs or machines brought together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tuner.cli import options
from tuner.cli.folders import devices_in
from tuner.cli.output import note, print_json, say


def merge(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER…", help="Results of one device, or of several below it."),
    ],
    *,
    out: options.Out = options.RESULTS,
    json: options.Json = False,
) -> None:
    """Add records and calibrations from other folders to --out.

    Results of the same model of device go into one folder, whichever card they are from. What is
    there already is not added again. The other folders are not changed. Needs no device. After
    that, `tuner export` and `tuner plot` use all of it.
    """
    from tuner import results
    from tuner.errors import ResultsError

    brought = []
    for folder in (each for source in sources for each in devices_in(source)):
        store = results.Store(folder, read_only=True)
        for repair in store.repairs:
            note(f"note: {repair}")
        info = store.device()
        if info is None:
            raise ResultsError(folder, "has no device.json to tell whose results these are")
        with results.Store(out / info.slug) as into:
            brought.append((folder, into.folder, results.merge(into, store)))
    if json:
        print_json([{"from": a, "into": b, "brought": found} for a, b, found in brought])
        return
    for folder, target, found in brought:
        say(f"{folder}: {found.records} records, {found.calibrations} calibrations into {target}/")
