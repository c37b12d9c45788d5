"""Launches of the gradients of paged attention: passes, and how their sizes follow a batch's."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.kernels import attention_chunks
from tuner.kernels.attention_operands import q_offset_rule
from tuner.kernels.base import Candidate, DispatchRule, Pass, PushField
from tuner.problems import AttentionGradientProblem

BASELINE_THREADS = 64
HELPER_THREADS = 256
"""Threads of the passes that zero the pool's gradients and sum up rows."""
DELTA_ROWS = 16
MAX_SCORED_ROWS = 8
"""Rows whose scores a thread sums up at a time."""

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


def key_tokens(c: Candidate) -> int:
    """Tokens that a workgroup of the keys pass owns."""
    if c["strategy"] == "deterministic":
        return int(min(c["key_tile_tokens"], c.problem.block_size))
    return int(c["key_tile_tokens"])


def own_vectors(c: Candidate, vectors: int) -> int:
    """Vectors of which a thread has four dimensions each."""
    owners = max(1, c["threads"] // (c.problem.head_size // 4))
    return int(-(-vectors // owners))


def passes(c: Candidate, given: Mapping[str, int | float]) -> tuple[Pass, ...]:
    """The launches of a candidate; see `Family.passes`."""
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
    pairs, tokens = problem.batch * problem.kv_heads, key_tokens(c)
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
        "own": own_vectors(c, owned),
        "scored_rows": min(MAX_SCORED_ROWS, max(1, -(-rows // row_groups))),
    }


def _folded(count: int, limits: tuple[int, ...]) -> tuple[int, int]:
    """Workgroup counts in x and y that hold `count`; kernels pass over those beyond it."""
    down = -(-count // limits[0])
    return -(-count // down), down


def dispatch_rule(c: Candidate) -> DispatchRule:
    """How an engine launches a candidate on other sizes; see `Family.dispatch`."""
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
        tokens = key_tokens(c)
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


def scratch_bytes(c: Candidate) -> dict[str, int]:
    """Bytes of the sum of each query row over out and its gradient."""
    problem: AttentionGradientProblem = c.problem
    return {"deltas": 4 * problem.batch * problem.query_heads * problem.query_tokens}
