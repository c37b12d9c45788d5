"""Append-only JSON Lines with a schema version and a checksum in each line.

A line is `{"schema_version": 1, "checksum": "…", "content": {…}}`; the checksum is the first 16 hex
digits of the SHA-256 of the content's bytes. A line counts once it is whole, with or without its
newline. Only the last line of a file can be torn, by a crash in the middle of an append: a writer
moves what is left of it to a `.torn` file beside, a reader passes over it. Anything else that is
wrong with a file was not done by this module, and is an error with file and line.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from tuner.errors import NoResultsError, ResultsError, UsageError
from tuner.records import SCHEMA_VERSION
from tuner.results.files import reason, sync_folder

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A torn last line that was found on opening, and where its bytes are now.

    `kept_in` is None where nothing was changed, because the file was opened for reading only.
    """

    path: Path
    line: int
    torn_bytes: int
    kept_in: Path | None

    def __str__(self) -> str:
        done = f"moved to {self.kept_in.name}" if self.kept_in else "passed over"
        return (
            f"{self.path}:{self.line}: the last line was cut off by a crash; "
            f"its {self.torn_bytes} bytes were {done}, all lines before it are intact"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents(Generic[T]):
    """What a journal's bytes mean: `data[:whole_bytes]` is good, `torn` the rest of it."""

    items: tuple[T, ...]
    whole_bytes: int
    torn: bytes
    ends_with_newline: bool


class _Version(msgspec.Struct, frozen=True):
    schema_version: int


class _Line(msgspec.Struct, frozen=True):
    schema_version: int
    checksum: str
    content: msgspec.Raw


class _DamagedLineError(Exception):
    """A line that is not as it was written; whether that is a tear depends on where it stands."""


def encode_line(item: msgspec.Struct) -> bytes:
    """The item as one line, newline included.

    Raises:
        UsageError: it would not be read back as it is (a float that is not finite, say).
    """
    try:
        content = msgspec.json.encode(item)
        same = msgspec.json.decode(content, type=type(item)) == item
    except (ValueError, OverflowError, TypeError) as error:
        raise UsageError(f"{type(item).__name__} cannot be stored: {error}") from error
    if not same:
        raise UsageError(f"{type(item).__name__} cannot be stored: it is not read back as it was")
    line = _Line(SCHEMA_VERSION, _checksum(content), msgspec.Raw(content))
    return msgspec.json.encode(line) + b"\n"


def decode_lines(data: bytes, kind: type[T], path: Path) -> Contents[T]:
    """All items in the bytes of a journal file; `path` is for messages.

    Raises:
        NoResultsError: there are several lines, and none of them is one of a journal.
        ResultsError: a damaged line that is not the last, a line of another schema version, or one
            whose checksum holds but which is no `kind`.
    """
    items: list[T] = []
    start, number = 0, 0
    while start < len(data):
        number += 1
        newline = data.find(b"\n", start)
        end = newline if newline >= 0 else len(data)
        try:
            items.append(_decode_line(data[start:end], kind, path, number))
        except _DamagedLineError as error:
            if end + 1 < len(data):
                raise _damage(data, kind, path, number, error) from None
            return Contents(
                items=tuple(items),
                whole_bytes=start,
                torn=data[start:],
                ends_with_newline=True,
            )
        start = end + 1
    whole = not data or data.endswith(b"\n")
    return Contents(items=tuple(items), whole_bytes=len(data), torn=b"", ends_with_newline=whole)


def read_journal(path: Path, kind: type[T]) -> tuple[tuple[T, ...], tuple[Repair, ...]]:
    """All items of the file, changing nothing; a missing file has none.

    Raises:
        ResultsError: the file cannot be read, or as `decode_lines`.
    """
    contents = decode_lines(_read(path), kind, path)
    if not contents.torn:
        return contents.items, ()
    return contents.items, (_repair(path, contents, None),)


class JournalWriter(Generic[T]):
    """The one writer of a journal file. The caller holds the folder's lock."""

    def __init__(self, path: Path, kind: type[T]) -> None:
        """Read the file, repair a torn last line.

        Raises:
            ResultsError: as `decode_lines`, or the file cannot be read or repaired.
        """
        self.path = path
        contents = decode_lines(_read(path), kind, path)
        self.items: list[T] = list(contents.items)
        self.repairs: tuple[Repair, ...] = ()
        self._handle = -1
        self._leftover = False
        self._size = contents.whole_bytes
        if contents.torn:
            self._move_torn(contents)
        if not contents.ends_with_newline:
            self._write(b"\n")

    def extend(self, items: Iterable[T]) -> None:
        """Append items; on return they are on the disk.

        Raises:
            UsageError: as `encode_line`; nothing was written.
            ResultsError: the disk is full, the folder went away …; the file is as it was before.
        """
        added = tuple(items)
        self._write(b"".join(encode_line(item) for item in added))
        self.items.extend(added)

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _write(self, data: bytes) -> None:
        written = False
        try:
            self._open()
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._handle, rest) :]
            os.fsync(self._handle)
            written = True
        except OSError as error:
            raise ResultsError(
                self.path,
                f"cannot append: {reason(error)}; the {len(self.items)} entries so far are intact: "
                "make room or make it writable, then run the same command again to continue",
            ) from error
        finally:
            # Also for KeyboardInterrupt, which may strike between two writes of one line.
            if not written:
                self._take_back()
        self._size += len(data)

    def _take_back(self) -> None:
        """Cut off what a failed append left; the next append opens the file anew."""
        if self._handle >= 0:
            try:
                os.ftruncate(self._handle, self._size)
                os.fsync(self._handle)
            except OSError:
                self._leftover = True  # A torn last line, which `_open` or the next run removes.
            finally:
                self.close()

    def _open(self) -> None:
        if self._handle >= 0:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        new = not self.path.exists()
        self._handle = os.open(self.path, flags, 0o666)
        if new:
            sync_folder(self.path.parent)
        if self._leftover:
            os.ftruncate(self._handle, self._size)
            self._leftover = False
        if (size := os.fstat(self._handle).st_size) != self._size:
            self.close()
            raise ResultsError(
                self.path,
                f"has {size} bytes where {self._size} were left: another program changed it; "
                "run the same command again to read it anew",
            )

    def _move_torn(self, contents: Contents[T]) -> None:
        side = self.path.with_name(self.path.name + ".torn")
        try:
            # First kept, then cut: a crash in between keeps the bytes twice, never not at all.
            with side.open("ab") as file:
                file.write(contents.torn.rstrip(b"\n") + b"\n")
                file.flush()
                os.fsync(file.fileno())
            sync_folder(side.parent)
            os.truncate(self.path, contents.whole_bytes)
        except OSError as error:
            raise ResultsError(
                self.path, f"cannot repair its torn last line: {reason(error)}"
            ) from error
        self.repairs = (_repair(self.path, contents, side),)


def _decode_line(line: bytes, kind: type[T], path: Path, number: int) -> T:
    try:
        version = msgspec.json.decode(line, type=_Version).schema_version
        if version != SCHEMA_VERSION:
            raise ResultsError(
                path,
                f"written with schema version {version}, this version of the tuner reads "
                f"{SCHEMA_VERSION}: use the version that wrote it, or another results folder",
                number,
            )
        parts = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _DamagedLineError(str(error)) from None
    content = bytes(parts.content)
    if _checksum(content) != parts.checksum:
        raise _DamagedLineError("its checksum does not match its content")
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, RecursionError, UsageError) as error:
        raise ResultsError(
            path,
            f"not a {kind.__name__}: {error}: is it another of the tuner's files, or of a newer "
            "version?",
            number,
        ) from error


def _damage(
    data: bytes, kind: type[T], path: Path, number: int, error: _DamagedLineError
) -> ResultsError:
    """What to say of a damaged line, which is not to be deleted from somebody else's file."""
    if any(_is_journals(line, kind, path) for line in data.split(b"\n")):
        return ResultsError(
            path,
            f"damaged line: {error}; the {number - 1} lines before it are intact: restore the file "
            "from a copy, or delete this line to go on without it",
            number,
        )
    return NoResultsError(
        path,
        f"is no results file of kvtune: a {kind.__name__.lower()} was expected in each line, and "
        f"there is none (line {number}: {error}): name a file or folder that the tuner wrote, or "
        "move this file out of its way",
    )


def _is_journals(line: bytes, kind: type[T], path: Path) -> bool:
    try:
        _decode_line(line, kind, path, 0)
    except _DamagedLineError:
        return False
    except ResultsError:
        return True  # Of another version or kind, but written as it is here.
    return True


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ResultsError(path, f"cannot read: {reason(error)}") from error


def _repair(path: Path, contents: Contents[T], kept_in: Path | None) -> Repair:
    return Repair(
        path=path,
        line=len(contents.items) + 1,
        torn_bytes=len(contents.torn),
        kept_in=kept_in,
    )


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
