"""Two equal tuning runs on a real device, one of them beset by faults: do both find the same best?

    .venv/bin/python scripts/fault_experiment.py FOLDER [--device NAME] [--trials N] [--shape SHAPE]

In the second run one variant is made to answer wrongly, one to ask for more threads than a device
has, and the worker process is killed twice by a signal while it works. Nothing here hangs a device
or writes out of bounds, so it may run on a shared GPU. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from tuner import kernels, templates
from tuner.compile import Compiler
from tuner.evaluate import Session
from tuner.results import Store
from tuner.runner.worker import WorkerRunner
from tuner.search import RunResult, Settings, tune
from tuner.shapes import parse_shape
from tuner.templates import Rendered

FAMILY = kernels.family("paged_decode_q8")
KILLED_AFTER_S = (3.0, 5.0)
WRONG = {"strategy": "scalar_f32", "pass_name": "attend"}
TOO_WIDE = {"strategy": "packed_f16", "pass_name": "attend"}


def broken_render(template: str, context: Mapping[str, Any]) -> Rendered:
    """Render, but for the first two kinds of start points as kernels gone wrong."""
    rendered = templates.render(template, context)
    text = rendered.text
    if all(context.get(name) == value for name, value in WRONG.items()):
        text = text.replace("push.softmax_scale", "(1.05 * push.softmax_scale)")
    if all(context.get(name) == value for name, value in TOO_WIDE.items()):
        size = context["subgroup_size"] * context["subgroups"]
        text = text.replace(f"local_size_x = {size}", "local_size_x = 65536")
    return dataclasses.replace(rendered, text=text)


def kill_now_and_then(runner: WorkerRunner, done: threading.Event) -> None:
    """Kill the worker at the times of `KILLED_AFTER_S`."""
    started = time.monotonic()
    for after in KILLED_AFTER_S:
        if done.wait(max(0.0, started + after - time.monotonic())):
            return
        os.kill(runner.pid, signal.SIGKILL)


def run(folder: Path, device: str | None, shape: str, trials: int, *, faults: bool) -> RunResult:
    """One tuning run with its records in `folder`."""
    done = threading.Event()
    with closing(WorkerRunner(device)) as runner, Store(folder) as store:
        killer = threading.Thread(target=kill_now_and_then, args=(runner, done))
        if faults:
            killer.start()
        try:
            return tune(
                runner,
                Compiler(),
                [(FAMILY, parse_shape(shape))],
                store,
                storage=folder / "studies.jsonl",
                settings=Settings(trials=trials, seed=1),
                session=Session(name="faults" if faults else "calm"),
                render=broken_render if faults else templates.render,
            )
        finally:
            done.set()
            if faults:
                killer.join()
                print(f"workers lost: {runner.losses}")


def main() -> None:
    """Run both and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--shape", default="8x4096:h32/8:d128")
    given = parser.parse_args()
    print("| run | records | states | best µs | best variant |\n|---|---|---|---|---|")
    errors: Counter[str] = Counter()
    for name, faults in (("calm", False), ("faults", True)):
        folder = given.folder / name
        result = run(folder, given.device, given.shape, given.trials, faults=faults)
        with Store(folder, read_only=True) as store:
            records = list(store.records())
        states = Counter(record.state for record in records)
        best = result.problems[0].best
        assert best is not None
        values = " ".join(f"{k}={v}" for k, v in best.values.items() if v != FAMILY.baseline[k])
        time_us = f"{(best.median_ns or 0.0) / 1e3:.2f}"
        print(f"| {name} | {len(records)} | {dict(states)} | {time_us} | {values} |")
        errors.update(f"{r.state}: {r.error}"[:160] for r in records if r.state != "correct")
    for error, count in errors.items():
        print(f"- {count} x {error}")


if __name__ == "__main__":
    main()
