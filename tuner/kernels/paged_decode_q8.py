"""Paged decode attention over the int8 token-major cache: one query token for each sequence.

Layout, rounding and semantics are those of the first system (an int8 paged-attention decode): a
token's vector of one KV head is D/4 words of four signed codes and one word with a float32 scale.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tuner.kernels import lane_decode
from tuner.kernels.base import ArithmeticClass, Binding, Family, Values
from tuner.kernels.decode_launches import (
    PUSH_FIELDS,
    SWITCHED_PUSH_FIELDS,
    dispatch_rule,
    passes,
    scratch_bytes,
    validated_as,
)
from tuner.kernels.decode_operands import (
    make_operands,
    timing_bytes,
    timing_scalars,
    validation_cases,
)
from tuner.kernels.decode_space import CONSTRAINTS, LAYOUTS, PARAMETERS, PLAIN, SWITCHED
from tuner.oracle import decode_reference, sampled_decode_reference
from tuner.problems import PagedDecodeProblem

BINDINGS = (
    Binding(name="query", buffer="query", element="float", role="input"),
    Binding(name="key_words", buffer="key_cache", element="uint", role="input"),
    Binding(name="value_words", buffer="value_cache", element="uint", role="input"),
    Binding(name="block_table", buffer="block_table", element="uint", role="input"),
    Binding(name="context_lens", buffer="context_lens", element="uint", role="input"),
    Binding(name="partials", buffer="partials", element="float", role="scratch"),
    Binding(name="attention", buffer="out", element="float", role="output"),
    Binding(name="key_quads", buffer="key_cache", element="uvec4", role="input"),
    Binding(name="value_quads", buffer="value_cache", element="uvec4", role="input"),
    Binding(name="partial_quads", buffer="partials", element="vec4", role="scratch"),
    Binding(name="counters", buffer="counters", element="uint", role="counter"),
)
SWITCH_BINDINGS = (
    Binding(name="sinks", buffer="sinks", element="float", role="input"),
    Binding(name="slopes", buffer="slopes", element="float", role="input"),
)


def _arithmetic(values: Values) -> ArithmeticClass:
    if values["strategy"] == "packed_f16":
        return "f16"
    if values["strategy"] == "matrix":
        return "f16_matrix" if values["key_operand"] == "float16" else "int8_matrix"
    if values["strategy"] == "int_dot":
        return "int8_one_term" if values["query_terms"] == 1 else "int8_two_terms"
    return "f32"


def _bytes_moved(problem: PagedDecodeProblem) -> int:
    """Codes and scales of what is seen once per KV head for K and V, queries, outputs, the fewest
    table entries, lengths; sinks and slopes."""
    lens = problem.visible_tokens()
    tokens = int(lens.sum())
    cache = 2 * tokens * problem.kv_heads * (problem.head_size + 4)
    vectors = 2 * problem.sequences * problem.query_heads * problem.head_size * 4
    blocks = int((-(-lens // problem.block_size)).sum())
    heads = (problem.sinks + problem.alibi) * problem.query_heads
    return cache + vectors + 4 * (blocks + problem.sequences + heads)


STARTS = tuple(
    {
        "strategy": "matrix",
        "subgroup_size": size,
        "matrix_shape": shape,
        "subgroups": subgroups,
        "staging": "shared",
        "prefetch": prefetch,
        "exchange": exchange,
        "tiles_unrolled": tiles,
        "rescale": rescale,
        "split": split,
    }
    for size, shape in ((32, "16x8x16"), (32, "16x16x16"), (64, "16x16x16"), (8, "8x8x8"))
    for exchange in ("convert", "shared")
    for subgroups, tiles, prefetch, rescale, split in (
        (4, 1, "all", "exact", "fit:4"),
        (16, 1, "all", "exact", "fit:1"),
        (12, 1, "all", "exact", "fit:1"),
        (8, 1, "none", "exact", "fit:1"),
        (8, 1, "all", "exact", "fit:1"),
        (4, 1, "all", "exact", "device:4"),
        (4, 1, "all", "exact", "fit:8"),
        (12, 1, "all", "lagging", "fit:1"),
        (4, 2, "all", "exact", "fit:4"),
        (16, 2, "all", "exact", "fit:1"),
        (8, 1, "keys", "exact", "fit:1"),
        (10, 1, "keys", "exact", "fit:1"),
    )
) + tuple(
    {
        "strategy": strategy,
        "subgroup_size": size,
        "subgroups": 4,
        "lanes_per_token": shared,
        "tokens_unrolled": 4,
        "split": "device:4",
        "combine_slices": 2,
    }
    for strategy in ("packed_f16", "scalar_f32")
    for size, shared in ((32, 8), (64, 8), (16, 8), (8, 8), (8, 4))
)


def _family(name: str, layout: str, *, switched: bool = False) -> Family:
    """The declaration of a layout: the same kernels on rows that lie otherwise.

    `switched`: for problems with window, soft cap, ALiBi or sinks, which take further bindings and
    push constants; engines that need none are not to be asked for them.
    """
    more = ", with window, soft cap, ALiBi or sinks" if switched else ""
    return Family(
        name=name,
        summary=f"decode attention over a paged int8 KV cache ({LAYOUTS[layout]}){more}",
        template="paged_decode_q8.comp.jinja",
        problem_type=PagedDecodeProblem,
        parameters=tuple(
            replace(each, values=(layout,)) if each.name == "layout" else each
            for each in PARAMETERS
        ),
        constraints=(SWITCHED if switched else PLAIN, *CONSTRAINTS),
        bindings=BINDINGS + (SWITCH_BINDINGS if switched else ()),
        push_fields=SWITCHED_PUSH_FIELDS if switched else PUSH_FIELDS,
        baseline={"strategy": "baseline"},
        starts=STARTS,
        portable=(*lane_decode.PORTABLE, *lane_decode.PORTABLE_STAGED),
        arithmetic=_arithmetic,
        passes=passes,
        scratch_bytes=scratch_bytes,
        operands=partial(make_operands, layout=layout),
        reference=decode_reference,
        sampled_reference=sampled_decode_reference,
        validation_cases=validation_cases,
        bytes_moved=_bytes_moved,
        operand_bytes=timing_bytes,
        scalars=timing_scalars,
        dispatch=dispatch_rule,
        validated_as=validated_as,
    )


PAGED_DECODE_Q8 = _family("paged_decode_q8", "token_major")
PAGED_DECODE_Q8_PLANAR = _family("paged_decode_q8_planar", "planar")
PAGED_DECODE_Q8_SWITCHED = _family("paged_decode_q8_switched", "token_major", switched=True)
