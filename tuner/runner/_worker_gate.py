"""A gate through which calls go side by side, or one of them alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Who enters alone waits until all others have left, and keeps new ones out meanwhile."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._waiting_alone = 0
        self._closed = False

    @contextmanager
    def entered(self, *, alone: bool = False) -> Iterator[None]:
        """Be inside for the block."""
        self._enter_alone() if alone else self._enter()
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._closed = False
                self._changed.notify_all()

    def _enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._closed and not self._waiting_alone)
            self._inside += 1

    def _enter_alone(self) -> None:
        with self._changed:
            self._waiting_alone += 1
            try:
                self._changed.wait_for(lambda: not self._inside)
                self._inside += 1
                self._closed = True
            finally:
                self._waiting_alone -= 1
                self._changed.notify_all()
