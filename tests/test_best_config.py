"""Reading `best-config.json`: the nearest entry, and files that are not what they should be."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tuner
from tests.made_records import decode
from tests.toy_export import FAST, PROBLEM, export, toy_record, with_rule
from tuner.errors import InputFileError, UnknownNameError, UsageError
from tuner.export.best_config import BestConfig, encode
from tuner.problems import PagedDecodeProblem

ROOT = Path(__file__).parent.parent

# Looking up


def config_for(problems: list[PagedDecodeProblem]) -> BestConfig:
    """A configuration whose entries differ in nothing but the problem."""
    with tempfile.TemporaryDirectory() as folder:
        made = [toy_record(FAST, problem=p) for p in problems]
        rule = with_rule()
        return export(Path(folder), made, family_of=rule)[0]


LOOKUP = config_for([decode(s, c) for s in (1, 8, 64) for c in (4096, 16384)])


def test_lookup_finds_the_very_problem() -> None:
    match = LOOKUP.lookup("toy", decode(8, 16384))
    assert (match.entry.problem, match.how, match.distance) == (decode(8, 16384), "exact", 0.0)


@pytest.mark.parametrize(
    ("asked", "found", "distance"),
    [
        (decode(1, 8000), decode(1, 4096), 0.966),
        (decode(3, 16384), decode(8, 16384), 1.415),
        (decode(512, 500_000), decode(64, 16384), 7.93),
        (decode(1, 8192), decode(1, 16384), 1.0),
        (decode(1, 0), decode(1, 4096), 12.0),
        (decode(8, 4096, lengths="uniform:1"), decode(8, 4096), 0.0),
    ],
)
def test_lookup_finds_the_nearest(
    asked: PagedDecodeProblem, found: PagedDecodeProblem, distance: float
) -> None:
    match = LOOKUP.lookup("toy", asked)
    assert (match.entry.problem, match.how) == (found, "nearest")
    assert match.distance == pytest.approx(distance, abs=0.01)


def test_lookup_prefers_the_same_spread_of_lengths() -> None:
    spread = decode(8, 4096, lengths="uniform:64")
    config = config_for([decode(8, 4096), spread])
    asked = decode(8, 4096, lengths="uniform:128")
    assert config.lookup("toy", asked).entry.problem == decode(8, 4096)
    asked = decode(16, 4096, lengths="uniform:64")
    assert config.lookup("toy", asked).entry.problem == spread


def test_lookup_never_crosses_head_geometry() -> None:
    for other in (decode(8, 16384, gqa=8), decode(8, 16384, block_size=32)):
        with pytest.raises(UsageError, match=r"not tuned for query_heads .*: there is query_heads"):
            LOOKUP.lookup("toy", other)


def test_a_window_that_no_context_reaches_beyond_is_to_be_looked_up_without() -> None:
    idle, at_work = (decode(8, 4096, window=window) for window in (4096, 4095))
    with pytest.raises(UsageError, match="no context reaches beyond the window: look it up with"):
        LOOKUP.lookup("toy", idle)
    assert LOOKUP.lookup("toy", idle.effective).how == "exact"
    with pytest.raises(UsageError, match="not tuned for") as told:
        LOOKUP.lookup("toy", at_work)
    assert "look it up" not in str(told.value)
    assert at_work.effective == at_work


def test_without_a_rule_an_entry_is_for_its_very_problem(tmp_path: Path) -> None:
    config, _ = export(tmp_path, [toy_record(FAST)])
    match = config.lookup("toy", PROBLEM)
    assert match.how == "exact"
    longer = msgspec.structs.replace(PROBLEM, context=65)
    with pytest.raises(
        UsageError, match=r"cannot be launched there as what was tuned: it has no r"
    ):
        config.lookup("toy", longer)
    with pytest.raises(UsageError, match="cannot be launched on 2x65 .*: it has no rule"):
        match.entry.dispatch.launch(longer)


def test_lookup_of_an_unknown_family_names_the_known() -> None:
    with pytest.raises(UnknownNameError, match="legal: toy"):
        LOOKUP.lookup("toys", PROBLEM)


@given(st.integers(1, 2**16), st.integers(0, 2**20))
def test_the_nearest_is_nearest(sequences: int, context: int) -> None:
    asked = decode(sequences, context)
    match = LOOKUP.lookup("toy", asked)

    def octaves(p: PagedDecodeProblem) -> float:
        across = abs(math.log2(p.sequences / sequences))
        return across + abs(math.log2(p.context / max(1, context)))

    assert octaves(match.entry.problem) == min(
        octaves(e.problem) for e in LOOKUP.families["toy"].entries
    )


# Reading bad files


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"best-config.json: cannot read: No such file"):
        tuner.load_best_config(tmp_path)


def test_another_schema_version_is_said(tmp_path: Path) -> None:
    path = tmp_path / "best-config.json"
    path.write_bytes(encode(LOOKUP).replace(b'"schema_version": 2', b'"schema_version": 3'))
    with pytest.raises(InputFileError, match="has schema version 3, this version of the tuner"):
        tuner.load_best_config(path)


def test_a_file_cut_off_anywhere_is_said_with_its_line(tmp_path: Path) -> None:
    data = encode(LOOKUP)
    path = tmp_path / "best-config.json"
    for length in range(0, len(data) - 2, 997):
        path.write_bytes(data[:length])
        with pytest.raises(InputFileError, match="was cut off") as caught:
            tuner.load_best_config(path)
        assert caught.value.line == data[:length].count(b"\n") + 1


def test_a_wrong_field_is_said_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "best-config.json"
    path.write_bytes(encode(LOOKUP).replace(b'"kind": "discrete"', b'"kind": "abacus"'))
    with pytest.raises(InputFileError, match=r"Invalid enum value 'abacus' - at `\$.device.kind`"):
        tuner.load_best_config(path)


@pytest.mark.parametrize("spirv", [b"spirv/../../secret.spv", b"/etc/passwd"])
def test_a_path_out_of_the_folder_is_refused(tmp_path: Path, spirv: bytes) -> None:
    good = LOOKUP.families["toy"].entries[0].passes[0].spirv.encode()
    path = tmp_path / "best-config.json"
    path.write_bytes(encode(LOOKUP).replace(good, spirv))
    with pytest.raises(InputFileError, match="matching regex"):
        tuner.load_best_config(path)


@given(st.binary(max_size=60) | st.integers(0, 2**20).map(lambda i: b"[" * (i % 100_000)))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_refused_as_an_input_file(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "best-config.json"
    path.write_bytes(data)
    with pytest.raises(InputFileError):
        tuner.load_best_config(path)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_changed_byte_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = bytearray(encode(LOOKUP))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("fuzz") / "best-config.json"
    path.write_bytes(whole)
    try:
        config = tuner.load_best_config(path)
    except InputFileError:
        return
    assert isinstance(config, BestConfig)


# The package's surface


def test_import_tuner_is_light() -> None:
    code = (
        "import sys, tuner; tuner.__version__; "
        "print([m for m in ('numpy', 'msgspec', 'pandas', 'vulkan') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_loading_a_configuration_needs_neither_vulkan_nor_pandas(tmp_path: Path) -> None:
    (tmp_path / "best-config.json").write_bytes(encode(LOOKUP))
    code = (
        "import sys, tuner; tuner.load_best_config(sys.argv[1]); "
        "print([m for m in ('pandas', 'vulkan', 'matplotlib', 'optuna') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        check=True,
    )
    assert done.stdout.strip() == "[]"
