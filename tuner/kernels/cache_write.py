"""Writers into the paged caches (the first system's): floats as they are, or quantised to int8.

Each token goes to its slot, block * block size + place; a slot of 0xFFFFFFFF is padding. The float
cache packs neighbouring dimensions of keys and keeps values by dimension; an int8 vector is codes
x * (127/a), halves away from zero, and the scale a/127 (1 for zeros), with a = max|x|.
"""

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
    PushField,
    Values,
)
from tuner.kernels.cache_write_operands import (
    VALIDATION_INPUTS,
    f32_operands,
    operand_bytes,
    q8_operands,
    scalars_of,
    validation_cases,
)
from tuner.kernels.subgroups import required_size, tuned
from tuner.oracle.cache_write import (
    f32_write_reference,
    q8_write_reference,
    sampled_f32_write_reference,
    sampled_q8_write_reference,
)
from tuner.problems import CacheWriteProblem

MAX_LANE_WORDS = 32

SIDES = Parameter(
    name="sides",
    values=("together", "apart"),
    help="whether the same threads write a token's key and value, or different ones",
    used=lambda values: values["strategy"] in ("direct", "teams"),
)
WIDTH = Parameter(name="width", values=(1, 4), help="numbers of one load", used=tuned)
PUSH_FIELDS = tuple(
    PushField(name=name, type="uint") for name in ("tokens", "key_stride", "value_stride")
)

F32_PARAMETERS = (
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

Q8_PARAMETERS = (
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


def _check_width(c: Candidate) -> str | None:
    size, strides = c.problem.head_size, c.problem.strides
    if c["width"] == 4 and (size % 4 or any(stride % 4 for stride in strides)):
        return (
            f"loads of 4 need a head size and strides that are multiples of 4, not {size} and "
            f"{strides[0]}/{strides[1]}"
        )
    return None


def _check_pack(c: Candidate) -> str | None:
    if c.problem.head_size % c.problem.pack:
        return f"{c.problem.pack} packed dimensions do not divide a head of {c.problem.head_size}"
    return None


def _check_threads(c: Candidate) -> str | None:
    threads = c["threads"] if tuned(c.values) else teams.BASELINE_THREADS
    limit = min(c.device.max_workgroup_invocations, c.device.max_workgroup_size[0])
    return f"{threads} threads a workgroup, the device allows {limit}" if threads > limit else None


def _check_tile(c: Candidate) -> str | None:
    if c["strategy"] != "staged":
        return None
    if c["tile_tokens"] == 1:
        return "a tile of one token has nothing to turn: use direct"
    loads = c.problem.head_size // c["width"] + 1
    needed, limit = (
        4 * c["tile_tokens"] * (loads * c["width"] + 1),
        c.device.max_shared_memory_bytes,
    )
    return (
        f"needs {needed} bytes of shared memory, the device has {limit}" if needed > limit else None
    )


def _check_grid(c: Candidate) -> str | None:
    groups, limit = 2 * c.problem.tokens * c.problem.kv_heads, teams.most_workgroups(c.device)
    return f"{groups} vectors, the device allows {limit} workgroups" if groups > limit else None


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


F32_CONSTRAINTS = (
    Constraint(needs=(), check=_check_grid),
    Constraint(needs=(), check=_check_pack),
    Constraint(needs=("strategy", "threads"), check=_check_threads),
    Constraint(needs=("width",), check=_check_width),
    Constraint(needs=("strategy", "tile_tokens", "width"), check=_check_tile),
)
Q8_CONSTRAINTS = (
    *teams.CONSTRAINTS,
    Constraint(needs=(), check=_check_grid),
    Constraint(needs=(), check=_check_whole_words),
    Constraint(needs=("width",), check=_check_width),
    Constraint(needs=("strategy", "lanes"), check=_check_lane_words),
)

F32_BINDINGS = (
    Binding(name="key", buffer="key", element="uint", role="input"),
    Binding(name="value", buffer="value", element="uint", role="input"),
    Binding(name="slots", buffer="slots", element="uint", role="input"),
    Binding(name="key_cache", buffer="key_cache", element="uint", role="state"),
    Binding(name="value_cache", buffer="value_cache", element="uint", role="state"),
    Binding(name="key_quads", buffer="key", element="uvec4", role="input"),
    Binding(name="value_quads", buffer="value", element="uvec4", role="input"),
    Binding(name="key_cache_quads", buffer="key_cache", element="uvec4", role="state"),
)
Q8_BINDINGS = (
    Binding(name="key", buffer="key", element="float", role="input"),
    Binding(name="value", buffer="value", element="float", role="input"),
    Binding(name="slots", buffer="slots", element="uint", role="input"),
    Binding(name="key_cache", buffer="key_cache", element="uint", role="state"),
    Binding(name="value_cache", buffer="value_cache", element="uint", role="state"),
    Binding(name="key_quads", buffer="key", element="vec4", role="input"),
    Binding(name="value_quads", buffer="value", element="vec4", role="input"),
)


def _f32_workgroups(c: Candidate) -> int:
    problem: CacheWriteProblem = c.problem
    if c["strategy"] == "baseline":
        return problem.tokens
    tiles = -(-problem.tokens // c["tile_tokens"])
    if c["strategy"] == "staged":
        return int(tiles * problem.kv_heads)
    loads = tiles * c["tile_tokens"] * problem.row // c["width"]
    sides = 2 if c["sides"] == "apart" else 1
    return int(-(-loads * sides // (c["threads"] * c["unroll"])))


def _q8_workgroups(c: Candidate) -> int:
    vectors = c.problem.tokens * c.problem.kv_heads
    if c["strategy"] == "baseline":
        return int(vectors)
    return int(-(-vectors * (2 if c["sides"] == "apart" else 1) // teams.teams(c)))


def _write(
    c: Candidate,
    scalars: Mapping[str, int | float],
    workgroups: int,
    more: Mapping[str, object],
    subgroup_size: int | None = None,
) -> tuple[Pass, ...]:
    problem: CacheWriteProblem = c.problem
    shape = {
        "head_size": problem.head_size,
        "block_size": problem.block_size,
        "kv_heads": problem.kv_heads,
        "pack": problem.pack,
    }
    return (
        Pass(
            name="write",
            constants={**shape, **more},
            push={f.name: scalars[f.name] for f in PUSH_FIELDS if f.name in scalars},
            groups=teams.linear_grid(workgroups, c.device),
            subgroup_size=subgroup_size,
        ),
    )


def _f32_passes(c: Candidate, scalars: Mapping[str, int | float]) -> tuple[Pass, ...]:
    baseline = c["strategy"] == "baseline"
    more = {"threads": teams.BASELINE_THREADS} if baseline else {}
    return _write(c, scalars, _f32_workgroups(c), more)


def _q8_passes(c: Candidate, scalars: Mapping[str, int | float]) -> tuple[Pass, ...]:
    baseline = c["strategy"] == "baseline"
    more = {"threads": teams.BASELINE_THREADS} if baseline else teams.constants(c)
    return _write(c, scalars, _q8_workgroups(c), more, required_size(c))


def _f32_dispatch(c: Candidate) -> DispatchRule:
    if c["strategy"] == "baseline":
        return _rule(c, "tokens", "a workgroup for each token")
    tiles, tile = f"ceil_div(tokens, {c['tile_tokens']})", c["tile_tokens"]
    if c["strategy"] == "staged":
        return _rule(c, f"{tiles} * kv_heads", f"a workgroup for each head of {tile} tokens")
    loads = c["tile_tokens"] * c.problem.row // c["width"] * (2 if c["sides"] == "apart" else 1)
    share = c["threads"] * c["unroll"]
    text = f"a workgroup for {share} loads, of which {tile} tokens make {loads}"
    return _rule(c, f"ceil_div({tiles} * {loads}, {share})", text)


def _q8_dispatch(c: Candidate) -> DispatchRule:
    if c["strategy"] == "baseline":
        return _rule(c, "tokens * kv_heads", "a workgroup for each head of each token")
    sides = 2 if c["sides"] == "apart" else 1
    text = f"a workgroup for {teams.teams(c)} heads of a token, keys and values "
    return _rule(
        c,
        f"ceil_div({sides} * tokens * kv_heads, {teams.teams(c)})",
        text + ("counted apart" if sides == 2 else "together"),
    )


def _rule(c: Candidate, workgroups: str, text: str) -> DispatchRule:
    """The dispatch rule of a writer with so many workgroups."""
    row = "kv_heads * head_size"
    return DispatchRule(
        policy="none",
        terms=teams.linear_terms("write", workgroups, c.device),
        groups={"write": teams.linear_counts("write")},
        push={
            "tokens": "tokens",
            "key_stride": f"max(key_stride, {row})",
            "value_stride": f"max(value_stride, {row})",
        },
        text=f"{text}; {teams.LINEAR}",
    )


def _f32_bytes(problem: CacheWriteProblem) -> int:
    """Keys and values in and out, and slots."""
    return 4 * problem.tokens * (4 * problem.row + 1)


def _q8_bytes(problem: CacheWriteProblem) -> int:
    """Keys and values in, codes and scales out, and slots."""
    vector = 4 * problem.head_size + problem.head_size + 4
    return problem.tokens * (2 * problem.kv_heads * vector + 4)


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
    parameters=F32_PARAMETERS,
    constraints=F32_CONSTRAINTS,
    bindings=F32_BINDINGS,
    push_fields=PUSH_FIELDS,
    baseline={"strategy": "baseline"},
    starts=(*STAGED_STARTS, *DIRECT_STARTS),
    portable=PORTABLE,
    arithmetic=lambda _values: "f32",
    passes=_f32_passes,
    scratch_bytes=lambda _candidate: {},
    operands=f32_operands,
    reference=f32_write_reference,
    sampled_reference=sampled_f32_write_reference,
    validation_cases=lambda problem: validation_cases(problem, ("bits", "random", "bits", "bits")),
    bytes_moved=_f32_bytes,
    operand_bytes=lambda problem: operand_bytes(problem, vector_bytes=4 * problem.head_size),
    scalars=scalars_of,
    dispatch=_f32_dispatch,
)

CACHE_WRITE_Q8 = Family(
    name="cache_write_q8",
    summary="quantises keys and values into the paged int8 cache (token-major words)",
    template="cache_write_q8.comp.jinja",
    problem_type=CacheWriteProblem,
    parameters=Q8_PARAMETERS,
    constraints=Q8_CONSTRAINTS,
    bindings=Q8_BINDINGS,
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
    passes=_q8_passes,
    scratch_bytes=lambda _candidate: {},
    operands=q8_operands,
    reference=q8_write_reference,
    sampled_reference=sampled_q8_write_reference,
    validation_cases=lambda problem: validation_cases(problem, tuple(VALIDATION_INPUTS)),
    bytes_moved=_q8_bytes,
    operand_bytes=lambda problem: operand_bytes(problem, vector_bytes=problem.head_size + 4),
    scalars=scalars_of,
    dispatch=_q8_dispatch,
)
