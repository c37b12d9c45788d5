"""Whatever ends a run, the same command goes on: nothing is lost and nothing is measured twice."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import tuner
from tests.fault_stub import Ledger, wait_for, worker
from tests.isolated_runs import PROBLEMS, Books, best_of, check_run, expected, searched, tune_toy
from tuner.errors import ResultsError
from tuner.results import Store
from tuner.runner.worker import WorkerRunner
from tuner.search import Silent

if TYPE_CHECKING:
    from tuner.records import Record

ROOT = Path(__file__).parent.parent
PARENT_KILLS = 50


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


@pytest.fixture(scope="module")
def tuning_process() -> Iterator[Tuning]:
    with contextlib.closing(Tuning()) as process:
        yield process


@pytest.fixture
def tuning(tuning_process: Tuning) -> Iterator[Tuning]:
    yield tuning_process
    tuning_process.settle()


@pytest.fixture
def second() -> Iterator[Tuning]:
    with contextlib.closing(Tuning()) as process:
        yield process
        process.settle()


def told(folder: Path) -> list[str]:
    """Variants of the records that a run was told are safe, as far as the lines are whole."""
    file = folder / "told"
    return file.read_text().split("\n")[:-1] if file.exists() else []


def ended(folder: Path) -> str:
    return (folder / "ended").read_text()


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


# --- kill -9 --------------------------------------------------------------------------------------


def test_a_parent_killed_at_50_random_moments_goes_on_each_time(
    tuning: Tuning, tmp_path: Path, books: Books
) -> None:
    chance, calls, kills = random.Random(5), tmp_path / "calls", 0
    while kills < PARENT_KILLS:
        folder = tmp_path / f"after {kills} kills"
        folder.mkdir()
        while kills < PARENT_KILLS and _killed_on_its_way(tuning, folder, calls, chance):
            kills += 1
            books.check(told(folder), folder / "results")
        tuning.begin(folder, problems=3)
        assert tuning.end() == 0
        assert set(ended(folder).split(",")) <= {"exhausted", "met before"}
        assert check_run(folder / "results", PROBLEMS) == []
        for problem in PROBLEMS:
            assert best_of(folder / "results", problem) == min(expected(problem).values())
        books.check(told(folder), folder / "results")
    books.count("parents killed at a random moment", kills)


def _killed_on_its_way(tuning: Tuning, folder: Path, calls: Path, chance: random.Random) -> bool:
    """Begin a run and kill it, sometimes while its worker starts; False if it ended first."""
    enough = Ledger.count(calls) + chance.randrange(40)
    tuning.begin(folder, options={"ledger": str(calls)}, problems=3)
    if chance.randrange(5) == 0:
        time.sleep(chance.uniform(0.0, 0.3))
    else:
        wait_for(lambda: Ledger.count(calls) >= enough or (folder / "ended").exists())
        time.sleep(chance.uniform(0.0, 0.01))
    workers = tuning.workers()
    status = tuning.kill()
    wait_for(lambda: all(map(is_gone, workers)))
    return status == -signal.SIGKILL


def test_a_worker_that_hangs_in_its_driver_does_not_outlive_its_parent(
    tuning: Tuning, tmp_path: Path
) -> None:
    tuning.begin(tmp_path, options={"at_start": "hang"})
    # The thread that watches for the end of the parent is there before the driver hangs.
    wait_for(lambda: any(worker.num_threads() > 1 for worker in tuning.workers()))
    workers = tuning.workers()
    tuning.kill()
    wait_for(lambda: all(map(is_gone, workers)))


def test_a_known_variant_is_not_measured_by_the_run_that_goes_on(
    tuning: Tuning, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    tuning.begin(tmp_path, options={"ledger": str(calls), "pause_s": 0.03})
    wait_for(lambda: len(told(tmp_path)) >= 20)
    assert tuning.kill() == -signal.SIGKILL
    before = Counter(digest for method, digest in Ledger.read(calls) if method == "m")
    known = len(searched(tmp_path / "results"))
    calls.unlink()
    tuning.begin(tmp_path, options={"ledger": str(calls)}, settings={"finalists": 1})
    tuning.end()
    after = Counter(digest for method, digest in Ledger.read(calls) if method == "m")
    # The finalist is measured again in four rounds; one variant was under way at the kill.
    again = [digest for digest in after if digest in before]
    assert len(again) <= 2
    assert len(after) >= len(expected(PROBLEMS[0])) - known


def test_innocent_variants_are_not_given_up_after_kills(tuning: Tuning, tmp_path: Path) -> None:
    """The baseline is under way at each kill: three of these condemn it without a worker."""
    calls = tmp_path / "calls"
    for _ in range(4):
        before = Ledger.count(calls)
        tuning.begin(tmp_path, options={"prepare_seconds": 60.0, "ledger": str(calls)})
        Ledger.wait_for(calls, before + 1)
        assert tuning.kill() == -signal.SIGKILL
    assert not (tmp_path / "results" / "records.jsonl").exists() or not searched(
        tmp_path / "results"
    )
    tuning.begin(tmp_path)
    tuning.end()
    assert check_run(tmp_path / "results") == []


# --- disks and files ------------------------------------------------------------------------------


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


EXPORTER = """
import sys
from pathlib import Path
from tests.toy_export import BASE, FAST, export, toy_record
for turn in range(100_000):
    export(Path(sys.argv[1]), [toy_record({**FAST, "width": 32 << turn % 3}, 1e6 / (turn + 1))])
    print(turn, flush=True)
"""


@pytest.mark.parametrize("attempt", range(4))
def test_an_export_that_is_killed_leaves_a_whole_one(
    tmp_path: Path, attempt: int, books: Books
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", EXPORTER, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        for _ in range(3 + attempt):
            assert process.stdout.readline()
        time.sleep(random.Random(attempt).uniform(0.0, 0.03))
        process.kill()
    (entry,) = tuner.load_best_config(tmp_path).families["toy"].entries
    assert all(each.read_spirv(tmp_path) for each in entry.passes)
    books.count("exports killed")


# --- two at once ----------------------------------------------------------------------------------


def test_of_two_runs_on_one_folder_the_second_is_refused_and_the_first_goes_on(
    tuning: Tuning, second: Tuning, tmp_path: Path, books: Books
) -> None:
    hold, other = tmp_path / "hold", tmp_path / "other"
    hold.touch()
    other.mkdir()
    calls = tmp_path / "calls"
    first = tuning.begin(tmp_path, options={"hold_if": str(hold), "ledger": str(calls)})
    Ledger.wait_for(calls, 1)
    second.begin(other, tmp_path / "results")
    assert second.end() == 0
    hold.unlink()
    assert f"process {first} is writing results here" in ended(other)
    assert told(other) == []
    assert (tuning.end(), ended(tmp_path)) == (0, "exhausted")
    assert check_run(tmp_path / "results") == []
    books.check(told(tmp_path), tmp_path / "results")
    books.count("pairs of runs on one folder")


def test_of_two_runs_with_one_study_file_the_second_is_refused(tmp_path: Path) -> None:
    from tuner.search.studylog import open_storage

    file = tmp_path / "studies.jsonl"
    with (
        contextlib.closing(open_storage(file)),
        pytest.raises(ResultsError, match="another run keeps its studies here"),
    ):
        open_storage(file)
    open_storage(file).close()
