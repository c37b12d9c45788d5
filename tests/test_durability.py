"""Nothing that a run was told is safe is lost, whoever is killed and whoever else is writing."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import tuner
from tests.fault_stub import Ledger, wait_for
from tests.forked_tuning import ROOT, Tuning, ended, is_gone, told
from tests.isolated_runs import PROBLEMS, Books, best_of, check_run, expected, searched
from tuner.errors import ResultsError

PARENT_KILLS = 50


@pytest.fixture
def second() -> Iterator[Tuning]:
    with contextlib.closing(Tuning()) as process:
        yield process
        process.settle()


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
    # The finalist is measured again in rounds; one variant was under way at the kill.
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
