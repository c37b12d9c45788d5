"""The store: nothing that was appended is ever lost, and nothing damaged is taken for good."""

from __future__ import annotations

import errno
import json
import math
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.made_records import (
    BASELINE,
    decode,
    gpu,
    made_calibration,
    made_record,
    made_run,
    software,
)
from tuner.errors import ResultsError, UsageError
from tuner.problems import PagedDecodeProblem
from tuner.records import Calibration, Check, Record
from tuner.results import (
    Store,
    device_folders,
    latest,
    merge,
    outcomes,
    outcomes_to_frame,
    row,
    to_frame,
)
from tuner.results.files import write_atomic
from tuner.results.frame import rows
from tuner.results.journal import JournalWriter, decode_lines, encode_line
from tuner.results.outcomes import FINAL, declared_baseline, interval
from tuner.runner.protocol import PassStatistics

ROOT = Path(__file__).parent.parent
PATH = Path("records.jsonl")

text = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
number = st.floats(allow_nan=False, allow_infinity=False)
optional = st.none() | number
values = st.dictionaries(text, st.integers(-(2**31), 2**31) | text, max_size=4)
statistics = st.dictionaries(
    text, st.integers(0, 2**40) | number | text | st.booleans(), max_size=3
)


@st.composite
def problems(draw: st.DrawFn) -> PagedDecodeProblem:
    kv_heads = draw(st.integers(1, 16))
    context = draw(st.integers(0, 4096))
    return PagedDecodeProblem(
        sequences=draw(st.integers(1, 4)),
        context=context,
        query_heads=kv_heads * draw(st.integers(1, 16)),
        kv_heads=kv_heads,
        head_size=draw(st.sampled_from([64, 96, 128])),
        lengths=draw(st.sampled_from(["equal", f"uniform:{context // 2}"])),
    )


TEXTS = (
    "variant",
    "time",
    "session",
    "device",
    "device_uuid",
    "driver",
    "compiler",
    "family",
)


def records() -> st.SearchStrategy[Record]:
    checks = st.builds(Check, cases=st.integers(0, 99), error=number, bound=number, worst=text)
    return st.builds(
        Record,
        **dict.fromkeys(TEXTS, text),
        problem=problems(),
        values=values,
        state=st.sampled_from(["correct", "compile", "timeout"]),
        error=st.none() | text,
        check=st.none() | checks,
        samples_ns=st.lists(number, max_size=5).map(tuple),
        median_ns=optional,
        low_ns=optional,
        high_ns=optional,
        read_gb_s=optional,
        statistics=st.lists(
            st.builds(PassStatistics, name=text, statistics=statistics), max_size=2
        ).map(tuple),
        note=text,
    )


def lines_of(folder: Path) -> list[bytes]:
    return (folder / "records.jsonl").read_bytes().splitlines(keepends=True)


# What is written is read back


@given(records())
def test_a_record_survives_the_round_trip(record: Record) -> None:
    assert decode_lines(encode_line(record), Record, PATH).items == (record,)


@given(st.lists(records(), min_size=1, max_size=4))
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_the_store_gives_back_what_was_appended(
    tmp_path_factory: pytest.TempPathFactory, made: list[Record]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    with Store(folder) as store:
        for record in made:
            store.append(record)
        assert store.records() == tuple(made)
    with Store(folder) as again:
        assert again.records() == tuple(made)
        assert again.repairs == ()
    assert Store(folder, read_only=True).records() == tuple(made)


def test_lines_are_json_with_version_and_checksum(tmp_path: Path) -> None:
    record = made_record()
    with Store(tmp_path) as store:
        store.append(record)
    line = json.loads(lines_of(tmp_path)[0])
    assert list(line) == ["schema_version", "checksum", "content"]
    assert msgspec.convert(line["content"], Record) == record


def test_every_append_is_on_the_disk_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd))[1])
    with Store(tmp_path) as store:
        for microseconds in (1.0, 2.0):
            store.append(made_record(median_us=microseconds))
            assert synced[-1] == (tmp_path / "records.jsonl").stat().st_size


@given(problems())
def test_problem_keys_survive_the_round_trip(problem: PagedDecodeProblem) -> None:
    again = msgspec.json.decode(msgspec.json.encode(problem), type=PagedDecodeProblem)
    assert again == problem
    assert again.key == problem.key


def test_problem_keys_are_the_same_on_every_machine() -> None:
    """A changed key would make every stored result unknown: change this only with the schema."""
    assert decode(8, 16384).key == "dc9bbb264930"


@pytest.mark.parametrize("error", [math.nan, math.inf, -math.inf])
def test_a_check_whose_error_is_no_number_can_be_stored(tmp_path: Path, error: float) -> None:
    check = Check(cases=3, error=error, bound=1e-3, worst="out[0, 0]")
    with Store(tmp_path) as store:
        store.append(made_record(state="correctness", check=check))
    stored = Store(tmp_path, read_only=True).records()[0].check
    assert stored is not None
    assert stored.error == sys.float_info.max
    assert (stored.bound, stored.worst) == (1e-3, "out[0, 0]")


def test_a_time_that_is_no_number_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.append(made_record())
        before = lines_of(tmp_path)
        for bad in (made_record(median_ns=math.nan), made_record(error="\ud800")):
            with pytest.raises(UsageError, match="Record cannot be stored"):
                store.append(bad)
        assert lines_of(tmp_path) == before
        assert len(store.records()) == 1


# Torn files


WHOLE = [encode_line(made_record(median_us=10.0 + i, note="naïve “quotes”")) for i in range(4)]


@given(st.integers(0, sum(map(len, WHOLE))))
@settings(deadline=None, max_examples=150)
def test_a_file_torn_at_any_byte_keeps_every_complete_record(
    tmp_path_factory: pytest.TempPathFactory, offset: int
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    data = b"".join(WHOLE)[:offset]
    (folder / "records.jsonl").write_bytes(data)
    complete, rest = 0, offset
    # A line that lacks its newline alone is complete.
    while complete < len(WHOLE) and rest >= len(WHOLE[complete]) - 1:
        rest -= len(WHOLE[complete])
        complete += 1
    torn = max(0, rest)

    reader = Store(folder, read_only=True)
    assert len(reader.records()) == complete
    assert (folder / "records.jsonl").read_bytes() == data

    with Store(folder) as store:
        assert len(store.records()) == complete
        assert bool(store.repairs) == bool(torn) == bool(reader.repairs)
        if torn:
            assert store.repairs[0].torn_bytes == torn
            assert store.repairs[0].line == complete + 1
            side = (folder / "records.jsonl.torn").read_bytes()
            assert side == data[len(data) - torn :] + b"\n"
        store.append(made_record(median_us=99.0))
        assert len(store.records()) == complete + 1
    with Store(folder) as again:
        assert len(again.records()) == complete + 1
        assert again.repairs == ()


def test_a_torn_line_is_announced_in_words(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_bytes(WHOLE[0] + WHOLE[1][:50])
    with Store(tmp_path) as store:
        (repair,) = store.repairs
    assert "records.jsonl:2: the last line was cut off by a crash; its 50 bytes" in str(repair)
    assert "moved to records.jsonl.torn" in str(repair)


def test_torn_bytes_of_several_crashes_are_all_kept(tmp_path: Path) -> None:
    for torn in (b'{"first', b'{"second'):
        with (tmp_path / "records.jsonl").open("ab") as file:
            file.write(torn)
        Store(tmp_path).close()
    assert (tmp_path / "records.jsonl.torn").read_bytes() == b'{"first\n{"second\n'


def test_zeros_that_a_power_cut_left_at_the_end_are_a_tear(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_bytes(WHOLE[0] + bytes(4096))
    with Store(tmp_path) as store:
        assert len(store.records()) == 1
        assert store.repairs[0].torn_bytes == 4096


def test_a_last_line_with_a_wrong_checksum_is_moved_aside(tmp_path: Path) -> None:
    bad = WHOLE[1].replace(b'"median_ns":11', b'"median_ns":12')
    assert bad != WHOLE[1]
    (tmp_path / "records.jsonl").write_bytes(WHOLE[0] + bad)
    with Store(tmp_path) as store:
        assert len(store.records()) == 1
    assert (tmp_path / "records.jsonl.torn").read_bytes() == bad


# Damage that is no tear


@given(st.integers(0, sum(map(len, WHOLE[:-1])) - 2), st.integers(1, 255))
@settings(max_examples=300)
def test_one_changed_byte_before_the_last_line_is_an_error_with_its_line(
    place: int, change: int
) -> None:
    data = bytearray(b"".join(WHOLE))
    data[place] ^= change
    line = bytes(b"".join(WHOLE))[:place].count(b"\n") + 1
    with pytest.raises(ResultsError) as caught:
        decode_lines(bytes(data), Record, PATH)
    assert caught.value.line == line
    assert f"records.jsonl:{line}: " in str(caught.value)


def test_a_damaged_middle_line_stops_the_store_and_changes_nothing(tmp_path: Path) -> None:
    data = WHOLE[0] + WHOLE[1][:40] + b"\n" + WHOLE[2]
    (tmp_path / "records.jsonl").write_bytes(data)
    for read_only in (False, True):
        with pytest.raises(ResultsError, match=r"records.jsonl:2: damaged line: .* restore"):
            Store(tmp_path, read_only=read_only)
    assert (tmp_path / "records.jsonl").read_bytes() == data
    assert not (tmp_path / "records.jsonl.torn").exists()


@pytest.mark.parametrize("last", [True, False])
def test_another_schema_version_is_an_error_wherever_it_stands(tmp_path: Path, last: bool) -> None:
    other = WHOLE[1].replace(b'"schema_version":1', b'"schema_version":7')
    data = WHOLE[0] + other + (b"" if last else WHOLE[2])
    (tmp_path / "records.jsonl").write_bytes(data)
    with pytest.raises(ResultsError, match=r"records.jsonl:2: written with schema version 7"):
        Store(tmp_path)
    assert (tmp_path / "records.jsonl").read_bytes() == data


def test_a_whole_line_that_is_no_record_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_bytes(encode_line(made_calibration()))
    with pytest.raises(ResultsError, match=r"records.jsonl:1: not a Record: .*missing"):
        Store(tmp_path)


def test_a_stored_problem_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    good = msgspec.to_builtins(made_record())
    good["problem"]["kv_heads"] = 5
    content = msgspec.json.encode(good)
    line = WHOLE[0].replace(json_content(WHOLE[0]), content)
    line = line.replace(checksum(WHOLE[0]), digest(content))
    (tmp_path / "records.jsonl").write_bytes(line)
    with pytest.raises(ResultsError, match=r"records.jsonl:1: not a Record: query_heads"):
        Store(tmp_path)


@given(st.binary(max_size=300) | st.recursive(st.none(), st.lists).map(lambda x: repr(x).encode()))
@settings(max_examples=300)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        contents = decode_lines(data, Record, PATH)
    except ResultsError as error:
        line = error.line
    else:
        assert contents.items == ()
        assert contents.torn == data
        return
    assert line is not None


def test_deep_nesting_is_damage_and_no_crash() -> None:
    assert decode_lines(b'{"schema_version":' + b"[" * 100_000, Record, PATH).torn


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
    (tmp_path / "records.jsonl").write_bytes(b"damage\n" + WHOLE[0])
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
        file.write(WHOLE[0])
        file.flush()
        with pytest.raises(ResultsError, match="another program changed it"):
            store.append(made_record(median_us=2.0))
    assert lines_of(tmp_path) == [WHOLE[0]]


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


def test_by_problem_keeps_every_record_once(tmp_path: Path) -> None:
    made = made_run([decode(1, 4096), decode(8, 4096)], trials=5)
    with Store(tmp_path) as store:
        store.extend(made)
        groups = store.by_problem()
    assert [problem for _, problem in groups] == [decode(1, 4096), decode(8, 4096)]
    assert sum(groups.values(), ()) == made


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


# Outcomes and rows


def test_an_outcome_names_best_ties_baseline_and_failures() -> None:
    problem = decode(8, 16384)
    fast, close, slow = ({**BASELINE, "strategy": "packed_f16", "subgroups": n} for n in (1, 2, 4))
    made = [
        made_record(problem, dict(BASELINE), median_us=1000.0),
        made_record(problem, slow, median_us=200.0),
        made_record(problem, close, median_us=100.5),
        made_record(problem, fast, median_us=100.0),
        made_record(problem, {**fast, "subgroups": 8}, state="timeout"),
        made_record(decode(1, 4096), fast, median_us=1.0),
    ]
    (outcome, other) = outcomes(made, baseline_of=lambda _: BASELINE)
    assert outcome.best == made[3]
    assert outcome.tied == (made[2],)
    assert outcome.baseline == made[0]
    assert outcome.speedup == pytest.approx(10.0)
    assert outcome.failures == {"timeout": 1}
    assert (other.baseline, other.speedup) == (None, None)


def test_a_final_measurement_decides_over_a_faster_first_one() -> None:
    """Only finalists were timed side by side; the others may have met a faster clock."""
    lucky = made_record(values={"n": 0}, median_us=90.0)
    finals = [made_record(values={"n": n}, median_us=99.9 + n / 10, note=FINAL) for n in (1, 2)]
    firsts = [made_record(values={"n": n}, median_us=80.0) for n in (1, 2)]
    (outcome,) = outcomes([lucky, *firsts, *finals], baseline_of=lambda _: None)
    assert outcome.best == finals[0]
    assert outcome.tied == (finals[1],)
    assert outcome.ranked == (*finals, lucky)


def test_the_note_of_finals_is_the_one_that_evaluation_writes() -> None:
    from tuner.evaluate import FINAL as WRITTEN

    assert WRITTEN == FINAL


def test_an_outcome_without_any_correct_record_has_no_best() -> None:
    (outcome,) = outcomes([made_record(state="compile")], baseline_of=lambda _: None)
    assert (outcome.best, outcome.tied, outcome.speedup) == (None, (), None)


@given(st.permutations(range(6)))
def test_the_best_does_not_depend_on_the_order(order: list[int]) -> None:
    made = [
        made_record(values={"subgroups": n}, median_us=100.0 if n < 3 else 200.0) for n in range(6)
    ]
    (outcome,) = outcomes([made[i] for i in order], baseline_of=lambda _: None)
    assert outcome.best == min(made[:3], key=lambda r: r.variant)
    assert {r.variant for r in outcome.tied} | {outcome.best.variant} == {
        r.variant for r in made[:3]
    }


def test_devices_and_drivers_are_kept_apart() -> None:
    newer = msgspec.structs.replace(gpu(), driver_info="590.1")
    made = [made_record(device=d) for d in (gpu(), software(), newer)]
    assert [(o.device, o.driver) for o in outcomes(made, baseline_of=lambda _: None)] == [
        (r.device, r.driver) for r in made
    ]


def test_a_record_without_interval_has_its_median_as_one() -> None:
    assert interval(made_record(low_ns=None, high_ns=None, median_ns=5.0)) == (5.0, 5.0)


def test_a_row_is_flat_and_in_the_units_it_names() -> None:
    record = made_record(median_us=100.0)
    cells = row(record)
    assert cells["median_us"] == pytest.approx(100.0)
    assert cells["problem_sequences"] == 8
    assert cells["param_strategy"] == "scalar_f32"
    assert cells["gb_s"] == pytest.approx(record.bytes_moved / 100e3)
    assert cells["utilisation"] == pytest.approx(record.bytes_moved / 100e3 / 4600)
    assert cells["stable"] is True
    assert all(v is None or isinstance(v, str | int | float | bool) for v in cells.values())


def test_rows_have_one_set_of_columns_for_all_families() -> None:
    columns, found = rows([made_record(values={"a": 1}), made_record(values={"b": 2})])
    assert {"param_a", "param_b"} <= set(columns)
    assert len(columns) == len(set(columns))
    assert all(set(each) <= set(columns) for each in found)
    assert columns[:3] == ("family", "problem", "problem_sequences")


def test_the_frame_has_a_row_a_record() -> None:
    made = made_run([decode(1, 4096)], trials=8)
    frame = to_frame(made)
    assert len(frame) == len(made)
    assert list(frame["variant"]) == [record.variant for record in made]
    assert frame.loc[frame["state"] == "correct", "median_us"].notna().all()
    assert len(to_frame([])) == 0
    failed = to_frame([made_record(state="compile")])
    assert failed["median_us"].dtype == float


def test_the_frame_of_outcomes_has_a_row_a_problem() -> None:
    made = [
        made_record(values=dict(BASELINE), median_us=1000.0),
        made_record(values={**BASELINE, "subgroups": 2}, median_us=100.0),
        made_record(decode(1, 4096), values={**BASELINE, "subgroups": 2}, state="timeout"),
    ]
    frame = outcomes_to_frame(outcomes(made, baseline_of=lambda _: BASELINE))
    assert list(frame["problem"]) == [decode(8, 16384).label, decode(1, 4096).label]
    assert frame["median_us"].tolist()[0] == pytest.approx(100.0)
    assert frame["speedup"].tolist()[0] == pytest.approx(10.0)
    assert frame["failed"].tolist() == [0, 1]
    assert "subgroups=2" in frame["best"].tolist()[0]
    assert frame["speedup"].dtype == frame["median_us"].dtype == float
    assert len(outcomes_to_frame([])) == 0


def test_the_declared_baseline_is_the_familys_own() -> None:
    found = declared_baseline("paged_decode_q8")
    assert found is not None
    assert found["strategy"] == "baseline"
    assert declared_baseline("no such family") is None


def test_journals_of_two_kinds_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "calibrations.jsonl"
    writer = JournalWriter(path, Calibration)
    writer.extend([made_calibration()])
    writer.close()
    with pytest.raises(ResultsError, match="not a Record"):
        JournalWriter(path, Record)


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


def json_content(line: bytes) -> bytes:
    return line[line.index(b'"content":') + len(b'"content":') : line.rindex(b"}")]


def checksum(line: bytes) -> bytes:
    return digest(json_content(line))


def digest(content: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(content).hexdigest()[:16].encode()
