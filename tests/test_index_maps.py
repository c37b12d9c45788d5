"""Tables as arithmetic: expressions mean what tables say, and are tables only if they must."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.kernels.index_maps import index_map


def evaluated(expression: str, count: int) -> list[int]:
    """The values of a GLSL expression, whose operators rank as Python's do, for each index."""
    table = re.fullmatch(r"uint\[\]\(([0-9u, ]+)\)\[i\]", expression)
    if table:
        return [int(value) for value in table[1].replace("u", "").split(", ")]
    code = compile(expression.replace("u", ""), "map", "eval")
    return [eval(code, {"i": i}) for i in range(count)]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=64))
def test_any_table_keeps_its_values(values: list[int]) -> None:
    assert evaluated(index_map(values), len(values)) == values


@given(st.lists(st.integers(0, 64), max_size=7), st.integers(0, 100))
def test_sums_of_bits_need_no_table(weights: list[int], first: int) -> None:
    values = [
        first + sum(weight for bit, weight in enumerate(weights) if i >> bit & 1)
        for i in range(1 << len(weights))
    ]
    expression = index_map(values)
    assert "uint[]" not in expression
    assert evaluated(expression, len(values)) == values


@pytest.mark.parametrize(
    ("values", "expression"),
    [
        ([i // 4 for i in range(32)], "(i >> 2)"),
        ([i % 4 * 2 for i in range(32)], "(i & 3u) * 2u"),
        (list(range(8)), "(i)"),
        ([7, 7], "7u"),
        ([2, 1], "uint[](2u, 1u)[i]"),
        ([0, 1, 2], "uint[](0u, 1u, 2u)[i]"),
    ],
)
def test_expressions_are_short(values: list[int], expression: str) -> None:
    assert index_map(values) == expression
