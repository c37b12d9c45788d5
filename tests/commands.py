"""The command line as users run it: processes, and what they leave behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILY = "paged_decode_q8"
SMALL = "1x256:h8/2:d64"
"""A problem that every driver ends in milliseconds."""
NO_DRIVER = {"VK_DRIVER_FILES": "/nowhere.json", "VK_ICD_FILENAMES": "/nowhere.json"}


@dataclass(frozen=True)
class Ran:
    """What a process left behind."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


Run = Callable[..., Ran]
"""`run` with an environment."""


def run(
    environment: dict[str, str], *arguments: object, code: int | None = None, **changes: str
) -> Ran:
    """Runs `python -m tuner`, which has to end with `code` if that is given; `changes` are to the
    environment."""
    done = subprocess.run(
        command(arguments),
        env={**environment, **changes},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    ran = Ran(done.returncode, done.stdout, done.stderr)
    assert code is None or ran.code == code, ran
    return ran


def command(arguments: Sequence[object]) -> list[str]:
    return [sys.executable, "-m", "tuner", *map(str, arguments)]


def only_folder(out: Path) -> Path:
    (folder,) = (path for path in out.iterdir() if path.is_dir())
    return folder
