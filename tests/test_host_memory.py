"""Host memory: what the system tells of it, and that operands beyond it are never made."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.made_records import decode, gpu
from tests.toy_family import TOY, ToyCompiler, toy_problem, toy_render, toy_runner
from tuner._host_memory import available_host_bytes
from tuner.cli.session import HOST_COPIES, misfit
from tuner.device_info import MemoryHeap
from tuner.errors import OutOfMemoryError
from tuner.evaluate import Evaluator, Session
from tuner.kernels.base import Operands
from tuner.kernels.space import canonical

ALL_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


AVAILABLE = "MemTotal: 9 kB\nMemAvailable:    2048 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"meminfo": AVAILABLE, "memory.max": "max"}, 2048 * 1024),
        ({"meminfo": AVAILABLE, "memory.max": "4096\n"}, 4096),
        ({"meminfo": AVAILABLE, "memory.max": "4096\n", "memory.current": "1024\n"}, 3072),
        (
            {
                "meminfo": AVAILABLE,
                "memory.max": "4096\n",
                "memory.current": "3000\n",
                "memory.stat": "anon 900\ninactive_file 2000\nactive_file 100\n",
            },
            3096,
        ),
        ({"meminfo": AVAILABLE, "memory.max": "4096\n", "memory.current": "5000\n"}, 0),
        ({"meminfo": "MemTotal: 9 kB\n", "memory.max": "max"}, ALL_BYTES),
        ({}, ALL_BYTES),
    ],
)
def test_what_is_available_is_what_system_and_container_leave(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert available_host_bytes(tmp_path / "meminfo", tmp_path) == expected


def test_this_host_has_some() -> None:
    assert 2**20 < available_host_bytes() <= ALL_BYTES


def test_what_the_host_cannot_hold_is_known_without_making_operands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = msgspec.structs.replace(
        gpu(), memory_heaps=(MemoryHeap(size_bytes=2**40, device_local=True),)
    )
    problem = decode(8, 16_384)
    needed = HOST_COPIES * TOY.operand_bytes(problem)
    monkeypatch.setattr("tuner._host_memory.available_host_bytes", lambda: needed)
    assert misfit(TOY, problem, info) is None
    monkeypatch.setattr("tuner._host_memory.available_host_bytes", lambda: needed - 1)
    error = misfit(TOY, problem, info)
    assert error is not None
    assert (error.needed_bytes, error.available_bytes) == (needed, needed - 1)
    assert "the host has" in str(error)
    assert "lower its sequences or context" in str(error)


def test_operands_for_which_there_is_no_memory_are_an_error_of_the_problem() -> None:
    def operands(problem: Any, inputs: str, seed: int) -> Operands:
        if inputs == "timing":
            raise MemoryError
        return TOY.operands(problem, inputs, seed)

    problem, session = toy_problem(4, 4096), Session()
    scalars = TOY.operands(problem, "timing", 0).scalars
    family = replace(TOY, operands=operands, scalars=lambda _: scalars)
    made = Evaluator(
        toy_runner(), ToyCompiler(), family, problem, session=session, render=toy_render
    )
    with pytest.raises(OutOfMemoryError, match="the host has"):
        made.run(canonical(family, family.baseline))
