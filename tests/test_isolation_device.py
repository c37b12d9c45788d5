"""Bad shaders on a real driver, and the command whose worker, and then itself, is killed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from tests.fault_stub import wait_for
from tests.isolated_runs import Books, searched
from tests.small_kernels import job, operands, outputs, run, spirv, step
from tuner.cli import app
from tuner.errors import (
    DeviceLostError,
    NoWorkerError,
    OutOfMemoryError,
    RunTimeoutError,
    WorkerDiedError,
)
from tuner.results import Store, outcomes
from tuner.runner._deadlines import Deadlines
from tuner.runner.protocol import Job, JobPass
from tuner.runner.worker import WorkerRunner

ENDLESS = """#version 460
layout(local_size_x = 64) in;
layout(set = 0, binding = 2, std430) buffer O { uint o[]; };
void main() {
    uint x = gl_GlobalInvocationID.x;
    while (o[0] != 1u) {
        x = x * 1664525u + 1013904223u;
        o[5 + x % 7u] = x;
    }
}
"""
"""Drivers that end every loop after 65,535 rounds still have to do that for every workgroup."""
FAR_WRITE = """#version 460
layout(local_size_x = 64) in;
layout(set = 0, binding = 2, std430) buffer O { uint o[]; };
void main() {
    for (uint i = 1u; i < 16u; i++) { o[gl_GlobalInvocationID.x + i * 0x00fffff1u] = 0xdeadbeefu; }
}
"""


@pytest.fixture(scope="module")
def on_cpu(vulkan_selector: str | None) -> Iterator[WorkerRunner]:
    """A worker on a CPU driver: a GPU that others use must not be hung."""
    runner = WorkerRunner(vulkan_selector, deadlines=Deadlines(launch_s=3.0, spare_s=3.0))
    with contextlib.closing(runner):
        if not runner.info.is_cpu:
            pytest.skip("endless loops are for CPU drivers alone")
        runner.load("w", operands(), outputs())
        yield runner


def _job_of(source: str, groups: tuple[int, int, int] = (4, 1, 1)) -> Job:
    made = JobPass(name="bad", spirv=spirv(source), push=b"", groups=groups)
    return Job(passes=(made,), bindings=("a", "t", "o"), scratch_bytes={"t": 4000})


def _still_right(runner: WorkerRunner) -> None:
    answer = run(runner, job(step("scale", factor=3.0))).outputs["o"]
    np.testing.assert_array_equal(answer, 3.0 * operands()["a"])


@pytest.mark.vulkan
def test_an_endless_loop_is_a_time_out(on_cpu: WorkerRunner, books: Books) -> None:
    losses = on_cpu.losses
    with pytest.raises(RunTimeoutError, match="did not end within"):
        run(on_cpu, _job_of(ENDLESS, (4096, 512, 1)))
    assert on_cpu.losses == losses + 1
    _still_right(on_cpu)
    books.count("endless loops on a CPU driver")


@pytest.mark.vulkan
def test_a_write_far_out_of_bounds_is_noticed_or_clamped(
    on_cpu: WorkerRunner, books: Books, tell: Callable[[str], None]
) -> None:
    """Drivers that check every access leave it out; with others it is a crash or a broken guard."""
    outcome: Any
    try:
        execution = run(on_cpu, _job_of(FAR_WRITE))
        poison = (execution.outputs["o"].view(np.uint32) == 0xFFFFFFFF).all()
        outcome = "clamped by the driver" if poison else "written somewhere"
        assert poison or execution.broken_guards
    except (WorkerDiedError, DeviceLostError, RunTimeoutError) as error:
        outcome = type(error).__name__
    tell(f"a write far out of bounds on {on_cpu.info.name}: {outcome}")
    _still_right(on_cpu)
    books.count("writes far out of bounds on a CPU driver")


@pytest.mark.vulkan
def test_a_job_that_asks_for_more_memory_than_there_is_costs_no_worker(
    on_cpu: WorkerRunner, books: Books
) -> None:
    losses = on_cpu.losses
    with pytest.raises(OutOfMemoryError, match="scratch"):
        run(on_cpu, job(step("scale"), scratch=1 << 44))
    _still_right(on_cpu)
    assert on_cpu.losses == losses
    books.count("jobs beyond the memory of a CPU driver")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def _arguments(name: str, out: Path, cache: Path, selector: str | None, *more: str) -> list[str]:
    device = [] if selector is None else ["--device", selector]
    return [name, "--out", str(out), "--cache", str(cache), "--json", *device, *more]


@pytest.mark.vulkan
def test_tune_goes_on_after_its_worker_and_then_it_itself_was_killed(
    vulkan_selector: str | None, tmp_path: Path, cache: Path, books: Books
) -> None:
    more = ("--shape", "1x256:h8/2:d64", "--trials", "5", "--sampler", "random")
    arguments = _arguments("tune", tmp_path, cache, vulkan_selector, *more)
    command = [sys.executable, "-m", "tuner", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: _records_in(tmp_path) >= 1, patience_s=120.0)
        (child,) = psutil.Process(process.pid).children()
        child.kill()
        wait_for(lambda: _records_in(tmp_path) >= 3, patience_s=120.0)
        process.kill()
    books.count("workers of the command line killed")
    books.count("runs of the command line killed")
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    kept = (folder / "records.jsonl").read_bytes()
    done = subprocess.run(command, check=True, capture_output=True, timeout=200)
    again = json.loads(done.stdout)
    assert (again["error"], again["problems"][0]["trials"]) == (None, 5)
    assert again["measured"] <= 2
    assert (folder / "records.jsonl").read_bytes().startswith(kept)
    records = searched(folder)
    assert len({record.variant for record in records}) == len(records) == 5
    assert {record.state for record in records} == {"correct"}
    (outcome,) = outcomes(Store(folder, read_only=True).records())
    assert outcome.best is not None
    assert again["problems"][0]["best"]["variant"] == outcome.best.variant


def _records_in(out: Path) -> int:
    return sum(len(file.read_bytes().splitlines()) for file in out.glob("*/records.jsonl"))


@pytest.mark.vulkan
@pytest.mark.parametrize("in_process", [False, True])
def test_device_work_is_in_a_worker_unless_told_otherwise(
    vulkan_selector: str | None,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_process: bool,
) -> None:
    started: list[str | None] = []
    kind = "tuner.runner.vulkan.VulkanRunner" if in_process else "tuner.runner.worker.WorkerRunner"

    def refuse(selector: str | None, *_: object, **__: object) -> Any:
        started.append(selector)
        raise NoWorkerError("not today")

    monkeypatch.setattr(kind, refuse)
    arguments = _arguments("calibrate", tmp_path, cache, vulkan_selector)
    result = CliRunner().invoke(app, [*arguments, *["--in-process"] * in_process])
    assert (result.exit_code, started) == (1, [vulkan_selector])
    assert "not today" in result.stderr
