"""The oracle of the backward pass of paged attention, and how far a kernel may be off.

    P = exp(z - lse)    dP = dO V'    Dv = rowsum(dO * O)    dS = P * (dP - Dv) * scale
    dV = P' dO          dQ = dS K     dK = dS' Q

All in float64 from what is stored: `lse` and `out` are inputs. Sequences that share a block add up.
The bounds are derived in docs/tolerances.md; they are for float32 arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tuner.elements import widened
from tuner.oracle.paged_attention import Geometry, forward, gathered, geometry, pool_rows
from tuner.oracle.tolerance import (
    DEVIATIONS,
    EXP_SLOPE,
    LOGIT_ROUNDINGS,
    ROUNDING_VARIANCE,
    TINY,
    U32,
    sum_variance,
)

if TYPE_CHECKING:
    from tuner.kernels.base import ArithmeticClass, Operands, Reference

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

EXP_UNITS = 8.0
"""Units of 3 ulp for the exponential of a weight, and its argument's last rounding."""
LAST_UNITS = 4.0
"""Units of the result for the scale and the store."""
SAMPLE_SEED = 20_260_105


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """R rows of one KV head that meet L keys at the given positions of their sequence.

    query, out, out_gradient [R, D]; lse [R]; seen [R] keys that each row sees; keys, values [L, D];
    positions [L].
    """

    query: Floats
    out: Floats
    out_gradient: Floats
    lse: Floats
    seen: Array
    keys: Floats
    values: Floats
    positions: Array
    scale: float

    @property
    def logits(self) -> Floats:
        """Natural-base logits [R, L]."""
        result: Floats = self.scale * (self.query @ self.keys.T)
        return result

    @property
    def shares(self) -> Floats:
        """Softmax weights P [R, L]; 0 where a row does not see the key."""
        visible = self.positions < self.seen[:, None]
        exponent = np.where(visible, self.logits - self.lse[:, None], -np.inf)
        result: Floats = np.exp(exponent)
        return result

    @property
    def share_gradients(self) -> Floats:
        """dP - Dv [R, L]."""
        products = self.out_gradient @ self.values.T
        result: Floats = products - (self.out_gradient * self.out).sum(axis=-1)[:, None]
        return result

    @property
    def share_error(self) -> Floats:
        """What the exponential may be off by, relative to P [R, L]."""
        below = np.abs(self.logits - self.lse[:, None])
        folded = np.abs(self.logits) + np.abs(self.lse)[:, None]
        result: Floats = U32 * (EXP_UNITS + EXP_SLOPE * below + 2 * folded)
        return result

    def gradients(self) -> tuple[Floats, Floats, Floats]:
        """dQ [R, D] from these keys, dK and dV [L, D] from these rows."""
        shares = self.shares
        logit_gradients = shares * self.share_gradients * self.scale
        return (
            logit_gradients @ self.keys,
            logit_gradients.T @ self.query,
            shares.T @ self.out_gradient,
        )


@dataclass(slots=True)
class Errors:
    """What adds up to the bounds of some vectors: independent variances, errors of one sign, and
    the sums of squared terms and their number, for the roundings of the sum itself."""

    variance: Floats
    systematic: Floats
    scatter: Floats
    terms: Floats

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> Errors:
        """No errors of vectors [*shape, D]."""
        return cls(*(np.zeros(shape) for _ in range(4)))

    def add(self, at: Any, other: Errors) -> None:
        """Add the errors of what is added to the vectors `at`."""
        for name in ("variance", "systematic", "scatter", "terms"):
            np.add.at(getattr(self, name), at, getattr(other, name))

    def bounds(self, norm: Floats) -> Floats:
        """Largest 2-norm of the errors of vectors with these norms."""
        summing = U32**2 * sum_variance(self.terms, self.scatter, norm)
        spread = DEVIATIONS * np.sqrt(self.variance + summing)
        result: Floats = spread + self.systematic + LAST_UNITS * U32 * norm
        return result


def errors(meeting: Meeting) -> tuple[Errors, Errors, Errors]:
    """Errors of dQ [R], dK [L] and dV [L] of float32 arithmetic."""
    size, scale = meeting.query.shape[-1], meeting.scale
    z, p, t = meeting.logits, meeting.shares, meeting.share_gradients
    query, keys = meeting.query**2, meeting.keys**2
    values, incoming = meeting.values**2, meeting.out_gradient**2
    delta = (meeting.out_gradient * meeting.out).sum(axis=-1)
    logit = U32**2 * LOGIT_ROUNDINGS * ROUNDING_VARIANCE * z**2
    logit += U32**2 * sum_variance(size, scale**2 * (query @ keys.T), z)
    product = U32**2 * sum_variance(size, incoming @ values.T, t + delta[:, None])
    of_delta = U32**2 * sum_variance(size, (incoming * meeting.out**2).sum(axis=-1), delta)
    gradient = p * t * scale
    rounded = logit + U32**2 * LOGIT_ROUNDINGS * ROUNDING_VARIANCE
    own = (p * scale) ** 2 * (t**2 * rounded + product)
    shared = (p * scale) ** 2 * of_delta[:, None]
    count, exponential = (p > 0).astype(np.float64), meeting.share_error
    one_sign = np.abs(gradient) * exponential + TINY * count * (1 + scale * np.abs(t))
    lost = TINY * np.sqrt(size)
    norms = [np.linalg.norm(v, axis=-1) for v in (meeting.query, meeting.keys)]
    incoming_norm, terms = np.linalg.norm(meeting.out_gradient, axis=-1), count.sum(axis=0)
    # All keys of a row share the error of its delta: it adds up before it is squared.
    together = of_delta * np.linalg.norm(scale * (p @ meeting.keys), axis=-1) ** 2
    of_queries = Errors(
        variance=own @ norms[1] ** 2 + together,
        systematic=one_sign @ norms[1] + lost * count.sum(axis=1),
        scatter=gradient**2 @ norms[1] ** 2,
        terms=count.sum(axis=1),
    )
    of_keys = Errors(
        variance=(own + shared).T @ norms[0] ** 2,
        systematic=one_sign.T @ norms[0] + lost * terms,
        scatter=(gradient**2).T @ norms[0] ** 2,
        terms=terms,
    )
    of_values = Errors(
        variance=(p**2 * logit).T @ incoming_norm**2,
        systematic=(p * exponential + TINY * count).T @ incoming_norm + lost * terms,
        scatter=(p**2).T @ incoming_norm**2,
        terms=terms,
    )
    return of_queries, of_keys, of_values


@dataclass(slots=True)
class Gradients:
    """dQ [B, H, Sq, D], dK and dV [NB * BS, Hkv, D] of a launch, with what their bounds need."""

    query: Floats
    key: Floats
    value: Floats
    of_query: Errors
    of_key: Errors
    of_value: Errors = field(repr=False)


def backward(operands: Operands, *, exact: bool = False) -> Gradients:
    """The gradients of a whole launch.

    `exact`: from a forward pass of the oracle's own rather than the stored `lse` and `out`.
    """
    of = geometry(operands)
    of_forward = forward(operands) if exact else None
    blocks, block_size = operands.inputs["keys"].shape[:2]
    pool = (blocks * block_size, of.kv_heads)
    rows = (of.batch, of.heads, of.rows)
    found = Gradients(
        query=np.zeros((*rows, of.head_size)),
        key=np.zeros((*pool, of.head_size)),
        value=np.zeros((*pool, of.head_size)),
        of_query=Errors.none(rows),
        of_key=Errors.none(pool),
        of_value=Errors.none(pool),
    )
    every_row, every_key = np.arange(of.rows), np.arange(of.context)
    for sequence in range(of.batch):
        places = pool_rows(operands, sequence, of.context)
        for kv_head in range(of.kv_heads):
            met = meeting(
                operands,
                (sequence, kv_head),
                rows=every_row,
                positions=every_key,
                of_forward=of_forward,
            )
            heads = np.arange(kv_head * of.group, (kv_head + 1) * of.group)
            dq, dk, dv = met.gradients()
            found.query[sequence, heads] = dq.reshape(of.group, of.rows, of.head_size)
            np.add.at(found.key[:, kv_head], places, dk)
            np.add.at(found.value[:, kv_head], places, dv)
            of_query, of_key, of_value = errors(met)
            at = (sequence, np.repeat(heads, of.rows), np.tile(every_row, of.group))
            found.of_query.add(at, of_query)
            found.of_key.add((places, kv_head), of_key)
            found.of_value.add((places, kv_head), of_value)
    return found


def meeting(
    operands: Operands,
    place: tuple[int, int],
    *,
    rows: Array,
    positions: Array,
    of_forward: tuple[Array, Array] | None = None,
) -> Meeting:
    """Some rows of a (sequence, KV head), for all its query heads, and some of its keys.

    `of_forward` are outputs and log-sum-exp; without them, those stored.
    """
    of, inputs = geometry(operands), operands.inputs
    sequence, kv_head = place
    out, lse = of_forward or (inputs["out"], inputs["lse"])
    heads = slice(kv_head * of.group, (kv_head + 1) * of.group)

    def of_rows(values: Array) -> Floats:
        chosen = values[sequence, heads][:, rows]
        return widened(chosen).reshape(of.group * len(rows), *chosen.shape[2:])

    # Keys that no row may see are not read, so that poison has no way in.
    pool = pool_rows(operands, sequence, of.context)[positions]
    seen = np.array([of.keys_seen(int(row)) for row in rows], np.int64)
    return Meeting(
        query=of_rows(inputs["query"]),
        out=of_rows(out),
        out_gradient=of_rows(inputs["out_gradient"]),
        lse=of_rows(lse),
        seen=np.tile(seen, of.group),
        keys=gathered(operands, "keys", pool)[kv_head],
        values=gathered(operands, "values", pool)[kv_head],
        positions=positions,
        scale=of.softmax_scale,
    )


def backward_reference(operands: Operands) -> Reference:
    """`query_gradient`, `key_gradient` and `value_gradient` of a whole launch, and their bounds."""
    from tuner.kernels.base import Reference

    found, pool = backward(operands), operands.inputs["keys"].shape
    outputs = {
        "query_gradient": found.query,
        "key_gradient": found.key.reshape(pool),
        "value_gradient": found.value.reshape(pool),
    }

    def bounds(_arithmetic: ArithmeticClass) -> dict[str, Array]:
        of = {
            "query_gradient": found.of_query,
            "key_gradient": found.of_key,
            "value_gradient": found.of_value,
        }
        return {
            name: each.bounds(np.linalg.norm(outputs[name], axis=-1).reshape(each.terms.shape))
            for name, each in of.items()
        }

    # A gradient may be zero because terms cancel; one without terms has a bound of zero.
    return Reference(outputs=outputs, bounds=bounds, zero_may_differ=frozenset(outputs))


def sampled_backward_reference(operands: Operands, count: int) -> Reference:
    """The oracle on `count` query rows and `count` tokens of the pool, with all their heads of one
    KV head, for launches too large to redo: the last ones, the first ones, others at random."""
    from tuner.kernels.base import Reference

    of, parts = geometry(operands), _sampled_parts(operands, count)
    names = {name: np.array([place for place, _, _ in part]) for name, part in parts.items()}
    outputs = {
        name: np.array([vector for _, vector, _ in part]).reshape(-1, of.head_size)
        for name, part in parts.items()
    }

    def bounds(_arithmetic: ArithmeticClass) -> dict[str, Array]:
        return {
            name: np.array(
                [float(each.bounds(np.asarray(np.linalg.norm(vector)))) for _, vector, each in part]
            )
            for name, part in parts.items()
        }

    def seen(written: Mapping[str, Array]) -> dict[str, Array]:
        return {
            name: written[name].reshape(-1, of.head_size)[names[name].astype(np.int64)]
            for name in outputs
        }

    return Reference(
        outputs=outputs,
        bounds=bounds,
        seen=seen,
        names=names,
        zero_may_differ=frozenset(outputs),
    )


_Part = tuple[int, Floats, Errors]
"""A vector's place in the flattened output, the vector, and the errors it may have."""


def _sampled_parts(operands: Operands, count: int) -> dict[str, list[_Part]]:
    """The sampled vectors of each output."""
    of = geometry(operands)
    rng = np.random.default_rng(SAMPLE_SEED)
    parts: dict[str, list[_Part]] = {
        "query_gradient": [],
        "key_gradient": [],
        "value_gradient": [],
    }
    for sequence, kv_head, row in _places(of, of.rows, count, rng):
        keys = np.arange(of.keys_seen(row))
        met = meeting(operands, (sequence, kv_head), rows=np.array([row]), positions=keys)
        places = [
            (sequence * of.heads + kv_head * of.group + head) * of.rows + row
            for head in range(of.group)
        ]
        dq, found = met.gradients()[0], errors(met)[0]
        parts["query_gradient"] += [
            (place, dq[i], _one(found, i)) for i, place in enumerate(places)
        ]
    for sequence, kv_head, token in _places(of, of.context, count, rng):
        place, dk, dv, of_key, of_value = _pool_token(operands, sequence, kv_head, token)
        parts["key_gradient"].append((place, dk, of_key))
        parts["value_gradient"].append((place, dv, of_value))
    return parts


def _pool_token(
    operands: Operands, sequence: int, kv_head: int, token: int
) -> tuple[int, Floats, Floats, Errors, Errors]:
    """dK and dV of the place in the pool that a token has, from all sequences that use it."""
    of, inputs = geometry(operands), operands.inputs
    block = int(inputs["block_table"][sequence, token // of.block_size])
    columns = -(-of.context // of.block_size)
    dk, dv = np.zeros(of.head_size), np.zeros(of.head_size)
    of_key, of_value = Errors.none(()), Errors.none(())
    for user, column in np.argwhere(inputs["block_table"][:, :columns] == block).tolist():
        position = column * of.block_size + token % of.block_size
        if position >= of.context:
            continue
        met = meeting(
            operands, (user, kv_head), rows=np.arange(of.rows), positions=np.array([position])
        )
        _, key, value = met.gradients()
        dk, dv = dk + key[0], dv + value[0]
        _, key_errors, value_errors = errors(met)
        of_key.add((), _one(key_errors, 0))
        of_value.add((), _one(value_errors, 0))
    place = (block * of.block_size + token % of.block_size) * of.kv_heads + kv_head
    return place, dk, dv, of_key, of_value


def _one(found: Errors, index: int) -> Errors:
    return Errors(
        variance=found.variance[index],
        systematic=found.systematic[index],
        scatter=found.scatter[index],
        terms=found.terms[index],
    )


def _places(
    of: Geometry, extent: int, count: int, rng: np.random.Generator
) -> list[tuple[int, int, int]]:
    """Distinct (sequence, KV head, index below `extent`), the last and the first among them."""
    if not extent:
        return []
    drawn = rng.integers(0, (of.batch, of.kv_heads, extent), (count, 3)).tolist()
    ends = [(of.batch - 1, of.kv_heads - 1, extent - 1), (0, 0, 0)]
    places = [*ends, *((int(b), int(g), int(i)) for b, g, i in drawn)]
    return list(dict.fromkeys(places))[: max(1, count)]
