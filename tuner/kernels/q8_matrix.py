"""Decode over the planar q8 cache on matrix units: parameters, geometry and constraints.

Codes become matrix elements in registers (`tuner.kernels.fragments`), straight from loads of up to
16 bytes. A step of the scores stays within the 32 dimensions of one scale, so that each group's sum
is scaled as a whole, exactly; a value's elements are scaled by what its scale is of the token's
largest, a power of two below which goes into the token's weight.
"""

from __future__ import annotations

import functools

from tuner.device_info import MatrixLayout
from tuner.kernels import limits
from tuner.kernels.base import Candidate, Constraint, Parameter, Values
from tuner.kernels.fragments import WORD_CODES, FragmentPlan, fragment_plan, operand_axes
from tuner.kernels.index_maps import index_map
from tuner.kernels.matrix_units import (
    EXCHANGE,
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
from tuner.kernels.q8_parts import CHUNK, heads_per_slice
from tuner.problems import GROUP_CODES

SCALE_WORDS = GROUP_CODES // WORD_CODES
MAX_LANE_WORDS = 224
"""32-bit words of sums, scores, keys and values one lane may hold: GPUs give it 128 to 256."""
MAX_PRODUCTS_ON_CPU = 128
"""Products of matrices in a step: a software driver takes several seconds to compile so many."""
MERGED_ELEMENTS = 8
"""Elements of a lane that subgroups merge at a time: of more, shared memory would be the limit."""

PARAMETERS = (
    Parameter(
        name="matrix_shape",
        values=("16x8x16", "16x16x16", "8x8x8", "8x8x16", "8x16x16"),
        help="cooperative-matrix shape: tokens x query heads x terms",
        used=by_matrix,
    ),
    EXCHANGE,
    Parameter(
        name="rescale",
        values=("exact", "lagging"),
        help="whether sums are rescaled every time the maximum moves, or only once it has moved "
        "far, behind a branch",
        used=by_matrix,
    ),
    Parameter(
        name="prefetch",
        values=(0, 1),
        help="whether keys, values and scales are loaded a round ahead",
        used=by_matrix,
    ),
)

STARTS: tuple[Values, ...] = tuple(
    {
        "strategy": "matrix",
        "subgroup_size": size,
        "subgroups": subgroups,
        "head_slices": slices,
        "matrix_shape": shape,
        "exchange": exchange,
        "rescale": rescale,
        "prefetch": prefetch,
        "split": split,
    }
    for size, shape, slices in (
        (32, "16x8x16", 1),
        (32, "16x8x16", 2),
        (32, "16x16x16", 1),
        (64, "16x16x16", 1),
        (8, "8x8x8", 2),
    )
    for prefetch, subgroups, rescale, split in (
        (0, 8, "lagging", "device:1"),
        (1, 8, "lagging", "device:1"),
        (1, 6, "exact", "device:2"),
        (0, 12, "lagging", "device:1"),
    )
    for exchange in ("convert", "shared")
)
"""Variants to try first; what they do not say is neutral."""


def constants(c: Candidate) -> dict[str, object]:
    """What the template of the attend pass needs beside the parameters."""
    layout, plan = _required(c)
    elements, groups = score_elements(layout.c), _groups(c)
    key_vector, value_vector = _vectors(layout, c.problem.head_size)
    sharing = max(1, min(c["subgroup_size"] // layout.shape.m, groups))
    lanes = 1 << (sharing.bit_length() - 1)
    scale_slots = -(-groups // lanes)
    return {
        **{name: c[name] for name in ("strategy", "subgroup_size", "subgroups", "head_slices")},
        **{name: c[name] for name in ("exchange", "prefetch")},
        "head_size": c.problem.head_size,
        "kv_heads": c.problem.kv_heads,
        "group": c.problem.group,
        "slice_heads": heads_per_slice(c),
        "head_tiles": _head_tiles(c),
        "plan": plan,
        "layout": layout,
        "maps": _maps(plan, layout),
        "key_vector": key_vector,
        "value_vector": value_vector,
        "scale_groups": groups,
        "scale_lanes": lanes,
        "scale_slots": scale_slots,
        "scale_vector": next(n for n in (8, 4, 2, 1) if scale_slots % n == 0 and groups % n == 0),
        "scale_tokens": max(1, layout.shape.m // c["subgroup_size"]),
        "paired": _paired(plan),
        "score_rows": elements.rows,
        "score_columns": elements.columns,
        "score_elements": elements.places,
        "column_masks": sharing_masks(layout.c.lane_column),
        "padding": WEIGHT_PADDING,
        "merged_elements": min(MERGED_ELEMENTS, _sums(c, layout, plan)),
        "slack": LAG if c["rescale"] == "lagging" else 0,
    }


def _maps(plan: FragmentPlan, layout: MatrixLayout) -> dict[str, str]:
    """The plan's tables as functions of the template, by name: expressions of their argument i."""
    tables = {
        "key_word": plan.key_word,
        "value_word": plan.value_word,
        "query_dim": plan.query_dims,
        "output_dim": plan.output_dims,
        "score_row": layout.c.lane_row,
        "score_column": layout.c.lane_column,
        "element_row": layout.c.element_row,
        "element_column": layout.c.element_column,
    }
    tables |= {f"key_token_{n}": tokens for n, tokens in enumerate(plan.key_tokens)}
    tables |= {f"value_token_{n}": tokens for n, tokens in enumerate(plan.value_tokens)}
    return {name: index_map(table) for name, table in tables.items()}


def _paired(plan: FragmentPlan) -> bool:
    """Whether each two terms of a value are neighbouring tokens, the first of them even."""
    pairs = zip(plan.value_tokens[::2], plan.value_tokens[1::2], strict=False)
    return len(plan.value_tokens) % 2 == 0 and all(
        one % 2 == 0 and other == one + 1
        for first, second in pairs
        for one, other in zip(first, second, strict=True)
    )


def _groups(c: Candidate) -> int:
    return int(c.problem.head_size // GROUP_CODES)


def _head_tiles(c: Candidate) -> int:
    return int(-(-heads_per_slice(c) // int(str(c["matrix_shape"]).split("x")[1])))


def _sums(c: Candidate, layout: MatrixLayout, plan: FragmentPlan) -> int:
    """Elements of the outputs that one lane holds."""
    return _head_tiles(c) * plan.output_tiles * len(layout.c.element_row)


def _vectors(layout: MatrixLayout, head_size: int) -> tuple[int, int]:
    """Words of one load of keys, whose lanes may not leave a scale's group, and of values."""
    axes, words = operand_axes(layout.a), head_size // WORD_CODES
    if isinstance(axes, str):
        return 1, 1
    rows, terms = len(axes[0].bases), len(axes[1].bases)
    widths = (4, 2, 1)
    return (
        next((n for n in widths if SCALE_WORDS % (n * terms) == 0 and words % (n * terms) == 0), 1),
        next((n for n in widths if words % (n * rows) == 0), 1),
    )


@functools.lru_cache(maxsize=64)
def plan_of(layout: MatrixLayout, head_size: int) -> FragmentPlan | str:
    """The plan for a layout and head size, or the reason why there is none."""
    if head_size % GROUP_CODES:
        return f"heads of {head_size} do not hold whole groups of {GROUP_CODES} codes under a scale"
    plan = fragment_plan(
        layout,
        layout,
        head_size=head_size,
        row_words=head_size // WORD_CODES,
        staged=False,
        vectors=_vectors(layout, head_size),
    )
    if isinstance(plan, str):
        return plan
    k = layout.shape.k
    groups = [dim // GROUP_CODES for dim in plan.query_dims]
    if groups != [s * k // GROUP_CODES for s in range(plan.steps) for _ in range(k)]:
        return f"steps of {k} terms take dimensions under several scales"
    if max(plan.output_dims) >= head_size:
        return f"head size {head_size} leaves a tile of {layout.shape.m} rows half empty"
    return plan


def _plan(c: Candidate) -> FragmentPlan | None:
    """The plan of a candidate whose layout and plan exist."""
    layout = layout_of(c.values, c.device) if by_matrix(c.values) else None
    plan = plan_of(layout, c.problem.head_size) if layout else None
    return None if isinstance(plan, str) else plan


def _required(c: Candidate) -> tuple[MatrixLayout, FragmentPlan]:
    layout, plan = layout_of(c.values, c.device), _plan(c)
    assert layout is not None, "asked of an illegal candidate"
    assert plan is not None, "asked of an illegal candidate"
    return layout, plan


def _check_features(c: Candidate) -> str | None:
    return features_reason(c.device) if by_matrix(c.values) else None


def _check_layout(c: Candidate) -> str | None:
    if not by_matrix(c.values):
        return None
    layout = layout_of(c.values, c.device)
    reason = layout_reason(c)
    if reason is not None or layout is None:
        return reason
    if CHUNK % layout.shape.m:
        return f"chunks of {CHUNK} tokens do not hold whole tiles of {layout.shape.m}"
    plan = plan_of(layout, c.problem.head_size)
    return plan if isinstance(plan, str) else None


def _check_exchange(c: Candidate) -> str | None:
    return exchange_reason(c) if by_matrix(c.values) else None


def _check_heads(c: Candidate) -> str | None:
    layout = layout_of(c.values, c.device) if by_matrix(c.values) else None
    if layout is None:
        return None
    heads, n = heads_per_slice(c), layout.shape.n
    if _head_tiles(c) > MAX_HEAD_TILES:
        return (
            f"slices of {heads} query heads need {_head_tiles(c)} matrices of {n}, the limit is "
            f"{MAX_HEAD_TILES}: use more head_slices"
        )
    if c["head_slices"] > 1 and 2 * heads <= n:
        return f"slices of {heads} query heads leave half of the {n} columns empty"
    return None


def _check_registers(c: Candidate) -> str | None:
    plan = _plan(c)
    if plan is None:
        return None
    layout, heads = _required(c)[0], _head_tiles(c)
    if c.device.is_cpu:
        products = heads * (plan.steps + plan.output_tiles)
        if products > MAX_PRODUCTS_ON_CPU:
            return (
                f"a step of {products} products of matrices takes a software driver too long to "
                f"compile, the limit is {MAX_PRODUCTS_ON_CPU}: use more head_slices"
            )
        return None
    held = _sums(c, layout, plan) + 2 * heads * len(layout.c.element_row)
    keys = len(plan.key_tokens) * len(plan.key_slots)
    values = len(plan.value_tokens) * len(plan.value_slots)
    # Without prefetch values take the place of keys.
    held += keys + values if c["prefetch"] else max(keys, values)
    if held > MAX_LANE_WORDS:
        return (
            f"a lane would hold {held} words of sums, scores, keys and values, the limit is "
            f"{MAX_LANE_WORDS}: do without prefetch, or use more head_slices"
        )
    return None


def shared_bytes(c: Candidate) -> int:
    """Shared memory of a legal candidate."""
    layout, plan = _required(c)
    heads, tokens = _head_tiles(c) * layout.shape.n, layout.shape.m
    queries = c["head_slices"] * heads * (2 * c.problem.head_size + 4)
    weights = 2 * heads * (tokens + WEIGHT_PADDING) if c["exchange"] == "shared" else 0
    scales = tokens * (6 * _groups(c) + 8)
    merge = 4 * c["subgroup_size"] * min(MERGED_ELEMENTS, _sums(c, layout, plan)) + 8 * heads
    return int(queries + c["subgroups"] * (weights + scales + merge) + 8 * c.problem.group + 64)


def _check_shared_memory(c: Candidate) -> str | None:
    if _plan(c) is None:
        return None
    return limits.shared_memory_reason(c.device, shared_bytes(c))


_SHAPE = ("strategy", "subgroup_size", "matrix_shape")
_HEADS = (*_SHAPE, "head_slices")
CONSTRAINTS = (
    Constraint(needs=("strategy",), check=_check_features),
    Constraint(needs=_SHAPE, check=_check_layout),
    Constraint(needs=("strategy", "exchange"), check=_check_exchange),
    Constraint(needs=_HEADS, check=_check_heads),
    Constraint(needs=(*_HEADS, "prefetch"), check=_check_registers),
    Constraint(needs=(*_HEADS, "subgroups", "exchange"), check=_check_shared_memory),
)
