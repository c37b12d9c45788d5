"""The jobs that are prepared in a worker, by numbers."""

from __future__ import annotations

import threading
from collections import Counter

from tuner.runner.protocol import Job, JobKey


class Jobs:
    """Numbers for jobs, so that each travels to the worker once and not with every launch.

    Thread-safe: a job that is released while another thread prepares it anew keeps its number.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[int, Job] = {}
        self._numbers: dict[JobKey, int] = {}
        self._users: Counter[int] = Counter()
        self._next = 0

    def enter(self, job: Job) -> int:
        """The number of a job that has been prepared once more."""
        with self._lock:
            number = self._numbers.setdefault(job.key, self._next)
            if number == self._next:
                self._next += 1
                self._jobs[number] = job
            self._users[number] += 1
            return number

    def find(self, job: Job | int) -> Job:
        """The job that is meant."""
        with self._lock:
            return self._jobs[job] if isinstance(job, int) else job

    def leave(self, number: int, times: int) -> Job:
        """The job, which is to be released so many times; its number goes with the last."""
        with self._lock:
            job = self._jobs[number]
            self._users[number] -= times
            if self._users[number] <= 0:
                del self._users[number], self._jobs[number], self._numbers[job.key]
            return job
