"""What `tune` came to, as text and as data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.output import microseconds, note, percent, print_table, say

if TYPE_CHECKING:
    from tuner.device_info import DeviceInfo
    from tuner.records import Calibration, Record
    from tuner.search import ProblemResult, RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The files of a run beside its records; without a configuration `error` says why."""

    best_config: Path | None = None
    plots: tuple[Path, ...] = ()
    error: str | None = None


def print_result(result: RunResult, folder: Path, written: Written) -> None:
    """The result as text; what went wrong goes to standard error."""
    say()
    print_table(
        ("problem", "baseline µs", "best µs", "speed-up", "of read", "trials", "failed"),
        [_row(each) for each in result.problems],
        right=("baseline µs", "best µs", "speed-up", "of read", "trials", "failed"),
    )
    say()
    for each in result.problems:
        say(f"{each.problem.label}: {_variant(each)}")
        for record in each.front:
            say(f"  {_priced(each, record)}")
    say()
    variants = "1 variant" if result.measured == 1 else f"{result.measured} variants"
    say(f"{variants} measured in {result.seconds:.0f} s; results in {folder}/")
    for path in (written.best_config, *written.plots):
        if path is not None:
            say(f"  {path}")
    if written.error:
        note(f"not exported: {written.error}")
    if result.error:
        note(f"stopped early: {result.error}")
    if result.interrupted:
        note("interrupted: run the same command again to go on")


def _row(result: ProblemResult) -> tuple[str, ...]:
    best, baseline = result.best, result.baseline
    best_ns = None if best is None else best.median_ns
    baseline_ns = None if baseline is None else baseline.median_ns
    return (
        result.problem.label,
        microseconds(baseline_ns),
        microseconds(best_ns),
        f"{baseline_ns / best_ns:.1f}x" if best_ns and baseline_ns else "-",
        percent(None if best is None else best.utilisation),
        str(result.trials),
        str(sum(result.failures.values())),
    )


def _variant(result: ProblemResult) -> str:
    from tuner.cli.variants import describe

    if result.best is None:
        return result.error or "no correct variant"
    return describe(result.family, result.best.values)


def _priced(result: ProblemResult, record: Record) -> str:
    """A variant of the front of time and energy, in one line."""
    from tuner.cli.variants import describe

    joules = record.energy_j_per_token
    assert joules is not None
    price = f"{microseconds(record.median_ns)} µs, {1e3 * joules:.3g} mJ/token"
    return f"{price}: {describe(result.family, record.values)}"


def as_data(
    result: RunResult,
    info: DeviceInfo,
    calibration: Calibration | None,
    folder: Path,
    written: Written,
) -> dict[str, Any]:
    """The result as plain data."""
    return {
        "device": info.name,
        "driver": info.driver,
        "calibration": calibration,
        "interrupted": result.interrupted,
        "error": result.error or written.error,
        "seconds": result.seconds,
        "measured": result.measured,
        "busy": result.busy,
        "problems": [
            {
                "family": each.family.name,
                "problem": each.problem,
                "ended": each.ended,
                "error": each.error,
                "legal": each.legal,
                "trials": each.trials,
                "measured": each.measured,
                "known": each.known,
                "failures": each.failures,
                "baseline": each.baseline,
                "best": each.best,
                "front": each.front,
            }
            for each in result.problems
        ],
        "results": folder,
        "best_config": written.best_config,
        "plots": written.plots,
    }
