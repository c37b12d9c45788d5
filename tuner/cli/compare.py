"""`compare`: two results, devices or variants side by side, and whether a difference is shown."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuner.cli import options
from tuner.cli.currency import UNTOLD, Earlier
from tuner.cli.folders import one_device
from tuner.cli.output import microseconds, note, print_json, print_table, say
from tuner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tuner.device_info import DeviceInfo
    from tuner.evaluate import Currency
    from tuner.records import Record
    from tuner.results import Pair, Side, SideBySide

SLOWER = 3
"""The exit code where B is slower than `--fail-if-slower` allows."""

_SIDE = "[RESULTS|DEVICE][@VARIANT]"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """A side with the records that count, how many were left out, and what there is to say."""

    side: Side
    left_out: int = 0
    remark: str | None = None


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=f"The one to compare with: {_SIDE}.")],
    b: Annotated[str, typer.Argument(metavar="B", help=f"The one to judge: {_SIDE}.")],
    *,
    out: options.Out = options.RESULTS,
    fail_if_slower: Annotated[
        str | None,
        typer.Option(
            "--fail-if-slower",
            metavar="PERCENT%",
            help=f"Exit code {SLOWER} if B is shown to be slower by more than this on any problem.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Draw the ratios into this file, too."),
    ] = None,
    earlier: Earlier = False,
    json: options.Json = False,
) -> None:
    """Say for each problem whether B is faster or slower than A.

    RESULTS is a folder or a records file. DEVICE is the name of a device with results below --out,
    or else below its folder `published`. VARIANT is best (the default), baseline, name=value,… or
    the start of a record's identity. Needs no device. Where a side has records of today's kernels,
    only these count, unless VARIANT is an identity or --earlier is given.
    """
    from tuner.results import side_by_side

    limit = None if fail_if_slower is None else _fraction(fail_if_slower)
    if plot is not None and plot.suffix.lower() != ".png":
        raise UsageError(
            f"--plot {plot}: a picture is written as PNG: name a file that ends in .png"
        )
    currency_of = functools.cache(_currency)
    chosen = [_chosen(text, out, currency_of, earlier=earlier) for text in (a, b)]
    sides = chosen[0].side, chosen[1].side
    for side, remark in ((one.side, one.remark) for one in chosen):
        if remark:
            note(f"note: {side.name}: {remark}")
    found = side_by_side(*sides)
    if plot is not None:
        from tuner.plots import ratios, save

        save(ratios(found.pairs, names=(a, b), limit=limit), plot)
    if json:
        print_json(_as_data(chosen, found))
    else:
        _print(sides, found)
    for each in found.unpaired:
        note(f"not compared: {each.family} {each.problem.label}: {each.reason}")
    if limit is not None and _is_worse(found, limit):
        raise typer.Exit(SLOWER)


def _fraction(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if match is None:
        raise UsageError(f"--fail-if-slower {text!r}: write a percentage, such as 3%")
    return float(match[1]) / 100


def _chosen(
    text: str, out: Path, currency_of: Callable[[DeviceInfo], Currency], *, earlier: bool
) -> _Chosen:
    """What the user's A or B stands for.

    Raises:
        UsageError, ResultsError: no such results or device, or more than one.
    """
    from tuner.results import Side
    from tuner.results.sides import BEST

    source, _, variant = (text, "", "") if Path(text).exists() else text.partition("@")
    records, info = _records(source, out)
    everything = Side(name=text, records=records, variant=variant or BEST)
    if earlier or everything.names_identity:
        return _Chosen(side=everything)
    if info is None:
        return _Chosen(side=everything, remark=f"{UNTOLD}: all count")
    sifted = currency_of(info).sift(records)
    if not sifted.earlier:
        return _Chosen(side=everything)
    if not sifted.current:
        remark = f"all {len(records)} records are of earlier kernels ({sifted.reason})"
        return _Chosen(side=everything, remark=remark)
    return _Chosen(
        side=Side(name=text, records=sifted.current, variant=everything.variant),
        left_out=len(sifted.earlier),
        remark=f"{len(sifted.earlier)} of {len(records)} records are of earlier kernels "
        f"({sifted.reason}) and left out; --earlier counts them, too",
    )


def _currency(info: DeviceInfo) -> Currency:
    from tuner.compile import Compiler
    from tuner.evaluate import Currency

    return Currency(info, Compiler().identity)


def _records(source: str, out: Path) -> tuple[tuple[Record, ...], DeviceInfo | None]:
    """The records, and whose they are, if a snapshot beside them tells."""
    from tuner.errors import NoResultsError
    from tuner.records import Record
    from tuner.results import Store
    from tuner.results.journal import read_journal

    path = Path(source) if source else out
    info = None
    if path.is_file():
        records, repairs = read_journal(path, Record)
    else:
        store = Store(one_device(source, out), read_only=True)
        records, repairs, info = store.records(), store.repairs, store.device()
    if not records:
        raise NoResultsError(
            path,
            "holds no records: `tuner tune` writes them, into a file `records.jsonl` in the "
            "device's folder of results",
        )
    for repair in repairs:
        note(f"note: {repair}")
    return records, info


def _is_worse(found: SideBySide, limit: float) -> bool:
    """Whether any problem is shown slower beyond the limit, or has lost its correct variant."""
    slower = any(pair.comparison.low > 1 + limit for pair in found.pairs)
    return slower or any(each.failed for each in found.unpaired)


def _geometric_mean(pairs: tuple[Pair, ...]) -> float:
    return math.exp(math.fsum(math.log(pair.comparison.ratio) for pair in pairs) / len(pairs))


def _print(sides: tuple[Side, Side], found: SideBySide) -> None:
    from tuner.results.outcomes import of_last_device

    several = len({pair.family for pair in found.pairs}) > 1
    print_table(
        ("problem", "A µs", "B µs", "B / A", "98 % interval", "verdict on B"),
        [
            (
                f"{pair.family} {pair.problem.label}" if several else pair.problem.label,
                microseconds(pair.a.median_ns),
                microseconds(pair.b.median_ns),
                f"{pair.comparison.ratio:#.4g}",
                f"{pair.comparison.low:#.4g} to {pair.comparison.high:#.4g}",
                pair.comparison.verdict,
            )
            for pair in found.pairs
        ],
        right=("A µs", "B µs", "B / A", "98 % interval"),
    )
    say()
    for letter, side, between in zip("AB", sides, found.between, strict=True):
        last = of_last_device(side.records)[0]
        say(f"{letter}: {side.name} · {last.device} · {last.driver}; {_told(between)}")
    if len(found.pairs) > 1:
        say(f"geometric mean of B / A: {_geometric_mean(found.pairs):#.4g}")


def _told(between: float | None) -> str:
    if between is None:
        return "no variant was measured often enough to tell how repeated measurements differ"
    if not between:
        return "repeated measurements of a variant differ no more than their samples explain"
    return (
        f"repeated measurements of a variant differ by {100 * between:.2g} % more than their "
        "samples explain"
    )


def _as_data(chosen: Sequence[_Chosen], found: SideBySide) -> dict[str, Any]:
    sides = {
        letter: {
            "name": each.side.name,
            "variant": each.side.variant,
            "between": between,
            "left_out": each.left_out,
            "remark": each.remark,
        }
        for letter, each, between in zip("ab", chosen, found.between, strict=True)
    }
    return {
        **sides,
        "geometric_mean": _geometric_mean(found.pairs),
        "problems": [
            {
                "family": pair.family,
                "label": pair.problem.label,
                "problem": pair.problem,
                "a": _measured(pair.a),
                "b": _measured(pair.b),
                "ratio": pair.comparison.ratio,
                "low": pair.comparison.low,
                "high": pair.comparison.high,
                "verdict": pair.comparison.verdict,
                "resampled": pair.comparison.units,
            }
            for pair in found.pairs
        ],
        "not_compared": [
            {"family": each.family, "label": each.problem.label, "reason": each.reason}
            for each in found.unpaired
        ],
    }


def _measured(record: Record) -> dict[str, Any]:
    return {
        "variant": record.variant,
        "values": record.values,
        "device": record.device,
        "driver": record.driver,
        "median_ns": record.median_ns,
        "samples": len(record.samples_ns),
        "rounds": len(record.rounds),
    }
