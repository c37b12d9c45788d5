"""The command line as users run it: help, what it lists and shows, and bad usage."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

import tuner
from tests.commands import FAMILY, NO_DRIVER, SMALL, Run

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


def test_help_lists_every_command_and_is_fast(run_tuner: Run) -> None:
    """By processor time, which other processes lengthen little, and of the best of several."""
    shown = run_tuner("--help", code=0).out
    assert [name for name in COMMANDS if f"\n  {name} " not in shown] == []
    taken: list[float] = []
    while len(taken) < 3 or (min(taken) >= 0.3 and len(taken) < 12):
        before = _processor_s()
        run_tuner("--help", code=0)
        taken.append(_processor_s() - before)
    assert min(taken) < 0.3


def _processor_s() -> float:
    """What ended child processes have had of processors."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_imports_nothing_heavy() -> None:
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tuner", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    imported = {line.rpartition("|")[2].strip() for line in told.splitlines()}
    assert {"typer", "tuner.cli", "tuner.cli.verify"} <= imported
    heavy = {"numpy", "msgspec", "rich", "optuna", "pandas", "matplotlib", "jinja2", "vulkan"}
    assert heavy & imported == set()


_INTERRUPTED_AT_AN_IMPORT = """
import os, runpy, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
runpy.run_module("tuner", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["tuner.cli", "typer", "tuner.cli.verify", "tuner.errors"])
def test_ctrl_c_during_imports_ends_without_a_traceback(module: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_AT_AN_IMPORT, module],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (130, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(run_tuner: Run, name: str) -> None:
    shown = run_tuner(name, "--help", code=0).out
    assert f"Usage: tuner {name}" in shown
    assert "--json" in shown


def test_without_a_command_help_is_shown_as_bad_usage(run_tuner: Run) -> None:
    ran = run_tuner(code=2)
    assert "Usage: tuner" in ran.out + ran.err


def test_version(run_tuner: Run) -> None:
    assert run_tuner("--version", code=0).out == f"kvtune {tuner.__version__}\n"


def test_devices(run_tuner: Run, vulkan_selector: str | None) -> None:
    found = run_tuner("devices", "--json").json()
    assert {"name", "kind", "driver_name", "subgroup_size", "memory_heaps"} <= set(found[0])
    assert found[0]["name"] in run_tuner("devices", code=0).out


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


def test_families_does_without_a_driver(run_tuner: Run) -> None:
    ran = run_tuner("families", FAMILY, code=0, **NO_DRIVER)
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


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tunee"], "No such command 'tunee'"),
        (["tune", "--trials", "0"], "--trials"),
        (["tune", "--sampler", "tpee"], "did you mean tpe"),
        (["families", "paged"], "unknown family 'paged'"),
    ],
)
def test_bad_usage(
    run_tuner: Run, vulkan_selector: str | None, arguments: list[str], told: str
) -> None:
    ran = run_tuner(*arguments, code=2)
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
    run_tuner: Run, vulkan_selector: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "own.toml"
    path.write_text('[[problem]]\nmodel = "Phi-4"\nsequences = 1\ncontext = "long"\n')
    assert f"{path}:4: context is 'long'" in run_tuner("tune", "--workload", path, code=2).err
    path.write_text("[[problem]]\nmodel = \n")
    assert f"{path}:2: malformed TOML" in run_tuner("tune", "--workload", path, code=2).err


@pytest.mark.parametrize("arguments", [["devices"], ["tune"], ["show", FAMILY]])
def test_no_vulkan_driver(run_tuner: Run, arguments: list[str]) -> None:
    ran = run_tuner(*arguments, code=2, **NO_DRIVER)
    assert "install" in ran.err
    assert "Traceback" not in ran.err


def test_debug_shows_the_traceback_and_keeps_the_exit_code(run_tuner: Run) -> None:
    ran = run_tuner("--debug", "families", "paged", code=2)
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
    assert "lower its sequences or context" in ran.err
