"""Strategies for the scores of index blocks: parameters, geometry, what is legal."""

from __future__ import annotations

from tuner.kernels import limits, subgroups
from tuner.kernels.base import Candidate, Constraint, Parameter, Values
from tuner.kernels.matrix_units import by_matrix
from tuner.problems import IndexerStepProblem

BASELINE_THREADS = 256
PIECE = 8
"""Dimensions of a key in one 16-byte load."""
MAX_LANE_WORDS = 224
"""32-bit words of queries, keys and sums one lane may hold: GPUs give it 128 to 256."""
MAX_UNROLLED = 1024
"""Multiplications in one unrolled step: beyond it compile times grow to many seconds."""
MAX_MATRIX_SUMS = 48
"""Sums of matrices in one lane: of more, compile times grow to minutes on a software driver."""
MAX_GROUP_BLOCKS = 4096
"""Blocks a workgroup may take: of more, 65,536 blocks make too few workgroups to fill a device, and
validation, at 4,500 blocks, would never see a second workgroup."""
SHAPES = ("16x8x16", "16x16x16", "8x8x8", "8x8x16")
QUERY_PADDING = 8


def by_lanes(values: Values) -> bool:
    """Whether groups of lanes take keys."""
    return values["strategy"] in ("scalar_f32", "packed_f16")


PARAMETERS = (
    Parameter(
        name="strategy",
        values=("baseline", "scalar_f32", "packed_f16", "matrix"),
        help="baseline: a thread walks a block's key, row after row; scalar_f32 and packed_f16: "
        "lanes share a key's 16-byte pieces; matrix: cooperative matrices of keys and queries",
    ),
    subgroups.SIZE,
    subgroups.per_workgroup(1, 2, 4, 8),
    Parameter(
        name="row_tile",
        values=(1, 2, 4),
        help="rows that share the reading of keys",
        used=subgroups.tuned,
    ),
    Parameter(
        name="unroll",
        values=(1, 2, 4, 8),
        help="keys (matrix: matrices of keys) that are loaded before any is used",
        used=subgroups.tuned,
    ),
    Parameter(
        name="tiles",
        values=(1, 4, 16),
        help="tiles of blocks that a workgroup takes one after the other",
        used=subgroups.tuned,
    ),
    Parameter(
        name="lanes", values=(1, 2, 4, 8, 16, 32), help="lanes that share a key", used=by_lanes
    ),
    Parameter(
        name="query_in",
        values=("registers", "shared"),
        help="where queries wait: in every lane's registers, or once for the workgroup",
        used=by_lanes,
    ),
    Parameter(
        name="widening",
        values=("hardware", "integer"),
        help="how float16 becomes float32: by the unpack instruction, which a device may let flush "
        "subnormals, or by integers",
        used=lambda values: values["strategy"] == "scalar_f32",
    ),
    Parameter(
        name="matrix_shape",
        values=SHAPES,
        help="cooperative-matrix shape: keys x queries x dimensions",
        used=by_matrix,
    ),
    Parameter(
        name="key_in",
        values=("memory", "shared"),
        help="where matrices of keys are loaded from: the cache itself, or shared memory, to which "
        "16-byte loads brought them",
        used=by_matrix,
    ),
    Parameter(
        name="query_terms",
        values=(1, 2),
        help="float16 terms of a query value: one rounds it, two keep what float32 has",
        used=by_matrix,
    ),
)


def _shape(c: Candidate) -> tuple[int, int, int]:
    m, n, k = (int(part) for part in str(c["matrix_shape"]).split("x"))
    return m, n, k


def _vectors(c: Candidate) -> int:
    """Query heads that share the reading of keys."""
    return int(c["row_tile"] * c.problem.index_heads)


def _pieces(c: Candidate) -> int:
    """16-byte pieces of a key in one lane (at least 1, as constraints are asked of all)."""
    return max(1, int(c.problem.index_dim // PIECE // c["lanes"]))


def tile_blocks(c: Candidate) -> int:
    """Blocks of one tile of a workgroup."""
    if by_matrix(c.values):
        return int(c["subgroups"] * c["unroll"] * _shape(c)[0])
    return int(c["subgroups"] * max(1, c["subgroup_size"] // c["lanes"]) * c["unroll"])


def groups(c: Candidate) -> tuple[int, int, int]:
    """Workgroups in x, y and z: by capacity for the baseline, else by the last row's blocks."""
    problem: IndexerStepProblem = c.problem
    if c["strategy"] == "baseline":
        return (problem.rows * -(-problem.max_blocks // BASELINE_THREADS), 1, 1)
    blocks = tile_blocks(c) * int(c["tiles"])
    return (max(1, -(-problem.end_block // blocks)), -(-problem.rows // int(c["row_tile"])), 1)


def counts(c: Candidate) -> tuple[str, str, str]:
    """`groups` in expressions of a step's sizes."""
    if c["strategy"] == "baseline":
        return (f"rows * ceil_div(max_blocks, {BASELINE_THREADS})", "1", "1")
    blocks = tile_blocks(c) * int(c["tiles"])
    complete = "floor_div(context, ratio)"
    return (f"max(1, ceil_div({complete}, {blocks}))", f"ceil_div(rows, {c['row_tile']})", "1")


# ------------------------------------------------------------------ constraints


def _check_buffer(c: Candidate) -> str | None:
    return limits.buffer_reason(
        c.device, "block_keys", 2 * c.problem.max_blocks * c.problem.index_dim
    )


def _check_features(c: Candidate) -> str | None:
    device = c.device
    if c["strategy"] == "packed_f16" and not device.float16:
        return "packed_f16 needs 16-bit float arithmetic (shaderFloat16)"
    features = (device.cooperative_matrix, device.float16, device.vulkan_memory_model)
    if by_matrix(c.values) and not all(features):
        return "matrix needs KHR cooperative matrices, 16-bit floats and Vulkan's memory model"
    if c["strategy"] != "baseline" and c.problem.index_dim % PIECE:
        return f"keys of {c.problem.index_dim} dimensions are no whole 16-byte pieces"
    return None


def _check_threads(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        needed = 4 * c.problem.index_heads * c.problem.index_dim
        return limits.shared_memory_reason(
            c.device, needed, " for the queries of a row"
        ) or limits.threads_reason(c.device, BASELINE_THREADS)
    return limits.threads_reason(c.device, c["subgroups"] * c["subgroup_size"])


def _check_rows(c: Candidate) -> str | None:
    if c["row_tile"] > 1 and c["row_tile"] >= 2 * c.problem.rows:
        return f"{c['row_tile']} rows at a time are too many for the step's {c.problem.rows}"
    return None


def _check_group_blocks(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        return None
    blocks = tile_blocks(c) * int(c["tiles"])
    if blocks > MAX_GROUP_BLOCKS:
        return f"a workgroup would take {blocks} blocks, the limit is {MAX_GROUP_BLOCKS}"
    return None


def _check_lanes(c: Candidate) -> str | None:
    if not by_lanes(c.values):
        return None
    pieces = c.problem.index_dim // PIECE
    if c["lanes"] > c["subgroup_size"]:
        return f"{c['lanes']} lanes of a key are more than the subgroup's {c['subgroup_size']}"
    if pieces % c["lanes"]:
        return f"{c['lanes']} lanes cannot share the {pieces} pieces of a key evenly"
    return None


def _check_registers(c: Candidate) -> str | None:
    if not by_lanes(c.values):
        return None
    pieces, vectors, unroll = _pieces(c), _vectors(c), int(c["unroll"])
    words = 4 if c["strategy"] == "packed_f16" else 8
    queries = vectors * pieces * words if c["query_in"] == "registers" else 0
    total = queries + unroll * (4 * pieces + vectors)
    if total > MAX_LANE_WORDS:
        return (
            f"a lane would hold {total} words of queries, keys and sums, the limit is "
            f"{MAX_LANE_WORDS}: use more lanes, a smaller row_tile or unroll, or query_in=shared"
        )
    unrolled = vectors * unroll * pieces * words
    if unrolled > MAX_UNROLLED:
        return (
            f"one step would unroll {unrolled} multiplications, the limit is {MAX_UNROLLED}: use "
            "more lanes, or a smaller row_tile or unroll"
        )
    return None


def _check_shared_queries(c: Candidate) -> str | None:
    if not by_lanes(c.values) or c["query_in"] == "registers":
        return None
    size = 2 if c["strategy"] == "packed_f16" else 4
    needed = _vectors(c) * (c.problem.index_dim * size + 4)
    return limits.shared_memory_reason(c.device, needed, " for queries")


def _check_shape(c: Candidate) -> str | None:
    if not by_matrix(c.values):
        return None
    m, n, k = _shape(c)
    known = [
        f"{each.m}x{each.n}x{each.k}"
        for each in c.device.cooperative_matrix_shapes
        if (each.a_type, each.b_type) == ("float16", "float16")
        and (each.c_type, each.result_type) == ("float32", "float32")
        and each.scope == "subgroup"
    ]
    if c["matrix_shape"] not in known:
        shapes = ", ".join(known) or "none"
        return f"no float16 matrices of {c['matrix_shape']} with float32 sums; there are: {shapes}"
    if c.problem.index_dim % k:
        return f"keys of {c.problem.index_dim} dimensions are no whole matrices of {k}"
    if c.problem.max_blocks < m:
        return f"a cache of {c.problem.max_blocks} blocks has no whole matrix of {m} keys"
    columns = -(-_vectors(c) // n)
    sums = columns * c["query_terms"] * c["unroll"] * m * n // c["subgroup_size"]
    if sums > MAX_MATRIX_SUMS:
        return f"a lane would hold {sums} sums of matrices, the limit is {MAX_MATRIX_SUMS}"
    queries = 2 * c["query_terms"] * columns * n * (c.problem.index_dim + QUERY_PADDING)
    dots = 4 * c["subgroups"] * m * (columns * n + 1)
    keys = 2 * c["subgroups"] * c["unroll"] * m * (c.problem.index_dim + PIECE)
    needed = queries + dots + (keys if c["key_in"] == "shared" else 0)
    return limits.shared_memory_reason(c.device, needed)


_TILE = ("strategy", "subgroup_size", "subgroups", "row_tile", "unroll", "tiles", "lanes")
CONSTRAINTS = (
    Constraint(needs=(), check=_check_buffer),
    Constraint(needs=("strategy",), check=_check_features),
    subgroups.operations("basic", "shuffle"),
    subgroups.SIZE_RULE,
    Constraint(needs=("strategy", "subgroup_size", "subgroups"), check=_check_threads),
    Constraint(needs=("row_tile",), check=_check_rows),
    Constraint(needs=("strategy", "subgroup_size", "lanes"), check=_check_lanes),
    Constraint(
        needs=("strategy", "row_tile", "unroll", "lanes", "query_in"), check=_check_registers
    ),
    Constraint(needs=("strategy", "row_tile", "query_in"), check=_check_shared_queries),
    Constraint(needs=(*_TILE, "matrix_shape"), check=_check_group_blocks),
    Constraint(
        needs=(*_TILE, "matrix_shape"),
        check=lambda c: limits.groups_reason(c.device, groups(c)),
    ),
    Constraint(
        needs=(
            "strategy",
            "subgroup_size",
            "subgroups",
            "row_tile",
            "unroll",
            "matrix_shape",
            "key_in",
            "query_terms",
        ),
        check=_check_shape,
    ),
)
