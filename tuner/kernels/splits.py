"""Split policies: how the tokens of a batch are cut, as a rule an engine can evaluate too.

A policy is a string, so that it can be a parameter value and stand in an export as it is. Some
kernels deal the tiles of all sequences out evenly to however many workgroups are launched; for them
it says how many (`workgroups_dealt`). For the others it says into how many parts the context is to
be cut (`split_plan`); what comes of it is then

    tokens_per_split = roundup(ceil(context / wanted), granule)
    num_splits = ceil(context / tokens_per_split)

where the context is the longest of the batch and at least 1, and wanted is at least 1:

* ``none``: 1, a workgroup walks the whole context;
* ``count:N``: N;
* ``tokens:N``: ceil(context / N), so that equal parts come out of about N tokens;
* ``device:N``: floor(N * compute units / (sequences * KV heads));
* ``fit:N``: for the former kernels only.

Kernels come in two kinds: those that leave partial results for a combine pass, and those that write
the output themselves. ``count:N`` always means the former, even where a context is too short to be
cut; ``tokens:N`` and ``device:N`` mean them where they make several parts.
"""

from __future__ import annotations

from typing import NamedTuple

from tuner.device_info import DeviceInfo
from tuner.kernels import limits
from tuner.kernels.base import Terms

POLICIES = (
    "none",
    "count:2",
    "count:4",
    "count:8",
    "count:16",
    "count:32",
    "count:64",
    "tokens:256",
    "tokens:512",
    "tokens:1024",
    "tokens:2048",
    "tokens:4096",
    "device:1",
    "device:2",
    "device:3",
    "device:4",
    "device:6",
    "device:8",
    "fit:1",
    "fit:2",
    "fit:3",
    "fit:4",
    "fit:8",
)

MAX_SPLITS = 1024
FEW_SHARES = "tokens:2048"
"""The policy that makes few workgroups of a batch of short sequences."""
MANY_PARTS = "count:16"
"""The policy that cuts contexts of a thousand tokens into several parts with almost any granule."""


def workgroups_dealt(policy: str, *, tokens: int, pairs: int, compute_units: int | None) -> int:
    """How many workgroups share the work, for kernels that deal it out evenly.

    ``none`` means one for each of the `pairs` of sequence and KV head, ``count:N`` N times as many,
    ``tokens:N`` one for every N of the `tokens` of all pairs, ``device:N`` N per compute unit.
    ``fit:N`` means as many of the latter as give each workgroup whole pairs, or each pair whole
    workgroups, where all sequences are equally long: no share is then of more pairs than need be.
    `compute_units` may be None only where the policy is neither ``device:N`` nor ``fit:N``.
    """
    kind, _, argument = policy.partition(":")
    if kind == "fit":
        most = int(argument) * (compute_units or 1)
        if pairs <= most:
            return pairs * (most // pairs)
        return -(-pairs // -(-pairs // most))
    if kind == "tokens":
        return max(1, -(-tokens // int(argument)))
    if kind == "device":
        return int(argument) * (compute_units or 1)
    return pairs * (int(argument) if argument else 1)


class SplitPlan(NamedTuple):
    """How the longest context is cut: `parts` parts of `tokens` tokens, the last may be shorter.

    `combined`: the parts are joined by a combine pass, be it only one.
    """

    parts: int
    tokens: int
    combined: bool = False


def split_plan(
    policy: str, *, context: int, workgroups: int, compute_units: int | None, granule: int
) -> SplitPlan:
    """The cut that `policy` makes.

    `context` is the longest context in tokens, `workgroups` the number of workgroups of one part
    (sequences times KV heads), `granule` the tokens one workgroup takes a step: parts are multiples
    of it. `compute_units` may be None only where the policy is not ``device:N``.
    """
    kind, _, argument = policy.partition(":")
    wanted = 1
    if kind == "count":
        wanted = int(argument)
    elif kind == "tokens":
        wanted = -(-context // int(argument))
    elif kind == "device":
        wanted = int(argument) * (compute_units or 1) // workgroups
    tokens = -(-max(1, context) // max(1, wanted))
    tokens = -(-tokens // granule) * granule
    parts = max(1, -(-context // tokens))
    return SplitPlan(parts, tokens, combined=parts > 1 or kind == "count")


CUT = (
    "the longest context of the batch is cut into num_splits parts of tokens_per_split tokens: "
    "count:N makes N parts, tokens:N makes parts of about N tokens, and device:N makes as many as "
    "give each of compute_units N workgroups. Any other cut into whole granule_tokens is right, "
    "too. The pass combine joins the parts"
)
"""What `split_rule` does for kernels that leave partial results, in words."""
UNCUT = "one workgroup walks a whole context: these kernels write the output, so it cannot be cut"
DEALT = (
    "num_splits workgroups share all tokens evenly; any number of them is right. With pairs = "
    "sequences * kv_heads, none makes one for each pair, count:N makes N for each pair, tokens:N "
    "one for N tokens, device:N makes N for each of compute_units, and fit:N at most so many, of "
    "which each has whole pairs or each pair has whole workgroups. tokens_per_split is not used"
)
"""What `dealt_rule` does, in words."""


def dealt_rule(policy: str, *, tokens: str, pairs: str) -> str:
    """`workgroups_dealt` as an expression; ``device:N`` and ``fit:N`` need `compute_units`."""
    kind, _, argument = policy.partition(":")
    if kind == "fit":
        most = f"{argument} * compute_units"
        whole = f"max(1, floor_div({most}, {pairs}))"
        return f"{whole} * ceil_div({pairs}, ceil_div({pairs}, {most}))"
    if kind == "tokens":
        return f"max(1, ceil_div({tokens}, {argument}))"
    if kind == "device":
        return f"{argument} * compute_units"
    return f"{argument or 1} * {pairs}"


def split_rule(policy: str, *, context: str, workgroups: str) -> Terms:
    """`split_plan` as the terms `tokens_per_split` and `num_splits` of a dispatch rule.

    They need `granule_tokens` and, for ``device:N``, `compute_units`.
    """
    kind, _, argument = policy.partition(":")
    wanted = {
        "none": "1",
        "count": argument,
        "tokens": f"max(1, ceil_div({context}, {argument}))",
        "device": f"max(1, floor_div({argument} * compute_units, {workgroups}))",
    }[kind]
    share = f"ceil_div(max(1, {context}), {wanted})"
    return (
        ("tokens_per_split", f"round_up({share}, granule_tokens)"),
        ("num_splits", f"max(1, ceil_div({context}, tokens_per_split))"),
    )


def split_reason(policy: str, parts: int, compute_units: int | None) -> str | None:
    """Why a policy, which makes so many parts, cannot be had on a device; None if it can."""
    if policy.startswith(("device:", "fit:")) and compute_units is None:
        return f"{policy} needs the number of compute units, which this driver does not tell"
    if parts > MAX_SPLITS:
        return f"{policy} makes {parts} splits, the limit is {MAX_SPLITS}"
    return None


def combine_reason(device: DeviceInfo, *, columns: int, slices: int, dimensions: int) -> str | None:
    """Why a combine pass cannot be launched on a device; None if it can.

    Its workgroups have `columns` threads in x, which share the `dimensions` of one output, and
    `slices` in y, which share the splits. Several slices meet in shared memory: each leaves its
    sums and two statistics there, in float32.
    """
    for wanted, named, most in (
        (columns * slices, "threads", device.max_workgroup_invocations),
        (columns, "columns", device.max_workgroup_size[0]),
        (slices, "slices", device.max_workgroup_size[1]),
    ):
        if wanted > most:
            return f"{wanted} {named} to combine, the device allows {most}"
    shared = 4 * slices * (dimensions + 2) if slices > 1 else 0
    return limits.shared_memory_reason(device, shared, " to combine")
