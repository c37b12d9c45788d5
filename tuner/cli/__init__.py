"""The command line: parse, call, print, exit code.

Exit codes: 0 good, 1 something was wrong with a kernel or a result, 2 bad usage, 3 slower than
`compare --fail-if-slower` allows, 130 interrupted.
Everything heavy is imported inside the commands, so that `tuner --help` stays fast; for the same
reason help is plain text, not Rich's.
"""

from __future__ import annotations

import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tuner import __version__
from tuner.cli import bench, calibrate, compare, describe, merge, report, tune, verify
from tuner.errors import TunerError


class _ErrorsAsMessages(TyperGroup):
    """Turns the package's errors into a message and their exit code; bugs keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TunerError as error:
            if ctx.params.get("debug"):
                traceback.print_exception(error)
            else:
                typer.echo(f"tuner: {error}", err=True)
            raise typer.Exit(error.exit_code) from None


app = typer.Typer(
    name="tuner",
    cls=_ErrorsAsMessages,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtune {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Find the fastest decode-attention kernels for a Vulkan device, each checked and measured."""


app.command("devices")(describe.devices)
app.command("families")(describe.families)
app.command("show")(describe.show)
app.command("verify")(verify.verify)
app.command("calibrate")(calibrate.calibrate)
app.command("bench")(bench.bench)
app.command("tune")(tune.tune)
app.command("compare")(compare.compare)
app.command("merge")(merge.merge)
app.command("export")(report.export)
app.command("plot")(report.plot)


def main() -> None:
    """Parse, run a command, and exit with its code."""
    app(prog_name="tuner")
