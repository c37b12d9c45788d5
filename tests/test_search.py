"""What comes of a search: its best, its failures, its study, and what it tells meanwhile."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from tests.toy_family import toy_device, toy_problem, toy_runner
from tests.toy_search import BASELINE, PROBLEM, Records, Watch, only_study, run, searched
from tuner.device_info import MemoryHeap
from tuner.errors import TunerError, UsageError, VulkanError
from tuner.records import FINAL
from tuner.runner.fake import Call, Workload
from tuner.runner.protocol import Job


def test_nothing_to_tune_is_refused(journal: Path) -> None:
    with pytest.raises(UsageError, match="nothing to tune"):
        run(journal, problems=())


def test_the_best_is_measured_again_with_its_rivals(journal: Path) -> None:
    store, watch = Records(), Watch()
    result = run(journal, store=store, trials=40, progress=watch)
    best = result.problems[0].best
    assert best is not None
    assert best.note == FINAL
    assert watch.finals
    assert watch.finals[0] >= 1
    fastest = min(r.median_ns for r in searched(store) if r.median_ns)
    assert best.median_ns == pytest.approx(fastest, rel=0.05)
    baseline = result.problems[0].baseline
    assert baseline is not None
    assert baseline.values == BASELINE
    assert baseline.median_ns > best.median_ns  # type: ignore[operator]


def test_finalists_of_several_passes_tell_where_their_time_goes(journal: Path) -> None:
    store = Records()
    run(journal, store=store)
    finals = [record for record in store.kept if record.note == FINAL]
    assert {record.passes for record in finals} >= {2}
    tried = {r.variant: r.check for r in store.kept if r.note != FINAL}
    for record in finals:
        first = tried[record.variant]
        assert first is not None
        assert record.check is not None
        assert record.check.cases == first.cases > 1, "the check of the finals alone would be 1"
    for record in finals:
        names = [stretch.passes for stretch in record.breakdown]
        assert names == ([("main",), ("join",)] if record.passes == 2 else [])
        assert all(len(stretch.samples_ns) >= 4 for stretch in record.breakdown)
    assert not any(record.breakdown for record in store.kept if record.note != FINAL)


def test_finals_repair_a_lucky_first_time(journal: Path) -> None:
    """One variant looks twice as fast in its first measurement than it is."""
    lucky: list[Job] = []

    def times(job: Job, workload: Workload) -> float:
        if job in lucky:
            return 2e6
        if b"'width': 128" in job.passes[0].spirv and not lucky:
            lucky.append(job)
            return 0.5e6
        return 1e6

    store = Records()
    result = run(journal, store=store, runner=toy_runner(times=times), trials=25)
    best = result.problems[0].best
    assert best is not None
    assert best.median_ns == pytest.approx(1e6, rel=0.05)
    assert best.note == FINAL


def test_slow_variants_are_given_up_but_not_the_baseline(journal: Path) -> None:
    def times(job: Job, workload: Workload) -> float:
        return 1e6 if b"'mode': 'tiled'" in job.passes[0].spirv else 9e6

    store = Records()
    run(journal, store=store, runner=toy_runner(times=times), trials=20)
    ended = {record.ended_by for record in searched(store)[2:] if record.values["mode"] != "tiled"}
    assert ended == {"gave_up"}
    assert searched(store)[0].ended_by != "gave_up"


def test_failures_are_kept_counted_and_never_proposed_again(journal: Path) -> None:
    def faults(call: Call) -> TunerError | None:
        bad = call.job is not None and b"'unroll': 4" in call.job.passes[0].spirv
        if bad and call.method == "execute":
            return VulkanError("vkQueueSubmit", "VK_ERROR_UNKNOWN", -13)
        return None

    store = Records()
    result = run(
        journal, store=store, runner=toy_runner(faults=faults), sampler="grid", trials=None
    )
    failed = [record for record in store.kept if record.values["unroll"] == 4]
    assert failed
    assert {record.state for record in failed} == {"runtime"}
    assert result.problems[0].failures == {"runtime": len(failed)}
    study = only_study(journal)
    pruned = [t for t in study.trials if t.state is optuna.trial.TrialState.PRUNED]
    assert len(pruned) == len(failed)
    assert pruned[0].user_attrs["state"] == "runtime"
    assert "VK_ERROR_UNKNOWN" in pruned[0].user_attrs["error"]


def test_the_study_is_one_that_optuna_understands(journal: Path) -> None:
    result = run(journal, trials=15)
    study = only_study(journal)
    assert len([t for t in study.trials if t.state.is_finished()]) >= 15
    best = result.problems[0].best
    assert best is not None
    assert study.best_value * 1000 == pytest.approx(best.median_ns, rel=0.1)
    assert study.best_trial.user_attrs["state"] == "correct"


def test_progress_tells_what_a_display_needs(journal: Path) -> None:
    watch = Watch()
    run(journal, trials=12, seconds=50.0, progress=watch, problems=(PROBLEM, toy_problem(1, 64)))
    status = watch.finished[3][1]
    assert (status.trials, status.measured, status.trial_limit) == (4, 4, 6)
    assert (status.index, status.problems) == (0, 2)
    assert status.best is not None
    assert status.best.gb_s > 0  # type: ignore[operator]
    assert status.best.utilisation is not None
    assert status.seconds_left is not None
    assert 0 < status.seconds_left < 25
    assert 0 < status.busy <= 1
    assert len(watch.started) == len(watch.finished) == 12
    assert [type(p).__name__ for p in watch.problems] == ["Status", "ProblemResult"] * 2


def test_the_best_of_one_problem_is_tried_early_on_the_next(journal: Path) -> None:
    def times(job: Job, workload: Workload) -> float:
        wanted = (b"'width': 128", b"'unroll': 2", b"'mode': 'half'")
        return 1e6 * (4 - sum(word in job.passes[0].spirv for word in wanted))

    store = Records()
    other = toy_problem(5, 4096)
    result = run(
        journal,
        store=store,
        runner=toy_runner(times=times),
        problems=(PROBLEM, other),
        trials=60,
    )
    best = result.problems[0].best
    assert best is not None
    tried = [record.values for record in searched(store) if record.problem == other]
    assert best.values in tried[:3]


def test_a_problem_that_does_not_fit_leaves_the_others(journal: Path) -> None:
    heap = MemoryHeap(size_bytes=100_000, device_local=True)
    runner = toy_runner(info=toy_device(memory_heaps=(heap,)))
    result = run(journal, runner=runner, problems=(toy_problem(8, 65536), toy_problem(1, 64)))
    assert [p.ended for p in result.problems] == ["does not fit", "trials"]
    assert "MiB" in (result.problems[0].error or "")
    assert runner.jobs == []


def test_a_problem_without_a_legal_variant_says_why(journal: Path) -> None:
    runner = toy_runner(info=toy_device(max_workgroup_invocations=16))
    result = run(journal, runner=runner, problems=(PROBLEM,))
    assert result.problems[0].ended == "nothing legal"
    assert "32 threads, the device has 16" in (result.problems[0].error or "")
