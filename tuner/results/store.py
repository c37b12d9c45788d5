"""The results of one device: records, calibrations and the device's snapshot in one folder."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from tuner.device_info import DeviceInfo
from tuner.errors import NoResultsError, ResultsError, UsageError
from tuner.records import REFERENCE, Calibration, Record
from tuner.results.files import reason, write_atomic
from tuner.results.journal import JournalWriter, Repair, read_journal
from tuner.results.lock import FolderLock

RECORDS = "records.jsonl"
CALIBRATIONS = "calibrations.jsonl"
DEVICE = "device.json"


class Store:
    """All results in one device's folder, such as `results/<device slug>`.

    Opened for writing (the default) it holds the folder's lock until `close`, repairs torn files,
    and every append is on the disk when it returns. Opened with `read_only` it is a snapshot that
    needs no lock and changes nothing. `repairs` says what was found torn on opening.
    """

    def __init__(self, folder: Path | str, *, read_only: bool = False) -> None:
        """Open the folder; for writing it is made where it is missing.

        Raises:
            NoResultsError: there is no such folder to read.
            ResultsError: another process writes here, the folder or a file in it cannot be read or
                written, a file is damaged or of another schema version; see the message.
        """
        self.folder = Path(folder)
        self._lock: FolderLock | None = None
        self._writers: tuple[JournalWriter[Record], JournalWriter[Calibration]] | None = None
        records_path, calibrations_path = self.folder / RECORDS, self.folder / CALIBRATIONS
        if read_only:
            _require_folder(self.folder)
            records, torn_records = read_journal(records_path, Record)
            calibrations, torn_calibrations = read_journal(calibrations_path, Calibration)
            self._records, self._calibrations = list(records), list(calibrations)
            self.repairs: tuple[Repair, ...] = torn_records + torn_calibrations
        else:
            self._lock = FolderLock(self.folder)
            try:
                writers = (
                    JournalWriter(records_path, Record),
                    JournalWriter(calibrations_path, Calibration),
                )
            except BaseException:
                self._lock.release()
                raise
            self._writers = writers
            self._records, self._calibrations = writers[0].items, writers[1].items
            self.repairs = writers[0].repairs + writers[1].repairs
        self._by_variant: dict[str, Record] = {}
        for record in self._records:
            self._remember(record)

    def records(self) -> tuple[Record, ...]:
        """All records, in the order they were appended."""
        return tuple(self._records)

    def calibrations(self) -> tuple[Calibration, ...]:
        """All calibrations, in the order they were appended."""
        return tuple(self._calibrations)

    def calibration(self, driver: str) -> Calibration | None:
        """The newest calibration made with that driver."""
        made = [c for c in self._calibrations if c.driver == driver]
        return max(made, key=lambda c: c.time, default=None)

    def find(self, variant: str) -> Record | None:
        """The newest record of a variant, references aside: it need not be measured again."""
        return self._by_variant.get(variant)

    def append(self, record: Record) -> None:
        """Append a record; on return it is on the disk.

        JSON knows no infinity: an error of a check that is not finite (the kernel answered NaN) is
        stored as the largest double.

        Raises:
            ResultsError: the disk is full, the folder went away …; all records so far are intact.
            UsageError: the record holds a number that JSON cannot.
        """
        self.extend((record,))

    def extend(self, records: Iterable[Record]) -> None:
        """Append several records with one write: all of them or none. Raises as `append`."""
        added = [_storable(record) for record in records]
        self._open_writers()[0].extend(added)
        for record in added:
            self._remember(record)

    def append_calibration(self, calibration: Calibration) -> None:
        """Append a calibration. Raises as `append`."""
        self._open_writers()[1].extend((calibration,))

    def device(self) -> DeviceInfo | None:
        """The snapshot of the device these results were last written for, if there is one.

        Raises:
            ResultsError: `device.json` cannot be read.
        """
        path = self.folder / DEVICE
        try:
            return msgspec.json.decode(path.read_bytes(), type=DeviceInfo)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ResultsError(path, f"cannot read: {reason(error)}") from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise ResultsError(
                path,
                f"no device snapshot of kvtune: {error}: restore it from a copy, or move it away: "
                "the next run on the device writes it again",
            ) from error

    def write_device(self, info: DeviceInfo) -> None:
        """Replace the device's snapshot.

        Raises:
            ResultsError: the folder holds another device's results, or cannot be written to.
        """
        self._open_writers()
        before = self.device()
        if before is not None and before.slug != info.slug:
            raise ResultsError(
                self.folder,
                f"holds results of {before.name}, not of {info.name}: use another --out",
            )
        text = msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n"
        write_atomic(self.folder / DEVICE, text)

    def close(self) -> None:
        """Give the lock back; idempotent. What was read stays readable."""
        if self._writers is not None:
            for writer in self._writers:
                writer.close()
            self._writers = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _open_writers(self) -> tuple[JournalWriter[Record], JournalWriter[Calibration]]:
        if self._writers is None:
            raise UsageError(f"{self.folder} is not open for writing")
        return self._writers

    def _remember(self, record: Record) -> None:
        if record.note == REFERENCE:
            return
        known = self._by_variant.get(record.variant)
        if known is None or known.time <= record.time:
            self._by_variant[record.variant] = record


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """How much `merge` brought over."""

    records: int
    calibrations: int


def merge(into: Store, source: Store) -> Merged:
    """Append to `into` what only `source` has; merging again brings nothing.

    Raises:
        ResultsError: the two hold results of different devices, or as `Store.append`.
    """
    ours, theirs = into.device(), source.device()
    if ours is not None and theirs is not None and ours.slug != theirs.slug:
        raise ResultsError(
            into.folder, f"holds results of {ours.name}; {source.folder} those of {theirs.name}"
        )
    known_records = {msgspec.json.encode(r, order="deterministic") for r in into.records()}
    records = [
        r
        for r in source.records()
        if msgspec.json.encode(r, order="deterministic") not in known_records
    ]
    known_calibrations = set(into.calibrations())
    calibrations = [c for c in source.calibrations() if c not in known_calibrations]
    into.extend(records)
    for calibration in calibrations:
        into.append_calibration(calibration)
    if ours is None and theirs is not None:
        into.write_device(theirs)
    return Merged(records=len(records), calibrations=len(calibrations))


def device_folders(root: Path | str) -> tuple[Path, ...]:
    """The folders below `root` that hold a device's results, by name; none if `root` is missing."""
    return tuple(sorted(path.parent for path in Path(root).glob(f"*/{RECORDS}")))


def _require_folder(folder: Path) -> None:
    if folder.is_file():
        raise NoResultsError(folder, "is a file: name the folder of results that it is in")
    if not folder.is_dir():
        raise NoResultsError(folder, "no such folder of results")


def _storable(record: Record) -> Record:
    check = record.check
    if check is None or (math.isfinite(check.error) and math.isfinite(check.bound)):
        return record
    finite = msgspec.structs.replace(check, error=_finite(check.error), bound=_finite(check.bound))
    return msgspec.structs.replace(record, check=finite)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else sys.float_info.max
