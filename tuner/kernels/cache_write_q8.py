"""The writer into the paged int8 cache, which quantises each vector by itself."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.kernels import teams
from tuner.kernels.base import (
    Binding,
    Candidate,
    Constraint,
    DispatchRule,
    Family,
    Parameter,
    Pass,
)
from tuner.kernels.cache_write import (
    PUSH_FIELDS,
    SIDES,
    WIDTH,
    check_grid,
    check_width,
    write_pass,
    write_rule,
)
from tuner.kernels.cache_write_operands import (
    VALIDATION_INPUTS,
    operand_bytes,
    q8_operands,
    scalars_of,
    validation_cases,
)
from tuner.kernels.subgroups import required_size, tuned
from tuner.oracle.cache_write import (
    q8_write_reference,
    sampled_q8_write_reference,
)
from tuner.problems import CacheWriteProblem

MAX_LANE_WORDS = 32

PARAMETERS = (
    Parameter(
        name="strategy",
        values=("baseline", "teams"),
        help="baseline: a workgroup of 128 a token and head; teams: vectors in registers",
    ),
    *teams.PARAMETERS,
    WIDTH,
    Parameter(
        name="order",
        values=("heads", "tokens"),
        help="whether neighbouring teams take the heads of a token (loads follow each other) or "
        "the tokens of a head (stores do)",
        used=tuned,
    ),
    SIDES,
)


def _check_whole_words(c: Candidate) -> str | None:
    if c.problem.head_size % 4:
        return f"head size {c.problem.head_size} is no multiple of 4, the codes of one word"
    return None


def _check_lane_words(c: Candidate) -> str | None:
    if not tuned(c.values):
        return None
    words = c.problem.head_size // 4
    if c["lanes"] > words:
        return f"{c['lanes']} lanes for the {words} words of a vector leave some without work"
    if -(-words // c["lanes"]) > MAX_LANE_WORDS:
        return (
            f"a lane would hold {-(-words // c['lanes'])} words of codes, the limit is "
            f"{MAX_LANE_WORDS}: use more lanes"
        )
    return None


CONSTRAINTS = (
    *teams.CONSTRAINTS,
    Constraint(needs=(), check=check_grid),
    Constraint(needs=(), check=_check_whole_words),
    Constraint(needs=("width",), check=check_width),
    Constraint(needs=("strategy", "lanes"), check=_check_lane_words),
)

BINDINGS = (
    Binding(name="key", buffer="key", element="float", role="input"),
    Binding(name="value", buffer="value", element="float", role="input"),
    Binding(name="slots", buffer="slots", element="uint", role="input"),
    Binding(name="key_cache", buffer="key_cache", element="uint", role="state"),
    Binding(name="value_cache", buffer="value_cache", element="uint", role="state"),
    Binding(name="key_quads", buffer="key", element="vec4", role="input"),
    Binding(name="value_quads", buffer="value", element="vec4", role="input"),
)


def _workgroups(c: Candidate) -> int:
    vectors = c.problem.tokens * c.problem.kv_heads
    if c["strategy"] == "baseline":
        return int(vectors)
    return int(-(-vectors * (2 if c["sides"] == "apart" else 1) // teams.teams(c)))


def _passes(c: Candidate, scalars: Mapping[str, int | float]) -> tuple[Pass, ...]:
    baseline = c["strategy"] == "baseline"
    more = {"threads": teams.BASELINE_THREADS} if baseline else teams.constants(c)
    return write_pass(c, scalars, _workgroups(c), more, required_size(c))


def _dispatch(c: Candidate) -> DispatchRule:
    if c["strategy"] == "baseline":
        return write_rule(c, "tokens * kv_heads", "a workgroup for each head of each token")
    sides = 2 if c["sides"] == "apart" else 1
    text = f"a workgroup for {teams.teams(c)} heads of a token, keys and values "
    return write_rule(
        c,
        f"ceil_div({sides} * tokens * kv_heads, {teams.teams(c)})",
        text + ("counted apart" if sides == 2 else "together"),
    )


def _bytes_moved(problem: CacheWriteProblem) -> int:
    """Keys and values in, codes and scales out, and slots."""
    vector = 4 * problem.head_size + problem.head_size + 4
    return problem.tokens * (2 * problem.kv_heads * vector + 4)


CACHE_WRITE_Q8 = Family(
    name="cache_write_q8",
    summary="quantises keys and values into the paged int8 cache (token-major words)",
    template="cache_write_q8.comp.jinja",
    problem_type=CacheWriteProblem,
    parameters=PARAMETERS,
    constraints=CONSTRAINTS,
    bindings=BINDINGS,
    push_fields=PUSH_FIELDS,
    baseline={"strategy": "baseline"},
    starts=tuple(
        {
            "strategy": "teams",
            "subgroup_size": size,
            "subgroups": subgroups,
            "lanes": lanes,
            "width": width,
            "order": order,
            "sides": "apart",
        }
        for size, lanes in ((32, 32), (32, 16), (64, 32), (16, 16), (8, 8))
        for subgroups, width, order in ((4, 4, "heads"), (4, 4, "tokens"), (4, 1, "heads"))
    ),
    portable=tuple(
        {
            "strategy": "teams",
            "subgroup_size": size,
            "subgroups": 2,
            "lanes": lanes,
            "width": width,
            "order": "heads",
            "sides": "apart",
        }
        for size, lanes in ((32, 8), (64, 16), (64, 8), (16, 8), (8, 4))
        for width in (4, 1)
    ),
    arithmetic=lambda _values: "f32",
    passes=_passes,
    scratch_bytes=lambda _candidate: {},
    operands=q8_operands,
    reference=q8_write_reference,
    sampled_reference=sampled_q8_write_reference,
    validation_cases=lambda problem: validation_cases(problem, tuple(VALIDATION_INPUTS)),
    bytes_moved=_bytes_moved,
    operand_bytes=lambda problem: operand_bytes(problem, vector_bytes=problem.head_size + 4),
    scalars=scalars_of,
    dispatch=_dispatch,
)
