"""Can the clock be trusted? One variant timed again and again on a real device.

    .venv/bin/python scripts/clock_experiment.py FOLDER [--device NAME] [--idle 20] [--trap-idle 5]

Three questions, at most 150 s with the defaults:

1. Timed ten times in rounds, five of them right after idling: do the medians agree within 1 %?
2. The same after idling, but without waiting for the clock: what would have been believed?
3. Do the device's timestamps agree within 2 % with the host's clock around 200 launches?

Writes `clock.json` and `clock.png` into FOLDER and prints tables in Markdown. Exit code 1 if the
first or the third answer is no, which on a CPU driver means nothing.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tuner import kernels
from tuner.cli.variants import chosen_variant
from tuner.compile import Compiler
from tuner.evaluate import Evaluator, PreparedTrial, utc_now
from tuner.kernels import space
from tuner.plots import save, style
from tuner.records import Observation
from tuner.results.files import write_atomic
from tuner.runner.protocol import Measurement, MeasurePlan
from tuner.runner.worker import WorkerRunner
from tuner.shapes import parse_shape
from tuner.timing import summarise

SETTLED_WITHIN, CLOCKS_WITHIN = 0.01, 0.02
BATCH = 200
ROUNDS = 8
RISE_MS = 900.0
"""Device time over which the rise of the clock after idling is followed."""
Kind = Literal["warm", "after idling", "after idling, not settled"]
COLOURS: dict[Kind, str] = {
    "warm": style.GREY,
    "after idling": style.BLUE,
    "after idling, not settled": style.VERMILION,
}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement; times in nanoseconds."""

    kind: Kind
    idle_s: float
    median_ns: float
    low_ns: float
    high_ns: float
    samples: int
    settled_ms: float
    steady: bool
    reference_ns: tuple[float, ...]
    observed: Observation | None


class ClockFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The same kernel by each clock and measure: median nanoseconds of a launch."""

    isolated_device_ns: float
    batched_device_ns: float
    batched_host_ns: float
    launches: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that the experiment found. `rise` pairs milliseconds of load with a sample in ns."""

    time: str
    device: str
    driver: str
    family: str
    problem: str
    values: dict[str, int | str]
    runs: tuple[Run, ...]
    settled_spread: float
    trap: float
    rise: tuple[tuple[float, float], ...]
    clocks: ClockFigures
    clocks_apart: float


class Experiment:
    """A validated variant on a device, ready to be timed."""

    def __init__(self, evaluator: Evaluator, trial: PreparedTrial) -> None:
        self.evaluator, self.trial = evaluator, trial

    def measure(self, plan: MeasurePlan) -> Measurement:
        """Time it."""
        return self.evaluator.measure(self.trial, plan)

    def run(self, kind: Kind, idle_s: float) -> Run:
        """Rounds of measurements, as the finals of a tuning run take them, but for `kind`.

        Single measurements of one variant lie further apart than their samples tell (0.56 % of
        standard deviation on the H200); what is measured without care has no rounds either.
        """
        time.sleep(idle_s)
        hasty = kind == "after idling, not settled"
        plan = MeasurePlan(settle="never" if hasty else "after_idle")
        rounds = [self.measure(plan) for _ in range(1 if hasty else ROUNDS)]
        measured = rounds[0]
        samples = [sample for each in rounds for sample in each.samples_ns]
        summary = summarise(samples, tuple(len(each.samples_ns) for each in rounds))
        state = measured.clock_state
        assert state is not None
        return Run(
            kind=kind,
            idle_s=idle_s,
            median_ns=summary.median_ns,
            low_ns=summary.low_ns,
            high_ns=summary.high_ns,
            samples=summary.count,
            settled_ms=state.settled_ms,
            steady=state.steady,
            reference_ns=state.reference_ns,
            observed=measured.observed,
        )

    def rise(self, idle_s: float, each_ns: float) -> tuple[tuple[float, float], ...]:
        """Samples from the first launch after idling on, and how long the load was by then."""
        count = max(10, round(RISE_MS * 1e6 / each_ns))
        time.sleep(idle_s)
        plan = MeasurePlan(
            settle="never",
            warmup_ms=0.0,
            precision=0.0,
            min_samples=count,
            max_samples=count,
            budget_ms=RISE_MS,
        )
        samples = self.measure(plan).samples_ns
        spent_ms = (spent / 1e6 for spent in itertools.accumulate(samples))
        return tuple(zip(spent_ms, samples, strict=True))

    def clocks(self) -> ClockFigures:
        """Timestamps of the device, and the host's clock around batches."""
        long = MeasurePlan(
            settle="always", measure="batched", batch_launches=BATCH, min_samples=10, budget_ms=500
        )
        by_host = self.measure(msgspec.structs.replace(long, clock="host"))
        batched = self.measure(long)
        isolated = self.measure(MeasurePlan(settle="always"))
        return ClockFigures(
            isolated_device_ns=statistics.median(isolated.samples_ns),
            batched_device_ns=statistics.median(batched.samples_ns),
            batched_host_ns=statistics.median(by_host.samples_ns),
            launches=by_host.launches,
        )


@contextmanager
def prepared(given: argparse.Namespace) -> Iterator[Experiment]:
    """The variant, validated on the device. Exits where it is not right."""
    family, problem = kernels.family(given.family), parse_shape(given.shape)
    with closing(WorkerRunner(given.device)) as runner:
        values = chosen_variant(family, given.set, problem, runner.info)
        evaluator = Evaluator(runner, Compiler(), family, problem)
        trial = evaluator.prepare(evaluator.draft(space.canonical(family, values)))
        evaluator.load()
        findings = evaluator.validate(trial).followed_by(evaluator.check_sampled(trial))
        if findings.failure is not None:
            sys.exit(f"{findings.failure.state}: {findings.failure.error}")
        yield Experiment(evaluator, trial)


def investigate(subject: Experiment, given: argparse.Namespace) -> Report:
    """All measurements, in an order that lets the device idle no more often than needed."""
    clocks = subject.clocks()
    runs = []
    for _ in range(given.runs):
        runs += [subject.run("warm", 0.0), subject.run("after idling", given.idle)]
    runs += [
        subject.run("after idling, not settled", given.trap_idle) for _ in range(given.trap_runs)
    ]
    settled = [run.median_ns for run in runs if run.kind != "after idling, not settled"]
    hasty = [run.median_ns for run in runs if run.kind == "after idling, not settled"]
    info, draft = subject.evaluator.runner.info, subject.trial.draft
    apart = clocks.batched_host_ns / clocks.batched_device_ns - 1
    return Report(
        time=utc_now(),
        device=info.name,
        driver=info.driver,
        family=subject.evaluator.family.name,
        problem=subject.evaluator.problem.label,
        values=dict(draft.values),
        runs=tuple(runs),
        settled_spread=max(settled) / min(settled) - 1,
        trap=max(hasty) / statistics.median(settled) - 1,
        rise=subject.rise(given.trap_idle, statistics.median(settled)),
        clocks=clocks,
        clocks_apart=apart,
    )


def print_report(report: Report) -> None:
    """Tables in Markdown."""
    print(f"{report.device}, {report.driver}, {report.time[:10]}: {report.problem}\n")
    print("| run | idle s | median µs | interval µs | load ms | reference µs | core MHz |")
    print("|---|---|---|---|---|---|---|")
    for run in report.runs:
        interval = f"{run.low_ns / 1e3:.2f} to {run.high_ns / 1e3:.2f}"
        mhz = run.observed.core_mhz if run.observed else None
        shown = "-" if mhz is None else f"{mhz[0]:.0f} to {mhz[1]:.0f}"
        print(
            f"| {run.kind} | {run.idle_s:g} | {run.median_ns / 1e3:.2f} | {interval} | "
            f"{run.settled_ms:.0f} | {run.reference_ns[-1] / 1e3:.2f} | {shown} |"
        )
    clocks = report.clocks
    print(f"\nsettled medians lie within {100 * report.settled_spread:.2f} %")
    print(f"without settling the slowest is off by {100 * report.trap:+.1f} %\n")
    print("| clock | measure | µs a launch |\n|---|---|---|")
    print(f"| device | isolated | {clocks.isolated_device_ns / 1e3:.3f} |")
    print(f"| device | batched, {clocks.launches} | {clocks.batched_device_ns / 1e3:.3f} |")
    print(f"| host | batched, {clocks.launches} | {clocks.batched_host_ns / 1e3:.3f} |")
    print(f"\nthe two clocks are {100 * abs(report.clocks_apart):.2f} % apart")


def drawn(report: Report, software: bool) -> Figure:
    """Medians by run beside the rise of the clock."""
    figure = style.new_figure(
        9.5,
        3.6,
        title="One variant timed again and again",
        sources=[],
        note=f"{report.device} · {report.driver} · {report.time[:10]} · {report.problem}",
        software=software,
    )
    runs, rise = figure.subplots(1, 2)
    draw_runs(runs, report)
    draw_rise(rise, report)
    for axes in (runs, rise):
        style.dress(axes, grid="y")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("µs", size=style.TEXT_SIZE, color=style.TEXT)
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=style.SMALL_SIZE)
    return figure


def draw_runs(axes: Axes, report: Report) -> None:
    """Medians with their intervals, in the order of the runs."""
    for kind, colour in COLOURS.items():
        chosen = [(n, run) for n, run in enumerate(report.runs, 1) if run.kind == kind]
        axes.errorbar(
            [n for n, _ in chosen],
            [run.median_ns / 1e3 for _, run in chosen],
            yerr=[
                [(run.median_ns - run.low_ns) / 1e3 for _, run in chosen],
                [(run.high_ns - run.median_ns) / 1e3 for _, run in chosen],
            ],
            fmt="o",
            color=colour,
            capsize=3,
            label=kind,
        )
    axes.set_title("median and its interval, by run", size=style.TEXT_SIZE, loc="left")
    axes.set_xlabel("run", size=style.TEXT_SIZE, color=style.TEXT)


def draw_rise(axes: Axes, report: Report) -> None:
    """Samples against the load before them, and where settling begins to ask the reference."""
    axes.plot(
        [ms for ms, _ in report.rise],
        [ns / 1e3 for _, ns in report.rise],
        ".",
        markersize=2.5,
        color=style.VERMILION,
    )
    axes.axvline(MeasurePlan().settle_ms, color=style.GREY, linestyle="--", linewidth=1.2)
    axes.set_title("single launches from idle on", size=style.TEXT_SIZE, loc="left")
    axes.set_xlabel(
        "load so far, ms (dashed: the least that settling takes)", size=style.SMALL_SIZE
    )


def main() -> int:
    """Measure, write, print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--family", default="paged_decode_q8")
    parser.add_argument("--shape", default="8x16384:h32/8:d128")
    parser.add_argument("--set", action="append", metavar="NAME=VALUE")
    parser.add_argument("--idle", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--trap-idle", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument(
        "--runs", type=int, default=5, help="pairs of a warm run and one after idle"
    )
    parser.add_argument("--trap-runs", type=int, default=3)
    given = parser.parse_args()
    with prepared(given) as subject:
        report = investigate(subject, given)
        software = subject.evaluator.runner.info.is_cpu
    given.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(given.folder / "clock.json", msgspec.json.encode(report) + b"\n")
    save(drawn(report, software), given.folder / "clock.png")
    print_report(report)
    if software:
        print(f"\n{style.SOFTWARE_NOTE}")
    good = report.settled_spread <= SETTLED_WITHIN and abs(report.clocks_apart) <= CLOCKS_WITHIN
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
