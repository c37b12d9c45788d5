"""What the user names as results: every command that reads some finds them in the same way."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.made_records import decode, gpu, made_record, software
from tuner import plots
from tuner.cli import app
from tuner.device_info import DeviceInfo
from tuner.results import Store

READING = [("plot",), ("export",), ("export", "--format", "t4")]


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write(folder: Path, device: DeviceInfo) -> Path:
    with Store(folder / device.slug) as store:
        store.write_device(device)
        store.append(made_record(decode(8, 16_384), {"split": "none"}, device=device))
    return folder


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return write(write(tmp_path / "results", gpu()), software())


def written(*arguments: str | Path) -> set[str]:
    """Whose results were exported, by the names of their folders."""
    told = invoke("export", "--format", "csv", *arguments)
    assert told.exit_code == 0, told.output
    return {Path(line).parent.name for line in told.stdout.splitlines()}


def test_a_device_is_named_by_folder_or_by_a_part_of_its_name(results: Path) -> None:
    one = {gpu().slug}
    assert written(results / gpu().slug) == one
    assert written("h200", "--out", results) == one
    assert written(gpu().uuid, "--out", results) == one
    assert written(results) == written("--out", results) == {gpu().slug, software().slug}


@pytest.mark.parametrize("command", [*READING, ("compare", "h200")])
def test_what_is_not_there_is_bad_usage_and_the_devices_are_named(
    results: Path, command: tuple[str, ...]
) -> None:
    told = invoke(*command, "nowhere", "--out", results)
    assert told.exit_code == 2, told.output
    assert "unknown results folder, records file or device" in told.stderr
    assert f"'nowhere': legal: {software().slug}, {gpu().slug}" in told.stderr


def test_a_picture_that_cannot_be_drawn_costs_no_other(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug of a picture")

    monkeypatch.setitem(plots.PLOTS, "history", broken)
    told = invoke("plot", "h200", "--earlier", "--out", results)
    assert told.exit_code == 1, told.output
    drawn = {Path(line).name for line in told.stdout.splitlines()}
    assert drawn == {f"{name}.png" for name in plots.PLOTS if name != "history"}
    assert "history.png: cannot be drawn: ZeroDivisionError: a bug of a picture" in told.stderr
    traced = invoke("--debug", "plot", "h200", "--earlier", "--out", results)
    assert "in broken" in traced.stderr


@pytest.mark.parametrize("command", READING)
def test_folders_without_results_and_files_are_bad_usage(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    file = tmp_path / "file.txt"
    file.write_text("no results")
    for named, says in (
        (("--out", tmp_path), "no results here: run `tuner tune` first"),
        ((file,), f"{file}: is a file: name the folder of results that it is in"),
    ):
        told = invoke(*command, *named)
        assert told.exit_code == 2, told.output
        assert says in told.stderr


def test_a_folder_and_where_to_look_for_devices_exclude_each_other(results: Path) -> None:
    for name in ("export", "plot"):
        told = invoke(name, results / gpu().slug, "--out", results)
        assert told.exit_code == 2
        assert f"{results / gpu().slug} and --out {results}: name one of them" in told.stderr


def test_what_fits_several_devices_is_ambiguous(results: Path) -> None:
    shared = gpu().uuid[:8]
    assert software().uuid.startswith(shared)
    told = invoke("plot", shared, "--out", results)
    assert told.exit_code == 2
    both = ", ".join(str(results / device.slug) for device in (software(), gpu()))
    assert f"{shared} stands for several devices: name one of {both}" in told.stderr
