"""Which folders of results a user means: by path, by the name of a device, or all there are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tuner.cli import options
from tuner.errors import NoResultsError, UnknownNameError, UsageError

_EMPTY = (
    "no results in this folder: there is no `records.jsonl` in it or in a folder below it; run "
    "`tuner tune` first, or name another"
)


def one_device(source: str, out: Path) -> Path:
    """The folder of one device's results that `source` means; empty, it is what there is in `out`.

    Raises:
        NoResultsError: it is a folder without results, or there are none at all to choose from.
        UnknownNameError: it is neither such a folder nor, in part, a device with results in `out`.
        UsageError: it stands for several devices.
    """
    path = Path(source) if source else out
    if _has_records(path):
        return path
    if path.is_dir():
        below = matching = _below(path)
    else:
        own, published = _below(out), _below(out / options.PUBLISHED)
        below = own + published
        matching = _of_device(source, own) or _of_device(source, published)
    if len(matching) == 1:
        return matching[0]
    if matching:
        listed = ", ".join(str(folder) for folder in matching)
        raise UsageError(f"{path} stands for several devices: name one of {listed}")
    if path.is_dir():
        raise NoResultsError(path, _EMPTY)
    if not below:
        raise NoResultsError(path, f"no such file or folder, and no device has results below {out}")
    raise UnknownNameError(
        "results folder, records file or device",
        path,
        dict.fromkeys(folder.name for folder in below),
    )


def every_device(source: str | None, out: Path) -> tuple[Path, ...]:
    """The folders of all devices below the folder `source`, else as `one_device`; all in `out`
    without a source.

    Raises:
        NoResultsError: there are none in `out`.
        UnknownNameError, UsageError: as `one_device`, or both a folder and where to look are given.
    """
    if source is None:
        if found := _below(out):
            return found
        raise NoResultsError(out, "no results here: run `tuner tune` first, or name another --out")
    path = Path(source)
    if path.exists() and out != options.RESULTS:
        raise UsageError(
            f"{path} and --out {out}: name one of them; files are written beside the results"
        )
    return devices_in(path) if path.exists() else (one_device(source, out),)


def devices_in(folder: Path) -> tuple[Path, ...]:
    """The folders of all devices with results below a folder; itself, if there are none.

    Raises:
        NoResultsError: it is a folder, and there are none in it either.
    """
    from tuner.results.store import CALIBRATIONS, DEVICE, RECORDS

    found = _below(folder) or (folder,)
    files = (RECORDS, CALIBRATIONS, DEVICE)
    if folder.is_dir() and not any((each / name).exists() for each in found for name in files):
        raise NoResultsError(folder, _EMPTY)
    return found


def _below(root: Path) -> tuple[Path, ...]:
    from tuner.results import device_folders

    return device_folders(root)


def _has_records(folder: Path) -> bool:
    from tuner.results.store import RECORDS

    return (folder / RECORDS).exists()


def _of_device(wanted: str, folders: Sequence[Path]) -> tuple[Path, ...]:
    """Those of the folders that hold results of a device so named, in part, or of its UUID."""
    from tuner.results import Store

    found, wanted = [], wanted.lower()
    for folder in folders:
        info = Store(folder, read_only=True).device()
        names = (folder.name.lower(), info.name.lower() if info else "")
        if any(wanted in name for name in names) or (info and info.uuid.startswith(wanted)):
            found.append(folder)
    return tuple(found)
