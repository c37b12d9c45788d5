"""Exports: what is chosen, what engines and other tools read, and that files are whole."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

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
from tests.toy_device import toy_device
from tests.toy_export import (
    BASE,
    FAST,
    PROBLEM,
    build,
    export,
    toy_record,
    toy_rule,
    with_rule,
)
from tests.toy_family import TOY, toy_problem
from tuner.errors import CompileError, InputFileError, ResultsError, UnknownNameError
from tuner.export import FORMATS, Exported, export_table, markdown, t4
from tuner.export.best_config import BestConfig, json_schema
from tuner.kernels.base import Family, Values
from tuner.kernels.space import require_legal
from tuner.problems import Problem
from tuner.records import ClockState, Observation, Record
from tuner.results import Store
from tuner.runner.protocol import Job

ROOT = Path(__file__).parent.parent
SCHEMA = ROOT / "tuner" / "data" / "best-config.schema.json"
T4_SCHEMA = json.loads((Path(__file__).parent / "data" / "t4-results.schema.json").read_text())


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


def test_a_baseline_that_other_values_come_to_as_well_is_compared_with(tmp_path: Path) -> None:
    base = toy_record(BASE, 100.0)
    again = msgspec.structs.replace(base, values={**BASE, "width": 64}, time="2099-01-01T00:00:00Z")
    config, _ = export(tmp_path, [base, again, toy_record(FAST, 10.0)])
    evidence = config.families["toy"].entries[0].evidence
    assert (evidence.baseline_us, evidence.speedup) == pytest.approx((100.0, 10.0))


def test_the_evidence_says_what_was_timed_on_a_lower_clock(tmp_path: Path) -> None:
    slow, fast = (ClockState(reference_ns=(ns,)) for ns in (150e3, 72e3))
    base = toy_record(BASE, 100.0, clock_state=slow)
    best = toy_record(FAST, 10.0, clock_state=fast)
    other = toy_record(FAST, 10.0, clock_state=slow)
    for folder, records, lower in (
        ("baseline", [base, best], ("baseline_us",)),
        ("none", [msgspec.structs.replace(base, clock_state=fast), best], ()),
        ("best", [msgspec.structs.replace(base, clock_state=fast), other], ("median_us",)),
    ):
        (tmp_path / folder).mkdir()
        config, _ = export(tmp_path / folder, records)
        assert config.families["toy"].entries[0].evidence.lower_clock == lower


def test_the_evidence_of_a_final_has_the_validation_of_its_trial(tmp_path: Path) -> None:
    trial = toy_record(FAST, 10.0, time="2026-01-01T00:00:00Z")
    assert trial.check is not None
    once = msgspec.structs.replace(trial.check, cases=1, error=1e-5)
    again = toy_record(FAST, 10.1, note="final", check=once, time="2026-01-02T00:00:00Z")
    config, _ = export(tmp_path, [trial, again])
    evidence = config.families["toy"].entries[0].evidence
    assert evidence.median_us == pytest.approx(10.1)
    assert evidence.check is not None
    assert (evidence.check.cases, evidence.check.error) == (trial.check.cases, trial.check.error)


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

    def objection(record: Record) -> str | None:
        return None if record.values == good.values else "changed"

    config, _ = export(tmp_path, [stale, good, also_stale], objection=objection)
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


def test_variants_of_another_version_are_told_by_their_reasons_alone(tmp_path: Path) -> None:
    def strict(family: Family, problem: Problem, values: Values) -> Job:
        require_legal(family, values, problem, toy_device())
        return build(family, problem, values)

    old = {name: value for name, value in FAST.items() if name != "split"}
    made = [toy_record(old), toy_record(old, problem=toy_problem(4, 64))]
    with pytest.raises(ResultsError) as told:
        export(tmp_path, made, build=strict)
    assert str(told.value) == (
        f"{tmp_path}: nothing to export: toy on {PROBLEM.label}: none of 1 correct variants is "
        "usable: no variant of today: split has no value; and so for 1 more problems; `tuner tune` "
        "measures what is missing"
    )


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


def test_a_family_with_a_rule_exports_it(tmp_path: Path) -> None:
    config, _ = export(tmp_path, [toy_record(FAST)], family_of=with_rule())
    dispatch = config.families["toy"].entries[0].dispatch
    assert (dispatch.policy, dispatch.facts) == ("count:2", {"granule": 16})
    assert dispatch.groups == {"main": ("sequences", "1", "1"), "join": ("1", "1", "1")}
    launch = dispatch.launch(toy_problem(7, 64))
    assert launch.groups == {"main": (7, 1, 1), "join": (1, 1, 1)}
    assert launch.push_constants == {"rows": 14}
    assert launch.scratch_bytes == {"partial": 8}


def changed(**fields: Any) -> Callable[[str], Family]:
    rule = dataclasses.replace(toy_rule(), **fields)
    return lambda _name: dataclasses.replace(TOY, dispatch=lambda _candidate: rule)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"groups": {"main": ("rows", "1", "1"), "join": ("1", "1", "1")}}, r"groups of main, mea"),
        ({"groups": {"main": ("sequences", "1", "1")}}, r"passes, measured was \['join', 'main'\]"),
        ({"push": {"rows": "rows + 1"}}, r"push constants of main, measured was {'rows': 4"),
        ({"push": {"row": "rows"}}, r"'row': 4} for push constants of main"),
        ({"scratch": {"partial": "4"}}, r"{'partial': 4} for scratch, measured was {'partial': 8"),
        ({"scratch": {}}, "{} for scratch"),
    ],
)
def test_a_rule_that_contradicts_the_measured_launch_is_a_bug(
    tmp_path: Path, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        export(tmp_path, [toy_record(FAST)], family_of=changed(**fields))


def test_what_goes_beside_the_pass_before_it_is_exported(tmp_path: Path) -> None:
    def together(family: Family, problem: Problem, values: Values) -> Job:
        job = build(family, problem, values)
        first, second = job.passes
        beside = msgspec.structs.replace(second, beside=True)
        return msgspec.structs.replace(job, passes=(first, beside))

    config, _ = export(tmp_path, [toy_record(FAST)], build=together)
    assert [each.beside for each in config.families["toy"].entries[0].passes] == [False, True]


def test_the_baseline_alone_is_no_choice_where_all_else_has_changed(tmp_path: Path) -> None:
    def objection(record: Record) -> str | None:
        return None if record.values == BASE else "sources have changed"

    made = [toy_record(BASE, 100.0), toy_record(FAST, 10.0)]
    with pytest.raises(ResultsError, match="only the baseline is of today's kernels, and no choic"):
        export(tmp_path, made, objection=objection)
    tried = toy_record({**FAST, "unroll": 2}, 120.0)
    untouched = {record.variant for record in (made[0], tried)}
    config, _ = export(
        tmp_path,
        [tried],
        objection=lambda record: None if record.variant in untouched else "sources have changed",
    )
    assert [entry.values for entry in config.families["toy"].entries] == [BASE]


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


def test_markdown_marks_what_was_timed_on_a_lower_clock() -> None:
    states = [ClockState(reference_ns=taken) for taken in ((72e3, 74e3), (72e3, 150e3, 160e3))]
    made = [
        made_record(decode(n, 4096), clock_state=state) for n, state in enumerate(states, start=1)
    ]
    text = markdown.text(made, device=gpu(), baseline_of=lambda _: BASELINE)
    first, second, _, note = text.splitlines()[-4:]
    assert "↓" not in first
    assert "| 100.0↓ (" in second
    assert note.startswith("↓: on a lower clock")
    slow = made_record(
        decode(1, 4096), values=dict(BASELINE), median_ns=500e3, clock_state=states[1]
    )
    first, *_ = markdown.text(
        [*made, slow], device=gpu(), baseline_of=lambda _: BASELINE
    ).splitlines()[-4:]
    assert first.startswith("| 1x4096 h32/8 d128 | 100.0 (")
    assert "| 500.0↓ | 5.0x |" in first
    capped = Observation(source="nvml", looks=1, throttled=("software power cap",))
    held = [msgspec.structs.replace(record, observed=capped) for record in made]
    assert "↓" not in markdown.text(held, device=gpu(), baseline_of=lambda _: BASELINE)
    alone = markdown.text(made[:1], device=gpu(), baseline_of=lambda _: BASELINE)
    on_cpu = markdown.text(made, device=software(), baseline_of=lambda _: BASELINE)
    assert "↓" not in alone + on_cpu


def test_markdown_takes_a_baseline_alone_for_no_choice() -> None:
    text = markdown.text([made_record(values=dict(BASELINE))], baseline_of=lambda _: BASELINE)
    assert text.splitlines()[-1].endswith("| – | 0 | 1 (0) | none but the baseline |")


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
