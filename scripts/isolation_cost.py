"""What isolation costs: the same trials in this process and in a worker, in turns.

    .venv/bin/python scripts/isolation_cost.py [--device NAME] [--seconds 50] [--shape SHAPE]

A trial is what a search does with a variant: render, compile (from the cache) and make pipelines;
then, on the device, validate, check the timed operands, take samples. Each variant, drawn at
random, is tried once in both ways without counting, and then in pairs, of which chance says which
comes first, until the time is up: a minute and a half at most with the defaults. Samples end by the
device time that they take, so that chance does not decide how many there are. Told are the wall
time and the processor time of both processes, whatever else the machine does; intervals are of
95 %, by resampling pairs.

A search makes pipelines in other threads while the device is busy: what it loses is what the part
on the device loses. Prints a table in Markdown; exit code 1 if that is proven to grow by over 5 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner import kernels
from tuner.compile import Compiler
from tuner.evaluate import Evaluator, Session
from tuner.kernels import space
from tuner.kernels.base import Values
from tuner.runner.protocol import MeasurePlan
from tuner.runner.vulkan import VulkanRunner
from tuner.runner.worker import WorkerRunner
from tuner.shapes import parse_shape

FAMILY = kernels.family("paged_decode_q8")
PLAN = MeasurePlan(settle="never", precision=0.0)
ALLOWED = 1.05
RESAMPLES = 2000
_CPU_CLOCK_OF_PROCESS = 2
"""How Linux numbers the processor-time clock of another process."""


@dataclass(frozen=True)
class Taken:
    """What one trial took, in milliseconds, and whether it was right; `device` is of `wall`."""

    wall: float
    device: float
    processor: float
    correct: bool


@dataclass(frozen=True)
class Way:
    """An evaluator in this process, or in the worker with that process id."""

    evaluator: Evaluator
    worker: int | None

    def take(self, values: Values) -> Taken:
        """Try a variant once."""
        wall, processor = time.perf_counter(), self._processor_s()
        trial = self.evaluator.prepare(self.evaluator.draft(values))
        device = time.perf_counter()
        record = self.evaluator.finish(trial)
        end = time.perf_counter()
        return Taken(
            wall=1e3 * (end - wall),
            device=1e3 * (end - device),
            processor=1e3 * (self._processor_s() - processor),
            correct=record.state == "correct",
        )

    def _processor_s(self) -> float:
        own = time.process_time()
        if self.worker is None:
            return own
        return own + time.clock_gettime(~self.worker << 3 | _CPU_CLOCK_OF_PROCESS)


def main() -> None:
    """Take turns and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device")
    parser.add_argument("--variants", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--shape", default="8x4096:h32/8:d128")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        first_s = _start_up_s(given.device, Path(cache))
        start_up_s = _start_up_s(given.device, Path(cache))
    with (
        closing(WorkerRunner(given.device)) as runner,
        closing(VulkanRunner(given.device, known=runner.info)) as own,
    ):
        pairs = take_pairs(own, runner, given)
        info = runner.info
    print(
        f"{FAMILY.name} on {given.shape}, {info.name} ({info.driver}): {len(pairs)} pairs of trials"
    )
    print(
        f"of {given.variants} variants; a worker starts in {start_up_s:.2f} s, the first ever on a "
        f"device in {first_s:.2f} s\n"
    )
    print("| a trial | in process ms | in a worker ms | more ms | ratio |\n|---|---|---|---|---|")
    tell("wall time, pipelines and all", [(a.wall, b.wall) for a, b in pairs])
    low = tell("wall time on the device", [(a.device, b.device) for a, b in pairs])
    tell("processor time", [(a.processor, b.processor) for a, b in pairs])
    sys.exit(1 if low > ALLOWED else 0)


def _start_up_s(device: str | None, cache: Path) -> float:
    began = time.perf_counter()
    with closing(WorkerRunner(device, cache_dir=cache)):
        return time.perf_counter() - began


def take_pairs(
    own: VulkanRunner, runner: WorkerRunner, given: argparse.Namespace
) -> list[tuple[Taken, Taken]]:
    """(in process, in a worker) for one variant after the other, until the time is up."""
    problem, chance = parse_shape(given.shape), np.random.default_rng(given.seed)
    compiler, session = Compiler(), Session(plan=PLAN)
    ways = [
        Way(Evaluator(own, compiler, FAMILY, problem, session=session), None),
        Way(Evaluator(runner, compiler, FAMILY, problem, session=session), runner.pid),
    ]
    variants = space.legal(FAMILY, problem, runner.info)
    drawn = [variants[int(n)] for n in chance.permutation(len(variants))[: given.variants]]
    right = [values for values in drawn if all(way.take(values).correct for way in ways)]
    if not right:
        sys.exit("none of the variants answers rightly here: another --shape or --seed may do")
    pairs: list[tuple[Taken, Taken]] = []
    until = time.perf_counter() + given.seconds
    while time.perf_counter() < until:
        values = right[len(pairs) % len(right)]
        order = chance.permutation(2)
        taken = {int(n): ways[n].take(values) for n in order}
        pairs.append((taken[0], taken[1]))
    return pairs


def tell(name: str, pairs: list[tuple[float, float]]) -> float:
    """Print a row; returns the lower end of the ratio's interval."""
    both = np.array(pairs)
    chance = np.random.default_rng(0)
    drawn = both[chance.integers(len(both), size=(RESAMPLES, len(both)))]
    ratio, (low, high) = _ratio(both), np.percentile(_ratio(drawn), (2.5, 97.5))
    more = np.median(both[:, 1] - both[:, 0])
    more_low, more_high = np.percentile(np.median(drawn[..., 1] - drawn[..., 0], -1), (2.5, 97.5))
    first, second = np.median(both, 0)
    print(
        f"| {name} | {first:.1f} | {second:.1f} | {more:.2f} ({more_low:.2f} to {more_high:.2f}) "
        f"| {ratio:.3f} ({low:.3f} to {high:.3f}) |"
    )
    return float(low)


def _ratio(pairs: npt.NDArray[Any]) -> Any:
    """Geometric mean of the pairs' ratios: every variant counts alike, and a pause of the machine
    counts little."""
    return np.exp(np.log(pairs[..., 1] / pairs[..., 0]).mean(-1))


if __name__ == "__main__":
    main()
