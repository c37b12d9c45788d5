"""Exports: what is chosen, what engines and other tools read, and that files are whole."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tuner
from tests.made_records import (
    BASELINE,
    ERRORS,
    decode,
    gpu,
    made_calibration,
    made_record,
    made_run,
    software,
)
from tests.toy_family import FACTOR, TOY, toy_problem
from tuner.errors import CompileError, InputFileError, ResultsError, UnknownNameError, UsageError
from tuner.export import FORMATS, Exported, export_best_config, export_table, markdown, t4
from tuner.export.best_config import BestConfig, encode, json_schema
from tuner.kernels.base import Candidate, DispatchRule, Family, Values
from tuner.problems import PagedDecodeProblem, Problem
from tuner.records import Record
from tuner.results import Store
from tuner.runner.protocol import Job, JobPass

ROOT = Path(__file__).parent.parent
SCHEMA = ROOT / "tuner" / "data" / "best-config.schema.json"
T4_SCHEMA = json.loads((Path(__file__).parent / "data" / "t4-results.schema.json").read_text())
PROBLEM = toy_problem(2, 64)
BASE: dict[str, int | str] = dict(TOY.baseline)
FAST: dict[str, int | str] = {**BASE, "width": 64, "split": 2}


def family_of(name: str) -> Family:
    if name != "toy":
        raise UnknownNameError("family", name, ["toy"])
    return TOY


def build(family: Family, problem: Problem, values: Values) -> Job:
    """A job with made-up SPIR-V that depends on the values."""
    assert isinstance(problem, PagedDecodeProblem)
    push = struct.pack("<If", problem.sequences * problem.query_heads, FACTOR)
    names = ("main", "join")[: int(values["split"])]
    return Job(
        passes=tuple(
            JobPass(
                name=name,
                spirv=f"{name} {sorted(values.items())}".encode(),
                push=push,
                groups=(problem.sequences, 1, 1) if name == "main" else (1, 1, 1),
                subgroup_size=32 if name == "main" else None,
            )
            for name in names
        ),
        bindings=tuple(binding.buffer for binding in family.bindings),
        scratch_bytes={"partial": 4 * int(values["split"])},
    )


def toy_record(values: dict[str, int | str], median_us: float = 10.0, **changes: Any) -> Record:
    fields = {"problem": PROBLEM, "family": "toy", **changes}
    return made_record(values=values, median_us=median_us, **fields)


def export(folder: Path, made: list[Record], **options: Any) -> tuple[BestConfig, Exported]:
    with Store(folder) as store:
        store.extend(made)
        arguments = {"info": gpu(), "build": build, "family_of": family_of, **options}
        exported = export_best_config(store, **arguments)
    return tuner.load_best_config(exported.path), exported


# best-config.json


def test_the_published_schema_is_up_to_date() -> None:
    """Write it anew with:

    python -c "import json; from tuner.export.best_config import json_schema as s;
    print(json.dumps(s(), indent=2))" > tuner/data/best-config.schema.json
    """
    assert json.loads(SCHEMA.read_text()) == json_schema()


def test_an_export_follows_its_schema_and_is_read_back(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.append_calibration(made_calibration())
    config, exported = export(tmp_path, [toy_record(BASE, 100.0), toy_record(FAST, 10.0)])
    written = json.loads(exported.path.read_text())
    jsonschema.validate(written, json.loads(SCHEMA.read_text()))
    assert msgspec.convert(written, BestConfig) == config
    assert tuner.load_best_config(tmp_path) == config
    assert exported == Exported(path=tmp_path / "best-config.json", entries=1, left_out=())


def test_an_entry_carries_all_that_an_engine_needs(tmp_path: Path) -> None:
    config, _ = export(tmp_path, [toy_record(BASE, 100.0), toy_record(FAST, 10.0)])
    assert (config.device.name, config.device.uuid) == (gpu().name, gpu().uuid)
    abi = config.families["toy"].abi
    assert [(b.binding, b.name, b.buffer, b.role) for b in abi.bindings] == [
        (0, "X", "x", "input"),
        (1, "Pool", "pool", "input"),
        (2, "Out", "out", "output"),
        (3, "Partial", "partial", "scratch"),
    ]
    assert [(p.name, p.type, p.offset) for p in abi.push_constants] == [
        ("rows", "uint", 0),
        ("factor", "float", 4),
    ]
    (entry,) = config.families["toy"].entries
    assert (entry.problem, entry.values, entry.scratch_bytes) == (PROBLEM, FAST, {"partial": 8})
    main, join = entry.passes
    assert (main.name, main.groups, main.subgroup_size) == ("main", (2, 1, 1), 32)
    assert main.push_constants == {"rows": 4, "factor": 2.5}
    assert (join.groups, join.subgroup_size) == ((1, 1, 1), None)
    for each, part in zip(entry.passes, build(TOY, PROBLEM, FAST).passes, strict=True):
        assert each.read_spirv(tmp_path) == part.spirv
        assert each.spirv == f"spirv/{hashlib.sha256(part.spirv).hexdigest()}.spv"
    assert entry.dispatch.policy == "fixed"


def test_the_evidence_is_that_of_the_record(tmp_path: Path) -> None:
    fast = toy_record(FAST, 10.0)
    config, _ = export(tmp_path, [toy_record(BASE, 100.0), fast])
    evidence = config.families["toy"].entries[0].evidence
    assert evidence.median_us == pytest.approx(10.0)
    assert evidence.low_us < evidence.median_us < evidence.high_us
    assert (evidence.baseline_us, evidence.speedup) == pytest.approx((100.0, 10.0))
    assert (evidence.gb_s, evidence.utilisation) == (fast.gb_s, fast.utilisation)
    assert (evidence.samples, evidence.variant) == (15, fast.variant)
    assert evidence.check is not None
    assert (evidence.check.error, evidence.check.bound) == (4e-4, 2e-3)


def test_chosen_is_the_fastest_correct_record_of_this_device_and_driver(tmp_path: Path) -> None:
    older = msgspec.structs.replace(gpu(), driver_info="570.0")
    made = [
        toy_record(FAST, 10.0),
        toy_record({**FAST, "width": 128}, 9.0, device=older),
        toy_record({**FAST, "width": 32}, 8.0, device=software()),
        toy_record({**FAST, "unroll": 2}, state="correctness"),
        toy_record({**FAST, "unroll": 4}, 20.0),
    ]
    config, _ = export(tmp_path, made)
    assert [entry.values for entry in config.families["toy"].entries] == [FAST]


def test_ties_are_listed_fastest_first(tmp_path: Path) -> None:
    close = [{**FAST, "unroll": n} for n in (2, 4)]
    made = [toy_record(FAST, 10.0), toy_record(close[0], 10.07), toy_record(close[1], 10.05)]
    config, _ = export(tmp_path, [*made, toy_record({**FAST, "width": 128}, 12.0)])
    tied = config.families["toy"].entries[0].tied
    assert [each.values for each in tied] == [close[1], close[0]]
    assert [each.median_us for each in tied] == pytest.approx([10.05, 10.07])


def test_calibration_is_the_newest_with_this_driver(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.append_calibration(made_calibration())
        store.append_calibration(msgspec.structs.replace(made_calibration(), driver="other"))
    config, _ = export(tmp_path, [toy_record(FAST)])
    assert config.calibration is not None
    assert config.calibration.read_gb_s == 4600.0
    assert config.calibration.method == made_calibration().method


def test_a_record_whose_sources_have_changed_is_passed_over(tmp_path: Path) -> None:
    stale, good = toy_record(FAST, 10.0), toy_record({**FAST, "unroll": 2}, 10.05)
    also_stale = toy_record({**FAST, "unroll": 4}, 10.06)

    def identify(family: Family, problem: Problem, values: Values) -> str:
        return good.variant if values == good.values else "changed"

    config, _ = export(tmp_path, [stale, good, also_stale], identify=identify)
    (entry,) = config.families["toy"].entries
    assert (entry.values, entry.tied) == (good.values, ())


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    def picky(family: Family, problem: Problem, values: Values) -> Job:
        if problem != PROBLEM:
            raise CompileError(template="toy", values=values, line=3, message="no")
        return build(family, problem, values)

    other, failed = toy_problem(4, 64), toy_problem(8, 64)
    made = [
        toy_record(FAST),
        toy_record(FAST, problem=other),
        toy_record(FAST, problem=failed, state="timeout"),
        toy_record(FAST, family="gone"),
    ]
    config, exported = export(tmp_path, made, build=picky)
    assert exported.entries == len(config.families["toy"].entries) == 1
    compiled, timed_out, gone = exported.left_out
    assert f"toy on {other.label}: none of 1 correct variants is usable: toy:3" in compiled
    assert timed_out == f"toy on {failed.label}: no correct variant"
    assert "unknown family 'gone'" in gone


@pytest.mark.parametrize("made", [[], [toy_record(FAST, state="runtime")]])
def test_nothing_to_export_is_an_error_and_writes_nothing(
    tmp_path: Path, made: list[Record]
) -> None:
    with pytest.raises(ResultsError, match="nothing to export: "):
        export(tmp_path, made)
    assert not (tmp_path / "best-config.json").exists()


def test_a_failed_export_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, exported = export(tmp_path, [toy_record(FAST, 10.0)])
    real = Path.replace

    def full(path: Path, target: Path) -> Path:
        if target.name == "best-config.json":
            raise OSError(28, "No space left on device")
        return real(path, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ResultsError, match=r"best-config.json: cannot write: No space left"):
        export(tmp_path, [toy_record({**FAST, "unroll": 2}, 5.0)])
    assert tuner.load_best_config(exported.path) == before
    assert before.families["toy"].entries[0].passes[0].read_spirv(tmp_path)


def test_a_spirv_file_that_was_damaged_is_noticed_and_written_again(tmp_path: Path) -> None:
    config, _ = export(tmp_path, [toy_record(FAST)])
    first = config.families["toy"].entries[0].passes[0]
    (tmp_path / first.spirv).write_bytes(b"damaged")
    with pytest.raises(InputFileError, match="not the SPIR-V that was exported"):
        first.read_spirv(tmp_path)
    export(tmp_path, [])
    assert first.read_spirv(tmp_path)


# The dispatch rule


def with_rule(main: tuple[str, str, str]) -> Any:
    def rule(candidate: Candidate) -> DispatchRule:
        return DispatchRule(
            policy=f"count:{candidate['split']}",
            facts={"granule": 16},
            groups={"main": main},
            text="one workgroup a sequence",
        )

    return lambda name: dataclasses.replace(TOY, dispatch=rule)


def test_a_family_with_a_rule_exports_it(tmp_path: Path) -> None:
    rule = with_rule(("sequences", "1", "1"))
    config, _ = export(tmp_path, [toy_record(FAST)], family_of=rule)
    dispatch = config.families["toy"].entries[0].dispatch
    assert (dispatch.policy, dispatch.facts) == ("count:2", {"granule": 16})
    assert dispatch.groups == {"main": ("sequences", "1", "1")}


def test_a_rule_that_contradicts_the_measured_launch_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gives \(4, 1, 1\) for pass main, measured was \(2, 1"):
        export(tmp_path, [toy_record(FAST)], family_of=with_rule(("rows", "1", "1")))


# Looking up


def config_for(problems: list[PagedDecodeProblem]) -> BestConfig:
    """A configuration whose entries differ in nothing but the problem."""
    with tempfile.TemporaryDirectory() as folder:
        return export(Path(folder), [toy_record(FAST, problem=p) for p in problems])[0]


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
    path.write_bytes(encode(LOOKUP).replace(b'"schema_version": 1', b'"schema_version": 2'))
    with pytest.raises(InputFileError, match="has schema version 2, this version of the tuner"):
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


# Other formats


def test_t4_follows_its_schema_in_every_state() -> None:
    made = [made_record(state=state) for state in ERRORS] + [made_record(state="constraints")]
    document = json.loads(t4.text([made_record(), *made]))
    jsonschema.validate(document, T4_SCHEMA)
    assert [r["invalidity"] for r in document["results"]] == ["correct", *ERRORS, "constraints"]


def test_t4_is_in_milliseconds() -> None:
    (result,) = t4.document([made_record(median_us=250.0)])["results"]
    assert sorted(result["times"]["runtimes"])[7] == pytest.approx(0.25)
    assert result["times"]["compilation"] == pytest.approx(311.4)
    assert {m["name"]: m["value"] for m in result["measurements"]} == {
        "time": pytest.approx(0.25),
        "GB/s": pytest.approx(made_record(median_us=250.0).gb_s),
        "utilisation": pytest.approx(made_record(median_us=250.0).utilisation),
        "attend.Register Count": 168,
    }


def test_t4_names_what_failed_as_its_readers_expect() -> None:
    (result,) = t4.document([made_record(state="compile")])["results"]
    assert result["measurements"] == [
        {"name": "time", "value": "CompilationFailedConfig", "unit": ""}
    ]
    assert result["error"] == ERRORS["compile"]


def store_of(folder: Path, made: tuple[Record, ...]) -> Store:
    store = Store(folder)
    store.extend(made)
    return store


def test_t4_has_one_file_a_problem(tmp_path: Path) -> None:
    problems = [decode(1, 4096), decode(8, 16384), decode(8, 16384, block_size=32)]
    made = made_run(problems, trials=3)
    with store_of(tmp_path, (*made, made_record(problems[0], device=software()))) as store:
        files = export_table(store, "t4")
    assert len(files) == len(set(files)) == 4
    assert files[0].relative_to(tmp_path).parts[:2] == ("t4", "paged_decode_q8")
    counted = 0
    for path in files:
        document = json.loads(path.read_text())
        jsonschema.validate(document, T4_SCHEMA)
        counted += len(document["results"])
    assert counted == len(made) + 1


def test_csv_has_a_row_a_record(tmp_path: Path) -> None:
    made = made_run([decode(1, 4096)], trials=5)
    with store_of(tmp_path, made) as store:
        (path,) = export_table(store, "csv", tmp_path / "elsewhere")
    found = list(csv.DictReader(io.StringIO(path.read_text())))
    assert path == tmp_path / "elsewhere" / "results.csv"
    assert [each["variant"] for each in found] == [record.variant for record in made]
    assert float(found[0]["median_us"]) * 1000 == pytest.approx(made[0].median_ns)


def test_markdown_shows_best_against_baseline() -> None:
    problem = decode(8, 16384)
    made = [
        made_record(problem, dict(BASELINE), median_us=1000.0),
        made_record(problem, {**BASELINE, "strategy": "packed_f16"}, median_us=100.0),
        made_record(problem, {**BASELINE, "subgroups": 2}, state="timeout"),
        made_record(decode(1, 4096), {**BASELINE, "subgroups": 2}, state="timeout"),
    ]
    text = markdown.text(made, device=gpu(), baseline_of=lambda _: BASELINE)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count(" | ") for line in table if "---" not in line}) == 1
    cells = [cell.strip() for cell in table[2].strip("|").split(" | ")]
    assert cells[:2] == ["8x16384 h32/8 d128", "100.0 (99.4–100.6)"]
    assert cells[4:8] == ["1,000", "10.0x", "0", "3 (1)"]
    assert "strategy=packed_f16" in cells[8]
    assert "none was correct" in table[3]
    assert "Software driver" not in text


def test_markdown_says_what_a_software_driver_proves() -> None:
    made = [made_record(device=software())]
    text = markdown.text(made, device=software(), baseline_of=lambda _: None)
    assert "Software driver: proves function, not speed." in text


def test_an_unknown_format_names_the_known(tmp_path: Path) -> None:
    with store_of(tmp_path, ()) as store:
        with pytest.raises(UnknownNameError, match="did you mean markdown"):
            export_table(store, "markdwn")
        for name in FORMATS:
            with pytest.raises(ResultsError, match="no records to export"):
                export_table(store, name)


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
