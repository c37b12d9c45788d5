"""The notebook runs from top to bottom on made-up and on committed results, and is kept clean."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.made_records import decode, gpu, made_calibration, made_record, made_run, software
from tuner.device_info import DeviceInfo
from tuner.results import Store, device_folders
from tuner.results.outcomes import declared_baseline

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "notebooks" / "compare.ipynb"


def run(results: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The executed notebook. The kernel finds the package where this process does."""
    monkeypatch.setenv("KVTUNE_RESULTS", str(results))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=180, kernel_name="python3")
    return client.execute(cwd=str(results))


def fill(folder: Path, device: DeviceInfo, seed: int) -> None:
    with Store(folder / device.slug) as store:
        store.write_device(device)
        store.append_calibration(made_calibration(device))
        problems = [decode(1, 4096), decode(8, 4096)]
        baseline = dict(declared_baseline("paged_decode_q8") or {})
        store.extend(made_run(problems, device=device, trials=12, seed=seed))
        store.extend(made_record(p, baseline, median_us=9e5, device=device) for p in problems)


def outputs(notebook: Any, kind: str) -> list[str]:
    return [
        output["data"][kind]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if kind in output.get("data", {})
    ]


def test_the_notebook_compares_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, device in enumerate((gpu(), software())):
        fill(tmp_path, device, seed)
    done = run(tmp_path, monkeypatch)
    tables = "\n".join(outputs(done, "text/html"))
    for name in ("NVIDIA H200", "llvmpipe (LLVM 15.0.6, 256 bits)", "1x4096 h32/8 d128", "speedup"):
        assert name in tables
    # One comparison, and four figures a device.
    assert len(outputs(done, "image/png")) == 1 + 2 * 4
    streams = [o for c in done.cells if c.cell_type == "code" for o in c.outputs if "name" in o]
    assert [o["text"] for o in streams] == []


def test_the_notebook_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CellExecutionError, match=r"no results below .*: run `tuner tune` first"):
        run(tmp_path, monkeypatch)


def test_the_notebook_shows_published_results_of_other_devices_than_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = ROOT / "results" / "published"
    (tmp_path / "published").symlink_to(committed)
    names = {folder.name for folder in device_folders(committed)}
    assert {"nvidia-h200", "llvmpipe"} <= names
    own = msgspec.structs.replace(software(), name="llvmpipe (my own)")
    assert own.slug in names
    fill(tmp_path, own, 1)
    done = run(tmp_path, monkeypatch)
    assert len(outputs(done, "image/png")) == 1 + 4 * len(names)
    listed = outputs(done, "text/html")[0]
    assert "of today&#x27;s kernels" in listed or "of today's kernels" in listed
    assert "published/nvidia-h200" in listed
    assert own.name in listed
    assert "published/llvmpipe" not in listed


def test_the_committed_notebook_has_no_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_the_committed_notebook_names_no_machine_path() -> None:
    text = NOTEBOOK.read_text()
    assert "/home" not in text
    assert str(ROOT) not in text
