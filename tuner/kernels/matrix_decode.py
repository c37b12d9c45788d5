"""Decode on matrix units: fragments of cooperative matrices are built in registers from codes.

Geometry and constraints of the strategy matrix. Legal only where the element mapping was probed
and lets a lane take whole words (`tuner.kernels.fragments`).
"""

from __future__ import annotations

import functools

from tuner.device_info import DeviceInfo, Fragment, MatrixLayout
from tuner.kernels.base import Candidate, Constraint, Values
from tuner.kernels.fragments import FragmentPlan, fragment_plan
from tuner.kernels.index_maps import index_map

SHAPES = ("16x8x16", "16x16x16", "8x8x8", "8x8x16", "8x16x16", "16x8x8")
MAX_HEAD_TILES = 4
MAX_LANE_WORDS = 240
"""32-bit words of accumulators and codes one lane may hold: GPUs give it 128 to 256."""
WEIGHT_PADDING = 8
"""Added to each head's row of weights in shared memory: its rows start in different banks."""
ROW_PADDING = 4
"""Words between staged rows that are 16-byte aligned."""
MERGED_ELEMENTS = 16
"""Elements of a lane that subgroups merge at a time: a tile of rows of 128 has room for so many."""
AHEAD: dict[object, tuple[str, ...]] = {"none": (), "keys": ("key",), "all": ("key", "value")}
"""Which loads are issued a round ahead, for each value of `prefetch`."""
LAG = 8
"""How far, in powers of two, the reference of the softmax may lag behind the maximum."""


def by_matrix(values: Values) -> bool:
    """Whether the strategy is this module's."""
    return values["strategy"] == "matrix"


def staged(values: Values) -> bool:
    """Whether tiles of tokens wait in shared memory."""
    return by_matrix(values) and values["staging"] == "shared"


def row_words(c: Candidate) -> int:
    """Words from one cached vector to the next: its codes, and its scale unless that lies apart."""
    return int(c.problem.head_size // 4 + (c["layout"] == "token_major"))


def granule(c: Candidate) -> int:
    """Tokens one workgroup takes a step."""
    return _tile_rows(c) * int(c["tiles_unrolled"]) * int(c["subgroups"])


def constants(c: Candidate) -> dict[str, object]:
    """What the template of the attend pass needs beside the parameters."""
    layout = _required_layout(c)
    scores, plan = _score_layout(c) or layout, _required_plan(c)
    rows, columns, elements = _score_elements(layout.c)
    return {
        "plan": plan,
        "maps": _maps(plan, scores.c),
        "scores": scores,
        "outputs": layout,
        "tile_rows": layout.shape.m,
        "tile_columns": layout.shape.n,
        "head_tiles": _head_tiles(c),
        "score_rows": rows,
        "score_columns": columns,
        "score_elements": elements,
        "column_masks": sharing_masks(layout.c.lane_column),
        "staged_row_words": _staged_row_words(c),
        "shared_words": _pool_words(c),
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


def _layout(values: Values, device: DeviceInfo) -> MatrixLayout | None:
    for layout in device.matrix_layouts:
        shape = layout.shape
        if f"{shape.m}x{shape.n}x{shape.k}" == values["matrix_shape"] and shape.a_type == "float16":
            return layout
    return None


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
    layout = _layout(c.values, c.device)
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


def _tile_rows(c: Candidate) -> int:
    return int(str(c["matrix_shape"]).split("x")[0])


def _head_tiles(c: Candidate) -> int:
    return int(-(-c.problem.group // int(str(c["matrix_shape"]).split("x")[1])))


def _score_elements(
    fragment: Fragment,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int, int], ...]]:
    """Distinct row and column offsets of an accumulator, and (element, row, column) numbers."""
    rows = tuple(dict.fromkeys(fragment.element_row))
    columns = tuple(dict.fromkeys(fragment.element_column))
    places = zip(fragment.element_row, fragment.element_column, strict=True)
    return (
        rows,
        columns,
        tuple(
            (element, rows.index(row), columns.index(column))
            for element, (row, column) in enumerate(places)
        ),
    )


def sharing_masks(lane_base: tuple[int, ...]) -> tuple[int, ...]:
    """The bits of a lane's number that do not change its base: lanes that share columns."""
    lanes = range(len(lane_base))
    bits = (1 << bit for bit in range(len(lane_base).bit_length() - 1))
    return tuple(m for m in bits if all(lane_base[i] == lane_base[i ^ m] for i in lanes))


def _pool_words(c: Candidate) -> int:
    """Words of the shared array of rows and, later, of the merge of subgroups."""
    tokens = _tile_rows(c) * c["tiles_unrolled"]
    rows = tokens * _staged_row_words(c) if staged(c.values) else 0
    return int(c["subgroups"] * max(rows, MERGED_ELEMENTS * c["subgroup_size"]))


def _check_features(c: Candidate) -> str | None:
    if not by_matrix(c.values):
        return None
    device = c.device
    features = (device.cooperative_matrix, device.float16, device.vulkan_memory_model)
    if not all((*features, device.storage_16bit, device.shared_memory_views)):
        return (
            "matrix needs KHR cooperative matrices, 16-bit floats and storage, Vulkan's memory "
            "model and an explicit layout of shared memory"
        )
    missing = {"basic", "shuffle", "vote", "arithmetic"} - set(device.subgroup_operations)
    if missing:
        return f"the device has no subgroup operations of kind {', '.join(sorted(missing))}"
    return None


def _check_shape(c: Candidate) -> str | None:
    if not by_matrix(c.values):
        return None
    layout = _layout(c.values, c.device)
    if layout is None:
        known = ", ".join(
            f"{i.shape.m}x{i.shape.n}x{i.shape.k}"
            for i in c.device.matrix_layouts
            if i.shape.a_type == "float16"
        )
        return f"no probed layout of shape {c['matrix_shape']}; the device has: {known or 'none'}"
    if c["exchange"] == "convert" and "conversions" not in c.device.cooperative_matrix2:
        return "exchange=convert needs NV cooperative matrix 2 with conversions"
    if len(layout.a.lane_row) != c["subgroup_size"]:
        return f"layouts were probed for subgroups of {len(layout.a.lane_row)} lanes"
    sharing = 1 << len(sharing_masks(layout.c.lane_column))
    if sharing * len(set(layout.c.lane_column)) != len(layout.c.lane_column):
        return "the lanes that hold one head's scores do not differ in whole bits"
    if c.problem.block_size % layout.shape.m:
        return f"tiles of {layout.shape.m} tokens do not divide the block of {c.problem.block_size}"
    if _head_tiles(c) > MAX_HEAD_TILES:
        return (
            f"{c.problem.group} query heads per KV head need {_head_tiles(c)} matrices of "
            f"{layout.shape.n}, the limit is {MAX_HEAD_TILES}"
        )
    return None


def _check_plan(c: Candidate) -> str | None:
    if not by_matrix(c.values) or _layout(c.values, c.device) is None:
        return None
    plan = _plan(c)
    if isinstance(plan, str):
        return plan
    whole_rows = 1 if c["layout"] == "planar" else _tile_rows(c)
    if staged(c.values) and whole_rows * row_words(c) % 4:
        return f"rows of {row_words(c)} words make no 16-byte vectors"
    return None


def _staged_row_words(c: Candidate) -> int:
    """Words from one staged row to the next: aligned rows move apart, into different banks."""
    return row_words(c) + (ROW_PADDING if c["layout"] == "planar" else 0)


def _check_registers(c: Candidate) -> str | None:
    layout = _layout(c.values, c.device) if by_matrix(c.values) else None
    if layout is None or isinstance(_plan(c), str):
        return None
    plan = _required_plan(c)
    accumulators = _head_tiles(c) * plan.output_tiles * len(layout.c.element_row)
    words = len(plan.key_tokens) * len(plan.key_slots)
    words += len(plan.value_tokens) * len(plan.value_slots)
    quads = -(-_tile_rows(c) * row_words(c) // (4 * c["subgroup_size"]))
    ahead = 4 * quads * len(AHEAD[c["prefetch"]])
    total = accumulators + (words + ahead) * c["tiles_unrolled"]
    if total > MAX_LANE_WORDS:
        return (
            f"a lane would hold {total} words of accumulators and codes, the limit is "
            f"{MAX_LANE_WORDS}: use fewer tiles_unrolled or less prefetch"
        )
    return None


def _check_shared_memory(c: Candidate) -> str | None:
    if not by_matrix(c.values) or _layout(c.values, c.device) is None:
        return None
    heads = _head_tiles(c) * int(str(c["matrix_shape"]).split("x")[1])
    tokens = _tile_rows(c) * c["tiles_unrolled"] + WEIGHT_PADDING
    weights = 2 * c["subgroups"] * heads * tokens if c["exchange"] == "shared" else 0
    statistics = 8 * heads * (c["subgroups"] + 1)
    queries = heads * (2 * c.problem.head_size + 4)
    needed = 4 * _pool_words(c) + weights + queries + statistics + 32
    if needed > c.device.max_shared_memory_bytes:
        return (
            f"needs {needed} bytes of shared memory, the device has "
            f"{c.device.max_shared_memory_bytes}"
        )
    return None


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
