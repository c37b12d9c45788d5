"""The search space of decode over the int8 cache: parameters, and which choices are legal."""

from __future__ import annotations

from tuner.kernels import lane_decode as lanes
from tuner.kernels import limits, subgroups
from tuner.kernels import matrix_decode as matrix
from tuner.kernels.base import Candidate, Constraint, Parameter
from tuner.kernels.decode_launches import split_of, workgroup_counts, workgroups_sharing
from tuner.kernels.matrix_units import EXCHANGE, by_matrix
from tuner.kernels.splits import POLICIES, combine_reason, split_reason

BASELINE_MAX_HEAD_SIZE = 256


LAYOUTS = {
    "token_major": "token-major words, one scale behind each vector",
    "planar": "of each block and KV head first all codes, then the scales: 16-byte aligned rows",
}
"""Cache layouts, each a family of its own: the first system's, and what an engine would gain with
the scales apart."""
PARAMETERS = (
    Parameter(
        name="layout",
        values=tuple(LAYOUTS),
        help="how the cache is laid out; each family has one layout",
    ),
    Parameter(
        name="strategy",
        values=("baseline", *lanes.STRATEGIES, "matrix"),
        help="baseline: one workgroup per query head, two passes over K. The others split the "
        "context and read KV once per KV head; they compute in f32, in packed f16, with the "
        "integer dot product for QK, or with cooperative matrices",
    ),
    subgroups.SIZE,
    subgroups.per_workgroup(1, 2, 4, 8, 10, 12, 16),
    Parameter(
        name="staging",
        values=("registers", "shared"),
        help="where codes wait: straight to registers, or tiles of tokens in shared memory",
        used=subgroups.tuned,
    ),
    Parameter(
        name="matrix_shape",
        values=matrix.SHAPES,
        help="cooperative-matrix shape: tokens x query heads x terms",
        used=by_matrix,
    ),
    Parameter(
        name="key_operand",
        values=("float16", "int8"),
        help="keys widened to 16 bits, or as they are with the query in two int8 terms",
        used=by_matrix,
    ),
    Parameter(
        name="tiles_unrolled",
        values=(1, 2, 4),
        help="matrices of tokens each subgroup loads before it computes",
        used=by_matrix,
    ),
    Parameter(
        name="prefetch",
        values=("none", "keys", "all"),
        help="loads of the next tiles that are issued before the present ones are computed",
        used=matrix.staged,
    ),
    EXCHANGE,
    Parameter(
        name="rescale",
        values=("lagging", "exact"),
        help="whether sums are rescaled with each new maximum, or only once it has moved far",
        used=by_matrix,
    ),
    Parameter(
        name="lanes_per_token",
        values=(1, 2, 4, 8, 16, 32, 64),
        help="lanes that share the dimensions of one token",
        used=lanes.by_lanes,
    ),
    Parameter(
        name="tokens_unrolled",
        values=(1, 2, 4, 8),
        help="tokens each group of lanes loads before it computes",
        used=lanes.by_lanes,
    ),
    Parameter(
        name="tile_tokens",
        values=(16, 32, 64, 128),
        help="tokens of a tile staged by the whole workgroup",
        used=lanes.staged,
    ),
    Parameter(
        name="load_words",
        values=(1, 4),
        help="words of one global load into the staged tile (4: blocks as 16-byte vectors)",
        used=lanes.staged,
    ),
    Parameter(
        name="head_slices",
        values=(1, 2, 4, 8),
        help="parts into which the query group is dealt out over the subgroups of a workgroup",
        used=lanes.staged,
    ),
    Parameter(
        name="query_terms",
        values=(1, 2),
        help="int8 terms of a query value for the integer dot product",
        used=lambda values: values["strategy"] == "int_dot",
    ),
    Parameter(
        name="split",
        values=POLICIES,
        help="how the work is cut: none (a workgroup for each sequence and KV head), count:N times "
        "as many, parts of tokens:N, device:N workgroups per compute unit, or fit:N at most so "
        "many that shares are whole",
        used=subgroups.tuned,
    ),
    Parameter(
        name="combine_slices",
        values=(1, 2, 4, 8),
        help="parts into which the combine pass deals out the splits of a query head",
        used=lambda values: lanes.by_lanes(values) and values["split"] != "none",
    ),
)


def _check_plain(c: Candidate) -> str | None:
    if c.problem.switched:
        quantised = "" if c.problem.value_head_size else "paged_decode_q8_switched, "
        return (
            f"this family has no {', '.join(c.problem.switched)}: use {quantised}paged_decode_f16 "
            "or paged_decode_f32"
        )
    return None


def _check_switched(c: Candidate) -> str | None:
    if not c.problem.switched:
        return "no switch is on: use paged_decode_q8, whose kernels need not ask for any"
    if c.problem.value_head_size:
        return (
            "keys and values of this cache are of one size, value_head_size is "
            f"{c.problem.value_head_size}: use paged_decode_f16 or paged_decode_f32"
        )
    return None


def _check_head_size(c: Candidate) -> str | None:
    if c.problem.head_size % 4:
        return f"head size {c.problem.head_size} is no multiple of 4, the codes of one word"
    if c["strategy"] == "baseline" and c.problem.head_size > BASELINE_MAX_HEAD_SIZE:
        return (
            f"the baseline's shared arrays hold a head size of {BASELINE_MAX_HEAD_SIZE}, "
            f"the problem has {c.problem.head_size}"
        )
    return None


def _check_split(c: Candidate) -> str | None:
    reason = None if c["strategy"] == "baseline" else _cut_reason(c)
    return reason or limits.launches_reason(c.device, workgroup_counts(c))


def _cut_reason(c: Candidate) -> str | None:
    policy = c["split"]
    if policy.startswith("fit:") and lanes.by_lanes(c.values):
        return f"{policy} is for kernels that deal out the work, {c['strategy']} cuts contexts"
    pairs = c.problem.sequences * c.problem.kv_heads
    parts = -(-workgroups_sharing(c) // pairs) if by_matrix(c.values) else split_of(c).parts
    return split_reason(policy, parts, c.device.compute_units)


def _check_combine(c: Candidate) -> str | None:
    if not lanes.by_lanes(c.values) or c["split"] == "none":
        return None
    size, slices = c.problem.head_size, c["combine_slices"]
    return combine_reason(c.device, columns=size // 4, slices=slices, dimensions=size)


def _check_staged(c: Candidate) -> str | None:
    if c["layout"] == "planar" and lanes.staged(c.values):
        return "tiles with their scales apart are staged by the strategy matrix alone"
    return None


PLAIN = Constraint(needs=(), check=_check_plain)
SWITCHED = Constraint(needs=(), check=_check_switched)
CONSTRAINTS = (
    Constraint(needs=("layout", "strategy", "staging"), check=_check_staged),
    Constraint(needs=("strategy",), check=_check_head_size),
    subgroups.operations("basic", "shuffle"),
    subgroups.SIZE_RULE,
    subgroups.WORKGROUP_RULE,
    *lanes.CONSTRAINTS,
    *matrix.CONSTRAINTS,
    Constraint(
        needs=(*lanes.GRANULE_NEEDS, "matrix_shape", "tiles_unrolled", "split"), check=_check_split
    ),
    Constraint(needs=("strategy", "split", "combine_slices"), check=_check_combine),
)
