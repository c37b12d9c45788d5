"""`tuner tune` in real processes with tiny budgets: what it leaves, and whatever stops it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

import tuner
from tests.commands import FAMILY, NO_DRIVER, SMALL, Ran, Run, command, only_folder
from tuner.records import SCHEMA_VERSION
from tuner.search.interrupts import ONE_S

TRIALS = 4


@pytest.fixture(scope="module")
def tuned(run_on_device: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """The results folder of a small run, and what the run said."""
    out = tmp_path_factory.mktemp("results")
    ran = run_on_device("tune", "--shape", SMALL, "--trials", TRIALS, "--out", out, code=0)
    return out, ran


@pytest.fixture
def copied(tuned: tuple[Path, Ran], tmp_path: Path) -> Path:
    """A copy of the results that a test may damage."""
    out = tmp_path / "results"
    subprocess.run(["cp", "-r", tuned[0], out], check=True)
    return out


def test_tune_leaves_results_and_says_where(tuned: tuple[Path, Ran]) -> None:
    out, ran = tuned
    folder = only_folder(out)
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert {
        "records.jsonl",
        "calibrations.jsonl",
        "device.json",
        "studies.jsonl",
        "best-config.json",
    } <= written
    for name in ("utilisation", "context", "history", "influence"):
        picture = folder / "plots" / f"{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert str(picture) in ran.out
    assert str(folder / "best-config.json") in ran.out
    assert "1x256 h8/2 d64" in ran.out
    assert "strategy=" in ran.out
    assert "read bandwidth" in ran.err
    assert f"trial {TRIALS}/{TRIALS} · best " in ran.err
    config = tuner.load_best_config(folder)
    assert config.families[FAMILY].entries[0].evidence.speedup is not None


def test_figures_of_cpu_drivers_are_said_to_mean_nothing(
    run_tuner: Run, tuned: tuple[Path, Ran], vulkan_selector: str | None
) -> None:
    kind = json.loads((only_folder(tuned[0]) / "device.json").read_text())["kind"]
    assert tuned[1].err.count("is a CPU driver: figures from it prove") == (kind == "cpu")


def test_a_second_run_measures_nothing_again(run_on_device: Run, copied: Path) -> None:
    files = [only_folder(copied) / name for name in ("records.jsonl", "calibrations.jsonl")]
    before = [file.read_bytes() for file in files]
    second = run_on_device(
        "tune", "--shape", SMALL, "--trials", TRIALS, "--out", copied, "--json"
    ).json()
    assert second["measured"] == 0
    assert second["problems"][0]["ended"] == "met before", "were templates edited meanwhile?"
    assert second["problems"][0]["best"]["state"] == "correct"
    assert second["calibration"]["read_gb_s"] > 0
    assert [file.read_bytes() for file in files] == before


def test_live_progress_on_a_terminal(environment: dict[str, str], copied: Path) -> None:
    arguments = ("tune", "--shape", SMALL, "--trials", TRIALS + 1, "--out", copied)
    reader, writer = pty.openpty()
    with subprocess.Popen(
        command(arguments),
        env={**environment, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=writer,
    ) as process:
        os.close(writer)
        shown = _read_all(reader)
    assert process.returncode == 0, shown
    assert f"trial {TRIALS + 1}/{TRIALS + 1}" in shown
    assert "━" in shown


def _read_all(reader: int) -> str:
    data = b""
    while True:
        try:
            part = os.read(reader, 65_536)
        except OSError:  # Linux's way to say that the other end is closed
            part = b""
        if not part:
            os.close(reader)
            return data.decode()
        data += part


def test_export_in_every_format_needs_no_device(run_tuner: Run, copied: Path) -> None:
    folder = only_folder(copied)
    (folder / "best-config.json").unlink()
    for name, file in (
        ("best-config", "best-config.json"),
        ("csv", "results.csv"),
        ("markdown", "results.md"),
    ):
        ran = run_tuner("export", "--format", name, "--out", copied, code=0, **NO_DRIVER)
        assert ran.out == f"{folder / file}\n"
        assert (folder / file).stat().st_size > 0
    files = run_tuner("export", folder, "--format", "t4", "--json", **NO_DRIVER).json()["files"]
    assert json.loads(Path(files[0]).read_text())["schema_version"] == "1.0.0"


def test_plot_draws_every_picture_again(run_tuner: Run, copied: Path) -> None:
    plots = only_folder(copied) / "plots"
    for picture in plots.iterdir():
        picture.unlink()
    printed = run_tuner("plot", "--out", copied, code=0, **NO_DRIVER).out.split()
    assert sorted(map(Path, printed)) == sorted(plots.glob("*.png"))
    assert len(printed) == 4


def test_what_is_too_large_and_an_empty_context_cost_no_other_problem(
    run_on_device: Run, tmp_path: Path
) -> None:
    shapes = ("1x0:h8/8:d64", "64000x128k:h8/8:d64", SMALL)
    arguments = [word for shape in shapes for word in ("--shape", shape)]
    ran = run_on_device("tune", *arguments, "--trials", 2, "--out", tmp_path, code=1)
    assert "left out: 64000x131072 h8/8 d64 needs " in ran.err
    assert "Traceback" not in ran.err
    rows = [line.split()[:2] + line.split()[-2:] for line in ran.out.splitlines()[2:5]]
    assert rows == [
        ["1x0", "h8/8", "1", "0"],
        ["64000x131072", "h8/8", "0", "0"],
        ["1x256", "h8/2", "1", "0"],
    ]
    assert len(tuner.load_best_config(only_folder(tmp_path)).families[FAMILY].entries) == 2
    assert (only_folder(tmp_path) / "plots" / "context.png").is_file()
    few = run_on_device("tune", *arguments, "--trials", 1, "--out", tmp_path / "few", code=2)
    assert "trials is 1 for 2 problems" in few.err


def test_ctrl_c_keeps_everything_and_exports_the_best(
    environment: dict[str, str], run_on_device: Run, tmp_path: Path
) -> None:
    arguments = ("tune", "--shape", SMALL, "--seconds", 120, "--out", tmp_path)
    with subprocess.Popen(
        command(arguments), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        _wait_for_records(tmp_path, process, 3)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # As from a wrapper that passes on the terminal's.
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert b"stopping after the trial at work" in err
    assert b"interrupted: run the same command again to go on" in err
    assert b"best-config.json" in out
    assert b"Traceback" not in err
    assert tuner.load_best_config(only_folder(tmp_path)).families
    lines = (only_folder(tmp_path) / "records.jsonl").read_text().splitlines()
    again = run_on_device(
        "tune", "--shape", SMALL, "--trials", len(lines), "--out", tmp_path, "--json"
    ).json()
    assert again["problems"][0]["trials"] >= len(lines) - 1


def test_a_second_ctrl_c_quits_at_once_though_the_device_hangs(
    environment: dict[str, str], run_on_device: Run, tmp_path: Path
) -> None:
    arguments = ("tune", "--shape", SMALL, "--seconds", 300, "--out", tmp_path)
    with subprocess.Popen(command(arguments), env=environment, stderr=subprocess.PIPE) as process:
        _wait_for_records(tmp_path, process, 1)
        (worker,) = psutil.Process(process.pid).children()
        worker.suspend()
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        said = next(line for line in process.stderr if b"stopping after" in line)
        assert b"Ctrl-C again quits at once" in said
        time.sleep(ONE_S + 0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    worker.kill()
    assert process.returncode == 130, err
    folder = only_folder(tmp_path)
    assert f"`tuner export {folder}` to export the best so far" in err.decode()
    assert b"Traceback" not in err
    assert not (folder / "best-config.json").exists()
    run_on_device("export", folder, code=0)
    assert tuner.load_best_config(folder).families


def _wait_for_records(out: Path, process: subprocess.Popen[bytes], count: int) -> None:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        if (
            sum(len(path.read_bytes().splitlines()) for path in out.glob("*/records.jsonl"))
            >= count
        ):
            return
        time.sleep(0.1)
    raise AssertionError("no records came")


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(
    run_on_device: Run, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    ran = run_on_device("tune", "--shape", SMALL, "--out", tmp_path / "file", code=1)
    assert str(tmp_path / "file") in ran.err
    assert "Traceback" not in ran.err
    assert "read bandwidth" not in ran.err


def test_results_of_another_schema_version_are_refused(
    run_tuner: Run, run_on_device: Run, copied: Path
) -> None:
    path = only_folder(copied) / "records.jsonl"
    text = path.read_text().replace(
        f'"schema_version":{SCHEMA_VERSION}', f'"schema_version":{SCHEMA_VERSION + 1}'
    )
    path.write_text(text)
    for ran in (
        run_on_device("tune", "--shape", SMALL, "--out", copied, code=1),
        run_tuner("export", "--out", copied, code=1),
        run_tuner("plot", "--out", copied, code=1),
    ):
        assert f"{path}:1: " in ran.err
        assert "Traceback" not in ran.err
    assert path.read_text() == text


def test_a_torn_last_line_is_told_and_costs_only_itself(run_tuner: Run, copied: Path) -> None:
    path = only_folder(copied) / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    ran = run_tuner("export", "--format", "csv", "--out", copied, code=0)
    assert "cut off" in ran.err
    assert len((only_folder(copied) / "results.csv").read_text().splitlines()) > 1
