"""Records in forms that others read: a configuration for engines, T4, CSV, Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tuner.device_info import DeviceInfo
from tuner.errors import NoResultsError, UnknownNameError
from tuner.export import comma_separated, markdown, t4
from tuner.export.chosen import Build, Exported, Objection, export_best_config
from tuner.records import Record
from tuner.results import Store, outcomes
from tuner.results.files import make_folder, write_atomic

__all__ = [
    "FORMATS",
    "Build",
    "Exported",
    "Objection",
    "export_best_config",
    "export_table",
]


def export_table(
    store: Store,
    name: str,
    folder: Path | str | None = None,
    *,
    records: Sequence[Record] | None = None,
) -> tuple[Path, ...]:
    """Write records in the format `name` (see `FORMATS`), by default all of the store beside them.

    Raises:
        UnknownNameError: no such format.
        NoResultsError: there are no records.
        ResultsError: the folder cannot be written to.
    """
    if name not in FORMATS:
        raise UnknownNameError("format", name, FORMATS)
    listed = store.records() if records is None else records
    if not listed:
        raise NoResultsError(store.folder, "no records to export: tune first")
    target = Path(folder) if folder is not None else store.folder
    written = []
    for relative, text in FORMATS[name](listed, store.device()).items():
        path = target / relative
        make_folder(path.parent)
        write_atomic(path, text.encode())
        written.append(path)
    return tuple(written)


def _t4(records: Sequence[Record], _device: DeviceInfo | None) -> dict[str, str]:
    """One file per problem; driver and device are told apart by its number where there are more."""
    files: dict[str, str] = {}
    for outcome in outcomes(records, baseline_of=lambda _: None):
        slug = re.sub(r"[^a-z0-9]+", "-", outcome.problem.label.lower()).strip("-")
        stem = f"t4/{outcome.family}/{slug}-{outcome.problem.key[:6]}"
        same = sum(name.startswith(stem) for name in files)
        files[f"{stem}{f'-{same + 1}' if same else ''}.json"] = t4.text(outcome.records)
    return files


def _csv(records: Sequence[Record], _device: DeviceInfo | None) -> dict[str, str]:
    return {"results.csv": comma_separated.text(records)}


def _markdown(records: Sequence[Record], device: DeviceInfo | None) -> dict[str, str]:
    return {"results.md": markdown.text(records, device=device)}


FORMATS: dict[str, Callable[[Sequence[Record], DeviceInfo | None], dict[str, str]]] = {
    "t4": _t4,
    "csv": _csv,
    "markdown": _markdown,
}
"""Formats of `export_table`: from records and their device to file names and contents."""
