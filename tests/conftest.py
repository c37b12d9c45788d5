"""Options, markers and the Vulkan runner that the tests share.

Every test that uses `vulkan_runner` is marked `vulkan` and fails if the validation layer says
anything while it runs; one that uses `matrix_shape` or `matrix_shapes` is marked `matrices`, too.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tuner.errors import NoDeviceError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.commands import Run
    from tests.forked_tuning import Tuning
    from tests.isolated_runs import Books
    from tuner.runner.vulkan import VulkanRunner
    from tuner.runner.worker import WorkerRunner

_TOLD = pytest.StashKey[list[str]]()
_VULKAN_FIXTURES = {
    "vulkan_selector",
    "vulkan_runner",
    "loaded_runner",
    "gpu_runner",
    "open_runner",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vulkan")
    group.addoption(
        "--require-vulkan",
        action="store_true",
        help="fail, rather than skip, tests for which there is no Vulkan device or layer",
    )
    group.addoption(
        "--require-matrices",
        action="store_true",
        help="fail, rather than skip, tests for which the device has no cooperative matrices",
    )
    group.addoption(
        "--launch-timeout",
        metavar="SECONDS",
        type=float,
        help="how long a launch of the shared runner may take (default: by the kind of device)",
    )
    group.addoption("--vulkan-device", metavar="SELECTOR", help="device to test on")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _VULKAN_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.vulkan)
        if "matrix_shapes" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.matrices)


@pytest.fixture(scope="session")
def tell(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Adds a line to what is printed at the end of the test session: counts and figures."""
    return pytestconfig.stash.setdefault(_TOLD, []).append


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Where a search may keep its study."""
    return tmp_path / "study.journal"


@pytest.fixture
def start() -> Iterator[Callable[..., WorkerRunner]]:
    """Starts workers as `tests.fault_stub.worker` does, and closes them after the test."""
    from tests.fault_stub import worker

    started: list[WorkerRunner] = []

    def start_one(*faults: Any, **options: Any) -> WorkerRunner:
        started.append(worker(*faults, **options))
        return started[-1]

    yield start_one
    for runner in started:
        runner.close()
        assert not psutil.pid_exists(runner.pid)


@pytest.fixture
def start_small(start: Callable[..., WorkerRunner]) -> Callable[..., WorkerRunner]:
    """Starts workers over `tests.fault_stub.small`, whose patience is short."""
    from tests.small_workers import SHORT

    return functools.partial(start, factory="small", deadlines=SHORT)


@pytest.fixture(scope="session")
def tuning_process() -> Iterator[Tuning]:
    from tests.forked_tuning import Tuning

    with contextlib.closing(Tuning()) as process:
        yield process


@pytest.fixture
def tuning(tuning_process: Tuning) -> Iterator[Tuning]:
    """Tunes the toy family in a fork of a process that has imported all it takes."""
    yield tuning_process
    tuning_process.settle()


@pytest.fixture(scope="session")
def books(tell: Callable[[str], None]) -> Iterator[Books]:
    """The books over all that is done to runs; printed at the end, and not one record may miss."""
    from tests.isolated_runs import Books

    kept = Books()
    yield kept
    for event, times in sorted(kept.events.items()):
        tell(f"{event}: {times}")
    tell(f"records acknowledged: {kept.acknowledged}, of these lost: {kept.lost}")
    assert kept.lost == 0


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash.get(_TOLD, [])
    if lines:
        terminalreporter.section("counts and figures")
    for line in lines:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def vulkan_selector(pytestconfig: pytest.Config) -> str | None:
    """The device that the command line asks for; skips (or fails) where there is none."""
    selector: str | None = pytestconfig.getoption("--vulkan-device")
    try:
        from tuner.device import list_devices, select

        select(list_devices(), selector)
    except NoDeviceError as error:
        _missing(pytestconfig, str(error))
    return selector


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of commands, with a cache of their own."""
    cache = tmp_path_factory.mktemp("cache")
    return {**os.environ, "XDG_CACHE_HOME": str(cache), "COLUMNS": "100"}


@pytest.fixture(scope="session")
def run_tuner(environment: dict[str, str]) -> Run:
    """As `tests.commands.run`, for commands that need no device or are told which."""
    from tests.commands import run

    return functools.partial(run, environment)


@pytest.fixture(scope="session")
def run_on_device(run_tuner: Run, vulkan_selector: str | None) -> Run:
    """As `run_tuner`, on the device under test; the test is skipped where there is none."""
    device = () if vulkan_selector is None else ("--device", vulkan_selector)
    return lambda *arguments, **options: run_tuner(*arguments, *device, **options)


@pytest.fixture(scope="session")
def validation(pytestconfig: pytest.Config, vulkan_selector: str | None) -> bool:
    """Whether the validation layer is there."""
    from tuner.device import has_validation_layer

    present = has_validation_layer()
    if not present and pytestconfig.getoption("--require-vulkan"):
        pytest.fail("the Khronos validation layer is not installed")
    return present


@pytest.fixture(scope="session")
def validation_log() -> list[list[str]]:
    """What the validation layer says to each runner that the tests share."""
    return []


@pytest.fixture(scope="session")
def vulkan_runner(
    pytestconfig: pytest.Config,
    vulkan_selector: str | None,
    validation: bool,
    validation_log: list[list[str]],
) -> Iterator[VulkanRunner]:
    """A runner on the device under test, validated if the layer is there."""
    from tuner.runner.vulkan import VulkanRunner

    timeout_s = pytestconfig.getoption("--launch-timeout")
    runner = VulkanRunner(vulkan_selector, validation, timeout_s=timeout_s)
    validation_log.append(runner.messages)
    yield runner
    runner.close()
    assert runner.messages == []


@pytest.fixture
def loaded_runner(vulkan_runner: VulkanRunner) -> Iterator[VulkanRunner]:
    """The runner with the workload "w" of `tests.small_kernels` loaded in three copies."""
    from tests.small_kernels import operands, outputs

    vulkan_runner.load("w", operands(), outputs(), copies=3)
    yield vulkan_runner
    vulkan_runner.unload("w")


@pytest.fixture
def open_runner(
    vulkan_selector: str | None, validation: bool
) -> Iterator[Callable[..., VulkanRunner]]:
    """Opens runners of the test's own, validated, too; closes those that the test leaves open."""
    from tuner.runner.vulkan import VulkanRunner

    opened: list[VulkanRunner] = []

    def open_one(**options: Any) -> VulkanRunner:
        opened.append(VulkanRunner(vulkan_selector, validation, **options))
        return opened[-1]

    yield open_one
    for runner in opened:
        runner.close()
    assert [message for runner in opened for message in runner.messages] == []


@pytest.fixture
def gpu_runner(vulkan_runner: VulkanRunner) -> VulkanRunner:
    """The runner, if it runs on a real GPU."""
    if vulkan_runner.info.is_cpu:
        pytest.skip("needs a GPU")
    return vulkan_runner


@pytest.fixture(scope="session")
def matrix_shapes(pytestconfig: pytest.Config, vulkan_runner: VulkanRunner) -> tuple[str, ...]:
    """The device's matrices of 16-bit floats, "16x8x16" …; skips (or fails) without any."""
    shapes = [each.shape for each in vulkan_runner.info.matrix_layouts]
    names = tuple(f"{each.m}x{each.n}x{each.k}" for each in shapes if each.a_type == "float16")
    if names:
        return names
    reason = "this device has no cooperative matrices of 16-bit floats whose mapping is known"
    if pytestconfig.getoption("--require-matrices"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def matrix_shape(matrix_shapes: tuple[str, ...]) -> str:
    """The first of `matrix_shapes`."""
    return matrix_shapes[0]


@pytest.fixture(autouse=True)
def _silent_validation(validation_log: list[list[str]]) -> Iterator[None]:
    """Fail the test during which the validation layer complains."""
    yield
    said = [message for log in validation_log for message in log]
    for log in validation_log:
        log.clear()
    assert said == []


def _missing(config: pytest.Config, reason: str) -> None:
    if config.getoption("--require-vulkan"):
        pytest.fail(reason)
    pytest.skip(reason)
