"""How a decode chain is launched on other sizes: each step's rule on its share of the problem."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tuner.expressions import renamed
from tuner.kernels import indexer, q8_operands, q8_parts
from tuner.kernels.base import Candidate, DispatchRule, Terms
from tuner.kernels.qsa_passes import attend_values, chosen, named, passes
from tuner.kernels.qsa_steps import ATTEND, LIGHT_STEPS, Step
from tuner.planar import SCALE_OFFSET
from tuner.problems import QsaStepProblem

STEP_NAMES = {LIGHT_STEPS["kv_append"].family.name: {"context": "base_pos"}}
"""What a step's own rule calls otherwise than the chain's does."""


def dispatch_rule(c: Candidate) -> DispatchRule:
    """How an engine launches a candidate on other sizes; see `Family.dispatch`."""
    problem: QsaStepProblem = c.problem
    attend = ATTEND.candidate(attend_values(c), problem, c.device)
    policy, facts, num_parts = q8_parts.parts_rule(attend, "seen")
    terms = dict(
        (
            *indexer.TERMS,
            *_seen_terms(problem),
            ("max_parts", renamed(q8_operands.MAX_PARTS, {"max_tokens": "seen"})),
            ("num_parts", num_parts),
        )
    )
    partials = f"rows * query_heads * num_parts * {problem.head_size + 2}"
    groups: dict[str, tuple[str, str, str]] = {}
    scratch = {"partials": f"4 * {partials}"}
    launched = {each.name for each in passes(c, {})}
    for step, rule in _rules(c):
        scratch = {**rule.scratch, **scratch}
        found = {n: counts for n, counts in named(step, rule.groups).items() if n in launched}
        if found:
            groups |= found
            terms = {**terms, **{n: text for n, text in rule.terms if n not in terms}}
    return DispatchRule(
        policy=policy,
        facts=facts,
        terms=tuple(terms.items()),
        groups=groups,
        push={
            **indexer.PUSH,
            "first_row": "base_pos",
            "scale_offset": SCALE_OFFSET,
            "scale_word": f"floor_div({SCALE_OFFSET}, 4)",
            "num_parts": "num_parts",
            "max_parts": "num_parts",
        },
        scratch=scratch,
        at_most=_missing(problem),
        text="context is what there is after the step, seen what the row sees that sees most; "
        "steps that have nothing to do on a problem do no harm there; part p of the attention "
        "takes chunks of chunk_tokens tokens: p, p + num_parts and so on",
    )


def _rules(c: Candidate) -> Iterator[tuple[Step, DispatchRule]]:
    """Every step and its own rule, in names of the chain."""
    for step, made in chosen(c):
        sub = step.candidate(made(c["subgroup_size"], c.problem), c.problem, c.device)
        assert step.family.dispatch is not None
        rule = step.family.dispatch(sub)
        meanings = STEP_NAMES.get(step.family.name, {})
        yield (
            step,
            replace(
                rule,
                terms=tuple((name, renamed(text, meanings)) for name, text in rule.terms),
                groups={n: _renamed_counts(each, meanings) for n, each in rule.groups.items()},
                scratch={n: renamed(text, meanings) for n, text in rule.scratch.items()},
            ),
        )


def _renamed_counts(
    counts: tuple[str, str, str], meanings: Mapping[str, str]
) -> tuple[str, str, str]:
    x, y, z = (renamed(text, meanings) for text in counts)
    return x, y, z


def _seen_terms(problem: QsaStepProblem) -> Terms:
    """What the row sees that sees most: with a budget one of a whole tail may see more than the
    last."""
    if problem.budget == 0:
        return (("seen", "context"),)
    return (
        ("last_whole_tail", "max(base_pos + 1, ratio * floor_div(context + 1, ratio) - 1)"),
        ("seen", f"max({_seen_by('context')}, {_seen_by('last_whole_tail')})"),
    )


def _seen_by(tokens: str) -> str:
    """What the row sees that is the last of so many tokens."""
    return f"min({tokens}, budget + {tokens} - ratio * floor_div({tokens}, ratio))"


def _missing(problem: QsaStepProblem) -> dict[str, int]:
    """What may not come up where the candidate has no step for it."""
    found = {}
    if problem.budget and not problem.completes:
        found["floor_div(context, ratio) - floor_div(base_pos, ratio)"] = 0
    if problem.budget and not problem.selects:
        found["floor_div(context, ratio)"] = problem.indexer.kept_blocks
    return found
