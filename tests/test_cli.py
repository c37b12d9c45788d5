"""The command line as users run it: real processes on a real device, with tiny budgets."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import tuner
from tuner.records import SCHEMA_VERSION
from tuner.search.interrupts import ONE_S

COMMANDS = (
    "devices",
    "families",
    "show",
    "verify",
    "calibrate",
    "bench",
    "tune",
    "compare",
    "merge",
    "export",
    "plot",
)
FAMILY = "paged_decode_q8"
SMALL = "1x256:h8/2:d64"
"""A problem that every driver ends in milliseconds."""
TRIALS = 4


@dataclass(frozen=True)
class Ran:
    """What a process left behind."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of the processes, with a cache of their own."""
    cache = tmp_path_factory.mktemp("cache")
    return {**os.environ, "XDG_CACHE_HOME": str(cache), "COLUMNS": "100"}


@pytest.fixture(scope="module")
def run(environment: dict[str, str]) -> Run:
    """Runs `python -m tuner`; a device is not needed for every command."""

    def run_one(*arguments: object, code: int | None = None, **changes: str) -> Ran:
        done = subprocess.run(
            command(arguments),
            env={**environment, **changes},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        ran = Ran(done.returncode, done.stdout, done.stderr)
        assert code is None or ran.code == code, ran
        return ran

    return run_one


@pytest.fixture(scope="module")
def run_on_device(run: Run, vulkan_selector: str | None) -> Run:
    """As `run`, on the device under test; the test is skipped where there is none."""

    def run_one(name: str, *arguments: object, **options: Any) -> Ran:
        device = () if vulkan_selector is None else ("--device", vulkan_selector)
        return run(name, *arguments, *device, **options)

    return run_one


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


def command(arguments: Sequence[object]) -> list[str]:
    return [sys.executable, "-m", "tuner", *map(str, arguments)]


def only_folder(out: Path) -> Path:
    (folder,) = (path for path in out.iterdir() if path.is_dir())
    return folder


# Help and start-up


def test_help_lists_every_command_and_is_fast(run: Run) -> None:
    shown = run("--help", code=0).out
    assert [name for name in COMMANDS if f"\n  {name} " not in shown] == []
    walls, processors = [], []
    for _ in range(5):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        run("--help", code=0)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        walls.append(time.perf_counter() - started)
        processors.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(processors) < 0.3
    assert min(walls) < 0.45, "0.3 s and slack for a busy machine"


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, tuner.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"numpy", "msgspec", "rich", "optuna", "pandas", "matplotlib", "jinja2", "vulkan"}
    assert heavy & set(done.stdout.split()) == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(run: Run, name: str) -> None:
    shown = run(name, "--help", code=0).out
    assert f"Usage: tuner {name}" in shown
    assert "--json" in shown


def test_without_a_command_help_is_shown_as_bad_usage(run: Run) -> None:
    ran = run(code=2)
    assert "Usage: tuner" in ran.out + ran.err


def test_version(run: Run) -> None:
    assert run("--version", code=0).out == f"kvtune {tuner.__version__}\n"


# What there is


def test_devices(run: Run, vulkan_selector: str | None) -> None:
    found = run("devices", "--json").json()
    assert {"name", "kind", "driver_name", "subgroup_size", "memory_heaps"} <= set(found[0])
    assert found[0]["name"] in run("devices", code=0).out


def test_families_tells_parameters_and_legal_sizes(run_on_device: Run) -> None:
    (entry,) = run_on_device("families", FAMILY, "--json", "--shape", SMALL).json()
    assert 0 < entry["legal_variants"] < entry["combinations"]
    for parameter in entry["parameters"]:
        assert parameter["help"]
        assert set(parameter["legal_values"]) <= set(parameter["values"])
    shown = run_on_device("families", FAMILY, "--shape", SMALL, code=0).out
    assert f"{entry['legal_variants']:,}" in shown
    assert all(parameter["name"] in shown for parameter in entry["parameters"])
    assert FAMILY in run_on_device("families", code=0).out


def test_families_does_without_a_driver(run: Run) -> None:
    ran = run("families", FAMILY, code=0, **NO_DRIVER)
    assert "no device" in ran.err
    assert "strategy = " in ran.out


def test_show_prints_glsl_that_names_its_parameters(run_on_device: Run) -> None:
    ran = run_on_device("show", FAMILY, "--set", "strategy=baseline", "--shape", SMALL, code=0)
    assert ran.out.startswith(f"// {FAMILY} for 1x256 h8/2 d64 on ")
    assert "//   --set strategy=baseline\n" in ran.out
    assert "#version 460" in ran.out
    shown = run_on_device(
        "show", FAMILY, "--set", "split=count:2", "--shape", SMALL, "--json"
    ).json()
    names = [each["name"] for each in shown["passes"]]
    assert shown["values"]["split"] == "count:2"
    assert len(names) == 2
    only = run_on_device(
        "show", FAMILY, "--set", "split=count:2", "--shape", SMALL, "--pass", names[1], code=0
    ).out
    assert f"// pass {names[1]}:" in only
    assert f"// pass {names[0]}:" not in only


# Bad usage: a message, no traceback, exit code 2

NO_DRIVER = {"VK_DRIVER_FILES": "/nowhere.json", "VK_ICD_FILENAMES": "/nowhere.json"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tunee"], "No such command 'tunee'"),
        (["tune", "--trials", "0"], "--trials"),
        (["tune", "--sampler", "tpee"], "did you mean tpe"),
        (["families", "paged"], "unknown family 'paged'"),
    ],
)
def test_bad_usage(run: Run, vulkan_selector: str | None, arguments: list[str], told: str) -> None:
    ran = run(*arguments, code=2)
    assert told in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""


def test_an_illegal_variant_is_refused_with_reason_and_way_out(run_on_device: Run) -> None:
    ran = run_on_device(
        "bench", FAMILY, "--shape", "1x64:h2/1:d64", "--set", "lanes_per_token=64", code=2
    )
    assert "64 lanes" in ran.err
    assert "nearest legal: change to lanes_per_token=" in ran.err


def test_a_malformed_workload_is_refused_with_file_and_line(
    run: Run, vulkan_selector: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "own.toml"
    path.write_text('[[problem]]\nmodel = "Phi-4"\nsequences = 1\ncontext = "long"\n')
    assert f"{path}:4: context is 'long'" in run("tune", "--workload", path, code=2).err
    path.write_text("[[problem]]\nmodel = \n")
    assert f"{path}:2: malformed TOML" in run("tune", "--workload", path, code=2).err


@pytest.mark.parametrize("arguments", [["devices"], ["tune"], ["show", FAMILY]])
def test_no_vulkan_driver(run: Run, arguments: list[str]) -> None:
    ran = run(*arguments, code=2, **NO_DRIVER)
    assert "install" in ran.err
    assert "Traceback" not in ran.err


def test_debug_shows_the_traceback_and_keeps_the_exit_code(run: Run) -> None:
    ran = run("--debug", "families", "paged", code=2)
    assert "Traceback" in ran.err
    assert "UnknownNameError: unknown family 'paged'" in ran.err


@pytest.mark.parametrize("arguments", [["bench", FAMILY], ["tune"]])
def test_what_cannot_fit_is_refused_beforehand_with_sizes(
    run_on_device: Run, tmp_path: Path, arguments: list[str]
) -> None:
    if arguments == ["tune"]:
        arguments = [*arguments, "--out", str(tmp_path)]
    huge = ("--shape", "8192x131072:h64/8:d128")
    ran = run_on_device(*arguments, *huge, code=1)
    assert "needs 2,1" in ran.err
    assert "MiB" in ran.err
    assert "use fewer sequences" in ran.err


# One whole run


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
    run: Run, tuned: tuple[Path, Ran], vulkan_selector: str | None
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


def test_export_in_every_format_needs_no_device(run: Run, copied: Path) -> None:
    folder = only_folder(copied)
    (folder / "best-config.json").unlink()
    for name, file in (
        ("best-config", "best-config.json"),
        ("csv", "results.csv"),
        ("markdown", "results.md"),
    ):
        ran = run("export", "--format", name, "--out", copied, code=0, **NO_DRIVER)
        assert ran.out == f"{folder / file}\n"
        assert (folder / file).stat().st_size > 0
    files = run("export", folder, "--format", "t4", "--json", **NO_DRIVER).json()["files"]
    assert json.loads(Path(files[0]).read_text())["schema_version"] == "1.0.0"


def test_plot_draws_every_picture_again(run: Run, copied: Path) -> None:
    plots = only_folder(copied) / "plots"
    for picture in plots.iterdir():
        picture.unlink()
    printed = run("plot", "--out", copied, code=0, **NO_DRIVER).out.split()
    assert sorted(map(Path, printed)) == sorted(plots.glob("*.png"))
    assert len(printed) == 4


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


# Damaged results, folders that cannot be written


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(
    run_on_device: Run, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    ran = run_on_device("tune", "--shape", SMALL, "--out", tmp_path / "file", code=1)
    assert str(tmp_path / "file") in ran.err
    assert "Traceback" not in ran.err
    assert "read bandwidth" not in ran.err


def test_results_of_another_schema_version_are_refused(
    run: Run, run_on_device: Run, copied: Path
) -> None:
    path = only_folder(copied) / "records.jsonl"
    text = path.read_text().replace(
        f'"schema_version":{SCHEMA_VERSION}', f'"schema_version":{SCHEMA_VERSION + 1}'
    )
    path.write_text(text)
    for ran in (
        run_on_device("tune", "--shape", SMALL, "--out", copied, code=1),
        run("export", "--out", copied, code=1),
        run("plot", "--out", copied, code=1),
    ):
        assert f"{path}:1: " in ran.err
        assert "Traceback" not in ran.err
    assert path.read_text() == text


def test_a_torn_last_line_is_told_and_costs_only_itself(run: Run, copied: Path) -> None:
    path = only_folder(copied) / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    ran = run("export", "--format", "csv", "--out", copied, code=0)
    assert "cut off" in ran.err
    assert len((only_folder(copied) / "results.csv").read_text().splitlines()) > 1


# Single measurements


def test_calibrate_stores_what_it_measures_and_draws_it(
    run_on_device: Run, tmp_path: Path, vulkan_selector: str | None
) -> None:
    ran = run_on_device("calibrate", "--out", tmp_path, "--plot", code=0)
    lines = (only_folder(tmp_path) / "calibrations.jsonl").read_text().splitlines()
    stored = json.loads(lines[0])["content"]
    sizes = [nbytes for nbytes, _ in stored["points"]]
    assert sizes == sorted(sizes)
    assert stored["read_gb_s"] == stored["points"][-1][1] > 0
    assert [curve["transfer"] for curve in stored["curves"]] == ["read", "write", "copy"]
    assert [floor["passes"] for floor in stored["floors"]] == [1, 2, 3]
    assert all(floor["batched_ns"] > 0 for floor in stored["floors"])
    assert "launch floor of 2 passes: " in ran.out
    assert "256 KiB" in ran.out
    assert (only_folder(tmp_path) / "plots" / "bandwidth.png").is_file()
    assert ran.err.count("is a CPU driver") <= 1


def test_bench_compares_a_variant_with_the_baseline(run_on_device: Run) -> None:
    arguments = ("bench", FAMILY, "--shape", SMALL, "--set", "split=count:2")
    measured = run_on_device(*arguments, "--json").json()
    assert [each["state"] for each in measured["records"]] == ["correct", "correct"]
    baseline, variant = (each["values"] for each in measured["records"])
    assert (baseline["strategy"], variant["split"]) == ("baseline", "count:2")
    assert [each["passes"] for each in measured["records"]] == [1, 2]
    assert [each["passes"] for each in measured["calibration"]["floors"]] == [1, 2]
    shown = run_on_device(*arguments, "--no-baseline", "--measure", "batched", code=0).out
    assert "variant: strategy=" in shown
    assert re.search(r"variant +[\d.,]+ .* \d+ x \d+ +(budget|precise|max_samples) ", shown)
    assert "launch floor of 2 passes: " in shown
    assert "baseline" not in shown


def test_verify_passes_and_counts(run_on_device: Run) -> None:
    ran = run_on_device("verify", FAMILY, "--variants", 3, "--shape", SMALL, code=0)
    assert "all answers are right" in ran.out
    assert "verified: 3/3" in ran.err
    writes = "cache_write:kv_heads=1,head_size=64,tokens=4"
    arguments = ("verify", "--all-families", "--variants", 2, "--shape", writes, "--json")
    batches = run_on_device(*arguments).json()["batches"]
    assert [each["family"] for each in batches] == ["cache_write_f32", "cache_write_q8"]
    assert [(each["variants"], each["failures"]) for each in batches] == [(2, [])] * 2


def test_verify_takes_only_the_variants_asked_for(run_on_device: Run) -> None:
    asked = {"strategy": ["teams"], "subgroups": [1, 4]}
    only = [w for name in asked for value in asked[name] for w in ("--only", f"{name}={value}")]
    report = run_on_device("verify", "kv_append_q8", *only, "--variants", "values", "--json").json()
    covered = report["covered"]["kv_append_q8"]
    assert {name: covered[name] for name in asked} == asked
    assert covered["halves"] == [1, 2]
    first, *others = (batch["variants"] for batch in report["batches"])
    assert first >= len(covered["lanes"]) > 1
    assert set(others) == {1}


def test_verify_asks_each_family_for_what_it_has_of_only(run_on_device: Run) -> None:
    writes = "cache_write:kv_heads=1,head_size=64,tokens=4"
    arguments = ["verify", "--all-families", "--shape", writes, "--variants", "values", "--json"]
    for text in ("strategy=direct", "strategy=teams", "threads=64", "lanes=8", "width=4"):
        arguments += ["--only", text]
    covered = run_on_device(*arguments).json()["covered"]
    assert set(covered) == {"cache_write_f32", "cache_write_q8"}
    of_floats, of_codes = covered["cache_write_f32"], covered["cache_write_q8"]
    assert (of_floats["strategy"], of_floats["threads"]) == (["direct"], [64])
    assert (of_codes["strategy"], of_codes["lanes"]) == (["teams"], [8])
    assert of_floats["width"] == of_codes["width"] == [4]
    refused = run_on_device(*arguments, "--only", "threads=65", code=2)
    assert "--only threads=65: no family has that" in refused.err


@pytest.mark.parametrize(
    ("only", "says"),
    [
        (["strategy"], "'strategy' is no assignment"),
        (["strategie=teams"], "did you mean strategy"),
        (["strategy=team"], "did you mean teams"),
        (["strategy=baseline", "halves=2"], "no such variant is legal"),
    ],
)
def test_verify_refuses_what_it_cannot_take_only(
    run_on_device: Run, only: list[str], says: str
) -> None:
    options = [word for text in only for word in ("--only", text)]
    assert says in run_on_device("verify", "kv_append_q8", *options, code=2).err
