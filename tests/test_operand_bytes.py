"""What operands for timing take is known without making them, and is what decides what fits."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from tests.made_records import gpu
from tuner import kernels
from tuner.cli.session import misfit
from tuner.device_info import MemoryHeap
from tuner.evaluate.residents import operand_bytes
from tuner.kernels import space
from tuner.kernels.base import Family
from tuner.problems import (
    IndexerStepProblem,
    PagedDecodeProblem,
    PagedSelectedProblem,
    Problem,
    QsaStepProblem,
)
from tuner.shapes import parse_shape
from tuner.workloads import default_problems, geometries

ODD = (
    PagedDecodeProblem(sequences=1, context=0, query_heads=2, kv_heads=1, head_size=16),
    PagedDecodeProblem(
        sequences=3, context=300, query_heads=4, kv_heads=2, head_size=32, window=33, alibi=1
    ),
    PagedDecodeProblem(
        sequences=2, context=70, query_heads=4, kv_heads=2, head_size=32, value_head_size=48
    ),
    IndexerStepProblem(rows=3, context=40, capacity=90, ratio=4, budget=16, rotary=0),
    QsaStepProblem(rows=5, context=300, budget=64),
    QsaStepProblem(rows=2, context=30, budget=0),
    parse_shape(
        "paged_attention:batch=2,query_tokens=3,context=0,query_heads=2,kv_heads=1,head_size=16"
    ),
)
"""Problems beside the families' own: nothing cached, windows, values of another size."""


def small_problems(family: Family) -> Iterator[Problem]:
    """Problems of the family's kind whose operands are made at once, of every odd size."""
    found = (*default_problems(family.kind, on_cpu=True), *geometries(family.kind), *ODD)
    for problem in found:
        if isinstance(problem, family.problem_type) and not space.refusals(family, problem, gpu()):
            yield problem
            yield from (case.problem for case in family.validation_cases(problem))


@pytest.mark.parametrize("family", kernels.families(), ids=lambda family: family.name)
def test_the_bytes_of_operands_are_known_without_making_them(family: Family) -> None:
    problems = dict.fromkeys(small_problems(family))
    assert len(problems) > 5
    for problem in problems:
        made = operand_bytes(family.operands(problem, "timing", 0))
        assert family.operand_bytes(problem) == made, problem.label


def test_operands_of_which_little_is_read_are_refused_where_they_do_not_fit() -> None:
    """A few blocks of a long context: what is read would fit fifty times."""
    family = kernels.family("paged_selected_q8")
    problem = PagedSelectedProblem(
        sequences=64, context=131_072, selected=16, query_heads=32, kv_heads=8, head_size=128
    )
    heap = MemoryHeap(size_bytes=2**30, device_local=True)
    info = msgspec.structs.replace(gpu(), memory_heaps=(heap,))
    assert 50 * family.bytes_moved(problem) < 2**30 < family.operand_bytes(problem)
    error = misfit(family, problem, info)
    assert error is not None
    assert error.needed_bytes == family.operand_bytes(problem)
    assert str(error) == (
        f"{problem.label} needs 16,900 MiB, the device has 1,024 MiB to give: lower its sequences, "
        "selected or context"
    )
