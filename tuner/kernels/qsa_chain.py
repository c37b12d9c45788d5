"""A whole decode step of block-sparse-indexed attention as one job of several passes.

Steps 2 to 7 of the third system: raw index keys appended, keys of completed blocks, indexer
queries, scores, selection, norm and rope, append to the planar cache, split-T attention dense or
over each row's list, and the gated join. Every pass is a variant of the family of its step, over
the chain's buffers. Steps that have nothing to do are not launched.
"""

from __future__ import annotations

from itertools import product

from tuner.kernels import q8_parts
from tuner.kernels.attn_partials_q8 import arithmetic
from tuner.kernels.base import (
    ArithmeticClass,
    Candidate,
    Constraint,
    Family,
    Parameter,
    ValidationCase,
    Values,
)
from tuner.kernels.qsa_operands import (
    make_operands,
    operand_bytes,
    scalars_of,
    validation_cases,
)
from tuner.kernels.qsa_passes import BINDINGS, PUSH_FIELDS, attend_values, passes
from tuner.kernels.qsa_rule import dispatch_rule
from tuner.kernels.qsa_steps import (
    ATTEND,
    BASELINE,
    COMBINE,
    LIGHT,
    LIGHT_STEPS,
    SCORE,
    SELECT,
    Made,
    Step,
)
from tuner.kernels.space import canonical, reasons
from tuner.oracle.qsa_chain import chain_reference, sampled_chain_reference
from tuner.problems import QsaStepProblem

SPLITS = ("upstream", "count:16", "count:32", "count:64", "device:1", "device:2", "device:4")
VALIDATED_SPLIT = "count:16"

PARAMETERS = (
    Parameter(
        name="schedule",
        values=("serial", "beside", "fresh"),
        help="serial: a barrier before every step; beside: steps that need nothing of each other "
        "share the time between two barriers; fresh: block keys take the new raw keys from the "
        "projections, so that they need not wait for the append, which comes later",
    ),
    Parameter(
        name="subgroup_size",
        values=(8, 16, 32, 64),
        help="lanes of a subgroup that all tuned steps are built for",
    ),
    Parameter(
        name="light_steps",
        values=LIGHT,
        help="appends, block keys, queries, norm and rope: as upstream has them, or in registers",
    ),
    Parameter(name="score", values=tuple(SCORE.variants), help="scores of index blocks"),
    Parameter(name="select", values=tuple(SELECT.variants), help="the best blocks of each row"),
    Parameter(name="attend", values=tuple(ATTEND.variants), help="partial attention"),
    Parameter(
        name="split",
        values=SPLITS,
        help="into how many parts a row's tokens are dealt out, see attn_partials_q8",
        used=lambda values: values["attend"] != BASELINE,
    ),
    Parameter(
        name="combine", values=tuple(COMBINE.variants), help="join of the parts, and the gate"
    ),
)


def _checked(step: Step, name: str) -> Constraint:
    """A rule: what is chosen for a step must be legal in the step's family."""

    def check(c: Candidate) -> str | None:
        return _why_not(c, step, step.variants[c[name]], name)

    return Constraint(needs=("subgroup_size", name), check=check)


def _why_not(c: Candidate, step: Step, made: Made, name: str) -> str | None:
    sub = step.candidate(made(c["subgroup_size"], c.problem), c.problem, c.device)
    found = reasons(step.family, canonical(step.family, sub.values), sub.problem, c.device)
    return f"{name}: {found[0]}" if found else None


def _check_light(c: Candidate) -> str | None:
    needed = dict(LIGHT_STEPS)
    if c.problem.budget == 0:
        needed = {name: LIGHT_STEPS[name] for name in ("norm_rope", "kv_append")}
    chosen = c["light_steps"]
    found = (_why_not(c, step, step.variants[chosen], name) for name, step in needed.items())
    return next((reason for reason in found if reason), None)


def _check_schedule(c: Candidate) -> str | None:
    if c["schedule"] == "fresh" and c["light_steps"] == BASELINE:
        return "fresh raw keys are for block keys in registers: the baseline reads the cache"
    if c["schedule"] == "fresh" and c.problem.budget == 0:
        return "a dense step (budget 0) has no block keys: its schedule is serial or beside"
    return None


def _check_dense(c: Candidate) -> str | None:
    if c.problem.budget == 0 and (c["score"], c["select"]) != (BASELINE, BASELINE):
        return "a dense step (budget 0) scores and selects nothing: both must be baseline"
    return None


def _check_attend(c: Candidate) -> str | None:
    made = attend_values(c)
    sub = ATTEND.candidate(made, c.problem, c.device)
    found = reasons(ATTEND.family, canonical(ATTEND.family, sub.values), sub.problem, c.device)
    return f"attend: {found[0]}" if found else None


def _check_size(c: Candidate) -> str | None:
    """Where nothing is tuned, one size stands for all."""
    tuned = [c[name] for name in ("light_steps", "score", "select", "attend")]
    if set(tuned) == {BASELINE} and c["subgroup_size"] != PARAMETERS[1].values[0]:
        return "no step is built for a subgroup size: it must be 8, which stands for any"
    return None


CONSTRAINTS = (
    Constraint(needs=("schedule", "light_steps"), check=_check_schedule),
    Constraint(needs=("score", "select"), check=_check_dense),
    Constraint(needs=("subgroup_size", "light_steps"), check=_check_light),
    _checked(SCORE, "score"),
    _checked(SELECT, "select"),
    Constraint(needs=("subgroup_size", "attend", "split"), check=_check_attend),
    _checked(COMBINE, "combine"),
    Constraint(
        needs=("subgroup_size", "light_steps", "score", "select", "attend"), check=_check_size
    ),
)


def _arithmetic(values: Values) -> ArithmeticClass:
    """That of the attention: the other steps are all of float32's class."""
    made = ATTEND.variants[str(values["attend"])]
    geometry = QsaStepProblem(context=1)
    return arithmetic(ATTEND.values(made(int(values["subgroup_size"]), geometry)))


def _validated_as(c: Candidate, _case: ValidationCase) -> Values:
    """The same kernels, cut into parts of a few chunks."""
    return c.values if c["attend"] == BASELINE else {**c.values, "split": VALIDATED_SPLIT}


def _scratch_bytes(c: Candidate) -> dict[str, int]:
    parts = q8_parts.parts(ATTEND.candidate(attend_values(c), c.problem, c.device))
    heads = c.problem.rows * c.problem.query_heads
    select = SELECT.candidate(
        SELECT.variants[c["select"]](c["subgroup_size"], c.problem), c.problem, c.device
    )
    own = {"partials": 4 * heads * parts * (c.problem.head_size + 2)}
    return SELECT.family.scratch_bytes(select) | own


def _bytes_moved(problem: QsaStepProblem) -> int:
    """Tokens and scales that some row sees, keys of the complete blocks, projections and output."""
    rows = problem.row_tokens().astype("int64")
    dense = rows[~problem.selective()]
    tokens = int(rows[problem.selective()].sum()) + int(dense.max(initial=0))
    row = problem.kv_heads * problem.head_size
    moved = 2 * min(tokens, problem.context) * (row + row // 16)
    vectors = 3 * problem.query_heads * problem.head_size + 3 * row
    moved += 4 * problem.rows * vectors
    if problem.budget:
        index = problem.indexer
        moved += 4 * problem.rows * (index.index_heads + 1) * index.index_dim
    if problem.selects:
        moved += 2 * index.end_block * index.index_dim
    return moved


_SCHEDULES = ("fresh", "beside")
_LISTS = (
    ("lanes8", "workgroup"),
    ("lanes8", "parts32"),
    ("lanes4", "workgroup_short"),
    (BASELINE, BASELINE),
)
"""Scores and selections to begin with."""
_ATTENTIONS = (
    ("f16_wide", "device:1"),
    ("int_dot_wide", "device:1"),
    *((f"matrix{kind}", "device:1") for kind in ("_lagging", "", "_shared", "_sliced")),
    *(product(("f16", "f32", "int_dot"), ("count:64", "device:2"))),
)
"""Attentions and their splits to begin with."""


_FIRST = (_ATTENTIONS[0], _SCHEDULES[0], _LISTS[0])
STARTS: tuple[Values, ...] = tuple(
    {
        "schedule": schedule,
        "subgroup_size": size,
        "light_steps": "registers",
        "score": score,
        "select": select,
        "attend": attend,
        "split": split,
        "combine": "groups8",
    }
    for (attend, split), schedule, (score, select) in (
        _FIRST,
        *((_FIRST[0], _FIRST[1], each) for each in _LISTS[1:]),
        *((_FIRST[0], each, _FIRST[2]) for each in _SCHEDULES[1:]),
        *((each, _FIRST[1], _FIRST[2]) for each in _ATTENTIONS[1:]),
        *((each, "beside", (BASELINE, BASELINE)) for each in _ATTENTIONS[:4]),
    )
    for size in (32, 64, 16, 8)
)
"""What differs from the first choice in one place; then those of dense steps."""
PORTABLE: tuple[Values, ...] = tuple(
    {
        "schedule": "beside",
        "subgroup_size": size,
        "light_steps": "registers",
        "score": score,
        "select": BASELINE,
        "attend": attend,
        "split": "count:16",
        "combine": "groups4",
    }
    for size in (32, 64, 16, 8)
    for score in ("lanes8", "lanes4", BASELINE)
    for attend in ("f16", "f32", "int_dot")
)
"""Those without scores are for dense steps."""

QSA_CHAIN = Family(
    name="qsa_chain",
    summary="a whole decode step of block-sparse-indexed attention over the planar q8 cache",
    template="qsa_chain.comp.jinja",
    problem_type=QsaStepProblem,
    parameters=PARAMETERS,
    constraints=CONSTRAINTS,
    bindings=BINDINGS,
    push_fields=PUSH_FIELDS,
    baseline=dict.fromkeys(("light_steps", "score", "select", "attend", "combine"), BASELINE),
    starts=STARTS,
    portable=PORTABLE,
    arithmetic=_arithmetic,
    passes=passes,
    scratch_bytes=_scratch_bytes,
    operands=make_operands,
    reference=chain_reference,
    sampled_reference=sampled_chain_reference,
    validation_cases=validation_cases,
    bytes_moved=_bytes_moved,
    operand_bytes=operand_bytes,
    scalars=scalars_of,
    dispatch=dispatch_rule,
    validated_as=_validated_as,
)
