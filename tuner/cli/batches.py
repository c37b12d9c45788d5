"""Which variants `verify` takes on which problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tuner.errors import IllegalVariantError, UnknownNameError, UsageError

if TYPE_CHECKING:
    from tuner.device_info import DeviceInfo
    from tuner.kernels.base import Family, Value, Values
    from tuner.kernels.selection import Variants
    from tuner.problems import Problem

FEW, FEWER = 4, 1
"""Variants on each of the other geometries; fewer where every value is enough."""
Count = int | Literal["values", "pairwise", "all"]
Only = Mapping[str, Sequence[str]]
"""Parameters and the values, as text, that variants may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Variants of one family to verify on one problem."""

    family: Family
    problem: Problem
    variants: Sequence[Values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """How variants are picked from a space: how many, only which, and the seed of what is left to
    chance."""

    count: Count
    only: Only = field(default_factory=dict)
    seed: int = 0

    def legal(self, family: Family, problem: Problem, info: DeviceInfo) -> Variants:
        """The legal variants that may be picked."""
        from tuner.kernels import space

        return space.legal(family, problem, info).having(wanted_values(family, self.only))

    def few(self) -> Pick:
        """The same for a problem on which a few will do."""
        count = FEWER if self.count == "values" else FEW
        return Pick(count=count, only=self.only, seed=self.seed)


def parse_count(text: str) -> Count:
    """What `--variants` means.

    Raises:
        UsageError: it means nothing.
    """
    match text:
        case "values" | "pairwise" | "all":
            return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(f"--variants {text!r}: give a number above 0, values, pairwise or all")


def parse_only(assignments: Sequence[str]) -> Only:
    """What `--only` means: "name=value", several of one name being alternatives.

    Raises:
        UsageError: an assignment without "=".
    """
    from tuner.kernels import space

    only: dict[str, list[str]] = {}
    for text in space.single_assignments(assignments):
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise UsageError(f"--only {text!r} is no assignment: write name=value")
        only.setdefault(name, []).append(value)
    return only


def wanted_values(family: Family, only: Only) -> dict[str, list[Value]]:
    """The values of the family's parameters that `only` names.

    Raises:
        UnknownNameError: the family has no such parameter or value; names the nearest.
    """
    wanted: dict[str, list[Value]] = {}
    for name, texts in only.items():
        by_text = {str(value): value for value in family.parameter(name).values}
        for text in texts:
            if text not in by_text:
                raise UnknownNameError(f"value of {name} of {family.name}", text, by_text)
            wanted.setdefault(name, []).append(by_text[text])
    return wanted


def having(families: Sequence[Family], only: Only) -> tuple[tuple[Family, Only], ...]:
    """Those of the families that have something of what `only` names, each with its part of that.

    A family's part are the parameters that it has, with the values that they have. A family that
    has none of the parameters, or none of the values of one of them, is left out.

    Raises:
        UnknownNameError: a parameter or value that no family has; names the nearest.
        UsageError: a value that no family is left to have.
    """
    parts = ((family, _part(family, only)) for family in families)
    found = tuple(
        (family, part) for family, part in parts if all(part.values()) and (part or not only)
    )
    met = {(name, text) for _, part in found for name, texts in part.items() for text in texts}
    for name, texts in only.items():
        for text in texts:
            if (name, text) not in met:
                raise _nobody_has(families, name, text)
    return found


def _nobody_has(families: Sequence[Family], name: str, text: str) -> UsageError:
    """What is wrong with a value that none of the families is left to have."""
    parameters = [each for family in families for each in family.parameters]
    values = {
        str(value): value for each in parameters if each.name == name for value in each.values
    }
    if not values:
        names = dict.fromkeys(each.name for each in parameters)
        return UnknownNameError("parameter of these families", name, names)
    if text not in values:
        return UnknownNameError(f"value of {name} of these families", text, values)
    return UsageError(f"--only {name}={text}: no family has that together with the rest of --only")


def _part(family: Family, only: Only) -> Only:
    return {
        parameter.name: [
            text for text in only[parameter.name] if text in map(str, parameter.values)
        ]
        for parameter in family.parameters
        if parameter.name in only
    }


def chosen_batches(
    family: Family, problems: Sequence[Problem], info: DeviceInfo, pick: Pick
) -> tuple[list[Batch], dict[Problem, str]]:
    """What to verify of a family, and the problems for which nothing may be picked, with reasons.

    Without problems these are the family's geometries: the first whose baseline is legal, and a few
    variants on each of the others.

    Raises:
        OutOfMemoryError: one of the problems is too large.
        IllegalVariantError: nothing may be picked for any of them, or for the first geometry.
    """
    from tuner.cli.session import require_fit

    first, others = (problems, ()) if problems else _geometries(family, info)
    require_fit([(family, problem) for problem in first], info)
    made = [_batch(family, problem, info, pick) for problem in first]
    if not any(batch.variants for batch in made):
        raise _refusal(family, first[0], info, pick.only)
    if pick.count != "all":
        made += [_batch(family, other, info, pick.few()) for other in others]
    return (
        [batch for batch in made if batch.variants],
        {
            batch.problem: _refusal(family, batch.problem, info, pick.only).reasons[1]
            for batch in made
            if not batch.variants
        },
    )


def _geometries(family: Family, info: DeviceInfo) -> tuple[Sequence[Problem], Sequence[Problem]]:
    """The first of the family's geometries whose baseline is legal, and the others."""
    from tuner import workloads
    from tuner.kernels import space

    others = list(workloads.geometries(family.kind))
    solved = (p for p in others if not space.reasons(family, family.baseline, p, info))
    first = next(solved, others[0])
    others.remove(first)
    return [first], others


def unverified(family: Family, refused: Mapping[Problem, str], only: Only) -> Iterator[str]:
    """What to say of problems that a family was not verified on: a line for each reason."""
    kernel = f"kernel with {_assigned(only)}" if only else "kernel"
    for reason in dict.fromkeys(refused.values()):
        problems = ", ".join(problem.label for problem, why in refused.items() if why == reason)
        yield (
            f"{family.name} was not verified on {problems}, for which it has no {kernel} on this "
            f"device ({reason})"
        )


def _assigned(only: Only) -> str:
    return " ".join(f"{name}={'|'.join(texts)}" for name, texts in only.items())


def _refusal(family: Family, problem: Problem, info: DeviceInfo, only: Only) -> IllegalVariantError:
    """Why no variant that may be picked is legal: what speaks against the likeliest of them."""
    from tuner.kernels import space

    found = space.why_none(family, problem, info, wanted_values(family, only))
    return IllegalVariantError(
        family.name,
        _assigned(only) or "(any)",
        (f"no such variant is legal for {problem.label} on {info.name}", *found),
    )


def _batch(family: Family, problem: Problem, info: DeviceInfo, pick: Pick) -> Batch:
    """The variants that are picked; a number has the baseline and a start among them, if it may."""
    import numpy as np

    from tuner.cli.variants import starting_variant
    from tuner.kernels import space

    legal = pick.legal(family, problem, info)
    match pick.count:
        case "all":
            return Batch(family=family, problem=problem, variants=legal)
        case "pairwise":
            return Batch(family=family, problem=problem, variants=space.pairwise(legal))
        case "values":
            chosen = space.every_value(legal, seed=pick.seed)
            return Batch(family=family, problem=problem, variants=chosen)
    rng = np.random.default_rng(pick.seed)
    drawn = [legal[int(place)] for place in rng.permutation(len(legal))[: pick.count]]
    known = [space.canonical(family, family.baseline), starting_variant(family, problem, info)]
    picked = [values for values in known if values in legal]
    picked += [values for values in drawn if values not in picked]
    return Batch(family=family, problem=problem, variants=picked[: pick.count])
