"""The writer into the paged float cache: numbers as they are, keys packed, values by dimension."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.kernels import limits, teams
from tuner.kernels.base import (
    Binding,
    Candidate,
    Constraint,
    DispatchRule,
    Family,
    Parameter,
    Pass,
    Values,
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
    f32_operands,
    operand_bytes,
    scalars_of,
    validation_cases,
)
from tuner.kernels.subgroups import tuned
from tuner.oracle.cache_write import (
    f32_write_reference,
    sampled_f32_write_reference,
)
from tuner.problems import CacheWriteProblem

PARAMETERS = (
    Parameter(
        name="strategy",
        values=("baseline", "direct", "staged"),
        help="baseline: a workgroup of 128 a token; direct: every thread copies a few loads; "
        "staged: tiles of tokens are turned in shared memory",
    ),
    Parameter(
        name="threads",
        values=(64, 128, 256, 512),
        help="threads of a workgroup",
        used=tuned,
    ),
    Parameter(
        name="tile_tokens",
        values=(1, 4, 8, 16, 32, 64),
        help="tokens that neighbouring threads go through before the next dimension",
        used=tuned,
    ),
    Parameter(
        name="unroll",
        values=(1, 2, 4),
        help="loads of a thread in flight",
        used=lambda values: values["strategy"] == "direct",
    ),
    WIDTH,
    SIDES,
)


def _check_pack(c: Candidate) -> str | None:
    if c.problem.head_size % c.problem.pack:
        return f"{c.problem.pack} packed dimensions do not divide a head of {c.problem.head_size}"
    return None


def _check_threads(c: Candidate) -> str | None:
    threads = c["threads"] if tuned(c.values) else teams.BASELINE_THREADS
    return limits.threads_reason(c.device, threads)


def _check_tile(c: Candidate) -> str | None:
    if c["strategy"] != "staged":
        return None
    if c["tile_tokens"] == 1:
        return "a tile of one token has nothing to turn: use direct"
    loads = c.problem.head_size // c["width"] + 1
    return limits.shared_memory_reason(c.device, 4 * c["tile_tokens"] * (loads * c["width"] + 1))


CONSTRAINTS = (
    Constraint(needs=(), check=check_grid),
    Constraint(needs=(), check=_check_pack),
    Constraint(needs=("strategy", "threads"), check=_check_threads),
    Constraint(needs=("width",), check=check_width),
    Constraint(needs=("strategy", "tile_tokens", "width"), check=_check_tile),
)
BINDINGS = (
    Binding(name="key", buffer="key", element="uint", role="input"),
    Binding(name="value", buffer="value", element="uint", role="input"),
    Binding(name="slots", buffer="slots", element="uint", role="input"),
    Binding(name="key_cache", buffer="key_cache", element="uint", role="state"),
    Binding(name="value_cache", buffer="value_cache", element="uint", role="state"),
    Binding(name="key_quads", buffer="key", element="uvec4", role="input"),
    Binding(name="value_quads", buffer="value", element="uvec4", role="input"),
    Binding(name="key_cache_quads", buffer="key_cache", element="uvec4", role="state"),
)


def _workgroups(c: Candidate) -> int:
    problem: CacheWriteProblem = c.problem
    if c["strategy"] == "baseline":
        return problem.tokens
    tiles = -(-problem.tokens // c["tile_tokens"])
    if c["strategy"] == "staged":
        return int(tiles * problem.kv_heads)
    loads = tiles * c["tile_tokens"] * problem.row // c["width"]
    sides = 2 if c["sides"] == "apart" else 1
    return int(-(-loads * sides // (c["threads"] * c["unroll"])))


def _passes(c: Candidate, scalars: Mapping[str, int | float]) -> tuple[Pass, ...]:
    baseline = c["strategy"] == "baseline"
    more = {"threads": teams.BASELINE_THREADS} if baseline else {}
    return write_pass(c, scalars, _workgroups(c), more)


def _dispatch(c: Candidate) -> DispatchRule:
    if c["strategy"] == "baseline":
        return write_rule(c, "tokens", "a workgroup for each token")
    tiles, tile = f"ceil_div(tokens, {c['tile_tokens']})", c["tile_tokens"]
    if c["strategy"] == "staged":
        return write_rule(c, f"{tiles} * kv_heads", f"a workgroup for each head of {tile} tokens")
    loads = c["tile_tokens"] * c.problem.row // c["width"] * (2 if c["sides"] == "apart" else 1)
    share = c["threads"] * c["unroll"]
    text = f"a workgroup for {share} loads, of which {tile} tokens make {loads}"
    return write_rule(c, f"ceil_div({tiles} * {loads}, {share})", text)


def _bytes_moved(problem: CacheWriteProblem) -> int:
    """Keys and values in and out, and slots."""
    return 4 * problem.tokens * (4 * problem.row + 1)


STAGED_STARTS: tuple[Values, ...] = tuple(
    {"strategy": "staged", "threads": 256, "tile_tokens": tile, "width": width}
    for tile, width in ((16, 4), (32, 4), (16, 1))
)
DIRECT_STARTS: tuple[Values, ...] = tuple(
    {
        "strategy": "direct",
        "threads": 256,
        "tile_tokens": tile,
        "unroll": unroll,
        "width": width,
        "sides": "apart",
    }
    for tile, unroll, width in ((1, 1, 4), (16, 2, 4), (8, 1, 1))
)
PORTABLE: tuple[Values, ...] = tuple(
    {"strategy": strategy, "threads": 128, "tile_tokens": tile, "width": width}
    for strategy, tile, width in (
        ("staged", 16, 1),
        ("staged", 8, 1),
        ("staged", 4, 1),
        ("direct", 1, 4),
        ("direct", 8, 1),
    )
)

CACHE_WRITE_F32 = Family(
    name="cache_write_f32",
    summary="writes keys and values into the paged float cache (packed keys, values by dimension)",
    template="cache_write_f32.comp.jinja",
    problem_type=CacheWriteProblem,
    parameters=PARAMETERS,
    constraints=CONSTRAINTS,
    bindings=BINDINGS,
    push_fields=PUSH_FIELDS,
    baseline={"strategy": "baseline"},
    starts=(*STAGED_STARTS, *DIRECT_STARTS),
    portable=PORTABLE,
    arithmetic=lambda _values: "f32",
    passes=_passes,
    scratch_bytes=lambda _candidate: {},
    operands=f32_operands,
    reference=f32_write_reference,
    sampled_reference=sampled_f32_write_reference,
    validation_cases=lambda problem: validation_cases(problem, ("bits", "random", "bits", "bits")),
    bytes_moved=_bytes_moved,
    operand_bytes=lambda problem: operand_bytes(problem, vector_bytes=4 * problem.head_size),
    scalars=scalars_of,
    dispatch=_dispatch,
)
