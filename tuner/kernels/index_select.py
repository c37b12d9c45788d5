"""The best blocks of each row: radix select of the k largest scores, ties to the lowest block.

Scores are not negative, so their bits order them. Rows with no more than k complete blocks are left
alone. Lists are ascending and always the same: nothing depends on the order of atomics.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.kernels import indexer, limits, subgroups
from tuner.kernels.base import (
    Candidate,
    Constraint,
    DispatchRule,
    Family,
    Parameter,
    Pass,
    Values,
)
from tuner.kernels.index_select_operands import (
    MAX_HELD_KEYS,
    make_operands,
    operand_bytes,
    validation_cases,
)
from tuner.oracle.indexer_references import sampled_select_reference, select_reference
from tuner.problems import IndexerStepProblem

BASELINE_THREADS = 1024
STAGES = ("maxima", "select")
"""Passes of the strategy parts."""
MAX_LANE_MAXIMA = 64
"""Largest keys of groups in the registers of a lane."""
SHARED_WORDS = 8
"""Single words in shared memory: a digit found, a range, counts."""


def in_parts(values: Values) -> bool:
    """Whether several workgroups share a row."""
    return values["strategy"] == "parts"


PARAMETERS = (
    Parameter(
        name="strategy",
        values=("baseline", "workgroup", "parts"),
        help="baseline: one workgroup a row, digits of 4 bits, a run of blocks for each thread; "
        "workgroup: one a row that lists the few keys at or above a bound, which the largest keys "
        "of groups of keys give; parts: several workgroups find that bound and list, in two "
        "passes, and the last one selects",
    ),
    subgroups.SIZE,
    subgroups.per_workgroup(4, 8, 16, 32),
    Parameter(
        name="digit_bits",
        values=(9, 11),
        help="bits of a score that one pass over the candidates tells apart",
        used=subgroups.tuned,
    ),
    Parameter(
        name="items",
        values=(1, 2, 4, 8),
        help="groups of keys for each thread, and keys it reads before it uses any",
        used=subgroups.tuned,
    ),
    Parameter(
        name="held",
        values=(0, 8, 16, 32, 64),
        help="keys a thread reads once and holds in registers; those beyond are read twice",
        used=subgroups.tuned,
    ),
    Parameter(
        name="listed",
        values=(1024, 2048),
        help="candidates that fit in shared memory; of more, all keys are read for each digit",
        used=subgroups.tuned,
    ),
    Parameter(
        name="parts",
        values=(4, 8, 16, 32, 64),
        help="workgroups that share a row",
        used=in_parts,
    ),
)


def _threads(c: Candidate) -> int:
    if c["strategy"] == "baseline":
        device = c.device
        return min(BASELINE_THREADS, device.max_workgroup_invocations, device.max_workgroup_size[0])
    return int(c["subgroups"] * c["subgroup_size"])


def _check_threads(c: Candidate) -> str | None:
    return limits.threads_reason(c.device, _threads(c))


def _lane_maxima(c: Candidate) -> int:
    """Groups of keys whose largest a lane looks at."""
    return int(c["items"]) * (int(c["parts"]) if in_parts(c.values) else 1)


def _check_groups(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        return None
    groups, kept = _lane_maxima(c) * _threads(c), c.problem.kept_blocks
    if groups < kept:
        return (
            f"the largest keys of {groups} groups are no bound for {kept} blocks: use more "
            "subgroups, items or parts"
        )
    if _lane_maxima(c) > MAX_LANE_MAXIMA:
        return f"a lane would look at {_lane_maxima(c)} groups, the limit is {MAX_LANE_MAXIMA}"
    return None


def _check_held(c: Candidate) -> str | None:
    if c["strategy"] == "baseline" or c["held"] * _threads(c) <= MAX_HELD_KEYS:
        return None
    return (
        f"{_threads(c)} threads would hold {c['held'] * _threads(c)} keys in registers, the limit "
        f"is {MAX_HELD_KEYS}"
    )


def _check_shared_memory(c: Candidate) -> str | None:
    if c["strategy"] == "baseline":
        needed = 8 * _threads(c) + 4 * 16 + 8
    else:
        words = 2 ** int(c["digit_bits"]) + c["subgroups"] + 2 * c["listed"] + c.problem.kept_blocks
        needed = 4 * int(words + SHARED_WORDS)
    return limits.shared_memory_reason(c.device, needed)


def _check_rows(c: Candidate) -> str | None:
    rows = c.problem.rows
    return limits.groups_reason(c.device, (c["parts"], rows) if in_parts(c.values) else (rows,))


_GROUPS = ("strategy", "subgroup_size", "subgroups", "items", "parts")
CONSTRAINTS = (
    subgroups.operations("basic", "arithmetic", "ballot"),
    subgroups.SIZE_RULE,
    Constraint(needs=("strategy", "subgroup_size", "subgroups"), check=_check_threads),
    Constraint(needs=_GROUPS, check=_check_groups),
    Constraint(needs=("strategy", "subgroup_size", "subgroups", "held"), check=_check_held),
    Constraint(
        needs=("strategy", "subgroup_size", "subgroups", "digit_bits", "listed"),
        check=_check_shared_memory,
    ),
    Constraint(needs=("strategy", "parts"), check=_check_rows),
)


def select_passes(c: Candidate, scalars: Mapping[str, int | float]) -> tuple[Pass, ...]:
    """One launch, or those of the strategy parts: its passes share their workgroup counts."""
    rows = c.problem.rows
    constants = indexer.constants(c.problem)
    if c["strategy"] == "baseline":
        constants |= {"threads": _threads(c)}

    def launch(name: str, groups: tuple[int, int, int]) -> Pass:
        return Pass(
            name=name,
            constants=constants | {"stage": name},
            push=indexer.push(scalars),
            groups=groups,
            subgroup_size=subgroups.required_size(c),
        )

    if in_parts(c.values):
        return tuple(launch(stage, (int(c["parts"]), rows, 1)) for stage in STAGES)
    return (launch("select", (rows, 1, 1)),)


def scratch_bytes(c: Candidate) -> dict[str, int]:
    """Counters, candidates and the largest keys of groups, for the strategy parts."""
    if not in_parts(c.values):
        return {"row_counters": 4, "candidates": 4, "group_maxima": 4}
    rows = c.problem.rows
    return {
        "row_counters": 8 * rows,
        "candidates": 4 * rows * int(c["listed"]),
        "group_maxima": 4 * rows * _lane_maxima(c) * _threads(c),
    }


def _dispatch(c: Candidate) -> DispatchRule:
    if not in_parts(c.values):
        scratch = dict.fromkeys(scratch_bytes(c), "4")
        groups = {"select": ("rows", "1", "1")}
        return indexer.rule(groups, "one workgroup for each row", scratch=scratch)
    return indexer.rule(
        dict.fromkeys(STAGES, (str(c["parts"]), "rows", "1")),
        "the same number of workgroups for each row in every pass",
        scratch={
            "row_counters": "8 * rows",
            "candidates": f"4 * rows * {c['listed']}",
            "group_maxima": f"4 * rows * {_lane_maxima(c) * _threads(c)}",
        },
        policy=f"count:{c['parts']}",
    )


def _bytes_moved(problem: IndexerStepProblem) -> int:
    """Scores, lists, counts and masks of the selective rows, each once."""
    blocks = problem.complete_blocks()
    selective = blocks[blocks > problem.kept_blocks]
    each = 4 * (problem.budget + 1 + problem.mask_words)
    return max(4, 4 * int(selective.sum()) + each * len(selective))


WORKGROUP_STARTS: tuple[Values, ...] = tuple(
    {
        "strategy": "workgroup",
        "subgroup_size": size,
        "subgroups": subgroups,
        "digit_bits": 11,
        "items": items,
        "held": held,
        "listed": 2048,
    }
    for size, subgroups, held in (
        (32, 32, 32),
        (32, 32, 8),
        (32, 16, 64),
        (64, 16, 32),
        (16, 32, 32),
        (8, 32, 16),
    )
    for items in (4, 8)
)
PARTS_STARTS: tuple[Values, ...] = tuple(
    {
        "strategy": "parts",
        "subgroup_size": size,
        "subgroups": subgroups,
        "digit_bits": 11,
        "items": 1,
        "held": held,
        "listed": 2048,
        "parts": parts,
    }
    for size, subgroups in ((32, 16), (64, 8), (32, 8), (16, 32), (8, 32))
    for parts, held in ((16, 8), (32, 8), (64, 8))
)
PORTABLE: tuple[Values, ...] = tuple(
    {
        "strategy": "workgroup",
        "subgroup_size": size,
        "subgroups": subgroups,
        "digit_bits": 9,
        "items": items,
        "held": 8,
        "listed": listed,
    }
    for size, subgroups in ((32, 32), (32, 4), (16, 8), (64, 4), (8, 32), (8, 16))
    for items, listed in ((8, 2048), (4, 1024), (8, 1024))
)
PORTABLE_PARTS: tuple[Values, ...] = tuple(
    {
        "strategy": "parts",
        "subgroup_size": size,
        "subgroups": subgroups,
        "digit_bits": 9,
        "items": 1,
        "held": 8,
        "listed": listed,
        "parts": 16,
    }
    for size, subgroups in ((32, 4), (16, 8), (64, 4), (8, 16))
    for listed in (1024, 2048)
)
"""For little shared memory, too, or where thousands of blocks take much of it."""

INDEX_SELECT = Family(
    name="index_select",
    summary="indexer: the best blocks of each selective row, as a list of tokens and a mask",
    template="index_select.comp.jinja",
    problem_type=IndexerStepProblem,
    parameters=PARAMETERS,
    constraints=CONSTRAINTS,
    bindings=tuple(
        indexer.BINDINGS[name]
        for name in (
            "score_bits",
            "visible",
            "visible_count",
            "block_mask",
            "row_counters",
            "candidates",
            "group_maxima",
        )
    ),
    push_fields=indexer.PUSH_FIELDS,
    baseline={"strategy": "baseline"},
    starts=(*WORKGROUP_STARTS, *PARTS_STARTS),
    portable=(*PORTABLE, *PORTABLE_PARTS),
    arithmetic=lambda _values: "f32",
    passes=select_passes,
    scratch_bytes=scratch_bytes,
    operands=make_operands,
    reference=select_reference,
    sampled_reference=sampled_select_reference,
    validation_cases=validation_cases,
    bytes_moved=_bytes_moved,
    operand_bytes=operand_bytes,
    dispatch=_dispatch,
    scalars=indexer.scalars,
)
