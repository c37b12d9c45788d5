"""When the study's file is on the disk, and what a machine that dies takes with it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from tests.toy_search import SPACE, Interrupting, Records, run, searched
from tuner.errors import ResultsError
from tuner.search.encoding import Encoding
from tuner.search.studylog import Budget, StudyLog, open_storage


class Disk:
    """Knows how much of a file a power cut would leave."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file, self._fsync = file, os.fsync
        self.safe_bytes = self.syncs = 0
        monkeypatch.setattr(os, "fsync", self._synced)

    def _synced(self, handle: int) -> None:
        self._fsync(handle)
        if self._file.exists() and os.fstat(handle).st_ino == self._file.stat().st_ino:
            self.safe_bytes, self.syncs = os.fstat(handle).st_size, self.syncs + 1

    @property
    def unsafe_bytes(self) -> int:
        return self._file.stat().st_size - self.safe_bytes


def test_what_is_under_way_and_what_was_met_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, records = tmp_path / "journal", Records()
    run(tmp_path / "other", store=records, trials=1)
    disk = Disk(file, monkeypatch)
    with contextlib.closing(open_storage(file)) as storage:
        log = StudyLog(storage, "toy", Encoding(SPACE, ordinal=False))
        trial = log.start(SPACE[0])
        assert disk.unsafe_bytes == 0
        log.finish(trial, records.kept[0], known=False)
        assert disk.unsafe_bytes > 0, "a result is written, and waits for no disk"
        log.start(SPACE[1])
        assert disk.unsafe_bytes == 0
        log.cover(Budget(trials=2, seconds=None))
        assert disk.unsafe_bytes == 0
        assert disk.syncs == 3


def test_a_power_cut_takes_no_result_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records answer for the trials that the study has forgotten."""
    file, store = tmp_path / "journal", Records()
    disk = Disk(file, monkeypatch)
    run(file, store=store, trials=12, progress=Interrupting(6), workers=2)
    assert disk.unsafe_bytes > 0
    os.truncate(file, disk.safe_bytes)
    result = run(file, store=store, trials=12, workers=2)
    assert (result.problems[0].trials, result.problems[0].measured) == (12, 6)
    tried = [str(record.values) for record in searched(store)]
    assert len(tried) == len(set(tried)) == 12


def test_a_folder_that_went_away_is_no_file_to_write_to(tmp_path: Path) -> None:
    file = tmp_path / "there" / "journal"
    with contextlib.closing(open_storage(file)) as storage:
        log = StudyLog(storage, "toy", Encoding(SPACE, ordinal=False))
        file.parent.rename(tmp_path / "gone")
        with pytest.raises(ResultsError, match="cannot keep the study"):
            log.start(SPACE[0])
