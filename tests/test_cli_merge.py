"""`tuner merge`: results of several runs or machines brought together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.made_records import decode, gpu, made_calibration, made_record, software
from tuner.cli import app
from tuner.device_info import DeviceInfo
from tuner.results import Store


def write(folder: Path, *contexts: int, device: DeviceInfo) -> Path:
    with Store(folder) as store:
        store.write_device(device)
        store.append_calibration(made_calibration(device))
        store.extend(made_record(decode(8, context), device=device) for context in contexts)
    return folder


def merge(*arguments: str | Path, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["merge", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def contexts(out: Path, device: DeviceInfo) -> list[int]:
    records = Store(out / device.slug, read_only=True).records()
    return [record.problem.extent for record in records]


def test_what_is_missing_comes_and_nothing_comes_twice(tmp_path: Path) -> None:
    out = tmp_path / "results"
    write(out / gpu().slug, 4096, 8192, device=gpu())
    other = write(tmp_path / "other", 8192, 16384, device=gpu())
    before = (other / "records.jsonl").read_bytes()
    told = merge(other, "--out", out).stdout
    assert told == f"{other}: 1 records, 0 calibrations into {out / gpu().slug}/\n"
    assert contexts(out, gpu()) == [4096, 8192, 16384]
    (again,) = json.loads(merge(other, "--out", out, "--json").stdout)
    assert again["brought"] == {"records": 0, "calibrations": 0}
    assert (other / "records.jsonl").read_bytes() == before


def test_each_device_below_a_folder_goes_to_its_own(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "results"
    for device in (gpu(), software()):
        write(source / device.slug, 4096, device=device)
    merge(source, "--out", out)
    assert contexts(out, gpu()) == contexts(out, software()) == [4096]
    assert Store(out / gpu().slug, read_only=True).device() == gpu()


@pytest.mark.parametrize("what", ["nowhere", "file"])
def test_what_is_not_there_is_bad_usage(tmp_path: Path, what: str) -> None:
    (tmp_path / "file").touch()
    told = merge(tmp_path / what, "--out", tmp_path / "results", code=2).stderr
    assert str(tmp_path / what) in told
    assert not (tmp_path / "results").exists()


def test_results_of_nobody_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "source", 4096, device=gpu())
    (source / "device.json").unlink()
    assert "no device.json" in merge(source, "--out", tmp_path / "results", code=1).stderr
