"""Runs of the toy family in a process of their own, which tests may kill at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent


class Tuning:
    """The process of `tests.tuning_process`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tuning_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.running: int | None = None

    def begin(self, folder: Path, results: Path | None = None, **order: Any) -> int:
        """Start a run, by default with its results in `folder`; returns its process id."""
        assert self._process.stdin is not None
        where = {"folder": str(folder), "results": str(results or folder / "results")}
        self._process.stdin.write(json.dumps({**where, **order}) + "\n")
        self._process.stdin.flush()
        self.running = self._told("began")
        return self.running

    def end(self) -> int:
        """Wait for the run; returns its exit status."""
        self.running = None
        return self._told("ended")

    def workers(self) -> list[psutil.Process]:
        """The workers of the run."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [worker for run in self._runs() for worker in run.children()]
        return []

    def kill(self) -> int:
        """Kill the run, unless it has ended by itself; returns its exit status."""
        for run in self._runs():
            run.kill()
        return self.end()

    def settle(self) -> None:
        """End what a failed test has left."""
        if self.running is not None:
            self.kill()

    def _runs(self) -> list[psutil.Process]:
        children = psutil.Process(self._process.pid).children()
        return [child for child in children if child.pid == self.running]

    def close(self) -> None:
        self._process.communicate(timeout=10.0)

    def _told(self, word: str) -> int:
        assert self._process.stdout is not None
        said, number = self._process.stdout.readline().split()
        assert said == word
        return int(number)


def told(folder: Path) -> list[str]:
    """Variants of the records that a run was told are safe, as far as the lines are whole."""
    file = folder / "told"
    return file.read_text().split("\n")[:-1] if file.exists() else []


def ended(folder: Path) -> str:
    return (folder / "ended").read_text()


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
