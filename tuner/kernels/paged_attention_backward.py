"""Gradients of paged attention: dQ, and dK and dV into the pool, from the stored log-sum-exp.

Semantics are those of the second system. Blocks that sequences share accumulate: either one
workgroup owns a block and goes through its users in a fixed order, or sums are added atomically.
"""

from __future__ import annotations

from tuner.kernels import limits
from tuner.kernels.attention_chunks import INPUTS, WHOLE_CHUNKS, chunks
from tuner.kernels.base import (
    ArithmeticClass,
    Binding,
    Candidate,
    Constraint,
    Family,
    Parameter,
    Values,
)
from tuner.kernels.gradient_launches import (
    HELPER_THREADS,
    PUSH_FIELDS,
    dispatch_rule,
    key_tokens,
    own_vectors,
    passes,
    scratch_bytes,
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


def _check_threads(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        return None
    if c.problem.head_size // 4 > c["threads"]:
        return f"head size {c.problem.head_size} needs {c.problem.head_size // 4} threads"
    return limits.threads_reason(c.device, c["threads"])


def _check_helpers(c: Candidate) -> str | None:
    return limits.threads_reason(c.device, HELPER_THREADS)


def _check_atomics(c: Candidate) -> str | None:
    if c["atomics"] == "native" and not c.device.atomic_float_add:
        return "atomics=native needs float additions of VK_EXT_shader_atomic_float"
    return None


def _shared_bytes(c: Candidate, rows: int, tokens: int) -> int:
    widened = 2 * rows * (c.problem.head_size // 4 + 1) * 16
    staged = 2 * tokens * (chunks(c) + 1) * 16
    return int(widened + staged + 2 * rows * (tokens + 1) * 4 + 12 * rows)


def _check_tile(c: Candidate, rows: int, tokens: int, owned: int) -> str | None:
    if own_vectors(c, owned) > MAX_OWN_VECTORS:
        return (
            f"a thread would hold sums of {own_vectors(c, owned)} vectors, the limit is "
            f"{MAX_OWN_VECTORS}: use more threads or smaller tiles"
        )
    return limits.shared_memory_reason(c.device, _shared_bytes(c, rows, tokens))


def _check_key_tile(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        return None
    tokens = key_tokens(c)
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
    if c["strategy"] == "baseline":
        return None
    return limits.groups_reason(c.device, (1, 1, c.problem.batch * c.problem.kv_heads))


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


def _arithmetic(_values: Values) -> ArithmeticClass:
    return "f32"


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
    passes=passes,
    scratch_bytes=scratch_bytes,
    operands=make_operands,
    reference=backward_reference,
    sampled_reference=sampled_backward_reference,
    validation_cases=validation_cases,
    bytes_moved=bytes_moved,
    operand_bytes=timing_bytes,
    scalars=scalars,
    dispatch=dispatch_rule,
)
