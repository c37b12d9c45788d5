"""Which stored records a command counts: those of today's kernels, unless asked for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli.output import note

if TYPE_CHECKING:
    from tuner.evaluate import Currency
    from tuner.records import Record
    from tuner.results import Store

Earlier = Annotated[
    bool,
    typer.Option(
        "--earlier",
        help="Use records of earlier kernels, too: their sources, compiler or driver have changed "
        "since.",
    ),
]


UNTOLD = "no device.json tells which records are of today's kernels"


def shown_records(store: Store, *, earlier: bool) -> tuple[Record, ...]:
    """The records of a store to show: all with `earlier`, else as `current_records`.

    Raises:
        ResultsError: there are records, but none is of today's kernels.
        UsageError: there is no GLSL compiler, by whose version kernels are told apart.
    """
    from tuner.compile import Compiler
    from tuner.evaluate import Currency

    records, info = store.records(), store.device()
    if earlier or not records:
        return records
    if info is None:
        note(f"note: {store.folder}: {UNTOLD}: all count")
        return records
    return current_records(store, Currency(info, Compiler().identity))


def current_records(
    store: Store, currency: Currency, *, option: str = "--earlier"
) -> tuple[Record, ...]:
    """The store's records of today's kernels; says what is left out.

    `option` is what the user may write to see all.

    Raises:
        ResultsError: there are records, but none is of today's kernels.
    """
    from tuner.errors import ResultsError

    records = store.records()
    sifted = currency.sift(records)
    if not sifted.earlier:
        return records
    if not sifted.current:
        raise ResultsError(
            store.folder,
            f"all {len(records)} records are of earlier kernels ({sifted.reason}): {option} shows "
            "them, `tuner tune` measures those of today",
        )
    note(
        f"note: {store.folder}: {len(sifted.earlier)} of {len(records)} records are of earlier "
        f"kernels ({sifted.reason}) and left out; {option} counts them, too"
    )
    return sifted.current
