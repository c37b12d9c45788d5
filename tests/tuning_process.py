"""A process that tunes the toy family when told to, each time in a fork of itself.

Importing everything takes longer than a small run, so that is done once. It reads a line of JSON
(see `tune_and_tell`), forks, answers with the fork's process id, and once that has ended with how.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.fault_stub import worker
from tests.isolated_runs import PROBLEMS, tune_toy
from tuner.errors import TunerError
from tuner.search import Silent

if TYPE_CHECKING:
    from tuner.records import Record
    from tuner.search import Status


class Teller(Silent):
    """Writes down what is safe, so that it is known even if the process is killed."""

    def __init__(self, file: Path) -> None:
        self._handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def trial_finished(self, record: Record, status: Status) -> None:
        os.write(self._handle, f"{record.variant}\n".encode())


def tune_and_tell(order: dict[str, Any]) -> None:
    """One run in `folder`: the variant of each record it was told is safe goes to the file `told`,
    and at the end what came of it, or the error, to `ended`. Its results go to `results`.
    """
    folder, results = Path(order["folder"]), Path(order["results"])
    ended = folder / "ended"
    ended.unlink(missing_ok=True)
    try:
        with closing(worker(**order.get("options", {}))) as runner:
            result = tune_toy(
                results,
                runner,
                problems=PROBLEMS[: order.get("problems", 1)],
                progress=Teller(folder / "told"),
                **order.get("settings", {}),
            )
        ended.write_text(result.error or ",".join(each.ended for each in result.problems))
    except TunerError as error:
        ended.write_text(f"{type(error).__name__}: {error}")


def main() -> None:
    """Serve until standard input ends."""
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            tune_and_tell(order)
            os._exit(0)
        os.write(1, f"began {child}\n".encode())
        _, status = os.waitpid(child, 0)
        os.write(1, f"ended {os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    main()
