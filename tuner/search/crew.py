"""The threads of a run beside the device thread, and how that one waits for them."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Self, TypeVar

from tuner.errors import TunerError
from tuner.runner.protocol import Runner
from tuner.search.settings import Settings

T = TypeVar("T")

WARM_MS, WARM_PAUSE_SECONDS = 20.0, 0.02
"""Load and pause, in turns, while the device waits: it must not idle, or its clock falls, and to
bring that up again takes half a second or two."""


class Crew:
    """Threads for a run: a context manager that ends with them.

    Attributes:
        workers: how many threads `pool` has, which prepares variants.
        clerk: the one thread that keeps study and model and proposes.
        scout: the one thread that gets the next problem ready.
        overlap: whether they may work while the device does; not so where the CPU is the device.
    """

    def __init__(self, runner: Runner, settings: Settings) -> None:
        self._runner = runner
        self.overlap = settings.overlaps(runner.info)
        self.workers = settings.worker_count()
        self.pool = ThreadPoolExecutor(self.workers, "prepare")
        self.clerk = ThreadPoolExecutor(1, "desk")
        self.scout = ThreadPoolExecutor(1, "scout")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        # What the scout still does is of use to nobody, and uses neither device nor files.
        self.scout.shutdown(wait=False, cancel_futures=True)
        self.clerk.shutdown()
        self.pool.shutdown()

    def keep_warm(self) -> None:
        """Load the device for a moment, so that its clock stays up; for the device thread."""
        if self.overlap:
            # A device or worker that is lost here is found lost by whoever needs it next.
            with contextlib.suppress(TunerError):
                self._runner.keep_warm(WARM_MS)

    def result_of(self, future: Future[T]) -> T:
        """What another thread comes to, the device being kept warm meanwhile."""
        self.keep_warm()
        while self.overlap and not future.done():
            wait([future], timeout=WARM_PAUSE_SECONDS)
            self.keep_warm()
        return future.result()
