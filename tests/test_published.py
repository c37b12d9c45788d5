"""The committed results: what engines and readers are offered can be made today."""

from __future__ import annotations

from pathlib import Path

import pytest

import tuner
from tuner.compile import Compiler
from tuner.evaluate import Currency
from tuner.results import Store

PUBLISHED = Path(__file__).parents[1] / "results" / "published"
FOLDERS = sorted(path.parent for path in PUBLISHED.glob("*/records.jsonl"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_published_entry_is_a_kernel_of_today(folder: Path) -> None:
    """Where sources have changed, `tuner tune` with that device makes the folder anew (`make tune`
    for the CPU driver), or `tuner export FOLDER` leaves out what is not of today."""
    store = Store(folder, read_only=True)
    device = store.device()
    assert device is not None
    currency = Currency(device, Compiler().identity)
    known = {record.variant: record for record in store.records()}
    config = tuner.load_best_config(folder)
    offered = [
        (name, entry) for name, family in config.families.items() for entry in family.entries
    ]
    assert offered
    for name, entry in offered:
        record = known[entry.evidence.variant]
        assert (record.family, record.problem) == (name, entry.problem)
        assert currency.objection(record) is None, record.problem.label
        for each in entry.passes:
            assert (folder / each.spirv).is_file()


def test_there_are_results_of_a_gpu_and_of_the_cpu_driver() -> None:
    assert {folder.name for folder in FOLDERS} >= {"nvidia-h200", "llvmpipe"}
