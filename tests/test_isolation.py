"""A bad kernel costs one variant: what goes wrong on the device, and what the run makes of it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.fault_stub import FAULT_LINE, Fault, How, Ledger, wait_for, worker
from tests.isolated_runs import (
    PROBLEMS,
    SHORT,
    SPACE,
    Books,
    best_of,
    check_run,
    expected,
    expected_time,
    marks_of,
    searched,
    tune_toy,
)
from tests.toy_family import TOY
from tuner.kernels.space import canonical
from tuner.records import FINAL, State
from tuner.results import Store
from tuner.runner.worker import WorkerRunner
from tuner.search import Silent
from tuner.search.loop import MAX_LOSSES_IN_A_ROW
from tuner.search.settings import RETRIED

if TYPE_CHECKING:
    from tuner.records import Record
    from tuner.search import Status

Start = Callable[..., WorkerRunner]
PROBLEM = PROBLEMS[0]
WORKER_KILLS = 50
FAULTS: tuple[tuple[How, str, State, str], ...] = (
    ("segfault", "prepare", "runtime", "SIGSEGV"),
    ("hang", "prepare", "timeout", "pipelines of main"),
    ("refused", "prepare", "compile", "VK_ERROR_UNKNOWN"),
    ("segfault", "execute", "runtime", "SIGSEGV"),
    ("deaf", "execute", "timeout", "did not end within"),
    ("lost", "execute", "runtime", FAULT_LINE),
    ("out of memory", "execute", "runtime", "1,048,576 MiB"),
    ("host out of memory", "execute", "runtime", "MemoryError"),
    ("hang", "measure", "timeout", "measuring main"),
    ("abort", "measure", "runtime", "SIGABRT"),
)
VICTIMS = [SPACE[3 + 5 * n] for n in range(len(FAULTS))]
LOST = [how for how, *_ in FAULTS if how not in ("refused", "out of memory")]


class Acknowledged(Silent):
    """Keeps the variants of the records that a run was told are safe."""

    def __init__(self) -> None:
        self.variants: list[str] = []

    def trial_finished(self, record: Record, status: Status) -> None:
        self.variants.append(record.variant)


@pytest.fixture(scope="module")
def wrecked(tmp_path_factory: pytest.TempPathFactory, books: Books) -> Path:
    """The results of a run through the whole space, in which one variant met each fault."""
    folder, told = tmp_path_factory.mktemp("wrecked"), Acknowledged()
    faults = [
        Fault(how=how, method=method, marks=marks_of(values))
        for (how, method, _, _), values in zip(FAULTS, VICTIMS, strict=True)
    ]
    with contextlib.closing(worker(*faults, deadlines=SHORT)) as runner:
        result = tune_toy(folder, runner, progress=told, workers=3, overlap=True)
        assert (result.error, result.problems[0].ended) == (None, "exhausted")
        assert runner.losses >= len(LOST)
        losses = runner.losses
        again = tune_toy(folder, runner)
        assert (again.measured, runner.losses) == (0, losses), "none is tried again"
    books.check(told.variants, folder)
    books.count("workers lost by a planned fault", losses)
    return folder


def test_every_fault_costs_its_variant_alone(wrecked: Path) -> None:
    failed = {str(record.values): record for record in check_run(wrecked)}
    innocent = [r.error for key, r in failed.items() if key not in map(str, VICTIMS)]
    assert innocent == []
    for (how, method, state, says), values in zip(FAULTS, VICTIMS, strict=True):
        record = failed[str(values)]
        assert (how, method, record.state) == (how, method, state)
        assert says in (record.error or "")
    victims = {record.variant for record in failed.values()}
    left = [ns for key, ns in expected(PROBLEM).items() if key not in victims]
    assert best_of(wrecked, PROBLEM) == min(left)


def test_what_failed_is_tried_again_when_asked(
    wrecked: Path, tmp_path: Path, start: Start, books: Books
) -> None:
    folder, healthy, told = tmp_path / "results", start(), Acknowledged()
    shutil.copytree(wrecked, folder)
    kept = len(searched(folder))
    result = tune_toy(folder, healthy, retry_failed=True, progress=told)
    states = (state for _, _, state, _ in FAULTS)
    retried = sorted(str(v) for v, state in zip(VICTIMS, states, strict=True) if state in RETRIED)
    assert result.measured == len(retried)
    assert sorted(str(record.values) for record in searched(folder)[kept:]) == retried
    assert {record.state for record in searched(folder)[kept:]} == {"correct"}
    assert result.problems[0].failures == {"compile": 1}
    assert tune_toy(folder, healthy, retry_failed=True).measured == 0
    correct = [r.median_ns or 0 for r in searched(folder) if r.state == "correct"]
    assert best_of(folder, PROBLEM) == min(correct)
    books.check(told.variants, folder)


def test_a_device_lost_at_20_random_points(tmp_path: Path, start: Start, books: Books) -> None:
    # So far apart that each meets a device of its own, whatever is under way at the last.
    points = [25 * n + random.Random(n).randrange(3, 13) for n in range(20)]
    fault = Fault(how="lost", at=tuple(points))
    runner, told = start(fault, deadlines=SHORT, ledger=tmp_path / "calls"), Acknowledged()
    result = tune_toy(tmp_path / "results", runner, progress=told, workers=3, overlap=True)
    assert result.problems[0].ended == "exhausted"
    assert runner.losses == len(points)
    failed = check_run(tmp_path / "results")
    assert 5 <= len(failed) <= len(points)
    assert all("device lost" in (r.error or "") and FAULT_LINE in (r.error or "") for r in failed)
    books.check(told.variants, tmp_path / "results")
    books.count("devices lost at a random point", runner.losses)


def test_a_worker_killed_at_50_random_moments(tmp_path: Path, start: Start, books: Books) -> None:
    calls = tmp_path / "calls"
    runner, told = start(deadlines=SHORT, ledger=calls), Acknowledged()
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(_kill_at_random, runner, calls)
        while not killing.done():
            folder = tmp_path / f"round {len(list(tmp_path.iterdir()))}"
            result = tune_toy(folder, runner, problems=PROBLEMS, progress=told)
            assert [each.ended for each in result.problems] == ["exhausted"] * 3
            failed = {record.variant: record.error for record in check_run(folder, PROBLEMS)}
            assert all("killed by SIGKILL" in (error or "") for error in failed.values())
            for problem in PROBLEMS:
                left = [ns for key, ns in expected(problem).items() if key not in failed]
                assert best_of(folder, problem) == min(left)
            books.check(told.variants, folder)
            told.variants.clear()
            books.count("variants given up for kills that met them three times", len(failed))
    books.count("workers killed at a random moment", killing.result())


def _kill_at_random(runner: WorkerRunner, calls: Path) -> int:
    """Kill one worker after the other, each fifth while it starts; returns how many."""
    chance, gone = random.Random(11), {0}
    for number in range(WORKER_KILLS):
        if number % 5 == 4:
            wait_for(lambda: {child.pid for child in psutil.Process().children()} - gone)
            time.sleep(chance.uniform(0.0, 0.3))
        else:
            wait_for(lambda: runner.pid not in gone)
            Ledger.wait_for(calls, Ledger.count(calls) + chance.randrange(30))
            time.sleep(chance.uniform(0.0, 0.01))
        for child in psutil.Process().children():
            gone.add(child.pid)
            child.kill()
    return WORKER_KILLS


def test_a_run_stops_when_trial_after_trial_loses_the_worker(
    tmp_path: Path, start: Start, books: Books
) -> None:
    fault = Fault(how="abort", method="execute")
    runner, told = start(fault, deadlines=SHORT), Acknowledged()
    result = tune_toy(tmp_path, runner, problems=PROBLEMS, progress=told)
    assert [each.ended for each in result.problems] == ["device lost"]
    assert f"{MAX_LOSSES_IN_A_ROW} trials in a row lost the worker" in (result.error or "")
    assert "SIGABRT" in (result.error or "")
    records = searched(tmp_path)
    assert [record.state for record in records] == ["runtime"] * MAX_LOSSES_IN_A_ROW
    assert canonical(TOY, TOY.baseline) in [record.values for record in records]
    books.check(told.variants, tmp_path)
    books.count("workers lost by a planned fault", runner.losses)


def test_a_run_goes_on_while_its_best_still_works(
    tmp_path: Path, start: Start, books: Books
) -> None:
    """Though a corner of the space loses the worker, more variants of it than may in a row."""
    corner = [v for v in SPACE if (v["mode"], v["width"], v["unroll"]) == ("tiled", 32, 1)]
    assert len(corner) > MAX_LOSSES_IN_A_ROW
    fault = Fault(
        how="segfault", method="execute", marks=("'mode': 'tiled'", "'unroll': 1,", "'width': 32}")
    )
    runner, told = start(fault, deadlines=SHORT), Acknowledged()
    result = tune_toy(tmp_path, runner, progress=told, workers=1)
    assert (result.error, result.problems[0].ended) == (None, "exhausted")
    failed = check_run(tmp_path)
    assert sorted(str(r.values) for r in failed) == sorted(str(dict(v)) for v in corner)
    books.check(told.variants, tmp_path)
    books.count("workers lost by a planned fault", runner.losses)


def test_a_worker_that_does_not_come_back_ends_the_run_with_everything_kept(
    tmp_path: Path, start: Start, books: Books
) -> None:
    gone, folder = tmp_path / "gone", tmp_path / "results"

    class Ending(Acknowledged):
        def trial_finished(self, record: Record, status: Status) -> None:
            super().trial_finished(record, status)
            if len(self.variants) == 7:
                gone.touch()
                os.kill(runner.pid, signal.SIGKILL)

    runner, told = start(deadlines=SHORT, no_device_if=gone), Ending()
    result = tune_toy(folder, runner, progress=told, workers=1)
    assert result.problems[0].ended == "device lost"
    assert "no other one starts (Vulkan reports no device)" in (result.error or "")
    states = [record.state for record in searched(folder)]
    assert states[:7] == ["correct"] * 7
    gone.unlink()
    assert tune_toy(folder, start()).problems[0].ended == "exhausted"
    assert len(check_run(folder)) <= 1
    books.check(told.variants, folder)


def test_a_finalist_that_loses_the_worker_leaves_the_others(tmp_path: Path, start: Start) -> None:
    """The fastest variant crashes once the search is over: the next best wins."""
    switch, folder = tmp_path / "finals", tmp_path / "results"
    first, second = sorted(expected(PROBLEM), key=lambda key: expected(PROBLEM)[key])[:2]
    fastest = min(SPACE, key=lambda values: expected_time(PROBLEM, values))

    class Switching(Silent):
        def finals_started(self, count: int, status: Status) -> None:
            switch.touch()

    fault = Fault(how="segfault", method="measure", marks=marks_of(fastest), once=str(switch))
    result = tune_toy(folder, start(fault, deadlines=SHORT), progress=Switching())
    assert result.problems[0].ended == "exhausted"
    finals = [r for r in Store(folder, read_only=True).records() if r.note == FINAL]
    assert [r.state for r in finals if r.variant == first] == ["runtime"]
    best = result.problems[0].best
    assert best is not None
    assert (best.variant, best.note) == (second, FINAL)
