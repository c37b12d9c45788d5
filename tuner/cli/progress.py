"""Live progress of long commands: one moving block on a terminal, a plain line now and then else.

Everything goes to standard error, so that results can be piped.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from tuner.cli.output import bandwidth, microseconds, note, percent

if TYPE_CHECKING:
    from tuner.kernels.base import Values
    from tuner.records import Record
    from tuner.search import ProblemResult, Status

STOPPING = "stopping after the trial at work, then exporting; Ctrl-C again quits at once"
PLAIN_INTERVAL_S = 5.0
"""Least time between two plain lines."""
_ENDINGS = {
    "met before": "earlier runs spent this budget already; give more --trials or --seconds",
    "exhausted": "every legal variant is tried",
}


class TuneProgress:
    """Shows a `tuner.search.tune` run: a `tuner.search.Progress` that is also a context manager."""

    def __init__(self) -> None:
        self._status: Status | None = None
        self._begun = 0.0
        self._doing, self._over, self._live, self._again = "", False, False, False
        self._display = ExitStack()
        self._refresh: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._display.close()

    def problem_started(self, status: Status) -> None:
        """A new block, or a headline in plain text."""
        title = f"[{status.index + 1}/{status.problems}] {status.problem.label}"
        title += f" · {status.family.name}, {status.legal:,} legal variants"
        self._status, self._begun = status, time.monotonic()
        self._over = self._again = False
        note(title)
        self._live = sys.stderr.isatty()
        display = _live(self._line, self._share) if self._live else _plain(self._line)
        self._refresh = self._display.enter_context(display)

    def trial_started(self, values: Values, status: Status) -> None:
        """Nothing to show: a trial is short."""
        del values
        self._status = status

    def trial_finished(self, record: Record, status: Status) -> None:
        """Show the new counts."""
        del record
        self._status = status
        self._refresh()

    def finals_started(self, count: int, status: Status) -> None:
        """Say that the best are measured again."""
        self._status, self._doing = status, f"measuring the best {count} again"
        self._again = True
        self._refresh()

    def stopping(self) -> None:
        """Say that a signal was heard; called from its handler, so not by way of any lock."""
        if self._live:
            self._doing = STOPPING
        else:
            os.write(sys.stderr.fileno(), f"  {STOPPING}\n".encode())

    def problem_finished(self, result: ProblemResult) -> None:
        """Close the block with the best that the result goes by, which after finals is not what the
        search saw; say why the search ended, if not by its budget."""
        status, doing = self._status, self._doing
        self._doing, self._over = "", True
        if status is not None and (doing or status.best is not result.best):
            self._status = replace(status, best=result.best)
            self._refresh()
        self._display.close()
        self._live = False
        if result.ended not in ("trials", "seconds"):
            why = _ENDINGS.get(result.ended, result.ended)
            note(f"  {why}" + (f": {result.error}" if result.error else ""))

    def _line(self) -> str:
        left = None if self._over else self._seconds_left()
        return self._doing or status_line(self._status, left, again=self._over and self._again)

    def _seconds_left(self) -> float | None:
        """By the search's own deadline, else by the pace of trials; None: no telling."""
        status = self._status
        if status is None or status.trial_limit is None or not status.measured:
            return None if status is None else status.seconds_left
        spent = time.monotonic() - self._begun
        left = max(0.0, (status.trial_limit - status.trials) * spent / status.measured)
        return left if status.seconds_left is None else min(left, status.seconds_left)

    def _share(self) -> float:
        """How much of the budget is spent, from 0 to 1."""
        if self._over:
            return 1.0
        left = self._seconds_left()
        spent = time.monotonic() - self._begun
        return 0.0 if left is None else spent / max(1e-9, spent + left)


def status_line(status: Status | None, seconds_left: float | None, *, again: bool = False) -> str:
    """Trials, best so far, failures by kind and time left, in one line; `again` says that the time
    of the best is that of the finals."""
    if status is None:
        return ""
    limit = status.trial_limit
    # Earlier runs may have tried more than this one is to.
    of = "" if limit is None or limit < status.trials else f"/{limit}"
    best = f"best {describe_best(status.best)}" + (", measured again" if again else "")
    parts = [f"trial {status.trials}{of}", best]
    if status.failures:
        counted = ", ".join(f"{count} {state}" for state, count in sorted(status.failures.items()))
        parts.append(f"failed: {counted}")
    if seconds_left is not None:
        parts.append(f"{clock(seconds_left)} left")
    return " · ".join(parts)


def describe_best(record: Record | None) -> str:
    """A record's time, GB/s and share of the read bandwidth; "-" for none."""
    if record is None or record.gb_s is None:
        return "-"
    text = f"{microseconds(record.median_ns)} µs, {bandwidth(record.gb_s)} GB/s"
    return text if record.utilisation is None else f"{text} ({percent(record.utilisation)} of read)"


def clock(seconds: float) -> str:
    """Seconds as M:SS."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Show how many of `total` are done; call what is yielded with the count and a remark."""
    done, remark = 0, ""

    def line() -> str:
        return f"{what}: {done}/{total}" + (f" · {remark}" if remark else "")

    display = _live(line, lambda: done / max(1, total)) if sys.stderr.isatty() else _plain(line)
    with display as refresh:

        def update(count: int, text: str = "") -> None:
            nonlocal done, remark
            done, remark = count, text
            refresh()

        yield update


@contextmanager
def _plain(line: Callable[[], str]) -> Iterator[Callable[[], None]]:
    """A line every few seconds, and one at the end if the last change was not printed yet."""
    printed, unprinted = time.monotonic(), False

    def refresh() -> None:
        nonlocal printed, unprinted
        unprinted = time.monotonic() - printed < PLAIN_INTERVAL_S
        if not unprinted:
            printed = time.monotonic()
            note(f"  {line()}")

    try:
        yield refresh
    finally:
        if unprinted:
            note(f"  {line()}")


@contextmanager
def _live(text: Callable[[], str], share: Callable[[], float]) -> Iterator[Callable[[], None]]:
    """The text and a bar, redrawn four times a second and at the end, whatever changes: what is
    yielded does nothing, as the device waits for whoever reports a trial."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    def draw() -> Group:
        return Group(Text(text()), ProgressBar(total=1.0, completed=share(), width=50))

    console = Console(stderr=True)
    with Live(get_renderable=draw, console=console, refresh_per_second=4):
        yield lambda: None
