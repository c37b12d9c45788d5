"""What isolation costs: the same search in this process and in a worker, in turns.

    .venv/bin/python scripts/isolation_cost.py [--device NAME] [--trials N] [--turns N] [--shape S]

Both try the same variants, drawn at random with one seed, with warm caches; the wall time is that
of the search alone, start-up is told beside. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tuner import kernels
from tuner.compile import Compiler
from tuner.evaluate import Session
from tuner.results import Store
from tuner.runner.vulkan import VulkanRunner
from tuner.runner.worker import WorkerRunner
from tuner.search import Settings, tune
from tuner.shapes import parse_shape

FAMILY = kernels.family("paged_decode_q8")
Open = Callable[[str | None, Path], VulkanRunner | WorkerRunner]
WAYS: dict[str, Open] = {
    "in process": lambda device, cache: VulkanRunner(device, cache_dir=cache),
    "in a worker": lambda device, cache: WorkerRunner(device, cache_dir=cache),
}


@dataclass(frozen=True)
class Cost:
    """Seconds of wall time to start and to search, of processor time in all; variants tried."""

    start: float
    search: float
    processor: float
    measured: int


def once(way: Open, given: argparse.Namespace, cache: Path) -> Cost:
    """One run."""
    used, started = processor_seconds(), time.perf_counter()
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
        searched = time.perf_counter() - opened
    # Only now, as a worker's time counts once the worker has ended.
    return Cost(opened - started, searched, processor_seconds() - used, result.measured)


def processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def main() -> None:
    """Take turns and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device")
    parser.add_argument("--trials", type=int, default=25)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--shape", default="1x1024:h32/8:d128")
    given = parser.parse_args()
    costs: dict[str, list[Cost]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as cache:
        once(WAYS["in process"], given, Path(cache))
        for turn in range(given.turns):
            order = list(WAYS.items())
            for name, way in order if turn % 2 else reversed(order):
                costs[name].append(once(way, given, Path(cache)))
    print(f"{costs['in a worker'][0].measured} variants a run, medians of {given.turns} runs:\n")
    print("| | search s | least s | processor s | start-up s |\n|---|---|---|---|---|")
    rows = {name: medians(found) for name, found in costs.items()}
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in row) + " |")
    first, second = rows.values()
    changes = (f"{100 * (b / a - 1):+.1f} %" for a, b in zip(first, second, strict=True))
    print("| isolation costs | " + " | ".join(list(changes)[:3]) + " | |")


def medians(costs: list[Cost]) -> tuple[float, float, float, float]:
    """Search, the least of these, processor, start-up."""
    return (
        statistics.median(cost.search for cost in costs),
        min(cost.search for cost in costs),
        statistics.median(cost.processor for cost in costs),
        statistics.median(cost.start for cost in costs),
    )


if __name__ == "__main__":
    main()
