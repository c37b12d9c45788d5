"""Ctrl-C and termination as a flag that is looked at between trials."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """While open, the first SIGINT or SIGTERM only sets `asked`; a second one acts as usual.

    So the trial on the device ends properly, and what is under way can be put away. Outside the
    main thread, where Python gives no signals, it does nothing.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        """Whether the run shall stop."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Stop the run as a signal would."""
        self._asked.set()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._asked.set()
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            # None: set by something other than Python, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
