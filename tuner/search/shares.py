"""How a run's budgets are shared out over its problems."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tuner.search.studylog import Budget

MOST_FORESEEN = 0.5
"""What is set aside for beginnings to come is at most this part of what is left: the first problem
of a family begins slowly, and says little of others."""


@dataclass(slots=True, kw_only=True)
class Shares:
    """The trials and seconds of a run, and what of its time is spent; for one thread at a time.

    The seconds of a run are wall time and those that earlier runs searched. A problem's share of
    them counts from its first result on. What comes before that (finding what is legal, making and
    uploading operands, settling the clock, and a baseline that may be a hundred times as slow as
    what is found later) is not the problem's to save: it takes from all alike, so that a problem
    that begins slowly is searched as long as the others. What a problem takes beyond its share, for
    `LEAST_TRIALS` or in its finals, comes off the shares of those that follow.

    Attributes:
        searched: seconds that this run has searched, on problems that are over.
        before: seconds that earlier runs have searched on them.
        begun: when the run began, by `time.monotonic`; later by what is not to count.
    """

    problems: int
    begun: float
    trials: int | None = None
    seconds: float | None = None
    searched: float = 0.0
    before: float = 0.0

    def budget(self, index: int) -> Budget:
        """The problem's share of the run's budgets, as if every problem took its own."""
        whole, rest = divmod(self.trials or 0, self.problems)
        return Budget(
            trials=None if self.trials is None else whole + (index < rest),
            seconds=None if self.seconds is None else self.seconds / self.problems,
        )

    def left(self, index: int, before: float) -> float | None:
        """Seconds from now on for search and finals of a problem that has its first result now.

        `before`: seconds that earlier runs have searched on it. None is no limit.
        """
        if self.seconds is None:
            return None
        coming = self.problems - index - 1
        left = max(0.0, self.seconds - self.spent)
        beginnings = (self._elapsed - self.searched) / (index + 1)
        foreseen = min(beginnings * coming, MOST_FORESEEN * left)
        return max(0.0, (left - foreseen) / (coming + 1) - before)

    def close(self, *, searched: float, before: float) -> None:
        """A problem is over."""
        self.searched += searched
        self.before += before

    @property
    def spent(self) -> float:
        """Seconds of the run so far."""
        return self._elapsed + self.before

    @property
    def over(self) -> float:
        """Seconds that the run has taken beyond its budget."""
        return 0.0 if self.seconds is None else max(0.0, self.spent - self.seconds)

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self.begun
