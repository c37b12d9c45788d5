"""Fragment plans: nothing is lost or counted twice, and the products come out as they should.

The products are emulated lane by lane: each lane fills its elements of a matrix from the words that
the plan has it read, as the kernel does.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.made_devices import LANES_8, LANES_32, LANES_32_INT8, LAYOUTS
from tuner.device_info import Fragment, MatrixLayout
from tuner.kernels.fragments import BANKS, FragmentPlan, fragment_plan
from tuner.quant import words_per_token

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
EVEN_CODES_FIRST, IN_ORDER = (0, 2, 1, 3), (0, 1, 2, 3)
"""Which code of a word comes out as its first, second … term: of pairs widened to 16 bits, and of
bytes that stay what they are."""
PAIRS = {
    "32 lanes": (LANES_32, LANES_32),
    "8 lanes": (LANES_8, LANES_8),
    "32 lanes, 8-bit keys": (LANES_32_INT8, LANES_32),
}


def plan_for(
    scores: MatrixLayout,
    outputs: MatrixLayout,
    head_size: int,
    *,
    staged: bool = True,
    vectors: tuple[int, int] = (1, 1),
) -> FragmentPlan | str:
    return fragment_plan(
        scores,
        outputs,
        head_size=head_size,
        row_words=words_per_token(head_size),
        staged=staged,
        widened=scores.shape.a_type == "float16",
        vectors=vectors,
    )


def planned(
    scores: MatrixLayout, outputs: MatrixLayout, head_size: int, *, staged: bool = True
) -> FragmentPlan:
    plan = plan_for(scores, outputs, head_size, staged=staged)
    assert isinstance(plan, FragmentPlan), plan
    return plan


NARROW = ("8 lanes", "32 lanes, 8-bit keys")
CUTTABLE = [
    pytest.param(*layouts, head_size, id=f"{name}-{head_size}")
    for name, layouts in PAIRS.items()
    for head_size in HEAD_SIZES
    if head_size % 32 == 0 or name not in NARROW
]
"""Layouts and head sizes that go together: some cut head sizes into whole steps of 32."""

every_case = pytest.mark.parametrize(("scores", "outputs", "head_size"), CUTTABLE)
staged_or_not = pytest.mark.parametrize("staged", [True, False], ids=["staged", "direct"])


def is_permutation(numbers: Sequence[int], count: int) -> bool:
    return sorted(numbers) == list(range(count))


@every_case
@staged_or_not
def test_each_dimension_and_token_has_one_place(
    scores: MatrixLayout, outputs: MatrixLayout, head_size: int, staged: bool
) -> None:
    plan = planned(scores, outputs, head_size, staged=staged)
    assert is_permutation(plan.query_dims, head_size)
    assert is_permutation(plan.tokens, scores.shape.m)
    counted = Counter(plan.output_dims)
    assert all(counted[dim] == 1 for dim in range(head_size))
    assert all(dim >= head_size for dim in counted if dim not in range(head_size))
    assert len(plan.output_dims) == plan.output_tiles * outputs.shape.m
    assert plan.steps * scores.shape.k == head_size


@settings(deadline=None)
@given(st.sampled_from(list(PAIRS)), st.integers(1, 128), st.booleans())
def test_any_head_size_has_a_sound_plan_or_a_reason(name: str, words: int, staged: bool) -> None:
    scores, outputs = PAIRS[name]
    head_size = 4 * words
    plan = plan_for(scores, outputs, head_size, staged=staged)
    if isinstance(plan, str):
        assert head_size % (32 if name in NARROW else scores.shape.k)
        assert f"head size {head_size}" in plan
    else:
        assert is_permutation(plan.query_dims, head_size)
        assert set(range(head_size)) <= set(plan.output_dims)
        assert len(set(plan.output_dims)) == len(plan.output_dims)


def test_layouts_that_do_not_go_together_have_a_reason() -> None:
    assert "16 tokens do not match steps of 8 terms" in str(plan_for(LANES_32, LANES_8, 64))


def test_a_fragment_whose_rows_hold_different_terms_has_a_reason() -> None:
    staggered = Fragment(
        lane_row=(0, 0), lane_column=(0, 2), element_row=(0, 1), element_column=(0, 1)
    )
    crooked = MatrixLayout(shape=LANES_8.shape, a=staggered, b=LANES_8.b, c=LANES_8.c)
    assert "different terms" in str(plan_for(crooked, LANES_8, 64))


def test_lanes_that_overlap_in_part_have_a_reason() -> None:
    torn = Fragment(lane_row=(0, 0), lane_column=(0, 1), element_row=(0, 0), element_column=(0, 1))
    crooked = MatrixLayout(shape=LANES_8.shape, a=torn, b=LANES_8.b, c=LANES_8.c)
    assert "overlap in part" in str(plan_for(crooked, LANES_8, 64))


# Reads from shared memory


def wavefronts(tokens: Sequence[int], words: Sequence[int], head_size: int) -> int:
    """In how many goes the lanes' words come out of banked shared memory."""
    places = {
        token * words_per_token(head_size) + word for token, word in zip(tokens, words, strict=True)
    }
    return max(Counter(place % BANKS for place in places).values())


def all_wavefronts(plan: FragmentPlan, head_size: int) -> int:
    """Of one word of each row and of each term that a lane owns."""
    keys = (wavefronts(tokens, plan.key_word, head_size) for tokens in plan.key_tokens)
    values = (wavefronts(tokens, plan.value_word, head_size) for tokens in plan.value_tokens)
    return sum(itertools.chain(keys, values))


def test_staged_rows_of_128_are_read_without_bank_conflicts() -> None:
    plan = planned(LANES_32, LANES_32, 128)
    assert all_wavefronts(plan, 128) == len(plan.key_tokens) + len(plan.value_tokens)


@pytest.mark.parametrize(
    ("head_size", "most"),
    [(64, 12), (80, 12), (96, 12), (112, 8), (128, 6), (192, 12), (256, 6)],
)
def test_conflicts_stay_as_few_as_they_are(head_size: int, most: int) -> None:
    staged, plain = (planned(LANES_32, LANES_32, head_size, staged=s) for s in (True, False))
    assert all_wavefronts(staged, head_size) <= most
    assert all_wavefronts(staged, head_size) <= all_wavefronts(plain, head_size)


# The products, emulated

Matrix = np.ndarray


def elements(fragment: Fragment) -> Iterator[tuple[int, int, int, int]]:
    """(lane, element, row, column) of every element that a lane holds."""
    places = list(enumerate(zip(fragment.element_row, fragment.element_column, strict=True)))
    for lane, (row, column) in enumerate(zip(fragment.lane_row, fragment.lane_column, strict=True)):
        for element, (down, right) in places:
            yield lane, element, row + down, column + right


def places_of(table: tuple[tuple[int, ...], ...]) -> dict[int, tuple[int, int]]:
    """Element -> (number of the lane's row, number of its term)."""
    return {e: (j, p) for j, row in enumerate(table) for p, e in enumerate(row)}


def scores_of(plan: FragmentPlan, layout: MatrixLayout, keys: Matrix, query: Matrix) -> Matrix:
    """What the kernel's products leave, [rows of the tile, heads]."""
    shape = layout.shape
    codes = EVEN_CODES_FIRST if shape.a_type == "float16" else IN_ORDER
    total = np.zeros((shape.m, query.shape[1]), np.int64)
    place, terms = places_of(plan.key_elements), len(plan.key_elements[0])
    for step in range(plan.steps):
        a = np.zeros((shape.m, shape.k), np.int64)
        for lane, element, row, column in elements(layout.a):
            j, p = place[element]
            slot, code = divmod(step * terms + p, 4)
            word = plan.key_word[lane] + plan.key_slots[slot]
            a[row, column] = keys[plan.key_tokens[j][lane], 4 * word + codes[code]]
        dims = plan.query_dims[step * shape.k : (step + 1) * shape.k]
        total += a @ query[list(dims)]
    return total


def outputs_of(plan: FragmentPlan, layout: MatrixLayout, values: Matrix, weights: Matrix) -> Matrix:
    """What the kernel's products leave, by dimension [head size, heads].

    `weights` [rows of the tile, heads] are in the order of the scores.
    """
    shape, head_size = layout.shape, values.shape[1]
    padded = np.concatenate([values, np.full((len(values), 512), 99)], axis=1)
    result = np.zeros((head_size, weights.shape[1]), np.int64)
    place, rows = places_of(plan.value_elements), len(plan.value_elements)
    for tile in range(plan.output_tiles):
        a = np.zeros((shape.m, shape.k), np.int64)
        for lane, element, row, column in elements(layout.a):
            j, p = place[element]
            slot, code = divmod(tile * rows + j, 4)
            word = plan.value_word[lane] + plan.value_slots[slot]
            a[row, column] = padded[plan.value_tokens[p][lane], 4 * word + code]
        for row, sums in enumerate(a @ weights):
            dim = plan.output_dims[tile * shape.m + row]
            if dim < head_size:
                result[dim] = sums
    return result


@every_case
@staged_or_not
def test_the_products_are_exact(
    scores: MatrixLayout, outputs: MatrixLayout, head_size: int, staged: bool
) -> None:
    plan = planned(scores, outputs, head_size, staged=staged)
    rng = np.random.default_rng(head_size)
    keys, values = rng.integers(-127, 128, (2, scores.shape.m, head_size))
    query = rng.integers(-9, 10, (head_size, scores.shape.n))
    weights = rng.integers(0, 10, (scores.shape.m, scores.shape.n))
    in_order = list(plan.tokens)
    np.testing.assert_array_equal(scores_of(plan, scores, keys, query), (keys @ query)[in_order])
    np.testing.assert_array_equal(
        outputs_of(plan, outputs, values, weights[in_order]), values.T @ weights
    )


@pytest.mark.parametrize(
    ("layout", "vectors", "head_size"),
    [
        (LANES_32, (2, 2), 64),
        (LANES_32, (2, 4), 128),
        (LANES_32, (4, 1), 192),
        (LANES_32, (2, 4), 256),
        (LANES_8, (1, 4), 96),
        (LANES_8, (4, 2), 128),
    ],
)
def test_the_products_of_wide_loads_are_exact(
    layout: MatrixLayout, vectors: tuple[int, int], head_size: int
) -> None:
    plan = plan_for(layout, layout, head_size, staged=False, vectors=vectors)
    assert isinstance(plan, FragmentPlan), plan
    for slots, words, width in (
        (plan.key_slots, plan.key_word, vectors[0]),
        (plan.value_slots, plan.value_word, vectors[1]),
    ):
        loads = np.array(slots).reshape(-1, width)
        assert (loads == loads[:, :1] + np.arange(width)).all()
        assert all(first % width == 0 for first in (*loads[:, 0], *words))
    rng = np.random.default_rng(head_size)
    keys, values = rng.integers(-127, 128, (2, layout.shape.m, head_size))
    query = rng.integers(-9, 10, (head_size, layout.shape.n))
    weights = rng.integers(0, 10, (layout.shape.m, layout.shape.n))
    np.testing.assert_array_equal(scores_of(plan, layout, keys, query), keys @ query)
    np.testing.assert_array_equal(outputs_of(plan, layout, values, weights), values.T @ weights)


def test_loads_too_wide_for_the_head_have_a_reason() -> None:
    assert "loads of (1, 4) words" in str(
        plan_for(LANES_32, LANES_32, 96, staged=False, vectors=(1, 4))
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=["32 lanes", "8 lanes"])
def test_the_layouts_on_paper_hold_each_element_once(layout: MatrixLayout) -> None:
    shape = layout.shape
    sizes = (
        (layout.a, shape.m, shape.k),
        (layout.b, shape.k, shape.n),
        (layout.c, shape.m, shape.n),
    )
    for fragment, rows, columns in sizes:
        held = Counter((row, column) for _, _, row, column in elements(fragment))
        assert held == Counter(itertools.product(range(rows), range(columns)))
