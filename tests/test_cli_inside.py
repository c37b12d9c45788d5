"""Parts of the command line that need no process: what it shows, and what errors become."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from tests.made_records import (
    decode,
    gpu,
    made_calibration,
    made_full_calibration,
    made_record,
)
from tests.toy_family import TOY, toy_problem
from tuner import kernels
from tuner.cli import app, bench, output, progress, session, summary, variants
from tuner.cli.calibrate import sensors
from tuner.cli.session import Opened
from tuner.compile import Compiler
from tuner.errors import ResultsError, UsageError
from tuner.export import markdown
from tuner.records import FINAL, REFERENCE, Energy, Observation, Record
from tuner.results import Store, outcomes
from tuner.runner.fake import FakeRunner
from tuner.search import ProblemResult, RunResult, Status

PROBLEM = decode(8, 16_384)
FAMILY = "paged_decode_q8"
SINKS = "paged_decode:sequences=1,context=64,query_heads=4,kv_heads=2,head_size=64,sinks"


def status(**changes: Any) -> Status:
    fields: dict[str, Any] = {
        "family": TOY,
        "problem": PROBLEM,
        "index": 1,
        "problems": 3,
        "legal": 1234,
        "trials": 0,
        "trial_limit": None,
    }
    return Status(**(fields | changes))


def test_status_line_says_trials_best_failures_and_time_left() -> None:
    best = made_record(PROBLEM, median_us=123.4)
    shown = progress.status_line(
        status(trials=7, trial_limit=20, best=best, failures={"timeout": 1, "compile": 2}), 75.4
    )
    expected = best.bytes_moved / 123_400
    share = 100 * expected / 4600
    assert shown == (
        f"trial 7/20 · best 123.4 µs, {expected:,.0f} GB/s ({share:.1f} % of read) · "
        "failed: 2 compile, 1 timeout · 1:15 left"
    )
    assert progress.status_line(status(), None) == "trial 0 · best -"
    # Earlier runs tried more than this one is to.
    assert progress.status_line(status(trials=9, trial_limit=6), None) == "trial 9 · best -"


def test_plain_progress_prints_a_line_at_most_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    record = made_record(PROBLEM)
    with progress.TuneProgress() as shown:
        shown.problem_started(status(trial_limit=9))
        for trials in range(1, 10):
            now[0] += 2.0
            shown.trial_finished(record, status(trials=trials, measured=trials, trial_limit=9))
        shown.problem_finished(
            ProblemResult(family=TOY, problem=PROBLEM, ended="does not fit", error="too large")
        )
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[2/3] 8x16384 h32/8 d128 · toy, 1,234 legal variants"
    assert [line.split(" · ")[0] for line in lines[1:]] == [
        "  trial 3/9",
        "  trial 6/9",
        "  trial 9/9",
        "  does not fit: too large",
    ]
    assert lines[1].endswith("0:12 left")


def test_a_problem_ends_with_the_time_that_its_finals_gave(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen, again = (made_record(PROBLEM, median_us=us) for us in (2_244.0, 3_831.0))
    with progress.TuneProgress() as shown:
        shown.problem_started(status(trial_limit=1))
        shown.trial_finished(seen, status(trials=1, best=seen))
        shown.finals_started(2, status(trials=1, best=seen))
        shown.problem_finished(
            ProblemResult(family=TOY, problem=PROBLEM, ended="trials", best=again)
        )
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("  trial 1 · best 3,831 µs, ")
    assert last.endswith(" of read), measured again")


def test_plain_tables_align_and_numbers_stand_right(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("name", "µs"), [("a", 1), ("longer", 1234)], right=("µs",))
    assert capsys.readouterr().out == "name      µs\na          1\nlonger  1234\n"


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(None, "-"), (1_234.5, "1.234"), (98_760.0, "98.76"), (2e9, "2,000,000")],
)
def test_times_are_microseconds(nanoseconds: float | None, text: str) -> None:
    assert output.microseconds(nanoseconds) == text


def test_an_expected_error_is_a_message_and_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ResultsError("here", "cannot be read")

    monkeypatch.setattr("tuner.device.list_devices", fail)
    result = CliRunner().invoke(app, ["devices"])
    assert (result.exit_code, result.stderr) == (1, "tuner: here: cannot be read\n")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("tuner.device.list_devices", fail)
    with pytest.raises(ZeroDivisionError):
        CliRunner().invoke(app, ["devices"], catch_exceptions=False)


def test_variants_are_described_without_parameters_that_mean_nothing() -> None:
    from tuner import kernels
    from tuner.kernels.space import canonical

    family = kernels.family(FAMILY)
    baseline = canonical(family, family.baseline)
    assert variants.describe(family, baseline) == "strategy=baseline"
    # As it was before the cache's layout became a parameter, and with one that is gone.
    before = {name: value for name, value in baseline.items() if name != "layout"}
    assert variants.describe(family, before | {"vector": 4}) == "strategy=baseline vector=4"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tune", "--trials", "many"], "--trials"),
        (["tune", "--seconds", "-1"], "seconds is -1.0, must be above 0"),
        (["tune", "--device", "no such card"], "no device matches 'no such card'"),
        (["tune", "--family", "paged_decode_q9"], "did you mean paged_decode_q8"),
        (["tune", "--model", "llama-3.1-9b"], "did you mean Llama-3.1-8B"),
        (["tune", "--model", "phi-4", "--context", "4096,x"], "--context '4096,x': 'x'"),
        (["tune", "--model", "phi-4", "--lengths", "log"], "lengths 'log'"),
        (["tune", "--shape", "8x16:h32"], "part 'h32'"),
        (["tune", "--workload", "h200-decod"], "did you mean h200-decode"),
        (["tune", "--workload", "qsa-chain"], "a family that solves what was given: qsa_chain"),
        (["tune", "--workload", "absent.toml"], "absent.toml: No such file"),
        (["show", FAMILY, "--set", "stratgy=baseline"], "did you mean strategy"),
        (["show", FAMILY, "--set", "strategy=basline"], "did you mean baseline"),
        (["show", FAMILY, "--set", "strategy"], "write name=value"),
        (["show", FAMILY, "--pass", "atend"], "did you mean attend"),
        (["show", FAMILY, "--model", "phi-4", "--sequences", "1,2"], "2 problems where one"),
        (["verify"], "give one FAMILY or --all-families, or problems by --shape or --model"),
        (["verify", FAMILY, "--all-families"], "give one FAMILY or --all-families"),
        (["verify", FAMILY, "--variants", "some"], "--variants 'some'"),
        (["verify", FAMILY, "--shape", f"{SINKS}=2"], "sinks is 2, must be 0 (off) or 1 (on)"),
        (["verify", FAMILY, "--shape", f"{SINKS}=1"], "this family has no sinks: use paged_decode"),
        (["bench", "paged_decode_q9"], "did you mean paged_decode_q8"),
        (["export", "--format", "json"], "unknown format 'json'"),
    ],
)
def test_bad_usage_is_told_with_exit_code_2(
    vulkan_selector: str | None, tmp_path: Path, arguments: list[str], told: str
) -> None:
    if arguments[0] == "tune":
        arguments = [*arguments, "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr
    assert isinstance(result.exception, SystemExit)
    assert list(tmp_path.iterdir()) == [], "bad usage leaves no folder behind"


def metered(us: float, mj: float, **changes: Any) -> Record:
    """A record of 8 sequences with a time and an energy for each of its tokens."""
    record = made_record(PROBLEM, median_us=us, **changes)
    energy = Energy(joules_per_launch=8 * mj / 1e3, launches=9, seconds=1.0, method="counter")
    return msgspec.structs.replace(record, energy=energy)


def ran(result: RunResult, folder: Path, written: summary.Written | None = None) -> summary.Ran:
    """What `tune` has to tell of a run."""
    return summary.Ran(
        info=gpu(),
        result=result,
        written=written or summary.Written(),
        calibration=None,
        folder=folder,
    )


def test_the_front_of_time_and_energy_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast, thrifty = metered(80.0, 5.25), metered(95.0, 4.0)
    result = ProblemResult(
        family=kernels.family(FAMILY),
        problem=PROBLEM,
        ended="trials",
        best=fast,
        front=(fast, thrifty),
    )
    run = RunResult(problems=(result,), interrupted=False, seconds=12.0)
    summary.print_result(ran(run, tmp_path))
    out = capsys.readouterr().out
    assert "  80 µs, 5.25 mJ/token: strategy=" in out
    assert "  95 µs, 4 mJ/token: strategy=" in out


def test_rows_name_the_family_where_there_are_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("paged_decode_q8", "paged_decode_f32")
    results = tuple(
        ProblemResult(family=kernels.family(name), problem=PROBLEM, ended="trials")
        for name in names
    )
    for shown in (results, results[:1]):
        run = RunResult(problems=shown, interrupted=False, seconds=12.0)
        summary.print_result(ran(run, tmp_path))
        out = capsys.readouterr().out
        for name in names:
            several = len(shown) > 1
            assert out.count(f"{name} {PROBLEM.label}") == (2 if several else 0)
        assert out.count(PROBLEM.label) == 2 * len(shown)


def test_tried_is_counted_as_the_exported_table_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each kernel once, whatever it was timed again, and whichever run tried it."""
    values = [
        {**made_record(PROBLEM).values, "split": split} for split in ("count:2", "count:4", "none")
    ]
    records = [
        made_record(PROBLEM, values[0]),
        made_record(PROBLEM, values[1], state="timeout"),
        made_record(PROBLEM, values[2], session="earlier"),
        made_record(PROBLEM, values[0], note=FINAL),
        made_record(PROBLEM, values[0], note=REFERENCE),
    ]
    result = ProblemResult(
        family=kernels.family(FAMILY), problem=PROBLEM, ended="trials", trials=9, best=records[0]
    )
    run = RunResult(problems=(result,), interrupted=False, seconds=12.0)
    written = summary.Written(outcomes=outcomes(records))
    told = ran(run, tmp_path, written)
    summary.print_result(told)
    header, row = capsys.readouterr().out.splitlines()[1:3]
    assert (header.split()[-2:], row.split()[-2:]) == (["tried", "failed"], ["3", "1"])
    assert "| 3 (1) |" in markdown.text(records)
    shown = summary.as_data(told)["problems"]
    assert [(each["tried"], each["failures"]) for each in shown] == [(3, {"timeout": 1})]


def test_a_problem_without_a_best_says_whether_anything_was_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for trials, told in ((0, "nothing was tried yet"), (3, "no correct variant")):
        result = ProblemResult(
            family=kernels.family(FAMILY), problem=PROBLEM, ended="interrupted", trials=trials
        )
        run = RunResult(problems=(result,), interrupted=True, seconds=2.0)
        summary.print_result(ran(run, tmp_path))
        assert f"{PROBLEM.label}: {told}\n" in capsys.readouterr().out


def test_what_could_not_be_written_is_told_apart_from_no_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunResult(problems=(), interrupted=False, seconds=2.0)
    for best_config, told in ((None, "not exported"), (tmp_path, "not everything was written")):
        written = summary.Written(best_config=best_config, error="a.png: no space")
        summary.print_result(ran(run, tmp_path, written))
        assert f"{told}: a.png: no space\n" in capsys.readouterr().err


def test_the_pace_and_what_it_is_the_pace_of_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields: dict[str, Any] = {"family": kernels.family(FAMILY), "problem": PROBLEM}
    problems = tuple(
        ProblemResult(
            **fields, ended="seconds", measured=n, seconds=10.0, search_seconds=s, busy=busy
        )
        for n, s, busy in ((70, 6.0, 0.8), (30, 4.0, 0.9))
    )
    run = RunResult(problems=problems, interrupted=False, seconds=21.0)
    summary.print_result(ran(run, tmp_path))
    out = capsys.readouterr().out
    assert "100 variants tried in 21 s, 10 a second while searching, device busy 85.0 %" in out
    idle = RunResult(problems=(), interrupted=False, seconds=1.0)
    summary.print_result(ran(idle, tmp_path))
    assert "0 variants tried in 1 s; results in" in capsys.readouterr().out


def test_bench_shows_floor_and_energy_beside_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    record = msgspec.structs.replace(
        metered(80.0, 5.25), passes=2, measure="batched", launches=25, ended_by="precise"
    )
    bench._print_records([record], made_full_calibration())
    header, line, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[-1] == "mJ/token"
    assert line.split()[-1] == "5.25"
    # The batched floor of two passes, and how many launches a sample had.
    assert re.search(r" 3\.8 +\d+ x 25 +precise ", line)


def test_bench_names_the_families_where_there_are_several(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, other = "paged_decode_q8", "paged_decode_q8_planar"
    records = [made_record(PROBLEM, family=one), made_record(PROBLEM, family=other)]
    bench._print_records(records, made_full_calibration())
    out = capsys.readouterr().out
    for name in (one, other):
        assert f"\n{name} {PROBLEM.label} " in out
        assert f"variant of {name}: strategy=" in out
    bench._print_records(records[:1], made_full_calibration())
    out = capsys.readouterr().out
    assert one not in out
    assert "\nvariant: strategy=" in out


def test_a_device_that_cannot_be_exported_does_not_hinder_the_others(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        with Store(tmp_path / name) as store:
            store.append_calibration(made_calibration())
            if name == "b":
                store.append(made_record(PROBLEM))
    for name in ("a", "c"):
        (tmp_path / name / "records.jsonl").touch()
    result = CliRunner().invoke(app, ["export", "--format", "csv", "--out", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (2, f"{tmp_path / 'b' / 'results.csv'}\n")
    assert [line.split(":")[1].strip() for line in result.stderr.splitlines()] == [
        str(tmp_path / "a"),
        str(tmp_path / "c"),
    ]


def test_what_sensors_say_fits_into_a_line() -> None:
    assert sensors(None) == "none found"
    assert sensors(Observation(source="xe", looks=1)) == "xe: nothing told"
    told = Observation(
        source="nvml",
        looks=9,
        power_w=412.4,
        core_mhz=(1755.0, 1980.0),
        memory_mhz=(3201.0, 3201.0),
        temperature_c=61.0,
        throttled=("software power cap",),
    )
    assert sensors(told) == (
        "nvml: 1,755 to 1,980 MHz, memory 3,201 MHz, 412 W, 61 °C, held down by software power cap"
    )


class SilentRunner(FakeRunner):
    """One with a validation layer that has nothing to say."""

    messages = ()


def test_verify_names_each_failure_as_it_comes_and_says_where_the_time_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def silent_device(*_: object, **__: object) -> Iterator[Opened]:
        yield Opened(SilentRunner(gpu()), Compiler())  # type: ignore[arg-type]

    monkeypatch.setattr("tuner.cli.session.opened", silent_device)
    writes = ("--shape", "cache_write:kv_heads=1,head_size=64,tokens=4", "--variants", "2")
    told = CliRunner().invoke(app, ["verify", "cache_write_q8", *writes])
    assert told.exit_code == 1
    heading = "correctness: cache_write_q8 on 1x4 kv1 d64"
    lines = [line for line in told.stderr.splitlines() if heading in line]
    assert len(lines) == 2
    assert all(": strategy=" in line for line in lines)
    assert told.stderr.index(heading) < told.stderr.index("verified: 2/2")
    assert told.stdout.count(heading) == 2
    row = next(line for line in told.stdout.splitlines() if line.startswith("cache_write_q8"))
    assert re.fullmatch(r"cache_write_q8 +1x4 kv1 d64 +2 +2 +\d+\.\d", row)
    found = json.loads(
        CliRunner().invoke(app, ["verify", "cache_write_q8", *writes, "--json"]).stdout
    )
    assert found["batches"][0]["seconds"] > 0


def test_the_summary_says_that_nothing_was_right() -> None:
    result = ProblemResult(
        family=TOY, problem=toy_problem(), ended="seconds", legal=9, trials=12, measured=12
    )
    assert "no correct" in summary._variant(result)


def test_the_summary_says_that_nothing_beat_the_baseline() -> None:
    values = [
        {"mode": mode, "width": 32, "unroll": 1, "tile": 1, "split": 1}
        for mode in ("plain", "half")
    ]
    plain, half = (made_record(family=TOY.name, values=each) for each in values)
    result = ProblemResult(family=TOY, problem=toy_problem(), ended="seconds", baseline=plain)
    assert summary._variant(replace(result, best=plain)).endswith("baseline: nothing was faster")
    assert summary._variant(replace(result, best=half)).startswith("mode=half")
    assert "baseline" not in summary._variant(replace(result, best=half))


def test_a_system_without_workers_is_told_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create")
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(UsageError, match="needs Linux, this is darwin: give --in-process"):
        session.opened(None).__enter__()
