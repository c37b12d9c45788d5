"""What a search does at the same time: host work beside the device's, which need not wait."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.toy_family import TOY, toy_device, toy_problem, toy_runner
from tests.toy_search import PROBLEM, Records, only_study, run
from tuner.kernels.base import Family, Operands, Reference
from tuner.problems import Problem
from tuner.records import Record
from tuner.runner.fake import FakeRunner
from tuner.runner.protocol import Job, MeasurePlan
from tuner.search import Silent, Status


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


def test_the_device_is_kept_warm_between_uploads(journal: Path) -> None:
    """A clock that has fallen takes half a second to settle, at each problem's first trial."""
    runner = toy_runner()
    run(journal, runner=runner, problems=(PROBLEM, toy_problem(2, 4096)), trials=8, workers=2)
    # Other threads may prepare a variant meanwhile.
    methods = [call.method for call in runner.calls if call.method != "prepare"]
    loads = [n for n, method in enumerate(methods) if method == "load"]
    assert len(loads) == 4, "two validation cases, and each problem's operands"
    assert {methods[n + 1] for n in loads} == {"keep_warm"}


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
