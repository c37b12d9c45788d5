"""What isolation costs: the same search in this process and in a worker, in turns.

    .venv/bin/python scripts/isolation_cost.py [--device NAME] [--trials N] [--turns N] [--shape S]

Both try the same variants, drawn at random with one seed, with warm caches; the wall time is that
of the search alone, start-up is told beside. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tuner import kernels
from tuner.compile import Compiler
from tuner.evaluate import Session
from tuner.results import Store
from tuner.runner.vulkan import VulkanRunner
from tuner.runner.worker import WorkerRunner
from tuner.search import Settings, tune
from tuner.workloads import parse_shape

FAMILY = kernels.family("paged_decode_q8")
Open = Callable[[str | None, Path], VulkanRunner | WorkerRunner]
WAYS: dict[str, Open] = {
    "in process": lambda device, cache: VulkanRunner(device, cache_dir=cache),
    "in a worker": lambda device, cache: WorkerRunner(device, cache_dir=cache),
}


def once(way: Open, given: argparse.Namespace, cache: Path) -> tuple[float, float, int]:
    """Seconds to start, seconds to search, variants tried."""
    started = time.perf_counter()
    runner = way(given.device, cache / "pipelines")
    opened = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(runner),
        Store(Path(folder)) as store,
    ):
        result = tune(
            runner,
            Compiler(cache / "spirv"),
            [(FAMILY, parse_shape(given.shape))],
            store,
            storage=Path(folder) / "studies.jsonl",
            settings=Settings(trials=given.trials, sampler="random", seed=1),
            session=Session(name="cost"),
        )
        return opened - started, time.perf_counter() - opened, result.measured


def main() -> None:
    """Take turns and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device")
    parser.add_argument("--trials", type=int, default=25)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--shape", default="1x1024:h32/8:d128")
    given = parser.parse_args()
    starts: dict[str, list[float]] = {name: [] for name in WAYS}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as cache:
        once(WAYS["in process"], given, Path(cache))
        for turn in range(given.turns):
            order = list(WAYS.items())
            for name, way in order if turn % 2 else reversed(order):
                start, searched, measured = once(way, given, Path(cache))
                starts[name].append(start)
                seconds[name].append(searched)
    print("| search of the same variants | median s | all s | start-up s |\n|---|---|---|---|")
    for name in WAYS:
        each = ", ".join(f"{value:.2f}" for value in seconds[name])
        median, start = statistics.median(seconds[name]), statistics.median(starts[name])
        print(f"| {name} | {median:.2f} | {each} | {start:.2f} |")
    first, second = (statistics.median(seconds[name]) for name in WAYS)
    print(f"\n{measured} variants a run; isolation costs {100 * (second / first - 1):+.1f} %")


if __name__ == "__main__":
    main()
