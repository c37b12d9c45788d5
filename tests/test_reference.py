"""The reference variant of a search: when it is timed, and what is timed again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.toy_family import TOY, ToyCompiler, toy_device, toy_render, toy_runner, toy_time_ns
from tests.toy_search import BASELINE, PLAN, PROBLEM, Records
from tuner.device_info import DeviceInfo
from tuner.errors import VulkanError
from tuner.evaluate import Session
from tuner.records import FINAL, REFERENCE, Record
from tuner.runner.fake import Call, Workload
from tuner.runner.protocol import Job
from tuner.search import RunResult, Settings, tune


class Drifting:
    """Speeds of the toy device, times a factor for the number of the measurement."""

    def __init__(self, factor: Callable[[int], float]) -> None:
        self.factor = factor
        self.asked = 0

    def __call__(self, job: Job, workload: Workload) -> float:
        self.asked += 1
        return toy_time_ns(job, workload) * self.factor(self.asked)


def search(
    folder: Path, store: Records, factor: Callable[[int], float], **changes: Any
) -> RunResult:
    settings: dict[str, Any] = {"trials": 40, "reference_every": 5, "finalists": 1}
    options = {name: changes.pop(name) for name in ("faults", "info") if name in changes}
    return tune(
        toy_runner(times=Drifting(factor), noise=0.005, **options),
        ToyCompiler(),
        [(TOY, PROBLEM)],
        store,
        storage=folder / "studies.jsonl",
        settings=Settings(**(settings | changes)),
        session=Session(plan=PLAN),
        render=toy_render,
    )


def noted(store: Records, note: str) -> list[Record]:
    return [record for record in store.kept if record.note.startswith(note)]


def test_a_reference_is_timed_after_every_so_many_trials(tmp_path: Path) -> None:
    store = Records()
    search(tmp_path, store, lambda _: 1.0)
    references = noted(store, REFERENCE)
    # 40 trials: the baseline, the reference, 38 others.
    assert len(references) == 38 // 5
    assert len({record.variant for record in references}) == 1
    assert references[0].values != BASELINE
    assert not noted(store, "timed again")


def test_a_reference_is_prepared_once_for_all_its_times(tmp_path: Path) -> None:
    store, runner = Records(), toy_runner()
    tune(
        runner,
        ToyCompiler(),
        [(TOY, PROBLEM)],
        store,
        storage=tmp_path / "studies.jsonl",
        settings=Settings(trials=40, reference_every=5, finalists=1),
        session=Session(plan=PLAN),
        render=toy_render,
    )
    (variant,) = {record.variant for record in noted(store, REFERENCE)}
    timed = [r for r in store.kept if r.variant == variant]
    assert len(timed) >= 8
    jobs = {call.job.key: call.job for call in runner.calls if call.job is not None}
    calls = Counter((call.method, call.job.key) for call in runner.calls if call.job is not None)
    key = max(jobs, key=lambda key: calls["measure", key])
    assert calls["measure", key] >= len(timed)
    # To be tried, to be the reference, and perhaps in the finals.
    assert 2 <= calls["prepare", key] <= 3
    assert not runner.jobs, "and released in the end"


def test_what_ran_while_the_reference_changed_is_timed_again(tmp_path: Path) -> None:
    """The device is slow during the measurements 9 to 20."""
    store = Records()
    search(tmp_path, store, lambda n: 1.2 if 9 <= n <= 20 else 1.0)
    again = noted(store, "timed again: the reference changed by")
    assert again
    assert {record.state for record in again} == {"correct"}
    # Whatever was timed on the slow device and counts has its true time in the end.
    newest = {r.variant: r for r in store.kept if r.note not in (REFERENCE, FINAL)}
    calm = Records()
    search(tmp_path / "calm", calm, lambda _: 1.0)
    truth = {r.variant: r for r in calm.kept if r.note not in (REFERENCE, FINAL)}
    shared = [variant for variant in newest if variant in truth]
    assert len(shared) >= 10
    wrong = [
        variant
        for variant in shared
        if abs((newest[variant].median_ns or 0) / (truth[variant].median_ns or 1) - 1) > 0.1
    ]
    assert len(wrong) <= 3  # a window may open and close on the slow device
    assert all(record.check is not None and record.check.cases > 1 for record in again)


def test_a_reference_whose_times_have_two_modes_is_no_drift(tmp_path: Path) -> None:
    store = Records()
    chance = random.Random(5)
    modes = {n: chance.choice((1.0, 1.05)) for n in range(1, 1000)}
    search(tmp_path, store, lambda n: modes[n], trials=80)
    references = noted(store, REFERENCE)
    medians = [record.median_ns or 0.0 for record in references]
    assert max(medians) > 1.04 * min(medians)
    assert len(noted(store, "timed again")) <= 2 * 5  # of 15 stretches of 5 trials


def test_a_time_that_was_too_good_does_not_stay(tmp_path: Path) -> None:
    calm = search(tmp_path / "calm", Records(), lambda _: 1.0).problems[0].best
    best = search(tmp_path, Records(), lambda n: 0.5 if n in (10, 11) else 1.0).problems[0].best
    assert calm is not None
    assert best is not None
    assert best.median_ns == pytest.approx(calm.median_ns, rel=0.05)


def test_a_reference_that_fails_makes_way_for_another(tmp_path: Path) -> None:
    measured: list[Job] = []
    failed: list[Job] = []

    def faults(call: Call) -> VulkanError | None:
        """Whatever is the first to be measured a second time fails then."""
        if call.method != "measure" or call.job is None:
            return None
        if call.job in measured and not failed:
            failed.append(call.job)
            return VulkanError("vkQueueSubmit", "VK_ERROR_UNKNOWN", -13)
        measured.append(call.job)
        return None

    store = Records()
    search(tmp_path, store, lambda _: 1.0, faults=faults)
    references = noted(store, REFERENCE)
    assert references[0].state == "runtime"
    assert references[1].state == "correct"
    assert references[1].variant != references[0].variant


@pytest.mark.parametrize(
    ("kind", "every", "expected"),
    [("discrete", None, 10), ("cpu", None, 0), ("cpu", 4, 4), ("discrete", 0, 0)],
)
def test_how_often_it_is_timed(kind: str, every: int | None, expected: int) -> None:
    info: DeviceInfo = toy_device(kind=kind)
    assert Settings(reference_every=every).reference_after(info) == expected


def test_without_references_none_is_timed(tmp_path: Path) -> None:
    store = Records()
    search(tmp_path, store, lambda n: 1.0 + 0.1 * (n % 3), reference_every=0)
    assert not noted(store, REFERENCE)
    assert not noted(store, "timed again")
