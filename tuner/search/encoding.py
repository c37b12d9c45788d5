"""A legal space in Optuna's terms, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    IntDistribution,
)

from tuner.kernels.base import Value, Values
from tuner.kernels.selection import Variants


class Encoding:
    """Distributions over the values that occur in a legal space.

    Categorical ones for samplers that know categories; `ordinal` ones, the places of the values in
    their declared order, for those that only know numbers. Parameters with one value have none.
    """

    def __init__(self, variants: Variants, *, ordinal: bool) -> None:
        self.ordinal = ordinal
        self._domains: dict[str, tuple[Value, ...]] = {
            name: tuple(values[code] for code in np.unique(variants.codes[:, column]))
            for column, (name, values) in enumerate(variants.domains.items())
        }
        self.distributions: dict[str, BaseDistribution] = {
            name: (
                IntDistribution(0, len(values) - 1) if ordinal else CategoricalDistribution(values)
            )
            for name, values in self._domains.items()
            if len(values) > 1
        }

    @property
    def digest(self) -> str:
        """Changes with whatever would make Optuna refuse a study's earlier trials."""
        raw = msgspec.json.encode([self.ordinal, list(self._domains.items())])
        return hashlib.sha256(raw).hexdigest()[:12]

    def params(self, values: Values) -> dict[str, Any]:
        """A variant of the space as Optuna's parameters."""
        return {
            name: self._domains[name].index(values[name]) if self.ordinal else values[name]
            for name in self.distributions
        }

    def values(self, params: Mapping[str, Any]) -> Values:
        """Optuna's parameters as parameter values, which may be illegal together."""
        return {
            name: domain[0]
            if name not in self.distributions
            else domain[params[name]]
            if self.ordinal
            else params[name]
            for name, domain in self._domains.items()
        }
