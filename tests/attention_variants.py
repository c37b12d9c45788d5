"""Problems of paged attention, and variants on whatever matrices a device has."""

from __future__ import annotations

from typing import Any

from tuner.problems import PagedAttentionProblem


def problem(
    head_size: int = 64, block_size: int = 16, group: int = 4, kv_heads: int = 2, **changes: Any
) -> PagedAttentionProblem:
    sizes: dict[str, Any] = {"batch": 2, "query_tokens": 8, "context": 200, **changes}
    return PagedAttentionProblem(
        query_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        block_size=block_size,
        **sizes,
    )


def matrix_variant(shape: str, text: str) -> str:
    """A variant on matrix units whose two subgroups have a matrix of rows each."""
    rows = 2 * int(shape.partition("x")[0])
    return f"matrix subgroups=2 tile_rows={rows} tile_tokens=16 matrix_shape={shape} {text}"


def lane_matrix_variant(shape: str, text: str, *, tiles: int = 1) -> str:
    """A variant fed by lanes: rows for so many matrices, tokens for as few as can be."""
    m, n, k = map(int, shape.split("x"))
    sizes = f"tile_rows={tiles * n} tile_tokens={max(m, k)} matrix_shape={shape}"
    return f"matrix_lanes {sizes} {text}"
