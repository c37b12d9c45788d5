"""Problems of paged attention: what they refuse, and which keys a row sees."""

from __future__ import annotations

from typing import Any

import pytest

from tests.test_attention_oracle import small
from tuner.errors import UsageError


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"causal": "left"}, "signed number"),
        ({"causal": "9999999999"}, "within"),
        ({"element": "f64"}, "must be one of f32, f16, bf16"),
        ({"query_heads": 7}, "multiple of kv_heads"),
        ({"query_tokens": 0}, "query_tokens is 0, must be from 1 to"),
        ({"context": -1}, "context is -1, must be from 0 to"),
        ({"batch": 2**17}, "at most"),
    ],
)
def test_problems_that_make_no_sense_say_why(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        small(**changes)


def test_offsets_are_those_of_the_specification() -> None:
    assert small(causal="off").keys_seen(0) == 11
    assert [small(causal="top_left").keys_seen(i) for i in (0, 4)] == [1, 5]
    assert [small(causal="bottom_right").keys_seen(i) for i in (0, 4)] == [7, 11]
    assert [small(causal="-3").keys_seen(i) for i in (2, 3)] == [0, 1]
    assert small(causal="+5").q_offset == 5
