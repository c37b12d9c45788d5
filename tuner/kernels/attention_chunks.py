"""Paged attention's vectors in chunks of 16 bytes: what its forward and backward kernels share."""

from __future__ import annotations

from tuner.kernels.base import Binding, Candidate, Constraint
from tuner.problems import AttentionGradientProblem, PagedAttentionProblem

CHUNK_BYTES = 16
INPUTS = (
    Binding(name="query", buffer="query", element="uvec4", role="input"),
    Binding(name="keys", buffer="keys", element="uvec4", role="input"),
    Binding(name="values", buffer="values", element="uvec4", role="input"),
    Binding(name="block_table", buffer="block_table", element="uint", role="input"),
)
"""The first bindings of either family."""


def chunks(c: Candidate) -> int:
    """Chunks of one stored vector."""
    return int(c.problem.head_size * c.problem.element_bytes // CHUNK_BYTES)


def vectors(c: Candidate) -> int:
    """Vectors of four dimensions in one chunk."""
    return int(4 // c.problem.element_bytes)


def constants(problem: PagedAttentionProblem | AttentionGradientProblem) -> dict[str, object]:
    """What is compiled into every pass of either family."""
    return {
        "head_size": problem.head_size,
        "block_size": problem.block_size,
        "group": problem.group,
        "element": problem.element,
    }


def _check_head_size(c: Candidate) -> str | None:
    whole = CHUNK_BYTES // c.problem.element_bytes
    if c.problem.head_size % whole:
        return f"head size {c.problem.head_size} is no multiple of {whole}: 16 bytes at a time"
    return None


WHOLE_CHUNKS = Constraint(needs=(), check=_check_head_size)
