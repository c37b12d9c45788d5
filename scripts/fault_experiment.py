"""Two equal tuning runs on a real device, one of them beset by faults: do both find the same best?

    .venv/bin/python scripts/fault_experiment.py FOLDER [--device NAME] [--trials N] [--shape SHAPE]

Both try the same variants, drawn at random. In the second run three of them, which the first found
right and neither fastest nor slowest, go wrong: one scales its scores by half too much, one asks
for more threads than a kernel may have, one kills the worker process by a signal whenever it is
launched. Besides, the worker is killed once from outside. Nothing here hangs a device or writes out
of bounds, so it may run on a shared GPU; half a minute on an H200. Prints tables in Markdown; exit
code 1 if the faults are not recorded as they should be, or the two runs do not end alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner import kernels, templates
from tuner.compile import Compiler
from tuner.device_info import DeviceInfo
from tuner.evaluate import Session, build_job
from tuner.kernels.base import Candidate, Values
from tuner.problems import Problem
from tuner.records import FINAL, Record, State
from tuner.results import Store
from tuner.results.outcomes import interval
from tuner.runner.protocol import Assignment, Execution, Job
from tuner.runner.vulkan import VulkanRunner
from tuner.runner.worker import WorkerRunner
from tuner.search import ProblemResult, Settings, Silent, Status, tune
from tuner.shapes import parse_shape
from tuner.templates import Rendered

FAMILY = kernels.family("paged_decode_q8")
KILLED_AFTER_TRIALS = 10


class MortalRunner(VulkanRunner):
    """Ends its process, as a driver that crashes does, when one of the `fatal` jobs is launched."""

    def __init__(self, selector: str | None = None, *, fatal: list[str], **options: Any) -> None:
        # First, since the device is probed by launching jobs while it is opened.
        self._fatal = frozenset(fatal)
        super().__init__(selector, **options)

    def execute(self, assignments: Sequence[Assignment]) -> Iterator[Execution]:
        """See `Runner.execute`."""
        if any(name_of(job) in self._fatal for job, _ in assignments):
            signal.raise_signal(signal.SIGSEGV)
        return super().execute(assignments)


def name_of(job: Job) -> str:
    """A text that is the same for equal jobs in every process."""
    return repr(job.key)


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The variants that go wrong in the second run."""

    wrong: Values
    over_limit: Values
    fatal: Values
    device: DeviceInfo

    def render(self, template: str, context: Mapping[str, Any]) -> Rendered:
        """Render, two of them as kernels gone wrong."""
        rendered = templates.render(template, context)
        text = rendered.text
        if context["values"] == self.wrong:
            text = text.replace("push.softmax_scale", "(1.5 * push.softmax_scale)")
        if context["values"] == self.over_limit:
            text = re.sub(r"local_size_x = \d+", "local_size_x = 65536", text)
        return dataclasses.replace(rendered, text=text)

    def expected(self) -> list[tuple[Values, State, str]]:
        """How each of them is to be recorded: state, and a word of the error."""
        return [
            (self.wrong, "correctness", "is off by"),
            (self.over_limit, "compile", "too large"),
            (self.fatal, "runtime", "SIGSEGV"),
        ]


class Killing(Silent):
    """Kills the worker once, in the middle of the run."""

    def __init__(self, runner: WorkerRunner) -> None:
        self._runner = runner
        self._finished = 0

    def trial_finished(self, record: Record, status: Status) -> None:
        """One more."""
        self._finished += 1
        if self._finished == KILLED_AFTER_TRIALS:
            os.kill(self._runner.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Outcome:
    """What a run left: its result, its records, the workers it lost, and how long it took."""

    device: DeviceInfo
    result: ProblemResult
    records: tuple[Record, ...]
    losses: int
    seconds: float


def run(folder: Path, given: argparse.Namespace, faults: Faults | None) -> Outcome:
    """One tuning run with its records in `folder`, beset by faults if there are any."""
    started, problem = time.monotonic(), parse_shape(given.shape)
    fatal = [] if faults is None else [name_of(job_of(faults.fatal, problem, faults.device))]
    runner = WorkerRunner(
        given.device,
        factory=f"{Path(__file__).stem}:{MortalRunner.__name__}",
        options={"fatal": fatal},
    )
    with closing(runner), Store(folder) as store:
        store.write_device(runner.info)
        found = tune(
            runner,
            Compiler(),
            [(FAMILY, problem)],
            store,
            storage=folder / "studies.jsonl",
            settings=Settings(trials=given.trials, sampler="random", seed=1),
            session=Session(name="calm" if faults is None else "faults"),
            progress=None if faults is None else Killing(runner),
            render=templates.render if faults is None else faults.render,
        )
        seconds = time.monotonic() - started
        return Outcome(runner.info, found.problems[0], store.records(), runner.losses, seconds)


def job_of(values: Values, problem: Problem, device: DeviceInfo) -> Job:
    """The job with which a variant is timed."""
    candidate = Candidate(values, problem, device)
    return build_job(FAMILY, candidate, FAMILY.timing_scalars(problem), Compiler()).job


def choose(calm: Outcome) -> Faults:
    """Three variants from the middle of the field."""
    finalists = {record.variant for record in calm.records if record.note == FINAL}
    field = sorted(
        (
            record
            for record in calm.records
            if record.state == "correct"
            and record.variant not in finalists
            and record.values["strategy"] != "baseline"
        ),
        key=lambda record: record.median_ns or 0.0,
    )
    if len(field) < 4:
        sys.exit(f"only {len(field)} variants to choose from: give more --trials")
    wrong, over_limit, fatal = (field[len(field) * n // 4].values for n in (1, 2, 3))
    return Faults(wrong=wrong, over_limit=over_limit, fatal=fatal, device=calm.device)


def main() -> None:
    """Run both and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--shape", default="8x4096:h32/8:d128")
    given = parser.parse_args()
    calm = run(given.folder / "calm", given, None)
    faults = choose(calm)
    beset = run(given.folder / "faults", given, faults)
    print(f"{FAMILY.name} on {given.shape}, {calm.device.name} ({calm.device.driver}):\n")
    print("| run | records | states | workers lost | ended | best µs | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name, outcome in (("calm", calm), ("faults", beset)):
        states = ", ".join(f"{n} {s}" for s, n in Counter(r.state for r in outcome.records).items())
        best = outcome.result.best
        best_us = "-" if best is None else f"{(best.median_ns or 0.0) / 1e3:.2f}"
        cells = (len(outcome.records), states, outcome.losses, outcome.result.ended, best_us)
        print(f"| {name} | " + " | ".join(map(str, cells)) + f" | {outcome.seconds:.0f} |")
    agree = [same_best(calm, beset), *as_planned(beset, faults)]
    sys.exit(0 if all(agree) else 1)


def as_planned(beset: Outcome, faults: Faults) -> list[bool]:
    """Whether each fault left the record that it should, and no other variant failed."""
    print("\n| what was made of it | state | error |\n|---|---|---|")
    failed = {str(r.values): r for r in beset.records if r.state != "correct"}
    agree = []
    for values, state, word in faults.expected():
        record = failed.pop(str(dict(values)), None)
        said = "" if record is None else (record.error or "").replace("|", "/")
        agree.append(record is not None and record.state == state and word in said)
        shown = " ".join(f"{name}={value}" for name, value in FAMILY.meaningful(values).items())
        print(f"| {shown} | {'correct' if record is None else record.state} | {brief(said)} |")
    for record in failed.values():
        print(f"\nnot planned: {record.state}: {record.error}")
    return [*agree, not failed]


def brief(error: str) -> str:
    """Beginning and end of a long message: the values of a variant stand in the middle."""
    return error if len(error) <= 200 else f"{error[:80]} … {error[-120:]}"


def same_best(calm: Outcome, beset: Outcome) -> bool:
    """Whether the same variant won, or one that is as fast by the intervals of both runs."""
    first, second = calm.result.best, beset.result.best
    if first is None or second is None:
        return False
    if first.values == second.values:
        print("\nthe same variant is best")
        return True
    (low, high), (other_low, other_high) = interval(first), interval(second)
    tied = bool(low <= other_high and other_low <= high)
    print(f"\nanother variant is best; the intervals {'overlap' if tied else 'do not overlap'}")
    return tied


if __name__ == "__main__":
    main()
