"""Files that are none of the tuner's, where results are wanted: what they are told to be."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.made_records import decode, gpu, made_calibration, made_record
from tuner.cli import app
from tuner.results import Store
from tuner.results.journal import encode_line

OTHERS = {
    "lines": b'{"trial": 1}\n{"trial": 2}\n',
    "document": b'{\n  "trials": [1, 2]\n}\n',
    "text": b"hello\nworld\n",
    "bytes": bytes(range(256)) * 8,
}
RECORD = encode_line(made_record(decode(8, 16_384)))
COMMANDS = {
    "compare": ("compare",),
    "export": ("export", "--format", "csv"),
    "plot": ("plot",),
    "merge": ("merge",),
}


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def told(good: Path, name: str, wrong: Path, *, code: int = 2) -> str:
    """What a command says of what it is given, which must be bad usage."""
    rest = (good,) if name == "compare" else ()
    more = ("--out", wrong.parent / "into") if name == "merge" else ()
    ran = invoke(*COMMANDS[name], wrong, *rest, *more)
    assert ran.exit_code == code, ran.output
    assert ran.stdout == ""
    assert not (wrong.parent / "into").exists()
    return ran.stderr


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A folder of results."""
    with Store(tmp_path / "good") as store:
        store.write_device(gpu())
        store.append(made_record(decode(8, 16_384)))
    return tmp_path / "good"


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("data", OTHERS.values(), ids=list(OTHERS))
def test_records_that_are_none_are_no_results_file(good: Path, name: str, data: bytes) -> None:
    records = good.parent / "wrong" / "records.jsonl"
    records.parent.mkdir()
    records.write_bytes(data)
    said = told(good, name, records.parent)
    assert f"{records}: is no results file of kvtune: a record was expected in each line" in said
    assert "move this file out of its way" in said
    assert "delete" not in said
    assert records.read_bytes() == data


@pytest.mark.parametrize("data", OTHERS.values(), ids=list(OTHERS))
def test_a_file_of_somebody_else_is_no_results_file(good: Path, data: bytes) -> None:
    other = good.parent / "other.jsonl"
    other.write_bytes(data)
    said = told(good, "compare", other)
    assert f"{other}: is no results file of kvtune" in said
    assert "delete" not in said


@pytest.mark.parametrize("data", [b"", b"one line", b'{"trial": 1}\n'])
def test_a_file_without_records_is_no_crash_of_the_tuner(good: Path, data: bytes) -> None:
    file = good.parent / "file"
    file.write_bytes(data)
    said = told(good, "compare", file)
    assert f"{file}: holds no records: `tuner tune` writes them" in said
    assert "crash" not in said


def test_a_damaged_line_among_records_may_be_deleted(good: Path) -> None:
    records = good / "records.jsonl"
    for line, data in ((1, b"damage\n" + RECORD), (2, RECORD + RECORD[:99] + b"\n" + RECORD)):
        records.write_bytes(data)
        for name in COMMANDS:
            said = told(good, name, good, code=1)
            assert f"{records}:{line}: damaged line" in said
            assert "delete this line to go on without it" in said


def test_another_file_of_the_tuners_is_said_to_be_that(good: Path) -> None:
    calibrations = good / "calibrations.jsonl"
    calibrations.write_bytes(encode_line(made_calibration()))
    said = told(good, "compare", calibrations, code=1)
    assert f"{calibrations}:1: not a Record" in said
    assert "another of the tuner's files" in said
    assert "is no results file of kvtune" in told(good, "compare", good / "device.json")


@pytest.mark.parametrize("name", COMMANDS)
def test_an_empty_folder_is_told_what_was_expected_in_it(good: Path, name: str) -> None:
    empty = good.parent / "empty"
    empty.mkdir()
    said = told(good, name, empty)
    assert f"{empty}: no results in this folder: there is no `records.jsonl` in it" in said


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_path_is_said_to_be_missing(
    good: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(good.parent)
    said = told(good, name, good.parent / "missing")
    wanted = "no such folder of results" if name == "merge" else "no such file or folder, and no"
    assert f"{good.parent / 'missing'}: {wanted}" in said


def test_a_wrong_snapshot_is_not_to_be_deleted(good: Path) -> None:
    snapshot = good / "device.json"
    snapshot.write_bytes(b'{"name": "another program\'s"}\n')
    for name in ("compare", "merge", "plot"):
        said = told(good, name, good, code=1)
        assert f"{snapshot}: no device snapshot of kvtune: Object missing required field" in said
        assert "move it away" in said
        assert "delete" not in said
