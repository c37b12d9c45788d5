"""Decode on matrix units: fragments of cooperative matrices are built in registers from codes.

Geometry and constraints of the strategy matrix. Legal only where the element mapping was probed
and lets a lane take whole words (`tuner.kernels.fragments`).
"""

from __future__ import annotations

import functools

from tuner.device_info import Fragment, MatrixLayout
from tuner.kernels import limits
from tuner.kernels.base import Candidate, Constraint, Values
from tuner.kernels.fragments import FragmentPlan, fragment_plan
from tuner.kernels.index_maps import index_map
from tuner.kernels.matrix_units import (
    LAG,
    MAX_HEAD_TILES,
    WEIGHT_PADDING,
    by_matrix,
    exchange_reason,
    features_reason,
    layout_of,
    layout_reason,
    score_elements,
    sharing_masks,
)

SHAPES = ("16x8x16", "16x16x16", "8x8x8", "8x8x16", "8x16x16", "16x8x8")
MAX_LANE_WORDS = 240
"""32-bit words of accumulators and codes one lane may hold: GPUs give it 128 to 256."""
ROW_PADDING = 4
"""Words between staged rows that are 16-byte aligned."""
MERGED_ELEMENTS = 16
"""Elements of a lane that subgroups merge at a time: a tile of rows of 128 has room for so many."""
AHEAD: dict[object, tuple[str, ...]] = {"none": (), "keys": ("key",), "all": ("key", "value")}
"""Which loads are issued a round ahead, for each value of `prefetch`."""


def staged(values: Values) -> bool:
    """Whether tiles of tokens wait in shared memory."""
    return by_matrix(values) and values["staging"] == "shared"


def row_words(c: Candidate) -> int:
    """Words from one cached vector to the next: its codes, and its scale unless that lies apart."""
    return int(c.problem.head_size // 4 + (c["layout"] == "token_major"))


def granule(c: Candidate) -> int:
    """Tokens one workgroup takes a step."""
    return tile_rows(c) * int(c["tiles_unrolled"]) * int(c["subgroups"])


def constants(c: Candidate) -> dict[str, object]:
    """What the template of the attend pass needs beside the parameters."""
    layout = _required_layout(c)
    scores, plan = _score_layout(c) or layout, _required_plan(c)
    elements = score_elements(layout.c)
    return {
        "plan": plan,
        "maps": _maps(plan, scores.c),
        "scores": scores,
        "outputs": layout,
        "tile_rows": layout.shape.m,
        "tile_columns": layout.shape.n,
        "head_tiles": _head_tiles(c),
        "score_rows": elements.rows,
        "score_columns": elements.columns,
        "score_elements": elements.places,
        "column_masks": sharing_masks(layout.c.lane_column),
        "staged_row_words": _staged_row_words(c),
        "region_words": _region_words(c),
        "padding": WEIGHT_PADDING,
        "ahead": AHEAD[c["prefetch"]],
        "slack": LAG if c["rescale"] == "lagging" else 0,
    }


def _maps(plan: FragmentPlan, scores: Fragment) -> dict[str, str]:
    """The plan's tables as functions of the template, by name: expressions of their argument i."""
    tables = {
        "key_word": plan.key_word,
        "value_word": plan.value_word,
        "query_dim": plan.query_dims,
        "output_dim": plan.output_dims,
        "tile_token": plan.tokens,
        "score_row": scores.lane_row,
        "score_column": scores.lane_column,
        "element_row": scores.element_row,
        "element_column": scores.element_column,
    }
    tables |= {f"key_token_{n}": tokens for n, tokens in enumerate(plan.key_tokens)}
    tables |= {f"value_token_{n}": tokens for n, tokens in enumerate(plan.value_tokens)}
    return {name: index_map(table) for name, table in tables.items()}


def _score_layout(c: Candidate) -> MatrixLayout | None:
    """The layout of keys x query: of 8-bit integers where keys stay what they are."""
    layout = _required_layout(c)
    if c["key_operand"] == "float16":
        return layout
    wanted = (layout.shape.m, layout.shape.n)
    for other in c.device.matrix_layouts:
        same = (other.shape.m, other.shape.n) == wanted and other.c == layout.c
        if same and other.shape.a_type == "int8":
            return other
    return None


def _required_layout(c: Candidate) -> MatrixLayout:
    layout = layout_of(c.values, c.device)
    assert layout is not None, "asked of an illegal candidate"
    return layout


@functools.lru_cache(maxsize=256)
def _plan_of(
    scores: MatrixLayout, outputs: MatrixLayout, head_size: int, distance: int, in_shared: bool
) -> FragmentPlan | str:
    return fragment_plan(
        scores,
        outputs,
        head_size=head_size,
        row_words=distance,
        staged=in_shared,
        widened=scores.shape.a_type == "float16",
    )


def _plan(c: Candidate) -> FragmentPlan | str:
    scores = _score_layout(c)
    if scores is None:
        return f"no 8-bit layout goes with the 16-bit layout of {c['matrix_shape']}"
    in_shared = staged(c.values)
    distance = _staged_row_words(c) if in_shared else row_words(c)
    return _plan_of(scores, _required_layout(c), c.problem.head_size, distance, in_shared)


def _required_plan(c: Candidate) -> FragmentPlan:
    plan = _plan(c)
    assert not isinstance(plan, str), "asked of an illegal candidate"
    return plan


def tile_rows(c: Candidate) -> int:
    """Tokens of one matrix."""
    return int(str(c["matrix_shape"]).split("x")[0])


def _head_tiles(c: Candidate) -> int:
    return int(-(-c.problem.group // int(str(c["matrix_shape"]).split("x")[1])))


def _region_words(c: Candidate) -> int:
    """Words of shared memory in which a subgroup has its rows and, later, what it merges."""
    tokens = tile_rows(c) * c["tiles_unrolled"]
    rows = tokens * _staged_row_words(c) if staged(c.values) else 0
    return int(max(rows, MERGED_ELEMENTS * c["subgroup_size"]))


def _check_features(c: Candidate) -> str | None:
    if not by_matrix(c.values):
        return None
    views = c.device.storage_16bit and c.device.shared_memory_views
    lacking = None if views else "matrix needs 16-bit storage and explicit layouts of shared memory"
    return features_reason(c.device) or lacking


def _check_shape(c: Candidate) -> str | None:
    if not by_matrix(c.values):
        return None
    layout = layout_of(c.values, c.device)
    reason = layout_reason(c) or exchange_reason(c)
    if reason is not None or layout is None:
        return reason
    if c.problem.block_size % layout.shape.m:
        return f"tiles of {layout.shape.m} tokens do not divide the block of {c.problem.block_size}"
    if _head_tiles(c) > MAX_HEAD_TILES:
        return (
            f"{c.problem.group} query heads per KV head need {_head_tiles(c)} matrices of "
            f"{layout.shape.n}, the limit is {MAX_HEAD_TILES}"
        )
    return None


def _check_plan(c: Candidate) -> str | None:
    if not by_matrix(c.values) or layout_of(c.values, c.device) is None:
        return None
    plan = _plan(c)
    if isinstance(plan, str):
        return plan
    whole_rows = 1 if c["layout"] == "planar" else tile_rows(c)
    if staged(c.values) and whole_rows * row_words(c) % 4:
        return f"rows of {row_words(c)} words make no 16-byte vectors"
    return None


def _staged_row_words(c: Candidate) -> int:
    """Words from one staged row to the next: aligned rows move apart, into different banks."""
    return row_words(c) + (ROW_PADDING if c["layout"] == "planar" else 0)


def _check_registers(c: Candidate) -> str | None:
    layout = layout_of(c.values, c.device) if by_matrix(c.values) else None
    if layout is None or isinstance(_plan(c), str):
        return None
    plan = _required_plan(c)
    accumulators = _head_tiles(c) * plan.output_tiles * len(layout.c.element_row)
    words = len(plan.key_tokens) * len(plan.key_slots)
    words += len(plan.value_tokens) * len(plan.value_slots)
    quads = -(-tile_rows(c) * row_words(c) // (4 * c["subgroup_size"]))
    ahead = 4 * quads * len(AHEAD[c["prefetch"]])
    total = accumulators + (words + ahead) * c["tiles_unrolled"]
    if total > MAX_LANE_WORDS:
        return (
            f"a lane would hold {total} words of accumulators and codes, the limit is "
            f"{MAX_LANE_WORDS}: use fewer tiles_unrolled or less prefetch"
        )
    return None


def _check_shared_memory(c: Candidate) -> str | None:
    if not by_matrix(c.values) or layout_of(c.values, c.device) is None:
        return None
    heads = _head_tiles(c) * int(str(c["matrix_shape"]).split("x")[1])
    tokens = tile_rows(c) * c["tiles_unrolled"] + WEIGHT_PADDING
    weights = 2 * c["subgroups"] * heads * tokens if c["exchange"] == "shared" else 0
    statistics = 8 * heads * c["subgroups"]
    queries = heads * (2 * c.problem.head_size + 4)
    needed = 4 * c["subgroups"] * _region_words(c) + weights + queries + statistics + 32
    return limits.shared_memory_reason(c.device, needed)


_BASE = ("layout", "strategy", "subgroup_size", "matrix_shape")
CONSTRAINTS = (
    Constraint(needs=("strategy",), check=_check_features),
    Constraint(needs=(*_BASE, "exchange"), check=_check_shape),
    Constraint(needs=(*_BASE, "key_operand", "staging"), check=_check_plan),
    Constraint(
        needs=(*_BASE, "key_operand", "staging", "tiles_unrolled", "prefetch"),
        check=_check_registers,
    ),
    Constraint(
        needs=(*_BASE, "staging", "tiles_unrolled", "subgroups", "exchange"),
        check=_check_shared_memory,
    ),
)
