"""Files that are either the old ones or the new ones, whatever happens: write, fsync, rename."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from tuner.errors import ResultsError


def make_folder(folder: Path) -> None:
    """Make the folder and those above it.

    Raises:
        ResultsError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultsError(
            folder, f"cannot make this folder: {reason(error)}: choose one that can be written to"
        ) from error


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the file's content, durably: a reader sees the old content or the new, never a part.

    Raises:
        ResultsError: the disk is full, the folder read-only …; the old content stays.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ResultsError(
            path, f"cannot write: {reason(error)}; what was there before is unchanged"
        ) from error


def sync_folder(folder: Path) -> None:
    """Make new names in the folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def reason(error: OSError) -> str:
    """The system's words for what went wrong, without the path that the message has already."""
    return error.strerror or type(error).__name__
