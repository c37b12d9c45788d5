"""The search on the toy family and the fake runner: samplers, budgets, resumption, interrupts."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from tests.toy_family import (
    TOY,
    ToyCompiler,
    toy_device,
    toy_problem,
    toy_render,
    toy_runner,
)
from tuner.device_info import MemoryHeap
from tuner.errors import DeviceLostError, ResultsError, TunerError, UsageError, VulkanError
from tuner.evaluate import FINAL, REFERENCE, Session
from tuner.kernels.base import Family, Operands, Parameter, Reference, Values
from tuner.kernels.space import canonical, legal
from tuner.problems import Problem
from tuner.records import Record
from tuner.runner.fake import Call, FakeRunner, Workload
from tuner.runner.protocol import Job, MeasurePlan
from tuner.search import Interrupts, RunResult, SamplerName, Settings, Silent, Status, tune
from tuner.search import interrupts as interrupts_module
from tuner.search.encoding import Encoding
from tuner.search.model import make_sampler
from tuner.search.proposer import Proposer
from tuner.search.studylog import MAX_CRASHES, Covered, StudyLog, open_storage

PROBLEM = toy_problem(4, 4096)
SPACE = legal(TOY, PROBLEM, toy_device())
BASELINE = canonical(TOY, TOY.baseline)
PLAN = MeasurePlan(min_samples=5, max_samples=8, budget_ms=0.01)


class Records:
    """A record store in memory."""

    def __init__(self, kept: tuple[Record, ...] = ()) -> None:
        self.kept = list(kept)
        self.fail_after: int | None = None

    def find(self, variant: str) -> Record | None:
        return next((r for r in reversed(self.kept) if r.variant == variant), None)

    def append(self, record: Record) -> None:
        if self.fail_after is not None and len(self.kept) >= self.fail_after:
            raise ResultsError("records.jsonl", "No space left on device")
        self.kept.append(record)

    def records(self) -> tuple[Record, ...]:
        return tuple(self.kept)


class Watch(Silent):
    """Keeps what a run tells."""

    def __init__(self) -> None:
        self.started: list[Values] = []
        self.finished: list[tuple[Record, Status]] = []
        self.finals: list[int] = []
        self.problems: list[Any] = []

    def trial_started(self, values: Values, status: Status) -> None:
        self.started.append(values)

    def trial_finished(self, record: Record, status: Status) -> None:
        self.finished.append((record, status))

    def finals_started(self, count: int, status: Status) -> None:
        self.finals.append(count)

    def problem_started(self, status: Status) -> None:
        self.problems.append(status)

    def problem_finished(self, result: Any) -> None:
        self.problems.append(result)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "study.journal"


def run(
    journal: Path,
    *,
    store: Records | None = None,
    runner: FakeRunner | None = None,
    problems: tuple[Problem, ...] = (PROBLEM,),
    family: Family = TOY,
    progress: Silent | None = None,
    interrupts: Interrupts | None = None,
    session: Session | Callable[[], Session] | None = None,
    **settings: Any,
) -> RunResult:
    chosen: dict[str, Any] = {"workers": 1, "seed": 3, "trials": 20, **settings}
    return tune(
        runner or toy_runner(),
        ToyCompiler(),
        [(family, problem) for problem in problems],
        Records() if store is None else store,
        storage=journal,
        settings=Settings(**chosen),
        session=session or Session(name="s", plan=PLAN, read_gb_s=1000.0),
        progress=progress,
        interrupts=interrupts,
        render=toy_render,
    )


def searched(store: Records) -> list[Record]:
    return [record for record in store.kept if record.note not in (FINAL, REFERENCE)]


# ---- what is tried


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid", "cmaes"])
def test_every_sampler_tries_legal_variants_once_and_the_baseline_first(
    sampler: SamplerName, journal: Path
) -> None:
    store = Records()
    result = run(journal, store=store, sampler=sampler, trials=30)
    tried = [record.values for record in searched(store)]
    assert tried[0] == BASELINE
    assert tried[1] == TOY.starts[0]
    assert len(tried) == 30
    assert all(values in SPACE for values in tried)
    assert len({str(values) for values in tried}) == 30
    assert {record.sampler for record in store.kept} == {sampler}
    (problem,) = result.problems
    assert (problem.ended, problem.trials, problem.measured) == ("trials", 30, 30)
    assert problem.legal == len(SPACE)


def test_grid_goes_through_the_whole_space_in_order(journal: Path) -> None:
    store = Records()
    result = run(journal, store=store, sampler="grid", trials=None)
    tried = [record.values for record in searched(store)]
    rest = [v for v in SPACE if v not in (BASELINE, TOY.starts[0])]
    assert tried[2:] == rest
    assert result.problems[0].ended == "exhausted"


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_equal_seeds_propose_alike_and_others_do_not(sampler: SamplerName, tmp_path: Path) -> None:
    def tried(name: str, seed: int) -> list[Any]:
        store = Records()
        run(tmp_path / name, store=store, sampler=sampler, seed=seed, overlap=False, trials=25)
        return [record.values for record in searched(store)]

    assert tried("a", 1) == tried("b", 1)
    assert tried("a2", 1) != tried("c", 2)


def test_tpe_finds_better_variants_than_chance(tmp_path: Path) -> None:
    """On a smooth space of 16,384 variants, with equal budgets and several seeds."""
    names = "abcdefg"
    parameters = tuple(Parameter(name=n, values=(1, 2, 4, 8), help="") for n in names)
    family = replace(
        TOY,
        parameters=parameters,
        constraints=(),
        baseline=dict.fromkeys(names, 1),
        starts=(),
        arithmetic=lambda values: "f32",
        passes=lambda candidate, scalars: TOY.passes(
            replace(candidate, values={**TOY.baseline, "split": 1}), scalars
        ),
        scratch_bytes=lambda candidate: {"partial": 4},
    )
    space = legal(family, PROBLEM, toy_device())

    def cost(values: Values) -> float:
        return 1000.0 + sum(abs(int(values[n]) - 4) * (i + 1) for i, n in enumerate(names))

    def best(sampler: SamplerName, seed: int) -> float:
        proposer = Proposer(space, sampler, seed)
        found = []
        for _ in range(60):
            proposal = proposer.next()
            assert proposal is not None
            found.append(cost(proposal.values))
            proposer.tell(proposal, (found[-1],))
        return min(found)

    seeds = range(4)
    assert sum(best("tpe", s) for s in seeds) < sum(best("random", s) for s in seeds)


def test_gp_needs_torch_and_says_so(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    with pytest.raises(UsageError, match="needs torch"):
        make_sampler("gp", 0)
    with pytest.raises(UsageError, match="kvtune"):
        run(journal, sampler="gp")


@pytest.mark.parametrize(
    "settings",
    [
        {"sampler": "annealing"},
        {"trials": 0},
        {"seconds": -1.0},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"workers": 0},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        Settings(**settings)


def test_nothing_to_tune_is_refused(journal: Path) -> None:
    with pytest.raises(UsageError, match="nothing to tune"):
        run(journal, problems=())


# ---- what comes of it


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


def only_study(journal: Path) -> optuna.Study:
    storage = JournalStorage(JournalFileBackend(str(journal)))
    (summary,) = optuna.get_all_study_summaries(storage)
    return optuna.load_study(study_name=summary.study_name, storage=storage)


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


# ---- budgets


def test_trials_are_shared_out_fairly(journal: Path) -> None:
    problems = (PROBLEM, toy_problem(1, 64), toy_problem(2, 64))
    result = run(journal, problems=problems, trials=20)
    assert [p.trials for p in result.problems] == [7, 7, 6]


def test_seconds_are_shared_out_and_what_is_left_is_passed_on(journal: Path) -> None:
    """The first problem's space is small and soon exhausted."""
    tiny = replace(TOY, name="tiny", parameters=tuple(_one_value(p) for p in TOY.parameters))
    result = tune(
        toy_runner(prepare_seconds=0.02),
        ToyCompiler(),
        [(tiny, PROBLEM), (TOY, PROBLEM), (TOY, toy_problem(2, 4096))],
        Records(),
        storage=journal,
        settings=Settings(seconds=4.0, sampler="random", workers=1),
        session=Session(plan=PLAN),
        render=toy_render,
    )
    first, second, third = result.problems
    assert (first.ended, second.ended, third.ended) == ("exhausted", "seconds", "seconds")
    assert first.seconds < 1.0
    assert 1.4 < second.seconds < 2.4
    assert 1.4 < third.seconds < 2.4
    assert result.seconds < 5.0


def _one_value(parameter: Parameter) -> Parameter:
    return replace(parameter, values=parameter.values[:1])


def test_a_budget_met_before_measures_nothing(journal: Path) -> None:
    store = Records()
    first = run(journal, store=store, trials=15)
    kept = len(store.kept)
    runner = toy_runner()
    again = run(journal, store=store, runner=runner, trials=15)
    assert again.problems[0].ended == "met before"
    assert again.measured == 0
    assert len(store.kept) == kept
    assert runner.calls == []
    assert again.problems[0].best == first.problems[0].best
    assert again.problems[0].trials == 15


def test_a_larger_budget_goes_on_and_a_smaller_is_met(journal: Path) -> None:
    store = Records()
    run(journal, store=store, trials=10)
    assert run(journal, store=store, trials=5).problems[0].ended == "met before"
    more = run(journal, store=store, trials=18)
    assert (more.problems[0].trials, more.problems[0].measured) == (18, 8)
    tried = [str(record.values) for record in searched(store)]
    assert len(tried) == len(set(tried)) == 18


def test_seconds_spent_before_count(journal: Path) -> None:
    store = Records()
    slow = toy_runner(prepare_seconds=0.01)
    run(journal, store=store, runner=slow, trials=None, seconds=1.0, sampler="random")
    again = run(journal, store=store, runner=slow, trials=None, seconds=1.0, sampler="random")
    assert again.problems[0].ended == "met before"
    assert again.measured == 0


@pytest.mark.parametrize(
    ("earlier", "now", "covered"),
    [
        ((10, None), (10, None), True),
        ((10, None), (11, None), False),
        ((10, None), (None, 5.0), False),
        ((None, 5.0), (99, 5.0), True),
        ((10, 5.0), (10, 6.0), False),
        ((None, None), (10, 6.0), True),
        ((None, None), (None, None), True),
    ],
)
def test_which_budgets_cover_which(
    earlier: tuple[Any, Any], now: tuple[Any, Any], covered: bool
) -> None:
    before = Covered(trials=earlier[0], seconds=earlier[1])
    assert before.covers(Covered(trials=now[0], seconds=now[1])) is covered


# ---- nothing twice


def test_records_answer_when_the_study_is_gone(tmp_path: Path) -> None:
    store, watch = Records(), Watch()
    run(tmp_path / "one", store=store, trials=15, overlap=False)
    finals = sum(record.note == FINAL for record in store.kept)
    runner = toy_runner()
    again = run(
        tmp_path / "two", store=store, runner=runner, trials=15, progress=watch, overlap=False
    )
    assert (again.problems[0].trials, again.problems[0].known) == (15, 15)
    assert again.measured == 0
    assert not [call for call in runner.calls if call.method == "execute"]
    assert sum(record.note == FINAL for record in store.kept) == finals
    known = [t for t in only_study(tmp_path / "two").trials if t.user_attrs.get("known")]
    assert len(known) == 15


@pytest.mark.parametrize(
    "changed",
    [
        lambda values: {name: value for name, value in values.items() if name != "tile"},
        lambda values: {**values, "vector": 4},
        lambda values: {**values, "mode": "gone"},
        lambda values: {**values, "width": 64},
    ],
    ids=["parameter came", "parameter went", "value went", "sources changed"],
)
def test_what_is_no_kernel_of_today_is_neither_best_nor_measured_again(
    changed: Callable[[Values], dict[str, Any]], tmp_path: Path
) -> None:
    """Records as another version of the family left them, faster than anything of today."""
    store = Records()
    run(tmp_path / "one", store=store, trials=5)
    old = [
        msgspec.structs.replace(
            record,
            variant=f"old {record.variant}",
            values=changed(record.values),
            median_ns=record.median_ns and record.median_ns / 10,
            note=FINAL,
        )
        for record in store.kept
    ]
    again = Records(tuple(old))
    other = toy_problem(5, 4096)
    result = run(tmp_path / "two", store=again, problems=(PROBLEM, other), trials=10)
    new = again.kept[len(old) :]
    assert {str(record.values) for record in new} <= {str(values) for values in SPACE}
    for problem in result.problems:
        assert problem.best in new
        assert problem.baseline in new


@pytest.mark.parametrize(
    "change",
    [
        {"runner": toy_runner(info=toy_device(driver_info="2.0"))},
        {"runner": toy_runner(info=toy_device(uuid="other"))},
        {"problems": (toy_problem(4, 4097),)},
    ],
)
def test_another_driver_device_or_problem_starts_anew(
    change: dict[str, Any], journal: Path
) -> None:
    store = Records()
    run(journal, store=store, trials=5)
    assert run(journal, store=store, trials=5, **change).measured == 5


# ---- interrupts, crashes, faults


class Interrupting(Watch):
    """Sends SIGINT to this process when the n-th trial gets the device."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def trial_started(self, values: Values, status: Status) -> None:
        super().trial_started(values, status)
        if len(self.started) == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_finishes_the_trial_and_keeps_everything(journal: Path) -> None:
    store, runner = Records(), toy_runner()
    before = signal.getsignal(signal.SIGINT)
    result = run(
        journal, store=store, runner=runner, progress=Interrupting(6), workers=3, trials=30
    )
    assert result.interrupted
    assert result.problems[0].ended == "interrupted"
    assert len(store.kept) == result.problems[0].measured == 6
    assert result.problems[0].best is not None
    assert runner.jobs == []
    assert runner.workloads == {}
    assert signal.getsignal(signal.SIGINT) is before
    states = [t.state for t in only_study(journal).trials]
    assert optuna.trial.TrialState.RUNNING not in states


def test_signals_close_together_are_one(journal: Path) -> None:
    class Twice(Interrupting):
        def trial_started(self, values: Values, status: Status) -> None:
            super().trial_started(values, status)
            if len(self.started) == self.at:
                os.kill(os.getpid(), signal.SIGINT)

    result = run(journal, progress=Twice(3), trials=20)
    assert result.interrupted
    assert result.measured == 3


def test_a_second_signal_acts_as_usual_after_what_the_caller_wants(
    monkeypatch: pytest.MonkeyPatch, journal: Path
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(interrupts_module, "ONE_S", 0.0)
    interrupts = Interrupts(
        first=lambda: heard.append("first"), second=lambda: heard.append("second")
    )
    before = signal.getsignal(signal.SIGINT)
    with interrupts:
        result = run(journal, progress=Interrupting(3), trials=20, interrupts=interrupts)
        assert (result.measured, heard) == (3, ["first"])
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before
    assert heard == ["first", "second"]


def test_a_session_is_made_only_for_what_is_left_to_measure(journal: Path) -> None:
    made: list[Session] = []

    def make() -> Session:
        made.append(Session(name=f"session {len(made)}", plan=PLAN, read_gb_s=1000.0))
        return made[-1]

    store, problems = Records(), (PROBLEM, toy_problem(1, 64))
    run(journal, store=store, problems=problems, trials=10, session=make)
    assert len(made) == 1
    assert {record.session for record in store.kept} == {"session 0"}
    assert run(journal, store=store, problems=problems, trials=10, session=make).measured == 0
    assert len(made) == 1
    assert run(journal, store=store, problems=problems, trials=12, session=make).measured == 2
    assert len(made) == 2
    assert searched(store)[-1].session == "session 1"


def test_a_stopped_run_goes_on_where_it_was(journal: Path) -> None:
    store = Records()
    run(journal, store=store, progress=Interrupting(6), trials=20, workers=2)
    under_way = [
        t.user_attrs["values"]
        for t in only_study(journal).trials
        if t.user_attrs.get("ended") == "stopped"
    ]
    assert under_way
    result = run(journal, store=store, trials=20, workers=2)
    assert (result.problems[0].trials, result.problems[0].measured) == (20, 14)
    tried = [record.values for record in searched(store)]
    assert len({str(values) for values in tried}) == len(tried) == 20
    assert all(values in tried[6:9] for values in under_way)


def test_an_interrupt_ends_the_run_not_only_the_problem(journal: Path) -> None:
    problems = (PROBLEM, toy_problem(1, 64))
    result = run(journal, problems=problems, progress=Interrupting(2), trials=20)
    assert len(result.problems) == 1


def test_the_library_leaves_signals_alone_in_other_threads(journal: Path) -> None:
    found: list[RunResult] = []
    thread = threading.Thread(target=lambda: found.append(run(journal, trials=4)))
    thread.start()
    thread.join()
    assert found[0].measured == 4


def test_a_lost_device_ends_the_run_with_its_record(journal: Path) -> None:
    def faults(call: Call) -> TunerError | None:
        if (call.method, call.number) == ("measure", 4):
            return DeviceLostError("vkWaitForFences", "VK_ERROR_DEVICE_LOST", -4)
        return None

    store = Records()
    problems = (PROBLEM, toy_problem(1, 64))
    result = run(journal, store=store, runner=toy_runner(faults=faults), problems=problems)
    assert result.error is not None
    assert "VK_ERROR_DEVICE_LOST" in result.error
    assert [p.ended for p in result.problems] == ["device lost"]
    assert [record.state for record in store.kept] == ["correct"] * 4 + ["runtime"]
    again = run(journal, store=store, problems=problems)
    lost = store.kept[4].values
    assert lost not in [r.values for r in store.kept[5:] if r.problem == PROBLEM]
    assert again.error is None


def test_a_lost_device_is_not_asked_to_clean_up(journal: Path) -> None:
    """Whatever is called on a lost device fails, and must not hide the record of the trial."""

    class Lost(FakeRunner):
        lost = False

        def measure(self, job: Job, workload: str, plan: MeasurePlan) -> Any:
            self.lost = True
            raise DeviceLostError("vkWaitForFences", "VK_ERROR_DEVICE_LOST", -4)

        def release(self, jobs: Sequence[Job]) -> None:
            if self.lost:
                raise DeviceLostError("vkDestroyPipeline", "VK_ERROR_DEVICE_LOST", -4)
            super().release(jobs)

        def unload(self, name: str) -> None:
            if self.lost:
                raise DeviceLostError("vkFreeMemory", "VK_ERROR_DEVICE_LOST", -4)
            super().unload(name)

    store, made = Records(), toy_runner()
    result = run(journal, store=store, runner=Lost(made.info, outputs=made._outputs), workers=3)
    assert "vkWaitForFences" in (result.error or "")
    assert [record.state for record in store.kept] == ["runtime"]


def test_nothing_is_prepared_that_could_not_be_tried_in_time(journal: Path) -> None:
    class Slow(FakeRunner):
        def measure(self, job: Job, workload: str, plan: MeasurePlan) -> Any:
            time.sleep(0.15)
            return super().measure(job, workload, plan)

    made = toy_runner()
    runner = Slow(made.info, outputs=made._outputs, times=made._times)
    result = run(journal, runner=runner, workers=8, trials=None, seconds=2.0)
    assert result.problems[0].ended == "seconds"
    stopped = [t for t in only_study(journal).trials if t.user_attrs.get("ended") == "stopped"]
    assert len(stopped) <= 3


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


def test_a_full_disk_stops_the_run_and_loses_nothing(journal: Path) -> None:
    store, runner = Records(), toy_runner()
    store.fail_after = 7
    with pytest.raises(ResultsError, match="No space left"):
        run(journal, store=store, runner=runner, trials=20)
    assert len(store.kept) == 7
    assert runner.jobs == []
    store.fail_after = None
    assert run(journal, store=store, trials=20).problems[0].trials == 20


def test_a_read_only_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="cannot keep the study here"):
        run(tmp_path / "file" / "study.journal")


def test_a_file_that_is_no_journal_is_said(journal: Path) -> None:
    journal.write_text("not a journal\nat all\n")
    with pytest.raises(ResultsError, match="no journal of Optuna's, or damaged"):
        run(journal)


def test_a_torn_last_line_of_the_journal_is_cut(journal: Path) -> None:
    store = Records()
    run(journal, store=store, trials=5)
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code": 4, "stu')
    assert run(journal, store=store, trials=8).problems[0].measured == 3


KILLED = """
    import os, signal, sys
    from pathlib import Path
    sys.path.insert(0, {root!r})
    from tests import test_search
    from tuner.results import Store

    class Killed(test_search.Watch):
        def trial_started(self, values, status):
            super().trial_started(values, status)
            if len(self.started) == {at}:
                os.kill(os.getpid(), signal.SIGKILL)

    with Store(Path({folder!r}) / "store") as store:
        test_search.run(
            Path({folder!r}) / "journal", store=store, progress=Killed(), trials=14, workers=2
        )
"""


def test_kill_9_loses_one_trial_and_the_next_run_goes_on(tmp_path: Path) -> None:
    from tuner.results import Store

    root = str(Path(__file__).parent.parent)
    script = textwrap.dedent(KILLED).format(root=root, folder=str(tmp_path), at=5)
    died = subprocess.run([sys.executable, "-c", script], check=False, timeout=120)
    assert died.returncode == -signal.SIGKILL
    with Store(tmp_path / "store") as store:
        assert len(store.records()) == 4
        result = run(tmp_path / "journal", store=store, trials=14, workers=2)  # type: ignore[arg-type]
        assert result.problems[0].trials == 14
        tried = [str(r.values) for r in store.records() if r.note not in (FINAL, REFERENCE)]
        assert len(tried) == len(set(tried)) == 14


def test_a_variant_under_way_at_every_crash_is_given_up(journal: Path) -> None:
    store = Records()
    guilty = {**TOY.baseline, "width": 64}
    encoding = Encoding(SPACE, ordinal=False)
    run(journal, store=store, trials=3)
    name = only_study(journal).study_name
    for _ in range(MAX_CRASHES):
        with contextlib.closing(open_storage(journal)) as storage:
            StudyLog(storage, name, encoding).start(guilty)
    result = run(journal, store=store, trials=10)
    record = next(r for r in store.kept if r.values == guilty)
    assert record.state == "runtime"
    assert "died 3 times" in (record.error or "")
    assert result.problems[0].trials == 10
    assert not [r for r in store.kept if r.values == guilty and r.median_ns]


@pytest.mark.parametrize(("boots", "given_up"), [("abc", True), ("aaa", False)])
def test_with_a_worker_only_the_death_of_the_machine_counts_against_a_variant(
    journal: Path, monkeypatch: pytest.MonkeyPatch, boots: str, given_up: bool
) -> None:
    guilty = {**TOY.baseline, "width": 64}
    run(journal, trials=3)
    name = only_study(journal).study_name
    for boot in boots:
        monkeypatch.setattr("tuner.search.studylog.boot_id", lambda boot=boot: boot)
        with contextlib.closing(open_storage(journal)) as storage:
            StudyLog(storage, name, Encoding(SPACE, ordinal=False), isolated=True).start(guilty)
    monkeypatch.setattr("tuner.search.studylog.boot_id", lambda: boots[-1].replace("c", "d"))
    store = Records()
    run(journal, store=store, trials=10)
    (record,) = (record for record in searched(store) if record.values == guilty)
    assert (record.state == "runtime") == given_up


# ---- throughput


def test_preparing_overlaps_timing(journal: Path) -> None:
    """Eight variants of 3 x 50 ms of preparation each take far less than 1.2 s on 8 workers."""
    runner = toy_runner(prepare_seconds=0.05)
    started = time.monotonic()
    run(journal, runner=runner, trials=8, workers=8, sampler="grid")
    assert time.monotonic() - started < 1.0


def by_thread(made: list[tuple[str, str]]) -> Family:
    """The toy, which notes what host work is done on which thread."""

    def note(what: str) -> None:
        made.append((what, threading.current_thread().name.rstrip("0123456789_")))

    def reference(operands: Operands, of: Reference) -> Reference:
        def bounds(arithmetic: Any) -> Any:
            note(f"bounds {arithmetic}")
            return of.bounds(arithmetic)

        return replace(of, bounds=bounds)

    def operands(problem: Problem, inputs: str, seed: int) -> Operands:
        note(f"{inputs} {problem.label}")
        return TOY.operands(problem, inputs, seed)

    return replace(
        TOY,
        operands=operands,
        scalars=lambda problem: TOY.operands(problem, "timing", 0).scalars,
        reference=lambda o: reference(o, TOY.reference(o)),
        sampled_reference=lambda o, groups: reference(o, TOY.sampled_reference(o, groups)),
    )


def test_the_device_thread_makes_no_operands_and_no_bounds(journal: Path) -> None:
    made: list[tuple[str, str]] = []
    second = toy_problem(2, 4096)
    run(journal, family=by_thread(made), problems=(PROBLEM, second), trials=40, workers=2)
    assert {what for what, _ in made} >= {"bounds f32", "bounds f16"}
    assert {thread for what, thread in made if what != f"timing {second.label}"} == {
        "prepare",
        "scout",
    }
    # While the first problem is searched, the second's are made.
    assert [thread for what, thread in made if what == f"timing {second.label}"] == ["scout"]


def test_nothing_is_made_ahead_on_a_cpu_device(journal: Path) -> None:
    made: list[tuple[str, str]] = []
    runner = toy_runner(info=toy_device(kind="cpu"))
    problems = (PROBLEM, toy_problem(2, 4096))
    run(journal, family=by_thread(made), problems=problems, runner=runner, workers=2)
    assert "scout" not in {thread for _, thread in made}
    assert "keep_warm" not in {call.method for call in runner.calls}


def test_an_interrupt_begins_nothing_for_the_next_problem(journal: Path) -> None:
    made: list[tuple[str, str]] = []

    class Impatient(Silent):
        def trial_finished(self, record: Record, status: Status) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    problems = (PROBLEM, toy_problem(2, 4096))
    result = run(journal, family=by_thread(made), problems=problems, progress=Impatient())
    assert (result.interrupted, result.measured) == (True, 1)
    assert "scout" not in {thread for _, thread in made}


def test_the_device_is_kept_warm_wherever_it_would_wait(journal: Path) -> None:
    """Before each finalist is prepared again, and from the finals to the next problem's trials."""
    runner = toy_runner(times=lambda job, workload: 1e5)
    waits: list[tuple[int, int]] = []

    class Marking(Silent):
        def finals_started(self, count: int, status: Status) -> None:
            waits.append((len(runner.calls), count))

        def problem_finished(self, result: Any) -> None:
            waits.append((len(runner.calls), 1))

    problems = (PROBLEM, toy_problem(2, 4096))
    run(journal, runner=runner, problems=problems, progress=Marking(), workers=2)
    *waits, _end = waits
    assert max(count for _, count in waits) == 6
    methods = [call.method for call in runner.calls]
    for begun, count in waits:
        before = max(n for n in range(begun) if methods[n] == "measure")
        between = methods[before : methods.index("measure", begun)]
        assert between.count("keep_warm") > count


def test_the_finals_do_not_wait_for_what_is_left_over(journal: Path) -> None:
    """The last variants take longer to prepare than the search has time."""
    finals = threading.Event()

    class Slow(FakeRunner):
        late: int = 0

        def prepare(self, jobs: Sequence[Job]) -> Any:
            if threading.current_thread().name.startswith("prepare") and len(self.calls) > 60:
                self.late += not finals.wait(20.0)
            return super().prepare(jobs)

    class Told(Silent):
        def finals_started(self, count: int, status: Status) -> None:
            finals.set()

    made = toy_runner()
    runner = Slow(made.info, outputs=made._outputs, times=made._times)
    result = run(journal, runner=runner, trials=None, seconds=1.0, workers=2, progress=Told())
    assert (result.problems[0].ended, runner.late) == ("seconds", 0)
    assert not runner.jobs, "what is left over is released"


def test_the_pace_is_that_of_the_search_alone(journal: Path) -> None:
    class Timed(FakeRunner):
        def measure(self, job: Job, workload: str, plan: MeasurePlan) -> Any:
            time.sleep(0.02)
            return super().measure(job, workload, plan)

        def load(self, name: str, *arguments: Any, **options: Any) -> None:
            if "timing" in name:
                time.sleep(0.2)
            super().load(name, *arguments, **options)

    made, store = toy_runner(), Records()
    runner = Timed(made.info, outputs=made._outputs, times=made._times)
    result = run(journal, runner=runner, store=store, trials=20, reference_every=0, workers=4)
    (problem,) = result.problems
    assert 20 * 0.02 + 0.2 <= problem.search_seconds < problem.seconds <= result.seconds
    assert result.pace == 20 / problem.search_seconds
    again = run(journal, runner=runner, store=store, trials=20)
    assert (again.measured, again.pace) == (0, None)


def test_a_cpu_device_is_never_timed_while_variants_are_prepared(journal: Path) -> None:
    active: list[str] = []
    seen: list[list[str]] = []

    class Careful(FakeRunner):
        def prepare(self, jobs: Sequence[Job]) -> Any:
            active.append("prepare")
            time.sleep(0.005)
            try:
                return super().prepare(jobs)
            finally:
                active.remove("prepare")

        def measure(self, job: Job, workload: str, plan: MeasurePlan) -> Any:
            seen.append(list(active))
            return super().measure(job, workload, plan)

    made = toy_runner()
    runner = Careful(toy_device(kind="cpu"), outputs=made._outputs, times=made._times)
    run(journal, runner=runner, trials=9, workers=3)
    assert len(seen) >= 9
    assert not any(seen)


# ---- encoding


@pytest.mark.parametrize("ordinal", [False, True])
def test_encodings_go_there_and_back(ordinal: bool) -> None:
    small = legal(TOY, toy_problem(1, 1), toy_device())
    encoding = Encoding(small, ordinal=ordinal)
    assert "split" not in encoding.distributions
    for values in small:
        assert encoding.values(encoding.params(values)) == values
    kinds = {type(d).__name__ for d in encoding.distributions.values()}
    assert kinds == ({"IntDistribution"} if ordinal else {"CategoricalDistribution"})


def test_digests_tell_spaces_apart() -> None:
    spaces = [SPACE, legal(TOY, toy_problem(1, 1), toy_device())]
    digests = {Encoding(s, ordinal=o).digest for s, o in itertools.product(spaces, (False, True))}
    assert len(digests) == 4
