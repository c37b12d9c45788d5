"""`calibrate` and `bench`: what the device reads in a second, and what one variant takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuner.cli import options
from tuner.cli.output import bandwidth, microseconds, note, percent, print_json, print_table, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.cli.session import Opened
    from tuner.kernels.base import Family, Values
    from tuner.problems import Problem
    from tuner.records import Calibration, Record


def calibrate(
    *,
    device: options.Device = None,
    out: options.Out = options.RESULTS,
    cache: options.Cache = None,
    in_process: options.InProcess = False,
    json: options.Json = False,
) -> None:
    """Measure and store the device's read bandwidth."""
    from tuner.cli.session import calibrate as measure_reads
    from tuner.cli.session import open_store, opened, session_name, warn_of_cpu

    with (
        opened(device, cache=cache, in_process=in_process) as open_device,
        open_store(out, open_device.info) as store,
    ):
        warn_of_cpu(open_device.info)
        measured = measure_reads(open_device.runner, session_name())
        store.append_calibration(measured)
    if json:
        print_json(measured)
        return
    print_table(
        ("read", "GB/s"),
        [(f"{nbytes / 2**20:,.0f} MiB", bandwidth(gb_s)) for nbytes, gb_s in measured.points],
        right=("read", "GB/s"),
    )
    say(f"{measured.device} reads {bandwidth(measured.read_gb_s)} GB/s ({measured.method})")


def bench(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help="A kernel family.")],
    *,
    assignments: options.Set = None,
    baseline: Annotated[
        bool, typer.Option("--baseline/--no-baseline", help="Measure the baseline, too.")
    ] = True,
    device: options.Device = None,
    shape: options.Shape = None,
    model: options.Model = None,
    sequences: options.Sequences = "1",
    context: options.Context = "4096",
    lengths: options.Lengths = "equal",
    block_size: options.BlockSize = 16,
    workload: options.Workload = None,
    cache: options.Cache = None,
    in_process: options.InProcess = False,
    json: options.Json = False,
) -> None:
    """Time one variant beside the baseline.

    Both are validated first; nothing is stored. Exit code 1 if a variant fails.
    """
    from tuner import kernels
    from tuner.cli.session import calibrate as measure_reads
    from tuner.cli.session import misfit, opened, session_name, warn_of_cpu

    chosen = kernels.family(family)
    choice = options.ProblemChoice(
        shapes=shape,
        models=model,
        sequences=sequences,
        context=context,
        lengths=lengths,
        block_size=block_size,
        workload=workload,
    )
    with opened(device, cache=cache, in_process=in_process) as open_device:
        info = open_device.info
        problems = choice.required(chosen, on_cpu=info.is_cpu)
        for problem in problems:
            if error := misfit(chosen, problem, info):
                raise error
        variants = [_variants(chosen, assignments, problem, info, baseline) for problem in problems]
        warn_of_cpu(info)
        calibration = measure_reads(open_device.runner, session_name())
        records = [
            record
            for problem, named in zip(problems, variants, strict=True)
            for record in _timed(open_device, chosen, problem, named, calibration)
        ]
    if json:
        print_json({"calibration": calibration, "records": records})
    else:
        _print_records(records, chosen, calibration)
    if any(record.state != "correct" for record in records):
        raise typer.Exit(1)


def _variants(
    family: Family,
    assignments: Sequence[str] | None,
    problem: Problem,
    info: Any,
    baseline: bool,
) -> list[Values]:
    from tuner.cli.variants import chosen_variant
    from tuner.kernels import space

    values = space.canonical(family, chosen_variant(family, assignments, problem, info))
    known = space.canonical(family, family.baseline)
    return [known, values] if baseline and values != known else [values]


def _timed(
    device: Opened,
    family: Family,
    problem: Problem,
    variants: Sequence[Values],
    calibration: Calibration,
) -> list[Record]:
    from tuner.evaluate import Evaluator, Session

    session = Session(name=calibration.session, read_gb_s=calibration.read_gb_s)
    evaluator = Evaluator(device.runner, device.compiler, family, problem, session=session)
    try:
        return [evaluator.run(values) for values in variants]
    finally:
        evaluator.close()


def _print_records(records: Sequence[Record], family: Family, calibration: Calibration) -> None:
    from tuner.cli.variants import describe
    from tuner.kernels import space

    known = dict(space.canonical(family, family.baseline))
    names = ["baseline" if record.values == known else "variant" for record in records]
    print_table(
        ("problem", "", "median µs", "interval µs", "samples", "GB/s", "of read", "error", "bound"),
        [
            (record.problem.label, name, *_cells(record))
            for record, name in zip(records, names, strict=True)
        ],
        right=("median µs", "interval µs", "samples", "GB/s", "of read", "error", "bound"),
    )
    say()
    say(f"read bandwidth: {bandwidth(calibration.read_gb_s)} GB/s ({calibration.method})")
    for text in dict.fromkeys(describe(family, record.values) for record in records):
        label = "baseline" if text == describe(family, known) else "variant"
        say(f"{label}: {text}")
    for record in records:
        if record.state != "correct":
            note(f"{record.state}: {record.problem.label}: {record.error}")


def _cells(record: Record) -> tuple[str, ...]:
    check = record.check
    return (
        microseconds(record.median_ns) if record.state == "correct" else record.state,
        f"{microseconds(record.low_ns)} to {microseconds(record.high_ns)}",
        str(len(record.samples_ns)),
        bandwidth(record.gb_s),
        percent(record.utilisation),
        "-" if check is None else f"{check.error:.1e}",
        "-" if check is None else f"{check.bound:.1e}",
    )
