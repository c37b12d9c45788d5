"""The steps of a decode chain: which family each is taken from, and a few good variants of each.

A chain does not search the product of its steps' spaces. A choice here is a name for a variant of a
family, made for a subgroup size and a geometry; the family's own constraints say whether it is
legal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tuner.device_info import DeviceInfo
from tuner.kernels import q8_parts
from tuner.kernels.attn_partials_q8 import ATTN_PARTIALS_Q8
from tuner.kernels.base import Candidate, Family, Value, Values
from tuner.kernels.gated_combine import GATED_COMBINE
from tuner.kernels.index_append import INDEX_APPEND
from tuner.kernels.index_blocks import INDEX_BLOCKS
from tuner.kernels.index_q import INDEX_Q
from tuner.kernels.index_score import INDEX_SCORE
from tuner.kernels.index_select import INDEX_SELECT
from tuner.kernels.kv_append import KV_APPEND_Q8
from tuner.kernels.norm_rope import QK_NORM_ROPE
from tuner.problems import Problem, QsaStepProblem

Made = Callable[[int, QsaStepProblem], Mapping[str, Value]]
"""Parameters of a variant, for a subgroup size and a problem; those not named are neutral."""

BASELINE = "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step: its family, its problem within a chain's, and the variants to choose from."""

    family: Family
    problem: Callable[[QsaStepProblem], Problem]
    variants: Mapping[str, Made]

    def values(self, made: Mapping[str, Value]) -> Values:
        """A variant of the family: these parameters, all others neutral."""
        neutral = {each.name: each.values[0] for each in self.family.parameters}
        return {**neutral, **made}

    def candidate(
        self, made: Mapping[str, Value], problem: QsaStepProblem, device: DeviceInfo
    ) -> Candidate:
        """The variant on the step's own problem."""
        return Candidate(self.values(made), self.problem(problem), device)


def _lanes(size: int, dims: int) -> int:
    """As many lanes as a subgroup has and a vector of so many quads keeps busy, at most 32."""
    lanes = 1
    while 2 * lanes <= min(size, dims // 4, 32):
        lanes *= 2
    return lanes


def _baseline(_size: int, _problem: QsaStepProblem) -> Mapping[str, Value]:
    return {"strategy": BASELINE}


def _vector(size: int, problem: QsaStepProblem) -> Mapping[str, Value]:
    lanes = _lanes(size, problem.index_dim)
    return {"strategy": "lanes", "subgroup_size": size, "subgroups": 1, "lanes": lanes}


def _packed(_size: int, problem: QsaStepProblem) -> Mapping[str, Value]:
    words = next(words for words in (4, 2, 1) if problem.index_dim % (2 * words) == 0)
    return {"strategy": "packed", "threads": 64, "words": words}


def _normed(size: int, problem: QsaStepProblem) -> Mapping[str, Value]:
    aligned = problem.head_size % 4 == 0 and problem.rotary % 8 == 0
    return {
        "strategy": "teams",
        "launches": "joint",
        "subgroup_size": size,
        "subgroups": 1,
        "lanes": _lanes(size, problem.head_size),
        "width": 4 if aligned else 1,
    }


def _appended(size: int, _problem: QsaStepProblem) -> Mapping[str, Value]:
    return {"strategy": "teams", "subgroup_size": size, "subgroups": 1, "lanes": 8, "halves": 1}


LIGHT = (BASELINE, "registers")
"""The variants of steps that move little, which are chosen together."""


def _light(family: Family, problem: Callable[[QsaStepProblem], Problem], registers: Made) -> Step:
    made = dict(zip(LIGHT, (_baseline, registers), strict=True))
    return Step(family=family, problem=problem, variants=made)


LIGHT_STEPS = {
    "append": _light(INDEX_APPEND, lambda p: p.indexer, _packed),
    "blocks": _light(INDEX_BLOCKS, lambda p: p.indexer, _vector),
    "query": _light(INDEX_Q, lambda p: p.indexer, _vector),
    "norm_rope": _light(QK_NORM_ROPE, lambda p: p.norm_rope, _normed),
    "kv_append": _light(KV_APPEND_Q8, lambda p: p.append, _appended),
}


def _score_lanes(rows: int, lanes: int, unroll: int) -> Made:
    return lambda size, problem: {
        "strategy": "scalar_f32",
        "subgroup_size": size,
        "subgroups": 4,
        "row_tile": rows,
        "unroll": unroll,
        "lanes": lanes,
    }


def _score_matrix(rows: int) -> Made:
    def made(size: int, _problem: QsaStepProblem) -> Mapping[str, Value]:
        return {
            "strategy": "matrix",
            "subgroup_size": size,
            "subgroups": 4,
            "row_tile": rows,
            "unroll": 2,
            "matrix_shape": "8x8x8" if size == 8 else "16x8x16" if size == 32 else "16x16x16",
            "query_terms": 2,
        }

    return made


SCORE = Step(
    family=INDEX_SCORE,
    problem=lambda p: p.indexer,
    variants={
        BASELINE: _baseline,
        "lanes4": _score_lanes(1, 4, 2),
        "lanes8": _score_lanes(1, 8, 4),
        "lanes16": _score_lanes(1, 16, 4),
        "lanes8_rows": _score_lanes(4, 8, 2),
        "matrix": _score_matrix(1),
        "matrix_rows": _score_matrix(4),
    },
)
"""All of them as exact as float32: the lists that come of the scores are held to be equal."""


def _in_workgroup(threads: int, held: int) -> Made:
    """`held` keys a thread, or as many as subgroups of 8 lanes have registers for."""

    def made(size: int, _problem: QsaStepProblem) -> Mapping[str, Value]:
        return {
            "strategy": "workgroup",
            "subgroup_size": size,
            "subgroups": min(32, threads // size),
            "digit_bits": 11,
            "items": 4,
            "held": min(held, 16) if size == 8 else held,
            "listed": 2048,
        }

    return made


def _in_parts(parts: int, threads: int) -> Made:
    def made(size: int, _problem: QsaStepProblem) -> Mapping[str, Value]:
        return {
            "strategy": "parts",
            "subgroup_size": size,
            "subgroups": max(4, min(32, threads // size)),
            "digit_bits": 11,
            "items": 1,
            "held": 8,
            "listed": 2048,
            "parts": parts,
        }

    return made


SELECT = Step(
    family=INDEX_SELECT,
    problem=lambda p: p.indexer,
    variants={
        BASELINE: _baseline,
        "workgroup": _in_workgroup(1024, 32),
        "workgroup_short": _in_workgroup(1024, 8),
        "workgroup_half": _in_workgroup(512, 64),
        "parts32": _in_parts(32, 512),
        "parts64": _in_parts(64, 256),
    },
)


def _attend(strategy: str, subgroups: int, heads: int, unroll: int, staging: str) -> Made:
    """By groups of lanes; a subgroup has at most so many query heads, where these divide so."""

    def made(size: int, problem: QsaStepProblem) -> Mapping[str, Value]:
        few = min(16, size)
        while problem.head_size // 4 % few:
            few //= 2
        group = problem.query_heads // problem.kv_heads
        slices = [
            each
            for each in q8_parts.SLICES
            if subgroups % each == 0 and group % each == 0 and group // each <= heads
        ]
        return {
            "strategy": strategy,
            "subgroup_size": size,
            "subgroups": subgroups,
            "head_slices": min(slices, default=1),
            "lanes_per_token": few,
            "tokens_unrolled": unroll,
            "staging": staging,
            "tile_tokens": 32 if staging == "shared" else 16,
            "query_terms": 2 if strategy == "int_dot" else 1,
        }

    return made


def _attend_matrix(
    subgroups: int,
    exchange: str,
    *,
    prefetch: int = 1,
    rescale: str = "exact",
    sliced: bool = False,
) -> Made:
    def made(size: int, problem: QsaStepProblem) -> Mapping[str, Value]:
        shape = "8x8x8" if size == 8 else "16x8x16" if size == 32 else "16x16x16"
        heads = int(shape.split("x")[1])
        matrices = -(-problem.query_heads // problem.kv_heads // heads)
        slices = [
            each for each in q8_parts.SLICES if subgroups % each == 0 and each <= max(1, matrices)
        ]
        return {
            "strategy": "matrix",
            "subgroup_size": size,
            "subgroups": subgroups,
            "head_slices": max(slices) if sliced else 1,
            "matrix_shape": shape,
            "exchange": exchange,
            "rescale": rescale,
            "prefetch": prefetch,
        }

    return made


ATTEND = Step(
    family=ATTN_PARTIALS_Q8,
    problem=lambda p: p.attention,
    variants={
        BASELINE: _baseline,
        "f32": _attend("scalar_f32", 4, 4, 2, "registers"),
        "f32_wide": _attend("scalar_f32", 8, 4, 8, "registers"),
        "f32_staged": _attend("scalar_f32", 4, 4, 2, "shared"),
        "f16": _attend("packed_f16", 4, 4, 4, "registers"),
        "f16_wide": _attend("packed_f16", 12, 2, 8, "registers"),
        "int_dot": _attend("int_dot", 4, 4, 4, "registers"),
        "int_dot_wide": _attend("int_dot", 8, 4, 8, "registers"),
        "matrix": _attend_matrix(8, "convert"),
        "matrix_lagging": _attend_matrix(8, "convert", prefetch=0, rescale="lagging"),
        "matrix_shared": _attend_matrix(8, "shared"),
        "matrix_few": _attend_matrix(4, "shared"),
        "matrix_sliced": _attend_matrix(8, "shared", sliced=True),
    },
)


def _joined(dims: int, groups: int, slices: int) -> Made:
    """`dims` dimensions a thread and `groups` workgroups a head, or fewer where these do not divide
    the head."""

    def made(_size: int, problem: QsaStepProblem) -> Mapping[str, Value]:
        own = dims if problem.head_size % dims == 0 else 2
        few = groups
        while problem.head_size % (own * few) and few > 1:
            few //= 2
        return {
            "strategy": "sliced",
            "combine_dims": own,
            "combine_groups": few,
            "combine_slices": slices,
        }

    return made


COMBINE = Step(
    family=GATED_COMBINE,
    problem=lambda p: p.combine(1),
    variants={
        BASELINE: _baseline,
        "slices4": _joined(2, 1, 4),
        "groups4": _joined(2, 4, 8),
        "groups4_wide": _joined(2, 4, 32),
        "groups8": _joined(4, 8, 32),
    },
)
STEPS = (*LIGHT_STEPS.values(), SCORE, SELECT, ATTEND, COMBINE)
"""All of them; bindings are numbered in this order."""
