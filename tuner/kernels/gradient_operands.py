"""Operands of the backward pass of paged attention.

Buffers beside those of `tuner.kernels.attention_operands` (NB blocks of the pool):

* `out`, `out_gradient` [B, H, Sq, D] of the problem's element type; `lse` float32 [B, H, Sq]: what
  the forward pass left, and the gradient that comes in;
* `user_starts` uint32 [NB + 1], `users` uint32 [uses, 2]: who uses block i, as (sequence, column of
  its table), are entries user_starts[i] to user_starts[i + 1] - 1, in ascending order;
* outputs `query_gradient` [B, H, Sq, D], `key_gradient` and `value_gradient` [NB, BS, Hkv, D], all
  float32: they are sums, and what sequences share accumulates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from tuner.elements import stored
from tuner.kernels import attention_operands as forward_operands
from tuner.kernels.attention_operands import random_elements
from tuner.kernels.base import Array, Operands, ValidationCase
from tuner.oracle.paged_attention import forward
from tuner.problems import AttentionProblem


def make_operands(problem: AttentionProblem, inputs: str, seed: int) -> Operands:
    """Operands of one launch; the same arguments give the same arrays.

    For "timing", `out` and `lse` are plausible and not those of the forward pass, which would take
    minutes in float64; gradients are a function of what is stored.

    Raises:
        UnknownNameError: `inputs` is no such kind.
    """
    made = forward_operands.make_operands(problem, inputs, seed)
    rng = np.random.default_rng([seed, 77])
    rows = made.outputs["lse"][0]
    gradient = random_elements((*rows, problem.head_size), problem.element, rng)
    if inputs == "timing":
        seen = [max(1, problem.keys_seen(i)) for i in range(problem.query_tokens)]
        lse = np.broadcast_to(np.log(seen) + 0.5, rows).astype(np.float32)
        return with_gradients(made, gradient, gradient, lse)
    out, log_sums = forward(made)
    return with_gradients(made, gradient, stored(out, problem.element), log_sums.astype(np.float32))


def with_gradients(made: Operands, out_gradient: Array, out: Array, lse: Array) -> Operands:
    """The operands of the backward pass, from those of the forward pass and what it left."""
    blocks = made.inputs["keys"].shape[0]
    starts, users = block_users(made.inputs["block_table"], blocks, _columns(made))
    pool = made.inputs["keys"].shape
    single = np.dtype(np.float32)
    return replace(
        made,
        inputs=made.inputs
        | {
            "out": out,
            "out_gradient": out_gradient,
            "lse": lse,
            "user_starts": starts,
            "users": users,
        },
        outputs={
            "query_gradient": (out_gradient.shape, single),
            "key_gradient": (pool, single),
            "value_gradient": (pool, single),
        },
        scalars=made.scalars | {"blocks": blocks},
    )


def scalars(problem: AttentionProblem) -> dict[str, int | float]:
    """The scalars of the operands for timing, without the arrays."""
    return forward_operands.scalars(problem) | {"blocks": forward_operands.timed_blocks(problem)}


def timing_bytes(problem: AttentionProblem) -> int:
    """Bytes of `make_operands(problem, "timing", …)`, without the arrays: beside those of the
    forward pass a gradient of its outputs, its blocks' users, and gradients in float32."""
    vectors = problem.batch * problem.query_heads * problem.query_tokens * problem.head_size
    blocks = forward_operands.timed_blocks(problem)
    users = blocks + 1 + 2 * blocks
    gradients = vectors + 2 * forward_operands.pool_elements(problem)
    given = forward_operands.timing_bytes(problem) + vectors * problem.element_bytes
    return given + 4 * (users + gradients)


def block_users(table: Array, blocks: int, columns: int) -> tuple[Array, Array]:
    """Who uses each block: starts [NB + 1] and users [uses, 2] as (sequence, column), ascending.

    `columns` are how many entries of a row of the table [B, MB] are in use. There is at least one
    row of users, so that the buffer is none of no bytes.
    """
    used = table[:, :columns].astype(np.int64).ravel()
    order = np.argsort(used, kind="stable")
    starts = np.zeros(blocks + 1, np.uint32)
    starts[1:] = np.cumsum(np.bincount(used, minlength=blocks))
    users = np.stack(np.divmod(order, max(1, columns)), axis=-1).astype(np.uint32)
    return starts, users if len(users) else np.zeros((1, 2), np.uint32)


def validation_cases(problem: AttentionProblem) -> tuple[ValidationCase, ...]:
    """The forward pass's cases, with fewer keys where they have many.

    The baseline goes round a loop for each element of each key, and lavapipe before Mesa 23 ends
    the loops of a kernel, all together, after 65,535 rounds.
    """
    most = max(1, 48 // problem.block_size) * problem.block_size + -(-problem.block_size // 2)
    return tuple(
        replace(case, problem=_shortened(case.problem, most))
        for case in forward_operands.validation_cases(problem)
    )


def _shortened(problem: Any, most: int) -> AttentionProblem:
    shorter: AttentionProblem = msgspec.structs.replace(problem, context=min(most, problem.context))
    return shorter


def _columns(made: Operands) -> int:
    return -(-int(made.scalars["context"]) // int(made.inputs["keys"].shape[1]))
