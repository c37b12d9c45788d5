"""The files of an export: what is removed, what is not, and one export at a time."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

import tuner
from tests.toy_export import BASE, FAST, export, toy_record
from tests.toy_family import toy_problem
from tuner.errors import InputFileError, ResultsError
from tuner.export import bundle
from tuner.export.best_config import BestConfig
from tuner.results.lock import FolderLock

FASTER = {**FAST, "unroll": 4}


def named(config: BestConfig) -> set[str]:
    entries = (entry for family in config.families.values() for entry in family.entries)
    return {Path(each.spirv).name for entry in entries for each in entry.passes}


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "spirv").iterdir()}


def test_spirv_that_is_no_longer_named_goes_and_what_still_is_stays(tmp_path: Path) -> None:
    other = toy_problem(4, 64)
    before, _ = export(tmp_path, [toy_record(BASE, 9.0, problem=other), toy_record(FAST, 10.0)])
    after, _ = export(tmp_path, [toy_record(FASTER, 5.0)])
    assert named(before) - named(after)
    assert named(before) & named(after)
    assert files(tmp_path) == named(after)


def test_what_an_export_has_not_written_stays(tmp_path: Path) -> None:
    export(tmp_path, [toy_record(FAST)])
    spirv, content = tmp_path / "spirv", b"not what its name says"
    mine = {
        "notes.txt": b"",
        "mine.spv": b"",
        "0" * 63 + ".spv": content,
        "0" * 64 + ".spv": content,
        "0" * 64 + ".spv.bak": content,
    }
    for name, data in mine.items():
        (spirv / name).write_bytes(data)
    (spirv / f"{'1' * 64}.spv").mkdir()
    elsewhere = tmp_path / hashlib.sha256(b"linked").hexdigest()
    elsewhere.write_bytes(b"linked")
    (spirv / f"{elsewhere.name}.spv").symlink_to(elsewhere)
    after, _ = export(tmp_path, [toy_record(FASTER, 5.0)])
    links = {f"{'1' * 64}.spv", f"{elsewhere.name}.spv"}
    assert files(tmp_path) == named(after) | set(mine) | links


def test_what_a_killed_export_left_half_written_goes(tmp_path: Path) -> None:
    export(tmp_path, [toy_record(FAST)])
    (tmp_path / "spirv" / f".{'0' * 64}.spv.0123abcd.tmp").write_bytes(b"half")
    after, _ = export(tmp_path, [])
    assert files(tmp_path) == named(after)


def test_nothing_goes_before_the_new_configuration_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _ = export(tmp_path, [toy_record(FAST)])
    real = Path.replace

    def full(path: Path, target: Path) -> Path:
        if target.name == "best-config.json":
            raise OSError(28, "No space left on device")
        return real(path, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ResultsError, match="No space left"):
        export(tmp_path, [toy_record(FASTER, 5.0)])
    assert tuner.load_best_config(tmp_path) == before
    assert named(before) < files(tmp_path)


def test_who_holds_an_older_configuration_is_told_to_load_the_new_one(tmp_path: Path) -> None:
    before, _ = export(tmp_path, [toy_record(FAST)])
    export(tmp_path, [toy_record(FASTER, 5.0)])
    part = before.families["toy"].entries[0].passes[0]
    with pytest.raises(InputFileError, match=r"is not there: load best-config\.json anew"):
        part.read_spirv(tmp_path)


def test_one_export_waits_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FolderLock(tmp_path, name=bundle.EXPORT_LOCK)
    released: list[float] = []

    def let_go() -> None:
        released.append(time.monotonic())
        lock.release()

    timer = threading.Timer(0.3, let_go)
    timer.start()
    export(tmp_path, [toy_record(FAST)])
    assert released
    assert time.monotonic() >= released[0]
    lock = FolderLock(tmp_path, name=bundle.EXPORT_LOCK)
    monkeypatch.setattr(bundle, "EXPORT_WAIT_S", 0.1)
    with pytest.raises(ResultsError, match=f"process {os.getpid()} is writing results here: wait"):
        export(tmp_path, [toy_record(FASTER)])
    lock.release()


def test_a_file_that_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _ = export(tmp_path, [toy_record(FAST)])

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".spv":
            raise PermissionError(1, "Operation not permitted")
        real(path, missing_ok=missing_ok)

    real = Path.unlink
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ResultsError, match="cannot remove this file, which best-config.json no"):
        export(tmp_path, [toy_record(FASTER, 5.0)])
    assert tuner.load_best_config(tmp_path) != before
