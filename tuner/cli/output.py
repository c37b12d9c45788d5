"""What the commands print: JSON, tables, and how figures are written.

On a terminal a table is Rich's; elsewhere it is aligned plain text, for logs and for `grep`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer


def say(text: str = "") -> None:
    """One line of a command's result, on standard output."""
    typer.echo(text)


def note(text: str) -> None:
    """One line beside the result (progress, warnings), on standard error."""
    typer.echo(text, err=True)


def print_json(value: Any) -> None:
    """Plain data or msgspec structs as indented JSON, keys as they are declared."""
    import msgspec

    encoded = msgspec.json.encode(value, enc_hook=str)
    typer.echo(msgspec.json.format(encoded, indent=2).decode())


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()
) -> None:
    """A table; the columns named in `right` hold numbers."""
    texts = [[str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _rich_table(columns, texts, right)
    else:
        _plain_table(columns, texts, right)


def _rich_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def _plain_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]
) -> None:
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, cell, width in zip(columns, row, widths, strict=True)
        ]
        typer.echo("  ".join(cells).rstrip())


def microseconds(nanoseconds: float | None) -> str:
    """Nanoseconds as µs with four significant digits or more; "-" for none."""
    if nanoseconds is None:
        return "-"
    value = nanoseconds / 1e3
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def bandwidth(gb_s: float | None) -> str:
    """GB/s with three significant digits or more; "-" for none."""
    if gb_s is None:
        return "-"
    return f"{gb_s:,.0f}" if gb_s >= 1000 else f"{gb_s:.3g}"


def percent(share: float | None) -> str:
    """A share of 1 as a percentage; "-" for none."""
    return "-" if share is None else f"{100 * share:.1f} %"


def mebibytes(count: int) -> str:
    """Bytes as MiB or GiB."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"
