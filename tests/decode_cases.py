"""Problems of decoding: of a geometry, a small one, and all cases with operands and references."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tuner.kernels.base import Operands, Reference, ValidationCase
from tuner.kernels.decode_operands import make_operands, validation_cases
from tuner.oracle import decode_reference
from tuner.oracle.tolerance import ROUNDINGS
from tuner.problems import PagedDecodeProblem

CLASSES = tuple(ROUNDINGS)
GEOMETRIES = {"gqa4": (16, 4, 128, 16), "gqa7": (14, 2, 64, 8), "mqa71": (71, 1, 80, 32)}


def problem(
    head_size: int, block_size: int, group: int, kv_heads: int, **changes: Any
) -> PagedDecodeProblem:
    """Two sequences of 1,024 tokens with `group` query heads per KV head."""
    sizes = {"sequences": 2, "context": 1024, **changes}
    return PagedDecodeProblem(
        query_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        block_size=block_size,
        **sizes,
    )


@lru_cache(maxsize=32)
def prepared(geometry: str) -> tuple[tuple[ValidationCase, Operands, Reference], ...]:
    heads, kv_heads, head_size, block_size = GEOMETRIES[geometry]
    group = heads // kv_heads
    of = problem(head_size, block_size, group, kv_heads, sequences=1, context=4096)
    made = []
    for case in validation_cases(of):
        operands = make_operands(case.problem, case.inputs, case.seed)
        made.append((case, operands, decode_reference(operands)))
    return tuple(made)


def small_problem(**changes: int | str) -> PagedDecodeProblem:
    fields: dict[str, int | str] = {
        "sequences": 4,
        "context": 37,
        "query_heads": 6,
        "kv_heads": 2,
        "head_size": 8,
        "block_size": 4,
        "lengths": "list:37,0,1,9",
    }
    return PagedDecodeProblem(**(fields | changes))  # type: ignore[arg-type]
