"""What to try next: start points, then what the sampler suggests, always legal and never twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tuner.kernels.base import Values
from tuner.kernels.selection import Variants
from tuner.search.encoding import Encoding
from tuner.search.model import MODEL_SAMPLERS, ORDINAL_SAMPLERS, WARM_UP_TRIALS, Model
from tuner.search.objective import Costs
from tuner.search.settings import SamplerName


@dataclass(frozen=True, slots=True)
class Proposal:
    """A variant to try; `handle` is how the model knows it."""

    values: Values
    handle: int


class Proposer:
    """Hands out each legal variant at most once. For one thread at a time.

    First come the start points that are legal and untried, then for "grid" the legal space in
    order, for "random" (and until a model has learnt a little) uniform draws from it, else the
    model's suggestions. A suggestion that is illegal or tried already is replaced by its nearest
    untried neighbour.
    """

    def __init__(
        self, variants: Variants, sampler: SamplerName, seed: int, *, objectives: int = 1
    ) -> None:
        """Raises UsageError if a package that the sampler needs is missing.

        `objectives`: how many costs a result has.
        """
        self._variants, self._sampler = variants, sampler
        self.encoding = Encoding(variants, ordinal=sampler in ORDINAL_SAMPLERS)
        self._seed = seed
        self._objectives = objectives
        self._model = self._new_model(seed)
        self._random = np.random.default_rng(seed)
        self._untried = np.ones(len(variants), np.bool_)
        self._first: deque[Values] = deque()
        self._results = 0

    @property
    def untried(self) -> int:
        """How many legal variants have not been handed out."""
        return int(self._untried.sum())

    def resume(self, results: Iterable[tuple[Values, Costs | None]]) -> None:
        """Take over an earlier run's results (values, costs or None), before any `next`.

        The sampler starts anew from there, with a seed of its own, lest it repeat itself.
        """
        legal = [result for result in results if self.exclude(result[0])]
        if legal:
            self._results = len(legal)
            self._random = np.random.default_rng([self._seed, self._results])
            self._model = self._new_model(self._seed + self._results)
            for values, costs in legal:
                self._model.learn(values, costs)

    def exclude(self, values: Values) -> bool:
        """Never hand out that variant; tells whether it was legal and untried."""
        index = self._variants.find(values)
        if index is None or not self._untried[index]:
            return False
        self._untried[index] = False
        return True

    def try_first(self, starts: Iterable[Values]) -> None:
        """Queue start points; those that are illegal or tried by then are passed over."""
        self._first.extend(starts)

    def next(self) -> Proposal | None:
        """The next variant, None when all are handed out."""
        while self._first:
            values = self._first.popleft()
            if self.exclude(values):
                return Proposal(values, self._model.open(values))
        if not self._untried.any():
            return None
        if self._sampler in MODEL_SAMPLERS and self._results >= self._warm_up:
            return self._suggested()
        choice = np.flatnonzero(self._untried)
        index = 0 if self._sampler == "grid" else int(self._random.integers(len(choice)))
        values = self._take(int(choice[index]))
        return Proposal(values, self._model.open(values))

    def tell(self, proposal: Proposal, costs: Costs | None) -> None:
        """The result of a proposal; None for a variant that failed."""
        self._results += 1
        self._model.close(proposal.handle, costs)

    def _new_model(self, seed: int) -> Model:
        return Model(self.encoding, self._sampler, seed, objectives=self._objectives)

    @property
    def _warm_up(self) -> int:
        return 0 if self._sampler == "cmaes" else WARM_UP_TRIALS

    def _suggested(self) -> Proposal:
        suggestion = self._model.suggest()
        values = self._take(self._variants.nearest(suggestion.values, self._untried))
        return Proposal(values, self._model.open(values, suggestion))

    def _take(self, index: int) -> Values:
        self._untried[index] = False
        return self._variants[index]
