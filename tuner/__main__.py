"""`tuner` and `python -m tuner`: the command line, which Ctrl-C ends quietly from its start on."""

from __future__ import annotations

import os


def main() -> None:
    """Run the command line; Ctrl-C while it is still being imported ends it with exit code 130."""
    try:
        # Imports are nearly all that happens before a command runs, so this one belongs inside.
        from tuner.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        # Not sys.exit: CPython may then end by the signal, or print what a second one interrupts.
        os._exit(130)


if __name__ == "__main__":
    main()
