"""Files that anything may have happened to: they are read or refused, and nothing else.

Every target is given arbitrary bytes, damaged copies of good files, and files that are good in form
and wrong in content. An exception that is not one of the package's is a failure, and so are ten
seconds without an answer. How many inputs were tried is printed at the end.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import tuner
from tests.made_records import decode, made_record
from tests.small_kernels import job, operands, outputs, run, step
from tests.test_best_config import LOOKUP
from tests.test_compile import rendered
from tests.toy_family import TOY, toy_device, toy_problem
from tuner import shapes, workloads
from tuner.cli import app
from tuner.cli.report import FORMATS
from tuner.compile import Compiler
from tuner.device_info import DeviceInfo
from tuner.errors import TunerError
from tuner.export.best_config import encode
from tuner.kernels.space import legal
from tuner.problems import KINDS, Problem
from tuner.results import Store, outcomes
from tuner.results.journal import encode_line
from tuner.results.store import DEVICE, RECORDS
from tuner.search.encoding import Encoding
from tuner.search.proposer import Proposer
from tuner.search.studylog import StudyLog, open_storage

TRIED: Counter[str] = Counter()
fuzz = settings(
    max_examples=250,
    deadline=timedelta(seconds=10),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module", autouse=True)
def _counts(tell: Callable[[str], None]) -> Iterator[None]:
    yield
    for target, tried in sorted(TRIED.items()):
        tell(f"fuzzed {target}: {tried} inputs")
    tell(f"fuzzed in all: {TRIED.total()} inputs")


# --- damage ---------------------------------------------------------------------------------------


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """A copy of a file to which a few things have happened."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 40)))
        kind = draw(st.sampled_from(["cut off", "lose", "repeat", "overwrite", "insert", "zero"]))
        if kind == "cut off":
            del data[start:]
        elif kind == "lose":
            del data[start:end]
        elif kind == "repeat":
            data[end:end] = data[start:end]
        elif kind == "zero":
            data[start:end] = bytes(end - start)
        else:
            piece = draw(st.binary(max_size=12) | st.sampled_from(_TOKENS))
            data[start : end if kind == "overwrite" else start] = piece
    return bytes(data)


_TOKENS = [
    b"\n",
    b"{}",
    b"null",
    b"[",
    b'"',
    b"-1",
    b"1e999",
    b"NaN",
    b"99999999999999999999",
    b",",
]
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def altered(draw: st.DrawFn, whole: bytes) -> bytes:
    """The JSON of a file with one or two of its values replaced, removed or added."""
    document = json.loads(whole)
    for _ in range(draw(st.integers(1, 2))):
        node: Any = {"": document}
        key: Any = ""
        while isinstance(node[key], dict | list) and node[key] and draw(st.integers(0, 4)):
            node = node[key]
            key = draw(
                st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node)))
            )
        kind = draw(st.sampled_from(["replace", "remove", "add"]))
        if kind == "remove" and node is not document and len(node) > 1:
            del node[key]
        elif kind == "add" and isinstance(node, dict):
            node[draw(st.text(max_size=5))] = draw(values)
        else:
            node[key] = draw(values)
            document = node[key] if key == "" and len(node) == 1 else document
    return json.dumps(document).encode()


@contextlib.contextmanager
def counted(target: str) -> Iterator[None]:
    """One input; the package's own errors are an answer."""
    TRIED[target] += 1
    with contextlib.suppress(TunerError):
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


# --- results --------------------------------------------------------------------------------------

GOOD_RECORDS = [
    made_record(decode(1 << n, 4096), median_us=100.0 + n, state=state)
    for n, state in enumerate(("correct", "correct", "runtime", "timeout"))
]
GOOD_LINES = b"".join(encode_line(record) for record in GOOD_RECORDS)


def _with_checksum(content: bytes) -> bytes:
    from tuner.results.journal import _checksum

    head = b'{"schema_version":1,"checksum":"' + _checksum(content).encode()
    return head + b'","content":' + content + b"}\n"


wrong_records = altered(msgspec.json.encode(GOOD_RECORDS[0])).map(_with_checksum)


@given(
    st.binary(max_size=300)
    | damaged(GOOD_LINES)
    | wrong_records.map(lambda line: GOOD_LINES + line + GOOD_LINES)
    | wrong_records.map(lambda line: GOOD_LINES + line)
)
@fuzz
def test_records(tmp_path: Path, data: bytes) -> None:
    folder = _emptied(tmp_path)
    (folder / RECORDS).write_bytes(data)
    with counted(RECORDS):
        Store(folder, read_only=True)
    with counted(RECORDS), Store(folder) as store:
        before = store.records()
        outcomes(before)
        store.append(GOOD_RECORDS[0])
        assert Store(folder, read_only=True).records() == (*before, GOOD_RECORDS[0])


GOOD_DEVICE = msgspec.json.format(msgspec.json.encode(toy_device()), indent=2)


@given(
    damaged(GOOD_LINES) | wrong_records.map(lambda line: GOOD_LINES + line),
    st.sampled_from([*FORMATS, "plot"]),
)
@settings(fuzz, max_examples=60)
def test_commands_that_read_results(
    tmp_path: Path, cache: Path, data: bytes, format_name: str
) -> None:
    folder = _emptied(tmp_path)
    (folder / RECORDS).write_bytes(data)
    (folder / DEVICE).write_bytes(GOOD_DEVICE)
    command = ("export", "--format", format_name, "--cache", str(cache))
    if format_name == "plot":
        command = ("plot",)
    done = CliRunner().invoke(app, [*command, str(folder)])
    TRIED["results given to commands"] += 1
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert done.exit_code in (0, 1, 2)
    assert "Traceback" not in done.output + done.stderr


@given(st.binary(max_size=300) | damaged(GOOD_DEVICE) | altered(GOOD_DEVICE))
@fuzz
def test_device_snapshots(tmp_path: Path, data: bytes) -> None:
    folder = _emptied(tmp_path)
    (folder / DEVICE).write_bytes(data)
    with counted(DEVICE), Store(folder) as store:
        found = store.device()
        assert found is None or isinstance(found, DeviceInfo)
        store.write_device(toy_device())
        assert store.device() == toy_device()


SPACE = legal(TOY, toy_problem(), toy_device())
ENCODING = Encoding(SPACE, ordinal=False)


@pytest.fixture(scope="module")
def good_journal(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A study with trials in every state."""
    file = tmp_path_factory.mktemp("study") / "studies.jsonl"
    with contextlib.closing(open_storage(file)) as storage:
        log = StudyLog(storage, "toy", ENCODING, isolated=True)
        for record, values in zip(GOOD_RECORDS, SPACE, strict=False):
            log.finish(log.start(values), record, known=False)
        log.drop(log.start(SPACE[7]), "stopped")
        log.start(SPACE[8])
        log.spend(1.5)
    return file.read_bytes()


@given(st.data())
@settings(fuzz, max_examples=150)
def test_study_journals(tmp_path: Path, good_journal: bytes, data: st.DataObject) -> None:
    lines = good_journal.splitlines(keepends=True)

    def with_line(at: int, line: bytes) -> bytes:
        return b"".join((*lines[:at], line, b"\n", *lines[at + 1 :]))

    place = data.draw(st.integers(0, len(lines) - 1))
    drawn = data.draw(
        st.binary(max_size=300)
        | damaged(good_journal)
        | altered(lines[place]).map(lambda line: with_line(place, line))
    )
    file = _emptied(tmp_path) / "studies.jsonl"
    file.write_bytes(drawn)
    with counted(file.name), contextlib.closing(open_storage(file)) as storage:
        log = StudyLog(storage, "toy", ENCODING)
        proposer = Proposer(SPACE, "grid", 0)
        proposer.resume((trial.values, trial.costs) for trial in log.finished)
        proposer.try_first(list(log.retry))
        while (proposal := proposer.next()) is not None:
            assert proposal.values in SPACE
        log.start(SPACE[3])


# --- configurations -------------------------------------------------------------------------------

GOOD_CONFIG = encode(LOOKUP)


@given(st.binary(max_size=300) | damaged(GOOD_CONFIG) | altered(GOOD_CONFIG))
@fuzz
def test_best_configs(tmp_path: Path, data: bytes) -> None:
    file = _emptied(tmp_path) / "best-config.json"
    file.write_bytes(data)
    with counted(file.name):
        config = tuner.load_best_config(file)
        for name, family in config.families.items():
            config.lookup(name, decode(3, 5000))
            for entry in family.entries:
                assert config.lookup(name, entry.problem).how == "exact"


# --- workloads ------------------------------------------------------------------------------------

GOOD_WORKLOAD = b"""# a workload
[[problem]]
model = "Llama-3.1-8B"
sequences = [1, 8]
context = [512, 4096]
lengths = "lognormal:128"

[[problem]]
query_heads = 32
kv_heads = 8
head_size = 128
block_size = 32
sequences = 1
context = 512
"""
FIELDS = {field.name for kind in KINDS.values() for field in msgspec.structs.fields(kind)}
keys = st.sampled_from(["model", "kind", *sorted(FIELDS), "other", "a.b", '"q"'])
toml_values = (
    st.integers(-3, 10).map(str)
    | st.integers(-(2**70), 2**70).map(str)
    | st.floats().map(str)
    | st.text(max_size=8).map(json.dumps)
    | st.sampled_from(
        [
            *(json.dumps(kind) for kind in KINDS),
            *("true", "[]", "[[1]]", "{}", "{a=1}", "1979-05-27", "0x10", "1_000", "''", "[1,'a']"),
            *('"Phi-4"', '"uniform:1"', '"list:1,2"', '"straggler:9"', '"lognormal:0"', "[1, 2]"),
        ]
    )
)
tables = st.lists(st.tuples(keys, toml_values), max_size=9).map(
    lambda pairs: "[[problem]]\n" + "".join(f"{key} = {value}\n" for key, value in pairs)
)


@given(
    st.binary(max_size=200)
    | damaged(GOOD_WORKLOAD)
    | st.lists(tables, max_size=3).map(lambda parts: "".join(parts).encode("utf-8", "replace"))
)
@fuzz
def test_workload_files(tmp_path: Path, data: bytes) -> None:
    file = _emptied(tmp_path) / "own.toml"
    file.write_bytes(data)
    with counted("workload TOML"):
        for problem in workloads.load_workload(str(file)):
            assert isinstance(problem, Problem)
            assert shapes.parse_shape(shapes.format_shape(problem)) == problem


# --- caches ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good_entry(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes, Path]:
    """An entry of the compile cache, the SPIR-V in it, and its place below the folder."""
    folder = tmp_path_factory.mktemp("cache")
    spirv = Compiler(folder).compile(rendered(), values={}).spirv
    (entry,) = (path for path in folder.rglob("*") if path.is_file())
    return entry.read_bytes(), spirv, entry.relative_to(folder)


@given(st.data())
@settings(fuzz, max_examples=150)
def test_compile_cache_entries(
    tmp_path: Path, good_entry: tuple[bytes, bytes, Path], data: st.DataObject
) -> None:
    raw, spirv, place = good_entry
    entry = _emptied(tmp_path) / place
    entry.parent.mkdir(parents=True)
    entry.write_bytes(data.draw(st.binary(max_size=200) | damaged(raw)))
    with counted("compile-cache entries"):
        assert Compiler(tmp_path / "fuzz").compile(rendered(), values={}).spirv == spirv
        assert Compiler(tmp_path / "fuzz").compile(rendered(), values={}).cached


@given(st.data())
@settings(fuzz, max_examples=25, deadline=timedelta(seconds=60))
def test_pipeline_cache_files(
    vulkan_selector: str | None, tmp_path: Path, data: st.DataObject
) -> None:
    from tuner.runner.vulkan import VulkanRunner

    folder = _emptied(tmp_path)
    for _ in range(2):
        with contextlib.closing(VulkanRunner(vulkan_selector, cache_dir=folder)) as runner:
            runner.load("w", operands(), outputs())
            answer = run(runner, job(step("scale", factor=3.0))).outputs["o"]
            assert (answer == 3.0 * operands()["a"]).all()
        (file,) = folder.glob("pipelines-*")
        file.write_bytes(data.draw(st.binary(max_size=200) | damaged(file.read_bytes())))
    TRIED["pipeline-cache files"] += 1


def _emptied(tmp_path: Path) -> Path:
    """A folder without anything in it."""
    folder = tmp_path / "fuzz"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
