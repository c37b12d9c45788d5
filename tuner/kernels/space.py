"""The space of a family: which variants are legal, why others are not, and how to pick from it.

One set of rules serves both sides. `legal` enumerates what a search may propose, `reasons` says of
a variant asked for by hand everything that speaks against it; both read the same declarations.
Parameters are taken in declared order, so `Parameter.used` may read only those declared before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from tuner.device_info import DeviceInfo
from tuner.errors import IllegalVariantError, UnknownNameError, UsageError
from tuner.kernels import limits
from tuner.kernels.base import Candidate, Constraint, Family, Value, Values
from tuner.kernels.selection import Variants, every_value, nearest_legal, pairwise
from tuner.problems import Problem

__all__ = [
    "Rules",
    "Variants",
    "canonical",
    "describe",
    "every_value",
    "legal",
    "nearest_legal",
    "pairwise",
    "parse_values",
    "reasons",
    "refusals",
    "require_legal",
    "single_assignments",
    "starts",
    "why_none",
]

_BETWEEN_ASSIGNMENTS = re.compile(r"\s+(?=\w+\s*=)")


def legal(family: Family, problem: Problem, device: DeviceInfo) -> Variants:
    """Every legal variant, in lexicographic order of the declared parameters and values.

    Depth first: a branch ends at the first constraint that the parameters chosen so far violate,
    and a parameter that means nothing in a branch takes only its neutral value there.
    """
    before, at = _rules_by_depth(family, problem, device)
    chosen: dict[str, Value] = _Known()
    codes = bytearray(len(family.parameters))
    found = bytearray()
    last = len(codes) - 1

    def descend(depth: int) -> None:
        parameter, rules = family.parameters[depth], at[depth]
        used = parameter.used is None or parameter.used(chosen)
        for code, value in enumerate(parameter.values if used else parameter.values[:1]):
            chosen[parameter.name], codes[depth] = value, code
            for rule in rules:
                if rule.forbids(chosen):
                    break
            else:
                if depth < last:
                    descend(depth + 1)
                else:
                    found.extend(codes)
        del chosen[parameter.name]

    if not any(rule.forbids(chosen) for rule in before):
        descend(0)
    domains = {parameter.name: parameter.values for parameter in family.parameters}
    return Variants(domains, np.frombuffer(bytes(found), np.uint8))


def reasons(
    family: Family, values: Values, problem: Problem, device: DeviceInfo
) -> tuple[str, ...]:
    """Everything that makes the variant illegal, in words; empty if it is legal. See `Rules`."""
    return Rules(family, problem, device).reasons(values)


class Rules:
    """What a family demands of its variants on one problem and device; remembers its answers."""

    def __init__(self, family: Family, problem: Problem, device: DeviceInfo) -> None:
        self._family, self._names = family, _names(family)
        self._rules = [(c.needs, _Rule(c, problem, device)) for c in _constraints(family)]

    def reasons(self, values: Values) -> tuple[str, ...]:
        """Everything that makes the variant illegal, in words; empty if it is legal.

        Names and values that do not exist are reported with the nearest that do; constraints that
        depend on these are left out, all others are asked.
        """
        found = [
            str(UnknownNameError(f"parameter of {self._family.name}", name, self._names))
            for name in values
            if name not in self._names
        ]
        known: dict[str, Value] = {}
        for parameter in self._family.parameters:
            if parameter.name not in values:
                found.append(f"{parameter.name} has no value")
            elif values[parameter.name] not in parameter.values:
                value = values[parameter.name]
                found.append(str(UnknownNameError(f"{parameter.name}", value, parameter.values)))
            else:
                known[parameter.name] = values[parameter.name]
        if len(known) == len(self._names):
            found += _not_neutral(self._family, known)
        for needs, rule in self._rules:
            if all(name in known for name in needs) and (reason := rule.reason(known)) is not None:
                found.append(reason)
        return tuple(found)

    def require(self, values: Values) -> None:
        """Do nothing for a legal variant.

        Raises:
            IllegalVariantError: with every reason.
        """
        if found := self.reasons(values):
            raise IllegalVariantError(self._family.name, describe(values), found)


def refusals(family: Family, problem: Problem, device: DeviceInfo) -> tuple[str, ...]:
    """What speaks against all variants on the problem, whatever their values; empty if nothing."""
    rules = (_Rule(each, problem, device) for each in _constraints(family) if not each.needs)
    found = (rule.reason({}) for rule in rules)
    return tuple(reason for reason in found if reason is not None)


def why_none(
    family: Family,
    problem: Problem,
    device: DeviceInfo,
    only: Mapping[str, Sequence[Value]] | None = None,
) -> tuple[str, ...]:
    """Where no variant with one of the values of each parameter in `only` is legal: what speaks
    against that of them that is nearest to legal, the first values on top of a known-good variant.
    """
    wanted = {name: values[0] for name, values in (only or {}).items()}
    bases = (family.baseline, *family.starts, *family.portable) if wanted else (family.baseline,)
    changed = ({**canonical(family, {**base, **wanted}), **wanted} for base in bases)
    return min((reasons(family, values, problem, device) for values in changed), key=len)


def require_legal(family: Family, values: Values, problem: Problem, device: DeviceInfo) -> None:
    """`Rules.require` for one variant."""
    Rules(family, problem, device).require(values)


def canonical(family: Family, values: Values) -> Values:
    """The one name of the kernel that `values` mean: parameters without meaning made neutral.

    Keys come out in declared order. All parameters must be present.
    """
    result: dict[str, Value] = _Known()
    for parameter in family.parameters:
        used = parameter.used is None or parameter.used(result)
        result[parameter.name] = values[parameter.name] if used else parameter.values[0]
    return dict(result)


def describe(values: Values) -> str:
    """The variant as one line, "name=value name=value", the form that `--set` takes."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def single_assignments(texts: Iterable[str]) -> list[str]:
    """Assignments "name=value", one each: a text may have several, as `describe` writes them."""
    return [part for text in texts for part in _BETWEEN_ASSIGNMENTS.split(text.strip())]


def parse_values(family: Family, assignments: Iterable[str], base: Values) -> Values:
    """`base` changed by assignments "name=value"; the result may be illegal.

    Parameters that lose their meaning through an assignment become neutral, except those assigned
    themselves: `reasons` then says that they mean nothing. Of several assignments to one parameter
    the last holds.

    Raises:
        UsageError: an assignment without "=".
        UnknownNameError: no such parameter or value; names the nearest.
    """
    assigned: dict[str, Value] = {}
    for text in single_assignments(assignments):
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise UsageError(f"{text!r} is no assignment: write name=value")
        by_text = {str(legal): legal for legal in family.parameter(name).values}
        if value not in by_text:
            raise UnknownNameError(f"value of {name}", value, by_text.values())
        assigned[name] = by_text[value]
    return {**canonical(family, {**base, **assigned}), **assigned}


def starts(family: Family, variants: Variants, device: DeviceInfo) -> tuple[Values, ...]:
    """The variants that a search of `variants` begins with, canonical; some may not be among them.

    These are the family's known-good ones. Where the driver does not tell the number of compute
    units, by which most of these cut their work, or where `variants` has none of them, the family's
    portable ones follow: elsewhere they would only cost trials.
    """
    known = tuple(canonical(family, values) for values in family.starts)
    if device.compute_units is not None and any(values in variants for values in known):
        return known
    return (*known, *(canonical(family, values) for values in family.portable))


class _Known(dict[str, Any]):
    """Parameter values known so far; reading another is a mistake in the family's declaration."""

    def __missing__(self, name: str) -> Any:
        raise LookupError(
            f"the family reads parameter {name!r} where only {sorted(self)} are known: list it in "
            "`needs`, or declare it before the parameter whose `used` reads it"
        )


class _Rule:
    """A constraint on one problem and device, remembering its answers by the values it needs."""

    def __init__(self, constraint: Constraint, problem: Problem, device: DeviceInfo) -> None:
        self._constraint, self._problem, self._device = constraint, problem, device
        needs = constraint.needs
        self._key: Callable[[Values], Any] = itemgetter(*needs) if needs else lambda _values: None
        self._forbidden: dict[Any, bool] = {}
        self._reasons: dict[Any, str | None] = {}

    def forbids(self, values: Values) -> bool:
        """Whether these values are illegal; the same needed values are asked about only once."""
        key = self._key(values)
        known = self._forbidden.get(key)
        if known is None:
            known = self._forbidden[key] = self._ask(values) is not None
        return known

    def reason(self, values: Values) -> str | None:
        """Why these values are illegal, None if they are not; asked once, as `forbids`."""
        key = self._key(values)
        if key not in self._reasons:
            self._reasons[key] = self._ask(values)
        return self._reasons[key]

    def _ask(self, values: Values) -> str | None:
        known = _Known((name, values[name]) for name in self._constraint.needs)
        return self._constraint.check(Candidate(known, self._problem, self._device))


def _rules_by_depth(
    family: Family, problem: Problem, device: DeviceInfo
) -> tuple[list[_Rule], list[list[_Rule]]]:
    """Rules to ask before any choice, and those to ask once parameter i is chosen."""
    depth_of = {name: depth for depth, name in enumerate(_names(family))}
    before: list[_Rule] = []
    at: list[list[_Rule]] = [[] for _ in family.parameters]
    for constraint in _constraints(family):
        rule = _Rule(constraint, problem, device)
        depths = [depth_of[family.parameter(name).name] for name in constraint.needs]
        (at[max(depths)] if depths else before).append(rule)
    return before, at


def _constraints(family: Family) -> tuple[Constraint, ...]:
    """The family's own, and what every pipeline must keep to: how many buffers, how many subgroups
    a workgroup, where variants choose these."""

    def check_buffers(c: Candidate) -> str | None:
        return limits.buffers_reason(c.device, len(family.slots))

    def check_subgroups(c: Candidate) -> str | None:
        return limits.subgroups_reason(c.device, c["subgroups"])

    shared = [Constraint(needs=(), check=check_buffers)]
    if "subgroups" in _names(family):
        shared.append(Constraint(needs=("subgroups",), check=check_subgroups))
    return (*shared, *family.constraints)


def _names(family: Family) -> tuple[str, ...]:
    return tuple(parameter.name for parameter in family.parameters)


def _not_neutral(family: Family, values: Values) -> list[str]:
    wanted = canonical(family, values)
    return [
        f"{name}={values[name]} means nothing beside the other values: it must be {wanted[name]}"
        for name in wanted
        if values[name] != wanted[name]
    ]
