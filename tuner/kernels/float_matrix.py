"""Decode over float16 caches on matrix units, fed from the cache without a detour.

Geometry and constraints of the strategy matrix. Both products are transposed, so that a lane's
accumulators belong to few query heads: scores [tokens, heads] = keys x query, and outputs
[dims, heads] = values x weights. Two ways to feed the first operands:

* ``registers``: lanes load several elements of a row at once (of keys always 16 bytes), and put
  them where the probed mapping wants them. A dot product may run over its terms in any order, so
  what a lane loads serves as its terms whatever their dimensions (of keys) or tokens (of values),
  and the query and the weights are permuted to match.
* ``matrices``: the unit loads them itself. Packets of keys are tokens x 8 matrices by rows, values
  dims x tokens matrices by rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tuner.device_info import MatrixLayout
from tuner.kernels import limits
from tuner.kernels.base import Candidate, Constraint, Parameter, Values
from tuner.kernels.fragments import Axis, operand_axes
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

SHAPES = ("16x8x16", "16x16x16", "16x8x8", "8x8x8", "8x8x16", "8x16x16")
PACKET = 8
"""Elements of a key that lie side by side, 16 bytes."""
MAX_LANE_WORDS = 224
"""32-bit words of sums, scores, keys and values one lane may hold: GPUs give it 128 to 256."""
MAX_PRODUCTS_ON_CPU = 32
"""Products of matrices in a step: a software driver takes a second or more to compile each."""
MERGED_HEADS = 2
"""Query heads that subgroups merge at a time: more would need more shared memory."""


def fed_by_lanes(values: Values) -> bool:
    """Whether lanes load the matrices' elements themselves."""
    return by_matrix(values) and values["feed"] == "registers"


PARAMETERS = (
    Parameter(
        name="matrix_shape",
        values=SHAPES,
        help="cooperative-matrix shape: tokens x query heads x terms",
        used=by_matrix,
    ),
    Parameter(
        name="feed",
        values=("registers", "matrices"),
        help="how keys and values become operands: by lanes that load 16 bytes each, or by the "
        "matrix unit's own loads",
        used=by_matrix,
    ),
    Parameter(
        name="value_width",
        values=(8, 4, 2),
        help="tokens for which a lane loads a value's element at once; times the classes of lanes "
        "that hold other terms, these are the tokens of a step",
        used=by_matrix,
    ),
    EXCHANGE,
    Parameter(
        name="rescale",
        values=("lagging", "exact"),
        help="whether sums are rescaled only once the maximum has moved far, behind a branch, or "
        "every time",
        used=by_matrix,
    ),
)


STARTS: tuple[Values, ...] = tuple(
    {
        "strategy": "matrix",
        "subgroup_size": size,
        "subgroups": subgroups,
        "matrix_shape": shape,
        "feed": feed,
        "value_width": width,
        "exchange": exchange,
        "rescale": rescale,
        "prefetch": prefetch,
        "split": split,
        "combine_slices": 4,
    }
    for size, shape in ((32, "16x8x16"), (32, "16x16x16"), (64, "16x16x16"), (8, "8x8x8"))
    for feed, prefetch, width in (
        ("registers", 1, 8),
        ("registers", 0, 8),
        ("registers", 1, 4),
        ("matrices", 0, 8),
        ("registers", 0, 2),
    )
    for exchange, rescale in (("convert", "exact"), ("shared", "lagging"))
    for subgroups, split in ((4, "device:2"), (8, "device:1"))
)
"""Variants to try first; what they do not say is neutral."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedPlan:
    """Tables of one layout for a span of tokens, a few for each class of lanes that share terms.

    Element `elements[j][p]` of a lane's first operand is the p-th term of its j-th row;
    `rows[j][lane]` is that row within a matrix, `lane_class[lane]` the class. A lane's terms,
    counted over the steps, take the elements of one packet after another. Term k of step s of the
    scores is dimension `query_dims[s * terms + k]`. Row r of the scores of a span is token
    `tokens[r]`, and its weight is the `places[r]`-th of the terms of the outputs.
    """

    span: int
    classes: int
    elements: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[int, ...], ...]
    lane_class: tuple[int, ...]
    query_dims: tuple[int, ...]
    tokens: tuple[int, ...]
    places: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def feed_plan(
    layout: MatrixLayout, *, head_size: int, value_width: int, feed: str, exchange: str
) -> FeedPlan | str:
    """The plan for a layout and head size, or the reason why there is none."""
    shape, axes = layout.shape, operand_axes(layout.a)
    if isinstance(axes, str):
        return axes
    rows, terms, elements = axes
    classes, own = len(terms.bases), len(terms.offsets)
    span = classes * value_width
    if span % shape.m or span % shape.k or value_width % own:
        return f"spans of {span} tokens, {own} terms a lane, do not suit {shape.m} x {shape.k}"
    by_lanes = feed == "registers"
    if by_lanes and head_size // PACKET % classes:
        return f"{classes} lanes cannot share the {head_size // PACKET} packets of a key evenly"
    if not by_lanes and shape.k != PACKET:
        return f"packets of {PACKET} are no matrices of {shape.k} terms"
    if head_size % shape.k:
        return f"head size {head_size} does not cut into steps of {shape.k} terms"
    if exchange == "convert" and shape.m != shape.k:
        return f"accumulators of {shape.m} rows do not convert to operands of {shape.k} terms"
    in_order = tuple(range(span))
    order = _token_order(terms, span // shape.k, value_width) if by_lanes else in_order
    tokens = order if exchange == "convert" else in_order
    return FeedPlan(
        span=span,
        classes=classes,
        elements=elements,
        rows=tuple(
            tuple(rows.bases[number] + offset for number in rows.lane_class)
            for offset in rows.offsets
        ),
        lane_class=terms.lane_class,
        query_dims=_query_dims(terms, head_size // shape.k)
        if by_lanes
        else tuple(range(head_size)),
        tokens=tokens,
        places=tuple(order.index(token) for token in tokens),
    )


def _token_order(terms: Axis, steps: int, value_width: int) -> tuple[int, ...]:
    """Token of each term of each step: class c of lanes has the c-th `value_width` of them."""
    return tuple(
        value_width * number + step * len(terms.offsets) + position
        for step in range(steps)
        for _, (number, position) in sorted(terms.table.items())
    )


def _query_dims(terms: Axis, steps: int) -> tuple[int, ...]:
    """Dimension of each term of each step: class c of lanes has packets c, c + classes, …"""
    dims = []
    for step in range(steps):
        for _, (number, position) in sorted(terms.table.items()):
            slot, element = divmod(step * len(terms.offsets) + position, PACKET)
            dims.append(PACKET * (number + len(terms.bases) * slot) + element)
    return tuple(dims)


def _required(c: Candidate) -> tuple[MatrixLayout, FeedPlan]:
    layout = layout_of(c.values, c.device)
    assert layout is not None, "asked of an illegal candidate"
    plan = _plan(c, layout)
    assert not isinstance(plan, str), "asked of an illegal candidate"
    return layout, plan


def _plan(c: Candidate, layout: MatrixLayout) -> FeedPlan | str:
    return feed_plan(
        layout,
        head_size=c.problem.head_size,
        value_width=c["value_width"],
        feed=c["feed"],
        exchange=c["exchange"],
    )


def tile(c: Candidate) -> int:
    """Tokens of one step of a subgroup."""
    layout = layout_of(c.values, c.device)
    axes = operand_axes(layout.a) if layout else ""
    return 1 if isinstance(axes, str) else int(c["value_width"]) * len(axes[1].bases)


def constants(c: Candidate) -> dict[str, object]:
    """What the template of the attend pass needs beside the parameters."""
    layout, plan = _required(c)
    shape, accumulator = layout.shape, layout.c
    elements = score_elements(accumulator)
    return {
        "plan": plan,
        "layout": layout,
        "head_tiles": _head_tiles(c),
        "score_tiles": plan.span // shape.m,
        "key_steps": c.problem.head_size // shape.k,
        "value_steps": plan.span // shape.k,
        "output_tiles": c.problem.value_size // shape.m,
        "score_rows": elements.rows,
        "score_columns": elements.columns,
        "score_elements": elements.places,
        "column_masks": sharing_masks(accumulator.lane_column),
        "padding": WEIGHT_PADDING,
        "merged_heads": _merged_heads(c),
        "lag": LAG if c["rescale"] == "lagging" else 0,
    }


def _head_tiles(c: Candidate) -> int:
    return int(-(-c.problem.group // int(str(c["matrix_shape"]).split("x")[1])))


def _merged_heads(c: Candidate) -> int:
    return min(MERGED_HEADS, int(c.problem.group))


def _check_features(c: Candidate) -> str | None:
    return features_reason(c.device) if by_matrix(c.values) else None


def _check_shape(c: Candidate) -> str | None:
    if not by_matrix(c.values):
        return None
    layout, reason = layout_of(c.values, c.device), layout_reason(c)
    if reason is not None or layout is None:
        return reason
    if _head_tiles(c) > MAX_HEAD_TILES:
        return (
            f"{c.problem.group} query heads per KV head need {_head_tiles(c)} matrices of "
            f"{layout.shape.n}, the limit is {MAX_HEAD_TILES}"
        )
    if c.problem.value_size % layout.shape.m:
        return f"values of {c.problem.value_size} elements leave matrices of {layout.shape.m} empty"
    return None


def _check_plan(c: Candidate) -> str | None:
    layout = layout_of(c.values, c.device) if by_matrix(c.values) else None
    if layout is None:
        return None
    plan = _plan(c, layout)
    reason = exchange_reason(c) or (plan if isinstance(plan, str) else None)
    if reason is not None or isinstance(plan, str):
        return reason
    block, shape = c.problem.block_size, layout.shape
    if block % c["value_width"]:
        return f"blocks of {block} tokens do not hold whole loads of {c['value_width']} values"
    if block % plan.span and plan.span % block:
        return f"steps of {plan.span} tokens and blocks of {block} do not divide each other"
    if c["feed"] == "matrices" and (block % shape.m or block % shape.k):
        return f"blocks of {block} tokens do not hold whole matrices of {shape.m} or {shape.k}"
    return None


def _check_registers(c: Candidate) -> str | None:
    layout = layout_of(c.values, c.device) if by_matrix(c.values) else None
    if layout is None or isinstance(_plan(c, layout), str):
        return None
    lanes, plan, shape = len(layout.a.lane_row), _required(c)[1], layout.shape
    if c.device.is_cpu:
        return _check_products(c, plan.span * (c.problem.head_size + c.problem.value_size))
    accumulator = len(layout.c.element_row)
    held = _head_tiles(c) * accumulator * (c.problem.value_size // shape.m)
    held += _head_tiles(c) * accumulator * (plan.span // shape.m)
    keys, values = (
        plan.span * n // (2 * lanes) for n in (c.problem.head_size, c.problem.value_size)
    )
    # Without prefetch values take the place of keys.
    held += keys + values if c["prefetch"] else max(keys, values)
    if held > MAX_LANE_WORDS:
        return (
            f"a lane would hold {held} words of sums, scores, keys and values, the limit is "
            f"{MAX_LANE_WORDS}: do without prefetch, or use another matrix_shape"
        )
    return None


def _check_products(c: Candidate, elements: int) -> str | None:
    m, _, k = map(int, str(c["matrix_shape"]).split("x"))
    products = _head_tiles(c) * elements // (m * k)
    if products > MAX_PRODUCTS_ON_CPU:
        return (
            f"a step of {products} products of matrices takes a software driver too long to "
            f"compile, the limit is {MAX_PRODUCTS_ON_CPU}: use a smaller value_width"
        )
    return None


def _check_shared_memory(c: Candidate) -> str | None:
    layout = layout_of(c.values, c.device) if by_matrix(c.values) else None
    if layout is None or isinstance(_plan(c, layout), str):
        return None
    heads = _head_tiles(c) * layout.shape.n
    weights = 2 * c["subgroups"] * heads * (_required(c)[1].span + WEIGHT_PADDING)
    if c["exchange"] == "convert":
        weights = 0
    merge = 4 * c["subgroups"] * _merged_heads(c) * (c.problem.value_size + 2)
    needed = heads * (2 * c.problem.head_size + 4) + weights + merge
    return limits.shared_memory_reason(c.device, needed)


_SHAPE = ("strategy", "subgroup_size", "matrix_shape")
_PLAN = (*_SHAPE, "feed", "value_width", "exchange")
CONSTRAINTS = (
    Constraint(needs=("strategy",), check=_check_features),
    Constraint(needs=_SHAPE, check=_check_shape),
    Constraint(needs=_PLAN, check=_check_plan),
    Constraint(needs=(*_PLAN, "prefetch"), check=_check_registers),
    Constraint(needs=(*_PLAN, "subgroups"), check=_check_shared_memory),
)
