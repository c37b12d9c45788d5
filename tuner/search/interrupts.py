"""Ctrl-C and termination as a flag that is looked at between trials."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

ONE_S = 1.0
"""Signals so close to each other are one: programs that start others pass on a Ctrl-C which the
terminal has sent to all of them."""


class Interrupts:
    """While open, the first SIGINT or SIGTERM only sets `asked`; a second one acts as usual.

    So the trial on the device ends properly, and what is under way can be put away. Outside the
    main thread, where Python gives no signals, it does nothing.

    Args:
        first, second: what else to do, in the main thread but wherever that is: `first` at the
            first signal, `second` at the second, before that acts.
    """

    def __init__(
        self, *, first: Callable[[], None] | None = None, second: Callable[[], None] | None = None
    ) -> None:
        self._first, self._second = first, second
        self._asked = threading.Event()
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        """Whether the run shall stop."""
        return self._asked.is_set()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_raised: object) -> None:
        self._restore()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if not self.asked:
            self._asked.set()
            self._asked_at = time.monotonic()
            if self._first is not None:
                self._first()
        elif time.monotonic() - self._asked_at > ONE_S:
            if self._second is not None:
                self._second()
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            # None: set by something other than Python, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
