"""The passes of a decode chain: every step's, over its buffers, and what may go beside what.

Every view that a step declares is one of the chain's, and every push constant too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal, TypeVar

from tuner.kernels import indexer, q8_parts
from tuner.kernels.attn_partials_q8 import VISIBLE
from tuner.kernels.base import Binding, Candidate, Pass, PushField, Value
from tuner.kernels.qsa_steps import (
    ATTEND,
    BASELINE,
    COMBINE,
    LIGHT_STEPS,
    SCORE,
    SELECT,
    STEPS,
    Made,
    Step,
)
from tuner.problems import QsaStepProblem
from tuner.records import BufferRole

T = TypeVar("T")

ROLES: Mapping[str, BufferRole] = {
    **dict.fromkeys(("query_gate", "key", "index_keys", "block_keys"), "state"),
    **dict.fromkeys(("key_cache", "value_cache"), "state"),
    **dict.fromkeys(("index_query", "scores", "visible", "visible_count"), "output"),
    **dict.fromkeys(("block_mask", "out"), "output"),
    "partials": "scratch",
}
"""Buffers that some step writes; all others are inputs."""


def _bindings() -> tuple[Binding, ...]:
    """Every view that any step needs, once; views of one buffer share a number."""
    views = {
        binding.name: replace(binding, role=_role(binding))
        for step in STEPS
        for binding in step.family.bindings
    }
    buffers = list(dict.fromkeys(view.buffer for view in views.values()))
    return tuple(replace(view, number=buffers.index(view.buffer)) for view in views.values())


def _role(binding: Binding) -> BufferRole:
    if binding.role in ("scratch", "counter"):
        return binding.role
    return ROLES.get(binding.buffer, "input")


def _push_fields() -> tuple[PushField, ...]:
    fields = {field.name: field for step in STEPS for field in step.family.push_fields}
    return tuple(fields.values())


BINDINGS = _bindings()
_MORE_VIEWS = {
    ATTEND.family.name: (VISIBLE,),
    LIGHT_STEPS["blocks"].family.name: (indexer.BINDINGS["projection"],),
}
"""What a step reads in the chain only."""
_NUMBERS = {binding.buffer: binding.number for binding in BINDINGS}
_STEP_BINDINGS = {
    step.family.name: tuple(
        replace(view, number=_NUMBERS[view.buffer])
        for view in (*step.family.bindings, *_MORE_VIEWS.get(step.family.name, ()))
    )
    for step in STEPS
}
"""What each step declares: its own views only, in the roles that they have in its family, so that a
compiler knows what the step only reads."""
PUSH_FIELDS = _push_fields()


def attend_values(c: Candidate) -> Mapping[str, Value]:
    """What is chosen for the attention, with the chain's split."""
    made = ATTEND.variants[c["attend"]](c["subgroup_size"], c.problem)
    return made if c["attend"] == BASELINE else {**made, "split": c["split"]}


def passes(c: Candidate, scalars: Mapping[str, int | float]) -> tuple[Pass, ...]:
    """The launches of a candidate; see `Family.passes`."""
    known = {field.name: scalars.get(field.name, 0) for field in PUSH_FIELDS}
    if not scalars:
        known = {}
    parts = q8_parts.parts(ATTEND.candidate(attend_values(c), c.problem, c.device))
    if known:
        known |= {"num_parts": parts, "max_parts": parts}
    found: list[Pass] = []
    for stretch in _stretches(c):
        first = True
        for each in stretch:
            beside = not first and c["schedule"] != "serial"
            found.append(replace(each, push={**known, **each.push, **_own(known)}, beside=beside))
            first = False
    return tuple(found)


def _own(known: Mapping[str, int | float]) -> dict[str, int | float]:
    """What the chain decides, whatever a step's family would."""
    return {name: known[name] for name in ("num_parts", "max_parts") if name in known}


def _stretches(c: Candidate) -> Iterator[tuple[Pass, ...]]:
    """Passes between which there may be no barrier; each stretch needs those before it.

    Norm, rope and the append of keys and values are for the attention, and fresh raw keys for the
    next step. So they go beside whatever comes first, and beside what follows it.
    """
    problem: QsaStepProblem = c.problem

    def of(name: str) -> tuple[Pass, ...]:
        step = LIGHT_STEPS[name]
        return _taken(c, step, step.variants[c["light_steps"]])

    fresh = c["schedule"] == "fresh"
    keys = of("append") if problem.budget else ()
    blocks = of("blocks") if problem.completes else ()
    query = of("query") if problem.selects else ()
    # Fresh block keys read what the cache had before its raw keys are appended.
    stretches = [(*query, *blocks)] if fresh else [(*query, *keys), blocks]
    if problem.selects:
        stretches.append(_taken(c, SCORE, SCORE.variants[c["score"]]))
        stretches += [(each,) for each in _taken(c, SELECT, SELECT.variants[c["select"]])]
    stretches = [each for each in stretches if each]
    stretches += [()] * (2 - len(stretches))
    stretches[0] = (*of("norm_rope"), *stretches[0])
    stretches[1] += of("kv_append") + (keys if fresh else ())
    yield from stretches
    yield _taken(c, ATTEND, lambda _size, _problem: attend_values(c))
    yield _taken(c, COMBINE, COMBINE.variants[c["combine"]])


def _taken(c: Candidate, step: Step, made: Made) -> tuple[Pass, ...]:
    """A step's passes, with all that its family's template reads."""
    sub = step.candidate(made(c["subgroup_size"], c.problem), c.problem, c.device)
    more: dict[str, object] = {
        "step_template": step.family.template,
        "step_bindings": _STEP_BINDINGS[step.family.name],
    }
    if step is ATTEND:
        more |= {
            "selected": _selected(c.problem),
            "ratio": c.problem.ratio,
            "kept_blocks": c.problem.budget // c.problem.ratio,
        }
    if step is LIGHT_STEPS["blocks"]:
        more["fresh_keys"] = c["schedule"] == "fresh"
    if step is COMBINE:
        sub = replace(sub, problem=c.problem.combine(1))
    found = named(step, {each.name: each for each in step.family.passes(sub, {})})
    return tuple(
        replace(each, name=name, constants={**sub.values, **each.constants, **more})
        for name, each in found.items()
    )


def named(step: Step, passes: Mapping[str, T]) -> dict[str, T]:
    """What a step has for each of its passes, by the names that these have in a chain."""
    family, several = step.family.name, len(passes) > 1
    return {f"{family} {name}" if several else family: each for name, each in passes.items()}


def chosen(c: Candidate) -> Iterator[tuple[Step, Made]]:
    """All steps with what is chosen for them."""
    yield from ((step, step.variants[c["light_steps"]]) for step in LIGHT_STEPS.values())
    yield SCORE, SCORE.variants[c["score"]]
    yield SELECT, SELECT.variants[c["select"]]
    yield ATTEND, lambda _size, _problem: attend_values(c)
    yield COMBINE, COMBINE.variants[c["combine"]]


def _selected(problem: QsaStepProblem) -> Literal["by row"] | bool:
    return "by row" if problem.budget else False
