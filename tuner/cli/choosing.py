"""Which family is taken for which problem, where the user leaves that open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from tuner.cli.output import note

if TYPE_CHECKING:
    from tuner.cli.options import ProblemChoice
    from tuner.device_info import DeviceInfo
    from tuner.kernels.base import Family
    from tuner.problems import Problem
    from tuner.search import Task

DEFAULT_FAMILIES = (
    "paged_decode_q8",
    "paged_decode_q8_switched",
    "paged_decode_f16",
    "paged_decode_f32",
)
"""Of each problem the first that solves it is taken; where no problem is named, the first of all.
Which cache an engine has is the user's to say: float16 is taken only where int8 has no kernel."""
NAMED = 3
"""So many problems of several are named."""


Pairing = Literal["asked", "every", "first"]
"""asked: each family with each of its problems, whether it solves it or not. every: with each that
it solves. first: each problem with the first family alone that solves it."""


def paired(
    families: Sequence[Family],
    choice: ProblemChoice,
    info: DeviceInfo,
    pairing: Pairing,
    *,
    once: bool = False,
) -> list[Task]:
    """Families with their problems; `once`: no work twice.

    Says which default families are passed over, and what is left out: also problems that the user
    named, but that are of a kind which none of the families solves.

    Raises:
        UsageError: what the user named is for none of these families.
    """
    tasks = _pairs(families, choice, info, pairing)
    if strange := _of_other_kinds(families, choice):
        note(strange)
    if once:
        tasks, repeats = _without_repeats(tasks, info, across=pairing == "first")
        if repeats:
            note(_left_out(repeats))
    for line in _why_taken(tasks, info) if pairing == "first" else ():
        note(line)
    return tasks


def _pairs(
    families: Sequence[Family], choice: ProblemChoice, info: DeviceInfo, pairing: Pairing
) -> list[Task]:
    """All tasks. What no family solves is the last one's of its kind, whose refusal says why."""
    if pairing == "asked":
        return [(family, p) for family in families for p in choice.required(family, info)]
    able = _able(families, choice, info)
    if pairing == "first":
        able = {problem: found[:1] for problem, found in able.items()}
    return [(family, p) for family in families for p, found in able.items() if family in found]


def _of_other_kinds(families: Sequence[Family], choice: ProblemChoice) -> str | None:
    """What to say of problems that are of no family's kind; None if there are none."""
    from tuner import kernels

    kinds = {family.problem_type for family in families}
    others = [problem for problem in choice.named() if type(problem) not in kinds]
    if not others:
        return None
    given = {type(problem) for problem in others}
    able = [family.name for family in kernels.families() if family.problem_type in given]
    return (
        f"{_labels(others)}: left out, because only other families solve problems of that kind: "
        f"{', '.join(able)}"
    )


def _able(
    families: Sequence[Family], choice: ProblemChoice, info: DeviceInfo
) -> Mapping[Problem, Sequence[Family]]:
    """By problem the families that solve it, else the last one of its kind."""
    from tuner.kernels import space

    of_kind: dict[Problem, list[Family]] = {}
    for family in families:
        for problem in choice.problems(family, info):
            of_kind.setdefault(problem, []).append(family)
    if not of_kind:
        choice.required(families[0], info)
    return {
        problem: [f for f in found if not space.refusals(f, problem, info)] or found[-1:]
        for problem, found in of_kind.items()
    }


def default_families(*, said: bool = True) -> list[Family]:
    """`DEFAULT_FAMILIES`, in their order; the first alone where the user has `said` no problems."""
    from tuner import kernels

    return [kernels.family(name) for name in DEFAULT_FAMILIES[: None if said else 1]]


def _why_taken(tasks: Iterable[Task], info: DeviceInfo) -> list[str]:
    """What to say of default families that were passed over: a line for each family and reason."""
    from tuner.kernels import space

    found: dict[tuple[str, str], list[Problem]] = {}
    for family, problem in tasks:
        if not space.refusals(family, problem, info) and (
            why := _passed_over(family, problem, info)
        ):
            found.setdefault((family.name, why), []).append(problem)
    return [
        f"{name} is used for {_labels(problems)}, because {why}"
        for (name, why), problems in found.items()
    ]


def _passed_over(family: Family, problem: Problem, info: DeviceInfo) -> str | None:
    """Which default family before this one does not do, and why; None if there is none before."""
    from tuner.kernels import space

    why: str | None = None
    for before in default_families():
        if before is family:
            break
        refusals = space.refusals(before, problem, info)
        if not refusals:
            return f"{before.name} has nothing of what --only names"
        why = f"{before.name} cannot solve it ({refusals[0]})"
    return why


def _without_repeats(
    tasks: Sequence[Task], info: DeviceInfo, *, across: bool
) -> tuple[list[Task], list[Task]]:
    """The tasks, and apart from them those that are the work of one of them.

    That is so where no context reaches beyond a window, and another task of the family (`across`:
    of any) solves the problem without it.
    """
    from tuner.kernels import space

    def work(family: Family, problem: Problem) -> tuple[str, Problem]:
        return ("" if across else family.name, problem)

    done = {work(*task) for task in tasks if not space.refusals(*task, info)}
    repeats = [(f, p) for f, p in tasks if p.effective != p and work(f, p.effective) in done]
    return [task for task in tasks if task not in repeats], repeats


def _left_out(repeats: Sequence[Task]) -> str:
    of = ", ".join(dict.fromkeys(family.name for family, _ in repeats))
    return (
        f"{_labels(problem for _, problem in repeats)}: left out of {of}, because no context is "
        "longer than the window: the same problem without the window is the same work, and is "
        "searched"
    )


def _labels(problems: Iterable[Problem]) -> str:
    """Each problem by its label, the first few of many."""
    found = list(dict.fromkeys(problem.label for problem in problems))
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more
