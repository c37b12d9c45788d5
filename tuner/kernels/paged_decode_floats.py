"""Paged decode attention over caches of floats: one query token for each sequence.

Two families, one for each type of cache, share everything here. The layout is that of the first
system's float caches: keys in packets of 16 bytes, so that those of a block's tokens lie side by
side for every few dimensions, and values by dimension, so that those of its tokens do.
"""

from __future__ import annotations

from functools import partial

from tuner.kernels import float_lanes as lanes
from tuner.kernels import float_matrix as matrix
from tuner.kernels.base import ArithmeticClass, Binding, Family, Value, Values
from tuner.kernels.decode_operands import validation_cases
from tuner.kernels.float_launches import (
    PUSH_FIELDS,
    dispatch_rule,
    passes,
    scratch_bytes,
    validated_as,
)
from tuner.kernels.float_operands import (
    F16,
    F32,
    CacheFormat,
    make_operands,
    timing_bytes,
    timing_scalars,
)
from tuner.kernels.float_space import constraints, parameters
from tuner.oracle.float_decode import float_decode_reference, sampled_float_decode_reference
from tuner.problems import PagedDecodeProblem


def _bindings(cache: CacheFormat) -> tuple[Binding, ...]:
    vector, pair, element = {
        "f32": ("vec4", "vec2", "float"),
        "f16": ("uvec4", "uvec2", "uint"),
    }[cache.name]
    return (
        Binding(name="query", buffer="query", element="float", role="input"),
        Binding(name="key_vectors", buffer="key_cache", element=vector, role="input"),
        Binding(name="value_vectors", buffer="value_cache", element=vector, role="input"),
        Binding(name="block_table", buffer="block_table", element="uint", role="input"),
        Binding(name="context_lens", buffer="context_lens", element="uint", role="input"),
        Binding(name="sinks", buffer="sinks", element="float", role="input"),
        Binding(name="slopes", buffer="slopes", element="float", role="input"),
        Binding(name="partials", buffer="partials", element="float", role="scratch"),
        Binding(name="attention", buffer="out", element="float", role="output"),
        Binding(name="key_elements", buffer="key_cache", element=element, role="input"),
        Binding(name="value_elements", buffer="value_cache", element=element, role="input"),
        Binding(name="value_pairs", buffer="value_cache", element=pair, role="input"),
    )


def _arithmetic(values: Values) -> ArithmeticClass:
    classes: dict[Value, ArithmeticClass] = {"packed_f16": "f16", "matrix": "f16_matrix"}
    return classes.get(values["strategy"], "f32")


def _bytes_moved(problem: PagedDecodeProblem, cache: CacheFormat) -> int:
    """What is seen once per KV head for K and V, queries, outputs, the fewest table entries,
    lengths; sinks and slopes."""
    lens = problem.visible_tokens()
    sizes = problem.head_size + problem.value_size
    kv = int(lens.sum()) * problem.kv_heads * sizes * cache.dtype.itemsize
    vectors = problem.sequences * problem.query_heads * sizes * 4
    blocks = int((-(-lens // problem.block_size)).sum())
    heads = (problem.sinks + problem.alibi) * problem.query_heads
    return kv + vectors + 4 * (blocks + problem.sequences + heads)


def _family(
    cache: CacheFormat, strategies: tuple[Value, ...], starts: tuple[Values, ...]
) -> Family:
    return Family(
        name=f"paged_decode_{cache.name}",
        summary=f"decode attention over a paged {cache.name} KV cache (keys in packets of 16 "
        "bytes, values by dimension), with window, soft cap, ALiBi and sinks",
        template="paged_decode_floats.comp.jinja",
        problem_type=PagedDecodeProblem,
        parameters=parameters(strategies),
        constraints=constraints(cache, matrices="matrix" in strategies),
        bindings=_bindings(cache),
        push_fields=PUSH_FIELDS,
        baseline={"strategy": "baseline"},
        starts=starts,
        portable=lanes.portable(cache),
        arithmetic=_arithmetic,
        passes=partial(passes, cache=cache),
        scratch_bytes=scratch_bytes,
        operands=partial(make_operands, cache=cache),
        reference=float_decode_reference,
        sampled_reference=sampled_float_decode_reference,
        validation_cases=validation_cases,
        bytes_moved=partial(_bytes_moved, cache=cache),
        operand_bytes=partial(timing_bytes, cache=cache),
        scalars=partial(timing_scalars, cache=cache),
        dispatch=dispatch_rule,
        validated_as=validated_as,
    )


PAGED_DECODE_F32 = _family(F32, ("baseline", "scalar_f32"), lanes.starts(F32))
PAGED_DECODE_F16 = _family(
    F16,
    ("baseline", "scalar_f32", "packed_f16", "matrix"),
    (*matrix.STARTS, *lanes.starts(F16)),
)
