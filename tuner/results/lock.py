"""One writer a folder: an advisory lock that ends with the process that holds it."""

from __future__ import annotations

import fcntl
import os
import re
import time
from pathlib import Path

from tuner.errors import ResultsError
from tuner.results.files import make_folder, reason

LOCK_NAME = ".lock"
POLL_S = 0.05


class FolderLock:
    """Exclusive right to write to a folder, or to a part of it under a lock of another `name`.

    It is held from construction to `release`.

    The kernel drops the lock when the process ends, even by `kill -9`, so no stale lock is ever
    left; the file itself stays, holding the process id of the last writer for messages.
    """

    def __init__(self, folder: Path, *, name: str = LOCK_NAME, wait_s: float = 0.0) -> None:
        """Take the lock, making the folder where it is missing; wait for it if it is held.

        Raises:
            ResultsError: another process holds it for longer than `wait_s` (its id is in the
                message), or the folder cannot be written to.
        """
        make_folder(folder)
        self.path = folder / name
        try:
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ResultsError(
                folder, f"cannot write here: {reason(error)}: choose another folder for results"
            ) from error
        try:
            self._take(folder, time.monotonic() + wait_s)
        except BaseException:
            os.close(self._handle)
            raise

    def release(self) -> None:
        """Give the lock back; idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _take(self, folder: Path, deadline: float) -> None:
        try:
            while not self._is_taken():
                if time.monotonic() >= deadline:
                    raise ResultsError(folder, self._held_message())
                time.sleep(POLL_S)
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            raise ResultsError(
                folder, f"cannot lock this folder: {reason(error)}: use one on a local disk"
            ) from error

    def _is_taken(self) -> bool:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _held_message(self) -> str:
        found = re.fullmatch(rb"(\d{1,10})\n?", os.pread(self._handle, 32, 0))
        holder = f"process {int(found[1])}" if found else "another process"
        return (
            f"{holder} is writing results here: wait until it ends or stop it, "
            "or choose another folder"
        )
