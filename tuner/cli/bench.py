"""`bench`: what one variant takes, beside the baseline and beside a launch that does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli import choosing, options
from tuner.cli.calibrate import launch_floors
from tuner.cli.output import bandwidth, microseconds, note, percent, print_json, print_table, say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tuner.cli.session import Opened
    from tuner.device_info import DeviceInfo
    from tuner.kernels.base import Family, Values
    from tuner.problems import Problem
    from tuner.records import Calibration, Measure, Record
    from tuner.runner.protocol import MeasurePlan
    from tuner.search import Task

MEASURES: tuple[Measure, ...] = ("isolated", "batched")
_COLUMNS = (
    "median µs",
    "interval µs",
    "floor µs",
    "samples",
    "ended by",
    "GB/s",
    "of read",
    "error",
    "bound",
)
_BREAKDOWN_RIGHT = ("median µs", "share")


def bench(
    family: Annotated[
        str | None,
        typer.Argument(
            metavar="FAMILY",
            help="A kernel family. Default: the one that tune takes for each problem.",
        ),
    ] = None,
    *,
    assignments: options.Set = None,
    baseline: Annotated[
        bool, typer.Option("--baseline/--no-baseline", help="Whether to measure the baseline, too.")
    ] = True,
    device: options.Device = None,
    shape: options.Shape = None,
    model: options.Model = None,
    sequences: options.Sequences = None,
    context: options.Context = None,
    lengths: options.Lengths = None,
    block_size: options.BlockSize = None,
    workload: options.Workload = None,
    measure: Annotated[
        str,
        typer.Option(
            "--measure",
            metavar="|".join(MEASURES),
            help="Whether a sample is one launch, or many back to back (for launches of a few "
            "microseconds).",
        ),
    ] = "isolated",
    energy: Annotated[
        bool, typer.Option("--energy", help="Measure energy, too, where the device has a meter.")
    ] = False,
    cache: options.Cache = None,
    in_process: options.InProcess = False,
    json: options.Json = False,
) -> None:
    """Time one variant beside the baseline.

    Both are validated first. Nothing is stored. The exit code is 1 if a variant fails.
    """
    from msgspec import structs

    from tuner import calibration, kernels
    from tuner.cli.session import opened, require_fit, session_name, warn_of_cpu

    plan = _plan(measure, energy)
    asked = None if family is None else kernels.family(family)
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
        tasks = _tasks(asked, choice, info)
        require_fit(tasks, info)
        variants = [_variants(*task, assignments, info, baseline) for task in tasks]
        warn_of_cpu(info)
        measured = calibration.quick(open_device.runner, session_name())
        records = [
            record
            for task, named in zip(tasks, variants, strict=True)
            for record in _timed(open_device, *task, named, measured, plan)
        ]
        passes = sorted({record.passes for record in records if record.passes})
        floors = tuple(calibration.launch_floor(open_device.runner, each) for each in passes)
        measured = structs.replace(measured, floors=floors)
    if json:
        print_json({"calibration": measured, "records": records})
    else:
        _print_records(records, measured)
        if energy and not any(record.energy for record in records):
            note(f"no energy: no meter of {info.name} was found")
    if any(record.state != "correct" for record in records):
        raise typer.Exit(1)


def _plan(measure: str, energy: bool) -> MeasurePlan:
    from tuner.runner.protocol import BREAKDOWN_SAMPLES, ENERGY_MS, MeasurePlan

    return MeasurePlan(
        measure=options.one_of("measure", measure, MEASURES),
        energy_ms=ENERGY_MS if energy else 0.0,
        breakdown_samples=BREAKDOWN_SAMPLES,
    )


def _tasks(asked: Family | None, choice: options.ProblemChoice, info: DeviceInfo) -> list[Task]:
    """The family asked for with its problems, else each problem with the family that tune takes."""
    if asked is not None:
        return choosing.paired([asked], choice, info, "asked")
    return choosing.paired(choosing.default_families(said=choice.said), choice, info, "first")


def _variants(
    family: Family,
    problem: Problem,
    assignments: Sequence[str] | None,
    info: DeviceInfo,
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
    plan: MeasurePlan,
) -> list[Record]:
    from tuner.evaluate import Evaluator, Session

    session = Session(name=calibration.session, read_gb_s=calibration.read_gb_s, plan=plan)
    evaluator = Evaluator(device.runner, device.compiler, family, problem, session=session)
    try:
        return [evaluator.run(values) for values in variants]
    finally:
        evaluator.close()


def _print_records(records: Sequence[Record], calibration: Calibration) -> None:
    from tuner.cli.session import warn_of_host_clock
    from tuner.timing import summarise

    names = ["baseline" if _is_baseline(record) else "variant" for record in records]
    several = len({record.family for record in records}) > 1
    metered = any(record.energy for record in records)
    columns = (*_COLUMNS, "mJ/token") if metered else _COLUMNS
    print_table(
        ("problem", "", *columns),
        [
            (
                f"{record.family} {record.problem.label}" if several else record.problem.label,
                name,
                *_cells(record, calibration)[: len(columns)],
            )
            for record, name in zip(records, names, strict=True)
        ],
        right=tuple(name for name in columns if name != "ended by"),
    )
    _print_breakdowns([(record, name) for record, name in zip(records, names, strict=True)])
    say()
    say(f"read bandwidth: {bandwidth(calibration.read_gb_s)} GB/s ({calibration.method})")
    for text in dict.fromkeys(_described(records)):
        say(text)
    for line in launch_floors(calibration):
        say(line)
    warn_of_host_clock(records)
    for record, name in zip(records, names, strict=True):
        if record.state != "correct":
            note(f"{record.state}: {record.problem.label}: {record.error}")
            continue
        for oddity in summarise(record.samples_ns, record.rounds).oddities:
            note(f"{record.problem.label} {name}: {oddity}")


def _is_baseline(record: Record) -> bool:
    from tuner import kernels
    from tuner.kernels import space

    family = kernels.family(record.family)
    return record.values == dict(space.canonical(family, family.baseline))


def _described(records: Sequence[Record]) -> Iterator[str]:
    """What was timed, in a line each; with the family where there are several."""
    from tuner import kernels
    from tuner.cli.variants import describe

    several = len({record.family for record in records}) > 1
    for record in records:
        of = f" of {record.family}" if several else ""
        text = describe(kernels.family(record.family), record.values)
        yield f"{'baseline' if _is_baseline(record) else 'variant'}{of}: {text}"


def _print_breakdowns(named: Sequence[tuple[Record, str]]) -> None:
    """Where launches of several passes spend their time: medians of launches of their own."""
    from statistics import median

    rows = []
    for record, name in named:
        medians = [median(stretch.samples_ns) for stretch in record.breakdown]
        for stretch, each_ns in zip(record.breakdown, medians, strict=True):
            share = percent(each_ns / sum(medians))
            passes = " + ".join(stretch.passes)
            rows.append((record.problem.label, name, passes, microseconds(each_ns), share))
    if rows:
        say()
        print_table(("problem", "", "passes", "median µs", "share"), rows, right=_BREAKDOWN_RIGHT)


def _cells(record: Record, calibration: Calibration) -> tuple[str, ...]:
    check, floor = record.check, calibration.floor(record.passes)
    floor_ns = None if floor is None else getattr(floor, f"{record.measure}_ns")
    per_token = record.energy_j_per_token
    return (
        microseconds(record.median_ns) if record.state == "correct" else record.state,
        f"{microseconds(record.low_ns)} to {microseconds(record.high_ns)}",
        microseconds(floor_ns),
        _samples(record),
        record.ended_by or "-",
        bandwidth(record.gb_s),
        percent(record.utilisation),
        "-" if check is None else f"{check.error:.1e}",
        "-" if check is None else f"{check.bound:.1e}",
        "-" if per_token is None else f"{1e3 * per_token:.3g}",
    )


def _samples(record: Record) -> str:
    count = len(record.samples_ns)
    return str(count) if record.launches == 1 else f"{count} x {record.launches}"
