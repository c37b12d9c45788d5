"""What all strategies of partial attention over the planar q8 cache share: the cut into workgroups.

A workgroup takes one part of the tokens of one KV head of one row, for the whole query group, whose
heads may be dealt out to slices of its subgroups.
"""

from __future__ import annotations

from tuner.kernels import limits, subgroups
from tuner.kernels.base import Candidate, Constraint, Parameter, PushField
from tuner.kernels.q8_operands import max_parts
from tuner.kernels.subgroups import head_slices_reason, tuned

CHUNK = 32
"""Tokens that are dealt out to the parts in turn."""
UPSTREAM_LANES = 32
UPSTREAM_PARTS = 256
UPSTREAM_CHUNKS = 3

SLICES = (1, 2, 3, 4, 6, 12)
POLICIES = (
    "upstream",
    "count:1",
    "count:2",
    "count:3",
    "count:4",
    "count:8",
    "count:16",
    "count:32",
    "count:64",
    "count:128",
    "device:1",
    "device:2",
    "device:4",
    "device:8",
)


PARAMETERS = (
    Parameter(
        name="strategy",
        values=("baseline", "scalar_f32", "packed_f16", "int_dot", "matrix"),
        help="baseline: one group of lanes per query head, which loads KV for itself, token by "
        "token. The others share KV in a workgroup and compute in f32, in packed f16, with the "
        "integer dot product for QK, or on matrix units",
    ),
    subgroups.SIZE,
    subgroups.per_workgroup(1, 2, 4, 6, 8, 12),
    Parameter(
        name="head_slices",
        values=SLICES,
        help="parts into which the query group is dealt out over the subgroups of a workgroup",
        used=tuned,
    ),
)
"""Those that come before the parameters of a strategy; `SPLIT` comes last."""
SPLIT = Parameter(
    name="split",
    values=POLICIES,
    help="into how many parts the chunks of 32 tokens are dealt out: upstream's one part for "
    "three chunks, count:N, or device:N workgroups per compute unit",
    used=tuned,
)

PUSH_FIELDS = (
    PushField(name="num_heads", type="uint"),
    PushField(name="num_kv_heads", type="uint"),
    PushField(name="scale_word", type="uint"),
    PushField(name="visible_stride", type="uint"),
    PushField(name="max_parts", type="uint"),
    PushField(name="num_parts", type="uint"),
    PushField(name="base2_scale", type="float"),
)


def parts(c: Candidate) -> int:
    """Into how many parts the tokens of the longest row are dealt out."""
    chunks = -(-c.problem.seen // CHUNK)
    kind, _, argument = (c["split"] if tuned(c.values) else "upstream").partition(":")
    if kind == "upstream":
        wanted = min(-(-chunks // UPSTREAM_CHUNKS), UPSTREAM_PARTS)
    elif kind == "count":
        wanted = int(argument)
    else:
        workgroups = c.problem.kv_heads * c.problem.rows
        wanted = int(argument) * (c.device.compute_units or 1) // workgroups
    return int(max(1, min(wanted, chunks, max_parts(c.problem.tokens))))


def parts_rule(c: Candidate, tokens: str) -> tuple[str, dict[str, int], str]:
    """The policy, its facts and `parts` as an expression, `tokens` being what the longest row sees.

    The expression needs `max_parts`.
    """
    policy = c["split"] if tuned(c.values) else "upstream"
    kind, _, argument = policy.partition(":")
    facts, chunks = {"chunk_tokens": CHUNK}, f"ceil_div({tokens}, chunk_tokens)"
    if kind == "upstream":
        wanted = f"ceil_div({chunks}, {UPSTREAM_CHUNKS}), {UPSTREAM_PARTS}"
    elif kind == "count":
        wanted = argument
    else:
        facts["compute_units"] = c.device.compute_units or 1
        wanted = f"floor_div({argument} * compute_units, kv_heads * rows)"
    return policy, facts, f"max(1, min({wanted}, {chunks}, max_parts))"


def subgroup_size(c: Candidate) -> int:
    """Lanes of a subgroup; the baseline wants 32, and takes what the device has otherwise."""
    if tuned(c.values):
        return int(c["subgroup_size"])
    device = c.device
    allowed = device.min_subgroup_size <= UPSTREAM_LANES <= device.max_subgroup_size
    return UPSTREAM_LANES if device.subgroup_size_control and allowed else device.subgroup_size


def heads_per_slice(c: Candidate) -> int:
    """Query heads of one slice of the query group."""
    return 1 if not tuned(c.values) else int(-(-c.problem.group // c["head_slices"]))


def _check_head_size(c: Candidate) -> str | None:
    if c.problem.head_size % 4:
        return f"head size {c.problem.head_size} is no multiple of 4, the codes of one word"
    return None


def _check_groups(c: Candidate) -> str | None:
    return limits.groups_reason(c.device, (1, c.problem.kv_heads, c.problem.rows))


def _check_subgroup_size(c: Candidate) -> str | None:
    return limits.subgroup_size_reason(c.device, subgroup_size(c))


def _check_workgroup(c: Candidate) -> str | None:
    count = c["subgroups"] if tuned(c.values) else c.problem.group
    return limits.threads_reason(c.device, count * subgroup_size(c))


def _check_head_slices(c: Candidate) -> str | None:
    if not tuned(c.values):
        return None
    return head_slices_reason(c["head_slices"], c["subgroups"], c.problem.group)


def _check_split(c: Candidate) -> str | None:
    policy = c["split"] if tuned(c.values) else "upstream"
    if policy.startswith("device:") and c.device.compute_units is None:
        return f"{policy} needs the number of compute units, which this driver does not tell"
    return None


CONSTRAINTS = (
    Constraint(needs=("strategy",), check=_check_head_size),
    Constraint(needs=("strategy",), check=_check_groups),
    Constraint(needs=("strategy", "subgroup_size"), check=_check_subgroup_size),
    Constraint(needs=("strategy", "subgroup_size", "subgroups"), check=_check_workgroup),
    Constraint(needs=("strategy", "subgroups", "head_slices"), check=_check_head_slices),
    Constraint(needs=("strategy", "split"), check=_check_split),
)
