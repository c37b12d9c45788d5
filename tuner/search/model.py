"""What proposes: an Optuna sampler on a study in memory, fed with exact results.

The durable study (`tuner.search.studylog`) is a log; this one is its working copy, which costs no
disk writes per proposal and can hold proposals that were replaced by legal neighbours.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import TrialState

from tuner.errors import UsageError
from tuner.kernels.base import Values
from tuner.search.encoding import Encoding
from tuner.search.objective import Costs
from tuner.search.settings import SamplerName

WARM_UP_TRIALS = 10
"""Results that a model needs before it beats a uniform draw from the legal space."""

ORDINAL_SAMPLERS: frozenset[SamplerName] = frozenset({"cmaes", "gp"})
MODEL_SAMPLERS: frozenset[SamplerName] = frozenset({"tpe", "cmaes", "gp"})


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What the sampler would like to try, and the open trial that waits for the answer."""

    values: Values
    trial: optuna.Trial


class Model:
    """A sampler and what it knows. For one thread at a time."""

    def __init__(
        self, encoding: Encoding, sampler: SamplerName, seed: int, *, objectives: int = 1
    ) -> None:
        """Raises UsageError if a package that the sampler needs is missing."""
        self._encoding, self._sampler = encoding, sampler
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(
            sampler=make_sampler(sampler, seed), directions=["minimize"] * objectives
        )

    def learn(self, values: Values, costs: Costs | None) -> None:
        """Add a result of an earlier run; None for a variant that failed."""
        state = TrialState.PRUNED if costs is None else TrialState.COMPLETE
        self._add(values, state, costs)

    def suggest(self) -> Suggestion:
        """Ask the sampler; the suggestion must be given to `open`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            trial = self._study.ask(self._encoding.distributions)
        return Suggestion(self._encoding.values(trial.params), trial)

    def open(self, values: Values, suggestion: Suggestion | None = None) -> int:
        """Note that `values` are being tried, in place of the suggestion; returns a handle.

        CMA-ES can only learn about what it asked for, so it gets the neighbour's result for it;
        other samplers learn the neighbour itself.
        """
        if suggestion is not None:
            if self._sampler == "cmaes" or suggestion.values == values:
                return suggestion.trial.number
            self._study.tell(suggestion.trial, state=TrialState.FAIL)
        self._add(values, TrialState.RUNNING, None)
        return self._study.get_trials(deepcopy=False)[-1].number

    def close(self, handle: int, costs: Costs | None) -> None:
        """Tell the result of what `open` noted; None for a variant that failed."""
        if costs is None:
            self._study.tell(handle, state=TrialState.PRUNED)
        else:
            self._study.tell(handle, _logarithms(costs))

    def _add(self, values: Values, state: TrialState, costs: Costs | None) -> None:
        self._study.add_trial(
            optuna.create_trial(
                state=state,
                values=None if costs is None else _logarithms(costs),
                params=self._encoding.params(values),
                distributions=self._encoding.distributions,
            )
        )


def make_sampler(name: SamplerName, seed: int) -> optuna.samplers.BaseSampler:
    """The Optuna sampler of that name ("random" and "grid" draw from the legal space themselves).

    Raises:
        UsageError: a package that it needs is missing.
    """
    needs = ("torch", "scipy") if name == "gp" else ()
    missing = [package for package in needs if importlib.util.find_spec(package) is None]
    if missing:
        raise UsageError(
            f"sampler {name!r} needs {' and '.join(missing)}, which is not installed: "
            f"install kvtune[{name}] or use --sampler tpe"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        samplers: dict[str, Any] = {
            "tpe": lambda: optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=WARM_UP_TRIALS, multivariate=True, constant_liar=True
            ),
            "cmaes": lambda: optuna.samplers.CmaEsSampler(
                seed=seed, warn_independent_sampling=False
            ),
            "gp": lambda: optuna.samplers.GPSampler(seed=seed, n_startup_trials=WARM_UP_TRIALS),
        }
        made = samplers.get(name, lambda: optuna.samplers.RandomSampler(seed=seed))()
    assert isinstance(made, optuna.samplers.BaseSampler)
    return made


def _logarithms(costs: Costs) -> list[float]:
    """What is minimised: in logarithms a ratio counts the same anywhere."""
    return [math.log(cost) for cost in costs]
