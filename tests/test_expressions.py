"""Expressions of whole numbers: what they are worth, what is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.errors import UsageError
from tuner.expressions import evaluate, renamed

KNOWN = {"tokens": 700, "a": 3, "b_2": 5}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("tokens", 700),
        ("a + b_2 * 2", 13),
        ("(a + b_2) * 2", 16),
        ("10 - 3 - 2", 5),
        ("ceil_div(tokens, 256)", 3),
        ("ceil_div(0 - 1, 2)", 0),
        ("floor_div(tokens, 256)", 2),
        ("floor_div(0 - 1, 2)", -1),
        ("round_up(tokens, 64)", 704),
        ("max(1, min(a, b_2, 4), 2)", 3),
    ],
)
def test_values(text: str, value: int) -> None:
    assert evaluate(text, KNOWN) == value


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a + c", "needs c, which is not known"),
        ("floor_div(a, b_2 - 5)", "divides by 0"),
        ("a +", "is no expression"),
        ("a / 2", "is no expression: a / 2 is not part of the language"),
        ("-a", "-a is not part of the language"),
        ("1.5", "1.5 is not part of the language"),
        ("True", "True is not part of the language"),
        ("__import__('os')", "is not part of the language"),
        ("ceil_div(a, b=2)", "is not part of the language"),
        ("ceil_div(a)", "is no expression"),
        ("a.b_2", "is not part of the language"),
    ],
)
def test_what_is_none_is_told(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told.replace("(", r"\(").replace("'", ".")):
        evaluate(text, KNOWN)


@given(st.integers(-(2**40), 2**40), st.integers(1, 2**20))
def test_division_is_exact(a: int, b: int) -> None:
    known = {"a": a, "b": b}
    down, up = evaluate("floor_div(a, b)", known), evaluate("ceil_div(a, b)", known)
    assert down * b <= a < (down + 1) * b
    assert (up - 1) * b < a <= up * b
    assert evaluate("round_up(a, b)", known) == up * b


def test_names_give_way_to_whole_expressions() -> None:
    text = renamed("2 * tokens - ceil_div(tokens, a)", {"tokens": "a + 1", "ceil_div": "b_2"})
    assert text == "2 * (a + 1) - ceil_div(a + 1, a)"
    assert evaluate(text, KNOWN) == 6
