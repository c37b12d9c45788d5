"""How an exported entry is launched on other problems than its own: the rule, and what it gives.

The rule is text in a language of its own (`tuner.expressions`), so that an engine in any language
can follow it. `Dispatch.launch` does so here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec

from tuner.errors import UsageError
from tuner.expressions import evaluate
from tuner.problems import Problem

FIXED = "fixed"
"""The policy of entries that can be launched on their very problem alone."""

Expression = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_ ,()+*-]+$")]
Counts = tuple[Expression, Expression, Expression]


class Launch(NamedTuple):
    """What to launch: workgroup counts by pass, push constants that sizes change, scratch bytes."""

    groups: dict[str, tuple[int, int, int]]
    push_constants: dict[str, int]
    scratch_bytes: dict[str, int]


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """A name that later expressions use, and its own expression."""

    name: str
    value: Expression


class Dispatch(msgspec.Struct, frozen=True, kw_only=True):
    """How to launch the variant on other sizes of the same geometry, in expressions.

    They may name the whole numbers among the problem's fields, `facts`, the counts of a batch (see
    `Entry.counts`), and `terms`, which are evaluated in order. `groups` gives the workgroup counts
    of every pass in x, y and z, `push_constants` those that sizes change (all others stay as the
    passes have them), `scratch_bytes` the size of every scratch and counter buffer. The rule holds
    where each expression in `at_most` is no larger than its number. `policy` says what cuts the
    work, `text` all of it in words. The policy ``fixed`` means: as given in the passes, for the
    entry's problem alone.
    """

    policy: str
    facts: dict[str, int]
    terms: tuple[Term, ...]
    groups: dict[str, Counts]
    push_constants: dict[str, Expression]
    scratch_bytes: dict[str, Expression]
    at_most: dict[Expression, int]
    text: str

    def known(self, problem: Problem, own: Mapping[str, int] | None = None) -> dict[str, int]:
        """Every name that expressions may have, with its value on a problem.

        `own` has what an engine knows better, such as the capacity of its cache: it stands in the
        place of a term, a field, a count or a push constant.

        Raises:
            UsageError: a term needs what is not known.
        """
        own = own or {}
        fields = msgspec.to_builtins(problem).items()
        known = {name: value for name, value in fields if isinstance(value, int)}
        known |= {**problem.counts, **self.facts, **own}
        for term in self.terms:
            if term.name not in own:
                known[term.name] = evaluate(term.value, known)
        return known

    def refusal(self, problem: Problem, own: Mapping[str, int] | None = None) -> str | None:
        """Why the rule does not hold on a problem, None if it does."""
        if self.policy == FIXED:
            return "it has no rule for other problems than its own"
        known = self.known(problem, own)
        for text, most in self.at_most.items():
            if (value := evaluate(text, known)) > most:
                return f"{text} is {value}, it may be at most {most}"
        return None

    def launch(self, problem: Problem, own: Mapping[str, int] | None = None) -> Launch:
        """What to launch on a problem; see `known` for `own`.

        Raises:
            UsageError: the rule does not hold there.
        """
        if why := self.refusal(problem, own):
            raise UsageError(f"cannot be launched on {problem.label}: {why}")
        known = self.known(problem, own)
        return Launch(
            groups={
                name: (evaluate(x, known), evaluate(y, known), evaluate(z, known))
                for name, (x, y, z) in self.groups.items()
            },
            push_constants={
                name: own[name] if own and name in own else evaluate(text, known)
                for name, text in self.push_constants.items()
            },
            scratch_bytes={n: evaluate(t, known) for n, t in self.scratch_bytes.items()},
        )
