"""Gradients of paged attention: dQ, and dK and dV into the pool, from the stored log-sum-exp.

Semantics are those of the second system. Blocks that sequences share accumulate: either one
workgroup owns a block and goes through its users in a fixed order, or sums are added atomically.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.kernels import attention_chunks
from tuner.kernels.attention_chunks import INPUTS, WHOLE_CHUNKS, chunks
from tuner.kernels.attention_operands import q_offset_rule
from tuner.kernels.base import (
    ArithmeticClass,
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
from tuner.kernels.gradient_operands import (
    make_operands,
    scalars,
    timing_bytes,
    validation_cases,
)
from tuner.oracle.paged_attention_backward import (
    backward_reference,
    sampled_backward_reference,
)
from tuner.problems import AttentionGradientProblem

BASELINE_THREADS = 64
HELPER_THREADS = 256
"""Threads of the passes that zero the pool's gradients and sum up rows."""
DELTA_ROWS = 16
MAX_SCORED_ROWS = 8
"""Rows whose scores a thread sums up at a time."""
MAX_OWN_VECTORS = 16
"""Vectors of four sums of each kind that a thread may hold."""


def _tiled(values: Values) -> bool:
    return values["strategy"] != "baseline"


def _atomic(values: Values) -> bool:
    return values["strategy"] == "atomic"


_ROWS = (4, 8, 16, 32)
PARAMETERS = (
    Parameter(
        name="strategy",
        values=("baseline", "deterministic", "atomic"),
        help="baseline: one thread per query row adds to its keys' gradients atomically. "
        "deterministic: a workgroup owns tokens of a block and goes through all its users in "
        "order. atomic: a workgroup owns keys of a sequence and adds its sums to the pool's",
    ),
    Parameter(name="threads", values=(64, 128, 256), help="threads of a workgroup", used=_tiled),
    Parameter(
        name="key_tile_tokens",
        values=_ROWS,
        help="tokens whose gradients one workgroup owns",
        used=_tiled,
    ),
    Parameter(
        name="key_tile_rows", values=_ROWS, help="query rows that these meet at a time", used=_tiled
    ),
    Parameter(
        name="query_tile_rows",
        values=_ROWS,
        help="query rows whose gradients one workgroup owns",
        used=_tiled,
    ),
    Parameter(
        name="query_tile_tokens", values=_ROWS, help="keys that these meet at a time", used=_tiled
    ),
    Parameter(
        name="row_parts",
        values=(1, 2, 4, 8),
        help="workgroups among which the rows of a sequence are dealt out",
        used=_atomic,
    ),
    Parameter(
        name="atomics",
        values=("compare_swap", "native"),
        help="how floats are added: by compare and swap, or by the device's own atomics",
        used=_atomic,
    ),
)


def _key_tokens(c: Candidate) -> int:
    """Tokens that a workgroup of the keys pass owns."""
    if c["strategy"] == "deterministic":
        return int(min(c["key_tile_tokens"], c.problem.block_size))
    return int(c["key_tile_tokens"])


def _check_threads(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        return None
    threads, limit = c["threads"], c.device.max_workgroup_invocations
    if threads > limit:
        return f"{threads} threads a workgroup, the device allows {limit}"
    if c.problem.head_size // 4 > threads:
        return f"head size {c.problem.head_size} needs {c.problem.head_size // 4} threads"
    return None


def _check_helpers(c: Candidate) -> str | None:
    if c.device.max_workgroup_invocations < HELPER_THREADS:
        return (
            f"{HELPER_THREADS} threads a workgroup, the device allows "
            f"{c.device.max_workgroup_invocations}"
        )
    return None


def _check_atomics(c: Candidate) -> str | None:
    if c["atomics"] == "native" and not c.device.atomic_float_add:
        return "atomics=native needs float additions of VK_EXT_shader_atomic_float"
    return None


def _shared_bytes(c: Candidate, rows: int, tokens: int) -> int:
    widened = 2 * rows * (c.problem.head_size // 4 + 1) * 16
    staged = 2 * tokens * (chunks(c) + 1) * 16
    return int(widened + staged + 2 * rows * (tokens + 1) * 4 + 12 * rows)


def _own(c: Candidate, vectors: int) -> int:
    """Vectors of which a thread has four dimensions each."""
    owners = max(1, c["threads"] // (c.problem.head_size // 4))
    return int(-(-vectors // owners))


def _check_tile(c: Candidate, rows: int, tokens: int, owned: int) -> str | None:
    needed, limit = _shared_bytes(c, rows, tokens), c.device.max_shared_memory_bytes
    if needed > limit:
        return f"needs {needed} bytes of shared memory, the device has {limit}"
    if _own(c, owned) > MAX_OWN_VECTORS:
        return (
            f"a thread would hold sums of {_own(c, owned)} vectors, the limit is "
            f"{MAX_OWN_VECTORS}: use more threads or smaller tiles"
        )
    return None


def _check_key_tile(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        return None
    tokens = _key_tokens(c)
    if _ROWS[0] < c["key_tile_tokens"] and tokens <= c["key_tile_tokens"] // 2:
        return (
            f"a block of {c.problem.block_size} tokens is no more than half of "
            f"{c['key_tile_tokens']}: use fewer key_tile_tokens"
        )
    return _check_tile(c, c["key_tile_rows"], tokens, tokens)


def _check_query_tile(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        return None
    rows = c["query_tile_rows"]
    return _check_tile(c, rows, c["query_tile_tokens"], rows)


def _check_groups(c: Candidate) -> str | None:
    problem: AttentionGradientProblem = c.problem
    groups, limit = problem.batch * problem.kv_heads, c.device.max_workgroup_count[2]
    if c["strategy"] != "baseline" and groups > limit:
        return f"{groups} workgroups in z, the device allows {limit}"
    return None


CONSTRAINTS = (
    WHOLE_CHUNKS,
    Constraint(needs=(), check=_check_helpers),
    Constraint(needs=("strategy",), check=_check_groups),
    Constraint(needs=("strategy", "threads"), check=_check_threads),
    Constraint(
        needs=("strategy", "threads", "key_tile_tokens", "key_tile_rows"), check=_check_key_tile
    ),
    Constraint(
        needs=("strategy", "threads", "query_tile_rows", "query_tile_tokens"),
        check=_check_query_tile,
    ),
    Constraint(needs=("atomics",), check=_check_atomics),
)

BINDINGS = (
    *INPUTS,
    Binding(name="attention", buffer="out", element="uvec4", role="input"),
    Binding(name="out_gradient", buffer="out_gradient", element="uvec4", role="input"),
    Binding(name="log_sums", buffer="lse", element="float", role="input"),
    Binding(name="user_starts", buffer="user_starts", element="uint", role="input"),
    Binding(name="users", buffer="users", element="uvec2", role="input"),
    Binding(name="deltas", buffer="deltas", element="float", role="scratch"),
    Binding(name="query_gradient", buffer="query_gradient", element="vec4", role="output"),
    Binding(name="key_gradient", buffer="key_gradient", element="float", role="output"),
    Binding(name="value_gradient", buffer="value_gradient", element="float", role="output"),
    Binding(name="key_bits", buffer="key_gradient", element="uint", role="output"),
    Binding(name="value_bits", buffer="value_gradient", element="uint", role="output"),
)

PUSH_FIELDS = (
    PushField(name="batch", type="uint"),
    PushField(name="query_heads", type="uint"),
    PushField(name="kv_heads", type="uint"),
    PushField(name="query_tokens", type="uint"),
    PushField(name="context", type="uint"),
    PushField(name="max_blocks", type="uint"),
    PushField(name="blocks", type="uint"),
    PushField(name="q_offset", type="int"),
    PushField(name="softmax_scale", type="float"),
)


def _arithmetic(_values: Values) -> ArithmeticClass:
    return "f32"


def _passes(c: Candidate, given: Mapping[str, int | float]) -> tuple[Pass, ...]:
    problem: AttentionGradientProblem = c.problem
    rows = problem.batch * problem.query_heads * problem.query_tokens
    blocks = int(given.get("blocks", 1))
    values = blocks * problem.block_size * problem.kv_heads * problem.head_size
    # These two go round until all is done, so that any number of workgroups does.
    most = c.device.max_workgroup_count[0]
    delta = _launch(c, given, "delta", min(most, -(-rows // DELTA_ROWS)))
    zero = _launch(c, given, "zero", min(most, -(-values // HELPER_THREADS)), beside=True)
    if c["strategy"] == "baseline":
        native = "native" if c.device.atomic_float_add else "compare_swap"
        constants = {"threads": BASELINE_THREADS, "atomics": native}
        count = -(-rows // BASELINE_THREADS)
        return (delta, zero, _launch(c, given, "baseline", count, constants=constants))
    pairs, tokens = problem.batch * problem.kv_heads, _key_tokens(c)
    query_rows = c["query_tile_rows"]
    of_queries = _tile(c, query_rows, c["query_tile_tokens"], query_rows)
    tiles = -(-problem.rows // query_rows)
    queries = _launch(c, given, "queries", tiles, z=pairs, constants=of_queries, beside=True)
    of_keys = _tile(c, c["key_tile_rows"], tokens, tokens)
    if c["strategy"] == "deterministic":
        tiles = -(-problem.block_size // tokens)
        constants = of_keys | {"block_tiles": tiles}
        count = blocks * tiles
        keys = _launch(c, given, "keys", count, z=problem.kv_heads, constants=constants)
        return (delta, keys, queries)
    count = -(-max(1, problem.context) // tokens) * c["row_parts"]
    constants = of_keys | {"atomics": c["atomics"]}
    keys = _launch(c, given, "keys", count, z=pairs, constants=constants)
    return (delta, zero, keys, queries)


def _launch(
    c: Candidate,
    given: Mapping[str, int | float],
    name: str,
    count: int,
    *,
    z: int = 1,
    constants: Mapping[str, object] | None = None,
    beside: bool = False,
) -> Pass:
    """A pass of `count` workgroups, folded into x and y, times z."""
    shape = attention_chunks.constants(c.problem) | {"atomics": "", "threads": HELPER_THREADS}
    return Pass(
        name=name,
        constants=shape | dict(constants or {}),
        push={field.name: given[field.name] for field in PUSH_FIELDS if field.name in given},
        groups=(*_folded(count, c.device.max_workgroup_count[:2]), z),
        subgroup_size=None,
        beside=beside,
    )


def _tile(c: Candidate, rows: int, tokens: int, owned: int) -> dict[str, object]:
    """What the template of a tiled pass needs beside the parameters."""
    row_groups = c["threads"] // tokens
    return {
        "threads": c["threads"],
        "rows": rows,
        "tokens": tokens,
        "own": _own(c, owned),
        "scored_rows": min(MAX_SCORED_ROWS, max(1, -(-rows // row_groups))),
    }


def _folded(count: int, limits: tuple[int, ...]) -> tuple[int, int]:
    """Workgroup counts in x and y that hold `count`; kernels pass over those beyond it."""
    down = -(-count // limits[0])
    return -(-count // down), down


def _dispatch(c: Candidate) -> DispatchRule:
    problem: AttentionGradientProblem = c.problem
    most, values = c.device.max_workgroup_count[0], problem.block_size * problem.kv_heads
    whole_rows = "batch * query_heads * query_tokens"
    zero = f"ceil_div(blocks * {values * problem.head_size}, {HELPER_THREADS})"
    counts = {
        "delta": (f"min({most}, ceil_div({whole_rows}, {DELTA_ROWS}))", "1", "1"),
        "zero": (f"min({most}, {zero})", "1", "1"),
    }
    if c["strategy"] == "baseline":
        counts["baseline"] = _counts(c, f"ceil_div({whole_rows}, {BASELINE_THREADS})")
    else:
        tiles = f"ceil_div(query_tokens * {problem.group}, {c['query_tile_rows']})"
        counts["queries"] = _counts(c, tiles, "batch * kv_heads")
        tokens = _key_tokens(c)
        keys = f"ceil_div(max(1, context), {tokens}) * {c['row_parts']}"
        counts["keys"] = _counts(c, keys, "batch * kv_heads")
    if c["strategy"] == "deterministic":
        del counts["zero"]
        keys = f"blocks * {-(-problem.block_size // tokens)}"
        counts["keys"] = _counts(c, keys, "kv_heads")
    return DispatchRule(
        policy="none",
        terms=(("blocks", "max(1, batch * ceil_div(context, block_size))"),),
        groups=counts,
        push={
            **{name: name for name in ("batch", "query_tokens", "context", "blocks")},
            "max_blocks": "max(1, ceil_div(context, block_size))",
            "q_offset": q_offset_rule(problem),
        },
        scratch={"deltas": f"4 * {whole_rows}"},
        text="blocks is how many the pool has; workgroups are numbered x first in x and y where "
        "the device allows fewer in x",
    )


def _counts(c: Candidate, count: str, z: str = "1") -> tuple[str, str, str]:
    """`_folded` in expressions, times z."""
    down = f"ceil_div({count}, {c.device.max_workgroup_count[0]})"
    return f"ceil_div({count}, {down})", down, z


def _scratch_bytes(c: Candidate) -> dict[str, int]:
    problem: AttentionGradientProblem = c.problem
    return {"deltas": 4 * problem.batch * problem.query_heads * problem.query_tokens}


def bytes_moved(problem: AttentionGradientProblem) -> int:
    """All inputs once, gradients of queries and of the whole pool written once in float32."""
    rows = problem.batch * problem.query_heads * problem.query_tokens
    columns = -(-problem.context // problem.block_size)
    pool = problem.batch * columns * problem.block_size * problem.kv_heads * problem.head_size
    seen = problem.keys_seen(problem.query_tokens - 1)
    cache = problem.batch * seen * problem.kv_heads * problem.head_size
    vectors = rows * problem.head_size
    read = (3 * vectors + 2 * cache) * problem.element_bytes + 4 * rows
    return read + 4 * vectors + 8 * pool + 4 * problem.batch * columns


STARTS: tuple[Values, ...] = tuple(
    {
        "strategy": strategy,
        "threads": threads,
        "key_tile_tokens": tokens,
        "key_tile_rows": rows,
        "query_tile_rows": query_rows,
        "query_tile_tokens": tokens,
        "atomics": atomics,
    }
    for strategy, atomics in (
        ("deterministic", "compare_swap"),
        ("atomic", "native"),
        ("atomic", "compare_swap"),
    )
    for threads, tokens, rows, query_rows in (
        (128, 16, 16, 16),
        (256, 16, 16, 32),
        (256, 32, 16, 32),
        (64, 8, 8, 8),
    )
)

PORTABLE: tuple[Values, ...] = tuple(
    {
        "strategy": strategy,
        "threads": 64,
        "key_tile_tokens": tile,
        "key_tile_rows": tile,
        "query_tile_rows": tile,
        "query_tile_tokens": tile,
    }
    for strategy in ("deterministic", "atomic")
    for tile in (8, 4)
)

PAGED_ATTENTION_BACKWARD = Family(
    name="paged_attention_backward",
    summary="gradients of paged attention into a float32 pool, from the stored log-sum-exp",
    template="paged_attention_backward.comp.jinja",
    problem_type=AttentionGradientProblem,
    parameters=PARAMETERS,
    constraints=CONSTRAINTS,
    bindings=BINDINGS,
    push_fields=PUSH_FIELDS,
    baseline={"strategy": "baseline"},
    starts=STARTS,
    portable=PORTABLE,
    arithmetic=_arithmetic,
    passes=_passes,
    scratch_bytes=_scratch_bytes,
    operands=make_operands,
    reference=backward_reference,
    sampled_reference=sampled_backward_reference,
    validation_cases=validation_cases,
    bytes_moved=bytes_moved,
    operand_bytes=timing_bytes,
    scalars=scalars,
    dispatch=_dispatch,
)
