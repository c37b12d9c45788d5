"""The store of a device: one writer, full disks, finding and merging."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.made_records import (
    decode,
    gpu,
    made_calibration,
    made_record,
    made_run,
    software,
)
from tuner.errors import ResultsError, UsageError
from tuner.results import Store, device_folders, latest, merge
from tuner.results.files import write_atomic
from tuner.results.journal import encode_line

ROOT = Path(__file__).parent.parent
LINE = encode_line(made_record())


def lines_of(folder: Path) -> list[bytes]:
    return (folder / "records.jsonl").read_bytes().splitlines(keepends=True)


# Writers


def test_a_second_writer_is_refused_with_the_holders_id(tmp_path: Path) -> None:
    with Store(tmp_path), pytest.raises(ResultsError, match=f"process {os.getpid()} is writing"):
        Store(tmp_path)


def test_another_process_is_refused_while_a_reader_is_not(tmp_path: Path) -> None:
    code = (
        "import sys; from tuner.results import Store; from tuner.errors import ResultsError\n"
        "print(len(Store(sys.argv[1], read_only=True).records()))\n"
        "try: Store(sys.argv[1])\n"
        "except ResultsError as error: print(error)"
    )
    with Store(tmp_path) as store:
        store.append(made_record())
        done = run_python(code, tmp_path)
    assert done.stdout.splitlines()[0] == "1"
    assert f"process {os.getpid()} is writing results here" in done.stdout


def test_the_lock_ends_with_its_holder_even_when_killed(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal; from tuner.results import Store\n"
        "store = Store(sys.argv[1]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert run_python(code, tmp_path).returncode == -signal.SIGKILL
    Store(tmp_path).close()


def test_a_closed_store_frees_the_lock_and_takes_no_more(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.close()
    store.close()
    Store(tmp_path).close()
    with pytest.raises(UsageError, match="not open for writing"):
        store.append(made_record())


def test_a_store_that_cannot_be_opened_frees_the_lock(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_bytes(b"damage\n" + LINE)
    for _ in range(2):
        with pytest.raises(ResultsError, match="damaged line"):
            Store(tmp_path)


WRITER = """
import sys
from tests.made_records import made_record
from tuner.results import Store
with Store(sys.argv[1]) as store:
    print("ready", flush=True)
    for i in range(100_000):
        store.append(made_record(median_us=1.0 + i, variant=str(i)))
        print(i, flush=True)
"""


@pytest.mark.parametrize("attempt", range(3))
def test_kill_9_at_a_random_moment_loses_no_acknowledged_record(
    tmp_path: Path, attempt: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(random.Random(attempt).uniform(0.02, 0.2))
        process.kill()
        acknowledged = process.stdout.read().split("\n")[:-1]
    with Store(tmp_path) as store:
        kept = [record.variant for record in store.records()]
    assert len(kept) - len(acknowledged) in (0, 1)
    assert kept == [str(i) for i in range(len(kept))]


FILL = """
import resource, sys
from tests.made_records import made_record
from tuner.errors import ResultsError
from tuner.results import Store
store = Store(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
count = 0
try:
    while True:
        store.append(made_record(median_us=1.0 + count))
        count += 1
except ResultsError as error:
    print(error)
assert len(store.records()) == count
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.append(made_record(median_us=0.5))
print(count)
"""


def test_a_full_disk_takes_the_partial_line_back_and_says_so(tmp_path: Path) -> None:
    """A file-size limit makes the system write a part of the line, then refuse: as a full disk."""
    done = run_python(FILL, tmp_path)
    message, count = done.stdout.strip().splitlines()
    assert "cannot append: File too large" in message
    assert f"the {count} entries so far are intact" in message
    assert int(count) >= 3
    with Store(tmp_path) as store:
        assert store.repairs == ()
        assert len(store.records()) == int(count) + 1


def append_until_refused(store: Store) -> tuple[int, str]:
    """How many records were taken, and what was said of the next."""
    for count in range(1000):
        try:
            store.append(made_record(median_us=1.0 + count))
        except ResultsError as error:
            return count, str(error)
    raise AssertionError("the disk took everything")


def test_a_full_file_system_keeps_all_that_was_acknowledged(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        with Store(small / "device") as store:
            count, message = append_until_refused(store)
            assert "No space left on device; the" in message
            assert f"the {count} entries so far are intact" in message
            kept = Store(small / "device", read_only=True)
            assert (len(kept.records()), kept.repairs) == (count, ())
            assert count > 3
    finally:
        subprocess.run(["umount", str(small)], check=True)


def fail(code: int) -> Any:
    def failing(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    return failing


def test_a_failed_fsync_is_a_failed_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(tmp_path) as store:
        store.append(made_record(median_us=1.0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail(errno.EIO))
            with pytest.raises(ResultsError, match="Input/output error; the 1 entries so far"):
                store.append(made_record(median_us=2.0))
        assert len(lines_of(tmp_path)) == 1
        store.append(made_record(median_us=3.0))
    assert len(Store(tmp_path, read_only=True).records()) == 2


def test_a_tail_that_could_not_be_taken_back_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path) as store:
        store.append(made_record(median_us=1.0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail(errno.EIO))
            patch.setattr(os, "ftruncate", fail(errno.EIO))
            with pytest.raises(ResultsError):
                store.append(made_record(median_us=2.0))
        assert len(lines_of(tmp_path)) == 2
        store.append(made_record(median_us=3.0))
    assert [r.median_ns for r in Store(tmp_path, read_only=True).records()] == [1000.0, 3000.0]


def test_an_interrupted_append_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def interrupted(handle: int, data: Any) -> int:
        real(handle, bytes(data)[:20])
        raise KeyboardInterrupt

    with Store(tmp_path) as store:
        store.append(made_record(median_us=1.0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.append(made_record(median_us=2.0))
        assert len(lines_of(tmp_path)) == 1
        assert len(store.records()) == 1


def test_a_file_changed_by_another_program_is_not_written_to(tmp_path: Path) -> None:
    with Store(tmp_path) as store, (tmp_path / "records.jsonl").open("ab") as file:
        file.write(LINE)
        file.flush()
        with pytest.raises(ResultsError, match="another program changed it"):
            store.append(made_record(median_us=2.0))
    assert lines_of(tmp_path) == [LINE]


def test_a_folder_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ResultsError, match="cannot make this folder"):
        Store("/proc/no-results-here")
    monkeypatch.setattr(os, "open", fail(errno.EROFS))
    with pytest.raises(ResultsError, match="Read-only file system: choose another folder"):
        Store(tmp_path)


def test_a_folder_without_results_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no such folder"):
        Store(tmp_path / "missing", read_only=True)


def test_records_that_are_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").mkdir()
    with pytest.raises(ResultsError, match="cannot read: Is a directory"):
        Store(tmp_path, read_only=True)


# Finding, grouping, merging


def test_find_gives_the_newest_record_of_a_variant(tmp_path: Path) -> None:
    old = made_record(median_us=2.0, time="2026-01-01T00:00:00Z")
    new = made_record(median_us=1.0, time="2026-01-02T00:00:00Z")
    with Store(tmp_path) as store:
        assert store.find(old.variant) is None
        store.append(new)
        store.append(old)
        assert store.find(old.variant) == new
        assert latest(store.records()) == (new,)
    assert Store(tmp_path, read_only=True).find(old.variant) == new


def test_calibrations_and_device_are_kept(tmp_path: Path) -> None:
    old = made_calibration()
    new = msgspec.structs.replace(old, time="2026-12-01T00:00:00Z", read_gb_s=4650.0)
    with Store(tmp_path) as store:
        for calibration in (new, old):
            store.append_calibration(calibration)
        store.write_device(gpu())
    reader = Store(tmp_path, read_only=True)
    assert reader.calibrations() == (new, old)
    assert reader.calibration(gpu().driver) == new
    assert reader.calibration("other driver") is None
    assert reader.device() == gpu()


def test_a_folder_takes_one_device(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        assert store.device() is None
        store.write_device(gpu())
        with pytest.raises(ResultsError, match="holds results of NVIDIA H200, not of llvmpipe"):
            store.write_device(software())


@pytest.mark.parametrize("bad", [b"", b"{", b"[" * 50_000, b'{"name": 3}', b"\xff"])
def test_a_damaged_device_file_is_an_error(tmp_path: Path, bad: bytes) -> None:
    (tmp_path / "device.json").write_bytes(bad)
    with pytest.raises(ResultsError, match=r"device.json: no device snapshot"):
        Store(tmp_path, read_only=True).device()


def test_merge_brings_what_is_missing_and_nothing_twice(tmp_path: Path) -> None:
    made = made_run([decode(1, 4096)], trials=6)
    with Store(tmp_path / "a") as a, Store(tmp_path / "b") as b:
        a.extend(made[:4])
        b.extend(made[2:])
        b.append_calibration(made_calibration())
        b.write_device(gpu())
        first, second = merge(a, b), merge(a, b)
        assert a.records() == made
        assert a.device() == gpu()
    assert (first.records, first.calibrations) == (len(made) - 4, 1)
    assert (second.records, second.calibrations) == (0, 0)


def test_merge_refuses_another_device(tmp_path: Path) -> None:
    with Store(tmp_path / "a") as a, Store(tmp_path / "b") as b:
        a.write_device(gpu())
        b.write_device(software())
        with pytest.raises(ResultsError, match="those of llvmpipe"):
            merge(a, b)


def test_device_folders_are_those_with_records(tmp_path: Path) -> None:
    for name in ("b", "a"):
        with Store(tmp_path / name) as store:
            store.append(made_record())
    (tmp_path / "empty").mkdir()
    assert device_folders(tmp_path) == (tmp_path / "a", tmp_path / "b")
    assert device_folders(tmp_path / "missing") == ()


def test_an_atomic_write_that_fails_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    write_atomic(path, b"old")
    for owner, name in ((os, "fsync"), (Path, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail(errno.ENOSPC))
            with pytest.raises(ResultsError, match=r"file.json: cannot write: No space left"):
                write_atomic(path, b"new")
        assert path.read_bytes() == b"old"
        assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
