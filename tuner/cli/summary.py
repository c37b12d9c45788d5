"""What `tune` came to, as text and as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.output import microseconds, note, percent, print_table, say
from tuner.cli.session import warn_of_host_clock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tuner.device_info import DeviceInfo
    from tuner.records import Calibration, Record, State
    from tuner.results import Outcome
    from tuner.search import ProblemResult, RunResult, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The files of a run beside its records; without a configuration `error` says why.

    `outcomes` are what all records of today's kernels come to, those of earlier runs included.
    """

    best_config: Path | None = None
    plots: tuple[Path, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    error: str | None = None

    def tried(self, result: ProblemResult) -> tuple[int, Mapping[State, int]]:
        """How many variants of a problem have a result, and how those failed that did: as
        `results.md` counts, where values that come to the same launches are one variant."""
        for found in self.outcomes:
            if (found.family, found.problem) == (result.family.name, result.problem):
                return len(found.records), found.failures
        return 0, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A run on a device: what it came to, what it has written, the folder of its results."""

    info: DeviceInfo
    result: RunResult
    written: Written
    calibration: Calibration | None
    folder: Path

    def beside(self, others: Sequence[ProblemResult], *, order: Sequence[Task]) -> Ran:
        """The same with the results of problems that were not searched, in the order of tasks."""
        results = (*self.result.problems, *others)
        by_task = {(each.family.name, each.problem): each for each in results}
        tasks = [(family.name, problem) for family, problem in order]
        problems = tuple(by_task[task] for task in tasks if task in by_task)
        return replace(self, result=replace(self.result, problems=problems))

    @property
    def error(self) -> str | None:
        """What ended the run early, or could not be exported."""
        return self.result.error or self.written.error

    @property
    def ok(self) -> bool:
        """Whether every problem has a best variant, and it is exported."""
        return self.error is None and all(each.best for each in self.result.problems)


def print_result(ran: Ran) -> None:
    """The result as text; what went wrong goes to standard error."""
    result, written = ran.result, ran.written
    several = len({each.family.name for each in result.problems}) > 1
    named = [
        (each, f"{each.family.name} {each.problem.label}" if several else each.problem.label)
        for each in result.problems
    ]
    say()
    print_table(
        ("problem", "baseline µs", "best µs", "speed-up", "of read", "tried", "failed"),
        [_row(each, written, name) for each, name in named],
        right=("baseline µs", "best µs", "speed-up", "of read", "tried", "failed"),
    )
    say()
    for each, name in named:
        say(f"{name}: {_variant(each)}")
        for record in each.front:
            say(f"  {_priced(each, record)}")
    say()
    say(f"{_throughput(result)}; results in {ran.folder}/")
    for path in (written.best_config, *written.plots):
        if path is not None:
            say(f"  {path}")
    warn_of_host_clock(each.best for each in result.problems if each.best)
    if lower := _lower_clocks(ran, named):
        note(lower)
    if written.error:
        what = "not exported" if written.best_config is None else "not everything was written"
        note(f"{what}: {written.error}")
    if shortage := _shortage(result):
        note(shortage)
    if result.error:
        note(f"stopped early: {result.error}")
    if result.interrupted:
        note("interrupted: run the same command again to go on")


def _throughput(result: RunResult) -> str:
    """What this run tried, and how fast."""
    variants = "1 variant" if result.measured == 1 else f"{result.measured} variants"
    said = f"{variants} tried in {result.seconds:.0f} s"
    if result.pace is None:
        return said
    return f"{said}, {result.pace:.2g} a second while searching, device busy {percent(result.busy)}"


def _shortage(result: RunResult) -> str | None:
    """What to say where the seconds were too few to search in; None where they were not."""
    from tuner.search import LEAST_TRIALS

    short = sum(each.is_short for each in result.problems)
    if not short:
        return None
    said = f"the time was too short: {short} of {len(result.problems)} problems had no time for "
    said += f"more than their first {LEAST_TRIALS} trials"
    if result.seconds_over >= 1:
        said += f", and even so the run took {result.seconds_over:.0f} s more"
    return f"{said}; give more --seconds, and the same command goes on from here"


def _lower_clocks(ran: Ran, named: Sequence[tuple[ProblemResult, str]]) -> str | None:
    """What was timed on a lower clock than the calibration or something else: best and baseline."""
    from tuner.results import clocks

    if ran.info.is_cpu:
        return None
    bests = [(name, each.best) for each, name in named if each.best]
    baselines = [
        (f"the baseline of {name}", each.baseline)
        for each, name in named
        if each.baseline and each.baseline is not each.best
    ]
    timed = bests + baselines
    calibrated = None if ran.calibration is None else ran.calibration.clock_state
    best_ns = clocks.fastest_ns((*(record.clock_state for _, record in timed), calibrated))
    lower = [
        f"{name} ({microseconds(clocks.reference_ns(record.clock_state))} µs)"
        for name, record in timed
        if clocks.is_lower(record, best_ns)
    ]
    if not lower:
        return None
    return (
        "timed on a lower clock than the device can have (the reference kernel took more than its "
        f"{microseconds(best_ns)} µs), and no sensor names a reason: {', '.join(lower)}; such "
        "times are too long, if anything, and of a baseline the speed-up too large"
    )


def _row(result: ProblemResult, written: Written, name: str) -> tuple[str, ...]:
    best, baseline = result.best, result.baseline
    tried, failures = written.tried(result)
    best_ns = None if best is None else best.median_ns
    baseline_ns = None if baseline is None else baseline.median_ns
    return (
        name,
        microseconds(baseline_ns),
        microseconds(best_ns),
        f"{baseline_ns / best_ns:.1f}x" if best_ns and baseline_ns else "-",
        percent(None if best is None else best.utilisation),
        str(tried),
        str(sum(failures.values())),
    )


def _variant(result: ProblemResult) -> str:
    from tuner.cli.variants import describe

    if result.best is None:
        why = result.error or ("no correct variant" if result.trials else "nothing was tried yet")
        return why.removeprefix(f"{result.problem.label} ")
    said = describe(result.family, result.best.values)
    beaten = result.baseline is None or result.best.values != result.baseline.values
    return said if beaten else f"{said}, the baseline: nothing was faster"


def _priced(result: ProblemResult, record: Record) -> str:
    """A variant of the front of time and energy, in one line."""
    from tuner.cli.variants import describe

    joules = record.energy_j_per_token
    assert joules is not None
    price = f"{microseconds(record.median_ns)} µs, {1e3 * joules:.3g} mJ/token"
    return f"{price}: {describe(result.family, record.values)}"


def as_data(ran: Ran) -> dict[str, Any]:
    """The result as plain data."""
    result = ran.result
    return {
        "device": ran.info.name,
        "driver": ran.info.driver,
        "calibration": ran.calibration,
        "interrupted": result.interrupted,
        "error": ran.error,
        "seconds": result.seconds,
        "seconds_over": result.seconds_over,
        "measured": result.measured,
        "tried_per_second": result.pace,
        "busy": result.busy,
        "problems": [_problem_as_data(each, *ran.written.tried(each)) for each in result.problems],
        "results": ran.folder,
        "best_config": ran.written.best_config,
        "plots": ran.written.plots,
    }


def _problem_as_data(
    result: ProblemResult, tried: int, failures: Mapping[State, int]
) -> dict[str, Any]:
    return {
        "family": result.family.name,
        "problem": result.problem,
        "ended": result.ended,
        "short": result.is_short,
        "error": result.error,
        "legal": result.legal,
        "tried": tried,
        "failures": failures,
        "trials": result.trials,
        "measured": result.measured,
        "known": result.known,
        "seconds": result.seconds,
        "search_seconds": result.search_seconds,
        "busy": result.busy,
        "baseline": result.baseline,
        "best": result.best,
        "front": result.front,
    }
