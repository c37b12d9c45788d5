"""The line format of the store: nothing appended is lost, nothing damaged is taken for good."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.made_records import decode, made_calibration, made_record
from tuner.errors import NoResultsError, ResultsError, UsageError
from tuner.problems import PagedDecodeProblem
from tuner.records import Calibration, Check, PassStatistics, Record
from tuner.results import Store
from tuner.results.journal import JournalWriter, decode_lines, encode_line

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
    if b"\n" in data[:-1]:
        with pytest.raises(NoResultsError, match="is no results file of kvtune"):
            decode_lines(data, Record, PATH)
    else:
        contents = decode_lines(data, Record, PATH)
        assert (contents.items, contents.torn) == ((), data)


def test_deep_nesting_is_damage_and_no_crash() -> None:
    assert decode_lines(b'{"schema_version":' + b"[" * 100_000, Record, PATH).torn


def test_journals_of_two_kinds_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "calibrations.jsonl"
    writer = JournalWriter(path, Calibration)
    writer.extend([made_calibration()])
    writer.close()
    with pytest.raises(ResultsError, match="not a Record"):
        JournalWriter(path, Record)


def json_content(line: bytes) -> bytes:
    return line[line.index(b'"content":') + len(b'"content":') : line.rindex(b"}")]


def checksum(line: bytes) -> bytes:
    return digest(json_content(line))


def digest(content: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(content).hexdigest()[:16].encode()
