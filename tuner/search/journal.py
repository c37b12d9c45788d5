"""The file of Optuna's journal: who may write it, and when it waits for the disk."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend, JournalFileBackend

from tuner.errors import ResultsError


class JournalFile(BaseJournalBackend):
    """Optuna's journal file, which waits for the disk when it is asked to, not at every write.

    A result is half a dozen writes. Without waiting they survive the death of the process, and with
    the next `sync` that of the machine.
    """

    def __init__(self, path: Path) -> None:
        """Whoever writes holds the `RunLock`. Raises OSError if it cannot be made where missing."""
        self._path = path
        # Reading takes no lock, and Optuna's own is not for this.
        self._reading = JournalFileBackend(str(path))

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        """See `BaseJournalBackend`."""
        return self._reading.read_logs(log_number_from)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """See `BaseJournalBackend`."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with self._path.open("ab") as file:
            file.write(lines.encode())

    def sync(self) -> None:
        """Return when all that was appended is on the disk."""
        with self._path.open("ab") as file:
            os.fsync(file.fileno())


class RunLock:
    """The right to write a journal, held by one run until `close`.

    It is the system's own lock, which no dead process can hold: Optuna's are files that a killed
    process leaves behind, to be waited for 30 seconds.
    """

    def __init__(self, path: Path) -> None:
        """Raises ResultsError if another run holds it, OSError if it cannot be taken."""
        file = path.with_name(path.name + ".flock")
        self._handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            if isinstance(error, BlockingIOError):
                raise ResultsError(
                    path, "another run keeps its studies here: wait for it or use another --storage"
                ) from None
            raise

    def close(self) -> None:
        """Let other runs have it; idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def cut_torn_line(path: Path) -> None:
    """Take away a last line that a crash has cut off."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            file.truncate(whole)
