"""Nothing that a run was told is safe is lost, whatever becomes of disks, files and folders."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fault_stub import wait_for, worker
from tests.forked_tuning import ROOT, Tuning, ended, told
from tests.isolated_runs import PROBLEMS, Books, best_of, check_run, expected, searched, tune_toy
from tuner.errors import ResultsError
from tuner.results import Store
from tuner.runner.worker import WorkerRunner
from tuner.search import Silent

if TYPE_CHECKING:
    from tuner.records import Record


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 KiB; the test is skipped where mounting is not allowed."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        yield small
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_full_disk_stops_the_run_and_more_room_continues_it(
    small_disk: Path, tuning: Tuning, tmp_path: Path, books: Books
) -> None:
    results = small_disk / "results"
    tuning.begin(tmp_path, results)
    assert tuning.end() == 0
    assert "ResultsError" in ended(tmp_path)
    assert "No space left on device" in ended(tmp_path)
    assert 5 < len(searched(results)) < len(expected(PROBLEMS[0]))
    books.check(told(tmp_path), results)
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    tuning.begin(tmp_path, results)
    assert (tuning.end(), ended(tmp_path)) == (0, "exhausted")
    assert check_run(results) == []
    books.check(told(tmp_path), results)
    books.count("full disks")


LIMITED = """
import resource, sys
from pathlib import Path
from tests.tuning_process import tune_and_tell
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
tune_and_tell({"folder": sys.argv[1], "results": sys.argv[1] + "/results"})
"""


def test_a_limit_on_file_sizes_does_as_a_full_disk(
    tuning: Tuning, tmp_path: Path, books: Books
) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path), "20000"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=60)
    assert "File too large" in ended(tmp_path)
    books.check(told(tmp_path), tmp_path / "results")
    tuning.begin(tmp_path)
    assert (tuning.end(), ended(tmp_path)) == (0, "exhausted")
    assert check_run(tmp_path / "results") == []
    books.check(told(tmp_path), tmp_path / "results")
    books.count("file sizes limited")


@pytest.mark.parametrize("name", ["records.jsonl", "studies.jsonl"])
def test_a_file_torn_anywhere_is_repaired_said_and_measured_up(
    name: str, tmp_path: Path, start: Callable[..., WorkerRunner], books: Books
) -> None:
    """Torn far from its end, as no crash of ours does it, a file loses what stood there; that is
    found and measured again, and only that."""
    runner, results, chance = start(), tmp_path / "results", random.Random(name)
    tune_toy(results, runner)
    file = results / name
    for _ in range(6):
        whole = file.read_bytes()
        file.write_bytes(whole[: chance.randrange(len(whole) // 2, len(whole) - 1)])
        with Store(results) as store:
            assert len(store.repairs) <= (name == "records.jsonl")
        left = len(searched(results))
        again = tune_toy(results, runner)
        assert again.measured == len(expected(PROBLEMS[0])) - left
        assert check_run(results) == []
        assert best_of(results, PROBLEMS[0]) == min(expected(PROBLEMS[0]).values())
        books.count("torn files")


def test_a_folder_that_is_moved_away_stops_the_run(tmp_path: Path, books: Books) -> None:
    class Moving(Silent):
        finished = 0

        def trial_finished(self, record: Record, status: object) -> None:
            self.finished += 1
            if self.finished == 6:
                (tmp_path / "results").rename(tmp_path / "gone")

    with contextlib.closing(worker()) as runner, pytest.raises(ResultsError):
        tune_toy(tmp_path / "results", runner, progress=Moving(), workers=1)
    assert len(searched(tmp_path / "gone")) >= 6
    books.count("folders moved away")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A folder, and the place where it is mounted a second time."""
    real, place = tmp_path / "real", tmp_path / "mounted"
    real.mkdir()
    place.mkdir()
    if subprocess.run(
        ["mount", "--bind", str(real), str(place)], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting is not allowed here")
    yield real, place
    subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=False)


def test_a_mount_that_is_lost_stops_the_run_and_its_return_continues_it(
    mounted: tuple[Path, Path], tuning: Tuning, tmp_path: Path, books: Books
) -> None:
    real, place = mounted
    tuning.begin(tmp_path, place / "results", options={"pause_s": 0.03})
    wait_for(lambda: len(told(tmp_path)) >= 6)
    subprocess.run(["umount", "--lazy", str(place)], check=True)
    assert tuning.end() == 0
    assert "ResultsError" in ended(tmp_path)
    assert "cannot keep the study: No such file or directory" in ended(tmp_path)
    books.check(told(tmp_path), real / "results")
    subprocess.run(["mount", "--bind", str(real), str(place)], check=True)
    tuning.begin(tmp_path, place / "results")
    assert (tuning.end(), ended(tmp_path)) == (0, "exhausted")
    assert check_run(real / "results") == []
    books.check(told(tmp_path), real / "results")
    books.count("mounts lost")


def test_a_read_only_folder_is_refused_and_left_as_it_was(
    mounted: tuple[Path, Path], tuning: Tuning, tmp_path: Path, books: Books
) -> None:
    real, place = mounted
    tuning.begin(tmp_path, place / "results", settings={"trials": 5})
    assert (tuning.end(), ended(tmp_path)) == (0, "trials")
    before = {path.name: path.read_bytes() for path in (real / "results").iterdir()}
    subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)
    tuning.begin(tmp_path, place / "results")
    assert tuning.end() == 0
    assert "ResultsError" in ended(tmp_path)
    assert "Read-only file system" in ended(tmp_path)
    assert {path.name: path.read_bytes() for path in (real / "results").iterdir()} == before
    books.count("read-only folders")
