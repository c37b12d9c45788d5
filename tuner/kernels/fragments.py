"""How cooperative-matrix fragments are fed straight from cached words, for any probed layout.

The order in which a dot product runs over its terms is free. So each lane takes whole words (four
codes) of the rows it owns, whatever their dimensions, and the query is permuted to match when it
is staged once; the order of output dimensions and of tokens within a tile is free likewise. A
`FragmentPlan` fixes these permutations for one layout and head size. Where rows wait in shared
memory, it takes those with the fewest bank conflicts.

Two products are planned, both transposed, so that a lane's accumulators belong to few query heads:
scores [tokens, heads] = keys x query, and outputs [dims, heads] = values x weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from tuner.device_info import Fragment, MatrixLayout

BANKS = 32
WORD_CODES = 4
WIDENED = (0, 2, 1, 3)
"""The order in which the codes of one word come out of widening: two pairs, even and odd."""
IN_ORDER = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a fragment: the indices of a lane are `bases[lane_class[lane]] + offsets[i]`."""

    lane_class: tuple[int, ...]
    bases: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def table(self) -> dict[int, tuple[int, int]]:
        """Index along the axis -> (class of lanes, position among that class's own indices)."""
        return {
            base + offset: (number, position)
            for number, base in enumerate(self.bases)
            for position, offset in enumerate(self.offsets)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentPlan:
    """Tables a kernel is rendered with; a table per lane has as many entries as lanes.

    Keys (operand A of the scores): element `key_elements[j][p]` is the p-th term of the lane's j-th
    row, whose token within the tile is `key_tokens[j][lane]`. A lane's terms, counted over all
    steps, take the four codes of one word after another: word w of a row is at
    `key_word[lane] + key_slots[w]`. Term k of step s is dimension `query_dims[s * terms + k]`.

    Values (operand A of the outputs): element `value_elements[j][p]` is row j for the token
    `value_tokens[p][lane]`. A lane's rows, counted over all tiles, take the codes of the words at
    `value_word[lane] + value_slots[w]`. Row r of tile i is dimension `output_dims[i * rows + r]`,
    which is none where it is not below the head size.
    """

    steps: int
    output_tiles: int
    key_elements: tuple[tuple[int, ...], ...]
    key_word: tuple[int, ...]
    key_slots: tuple[int, ...]
    key_tokens: tuple[tuple[int, ...], ...]
    query_dims: tuple[int, ...]
    value_elements: tuple[tuple[int, ...], ...]
    value_word: tuple[int, ...]
    value_slots: tuple[int, ...]
    value_tokens: tuple[tuple[int, ...], ...]
    output_dims: tuple[int, ...]
    tokens: tuple[int, ...]
    """Token within the tile of each row of the scores (and of each term of the outputs)."""


def fragment_plan(
    scores: MatrixLayout,
    outputs: MatrixLayout,
    *,
    head_size: int,
    row_words: int,
    staged: bool,
    widened: bool = True,
    vectors: tuple[int, int] = (1, 1),
) -> FragmentPlan | str:
    """The plan for a pair of layouts, or the reason why there is none.

    `row_words` is the distance of two tokens, in words. Rows that are staged are read from shared
    memory, where bank conflicts count; from global memory, neighbouring lanes take neighbouring
    `vectors` of so many words of keys and of values. Key codes that are `widened` to 16 bits come
    in pairs, else in order.
    """
    keys, values = operand_axes(scores.a), operand_axes(outputs.a)
    if isinstance(keys, str) or isinstance(values, str):
        return keys if isinstance(keys, str) else str(values)
    (key_rows, key_terms, key_elements) = keys
    (value_rows, value_terms, value_elements) = values
    reason = _misfit(scores, outputs, key_terms, value_rows, head_size=head_size, vectors=vectors)
    if reason is not None:
        return reason
    words, row_classes = head_size // WORD_CODES, len(value_rows.bases)
    slots = _slots(value_rows, words)
    key_orders = tuple(_word_orders(words, len(key_terms.bases), vectors[0], staged))
    value_orders = tuple(_word_orders(slots * row_classes, row_classes, vectors[1], staged))
    choices = []
    for order in _token_orders(scores.shape.m, value_terms, staged):
        # Conflicts of keys and of values do not depend on each other.
        of_keys, key_words = _fewest(order, key_rows, key_terms, key_orders, row_words)
        of_values, value_words = _fewest(order, value_terms, value_rows, value_orders, row_words)
        choices.append((of_keys + of_values, order, key_words, value_words))
    _, tokens, (key_word, key_slots), (value_word, value_slots) = min(choices, key=itemgetter(0))
    steps = head_size // scores.shape.k
    output_tiles = slots * WORD_CODES // len(value_rows.offsets)
    return FragmentPlan(
        steps=steps,
        output_tiles=output_tiles,
        key_elements=key_elements,
        key_word=tuple(key_word[c] for c in key_terms.lane_class),
        key_slots=key_slots,
        key_tokens=_tokens_of(key_rows, tokens),
        query_dims=_dims(key_terms, steps, key_word, key_slots, WIDENED if widened else IN_ORDER),
        value_elements=value_elements,
        value_word=tuple(value_word[c] for c in value_rows.lane_class),
        value_slots=value_slots,
        value_tokens=_tokens_of(value_terms, tokens),
        output_dims=_dims(value_rows, output_tiles, value_word, value_slots, IN_ORDER),
        tokens=tokens,
    )


def _misfit(
    scores: MatrixLayout,
    outputs: MatrixLayout,
    key_terms: Axis,
    value_rows: Axis,
    *,
    head_size: int,
    vectors: tuple[int, int],
) -> str | None:
    """Why words of rows of that head size do not fill the fragments of a pair of layouts."""
    shape, rows, classes = scores.shape, len(value_rows.offsets), len(key_terms.bases)
    words = head_size // WORD_CODES
    slots = _slots(value_rows, words)
    if head_size % shape.k or words % classes:
        return f"head size {head_size} does not cut into words of {shape.k}-term steps"
    if outputs.shape.k != shape.m:
        return f"tiles of {shape.m} tokens do not match steps of {outputs.shape.k} terms"
    if WORD_CODES % rows and rows % WORD_CODES:
        return f"{rows} rows a lane do not share the four codes of a word"
    if slots * WORD_CODES % rows:
        return f"head size {head_size} leaves a tile of {outputs.shape.m} rows half empty"
    if words // classes % vectors[0] or slots % vectors[1]:
        return f"head size {head_size} does not cut into loads of {vectors} words of each lane"
    return None


def _slots(value_rows: Axis, words: int) -> int:
    """Words of a row of values that each lane takes, as many as fill whole matrices."""
    slots = -(-words // len(value_rows.bases))
    return slots + -slots % max(1, len(value_rows.offsets) // WORD_CODES)


def _dims(
    axis: Axis, count: int, word: Sequence[int], slots: Sequence[int], codes: Sequence[int]
) -> tuple[int, ...]:
    """Dimension of each index along `axis` in each of `count` matrices, one after another."""
    dims = []
    for matrix in range(count):
        for _, (number, position) in sorted(axis.table.items()):
            slot, code = divmod(matrix * len(axis.offsets) + position, WORD_CODES)
            dims.append(WORD_CODES * (word[number] + slots[slot]) + codes[code])
    return tuple(dims)


_Operand = tuple[Axis, Axis, tuple[tuple[int, ...], ...]]
_Words = tuple[tuple[int, ...], tuple[int, ...]]
"""Words of a row: the part of a class of lanes and the part of a slot, which add up."""


def operand_axes(fragment: Fragment) -> _Operand | str:
    """Rows, terms and element numbers [row][term] of an operand A, or why it does not fit."""
    row_offsets = tuple(dict.fromkeys(fragment.element_row))
    elements = tuple(
        tuple(e for e, row in enumerate(fragment.element_row) if row == offset)
        for offset in row_offsets
    )
    term_offsets = tuple(fragment.element_column[e] for e in elements[0])
    for row in elements[1:]:
        if tuple(fragment.element_column[e] for e in row) != term_offsets:
            return "the rows of a lane's fragment hold different terms"
    rows = _axis(fragment.lane_row, row_offsets)
    terms = _axis(fragment.lane_column, term_offsets)
    if rows is None or terms is None:
        return "the lanes' rows or terms overlap in part"
    return rows, terms, elements


def _axis(lane_base: Sequence[int], offsets: tuple[int, ...]) -> Axis | None:
    bases = tuple(sorted(set(lane_base)))
    covered = sorted(base + offset for base in bases for offset in offsets)
    if covered != list(range(len(covered))):
        return None
    return Axis(tuple(bases.index(base) for base in lane_base), bases, offsets)


def _tokens_of(axis: Axis, tokens: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(tokens[axis.bases[number] + offset] for number in axis.lane_class)
        for offset in axis.offsets
    )


def _token_orders(count: int, terms: Axis, staged: bool) -> Iterable[tuple[int, ...]]:
    """Orders of a tile's tokens: as they are, and with those of one lane side by side."""
    yield tuple(range(count))
    if staged:
        table, run = terms.table, len(terms.offsets)
        yield tuple(table[i][0] * run + table[i][1] for i in range(count))


def _word_orders(words: int, classes: int, vector: int, staged: bool) -> Iterable[_Words]:
    """Ways to write word numbers as (part of the class of lanes) + (part of the slot)."""
    slots = words // classes
    yield (
        tuple(vector * c for c in range(classes)),
        tuple(vector * classes * (s // vector) + s % vector for s in range(slots)),
    )
    if not staged:
        return
    yield tuple(slots * c for c in range(classes)), tuple(range(slots))
    bits = words.bit_length() - 1
    if words == 1 << bits and classes.bit_count() == 1:
        for chosen in itertools.combinations(range(bits), classes.bit_length() - 1):
            rest = [bit for bit in range(bits) if bit not in chosen]
            yield _deposits(classes, chosen), _deposits(slots, rest)


def _deposits(count: int, bits: Sequence[int]) -> tuple[int, ...]:
    return tuple(
        sum((number >> i & 1) << bit for i, bit in enumerate(bits)) for number in range(count)
    )


def _fewest(
    tokens: Sequence[int], owned: Axis, shared: Axis, orders: Sequence[_Words], row_words: int
) -> tuple[int, _Words]:
    """The first of the orders of words with the fewest wavefronts, behind their number."""
    counted = [(_wavefronts(tokens, owned, shared, o[0], row_words), o) for o in orders]
    return min(counted, key=itemgetter(0))


def _wavefronts(
    tokens: Sequence[int], owned: Axis, shared: Axis, word: Sequence[int], row_words: int
) -> int:
    """Shared-memory wavefronts of reading one word for each row (or term) that a lane owns."""
    total = 0
    for row in _tokens_of(owned, tokens):
        places = zip(row, shared.lane_class, strict=True)
        banks = [place % BANKS for place in {t * row_words + word[c] for t, c in places}]
        total += max(banks.count(bank) for bank in set(banks))
    return total
