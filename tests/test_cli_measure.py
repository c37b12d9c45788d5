"""Single measurements from the command line: calibrate, bench and verify."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.commands import FAMILY, SMALL, Run, only_folder
from tests.made_records import made_record
from tuner.cli.session import warn_of_host_clock


def test_calibrate_stores_what_it_measures_and_draws_it(
    run_on_device: Run, tmp_path: Path, vulkan_selector: str | None
) -> None:
    ran = run_on_device("calibrate", "--out", tmp_path, "--plot", code=0)
    lines = (only_folder(tmp_path) / "calibrations.jsonl").read_text().splitlines()
    stored = json.loads(lines[0])["content"]
    sizes = [nbytes for nbytes, _ in stored["points"]]
    assert sizes == sorted(sizes)
    assert stored["read_gb_s"] == stored["points"][-1][1] > 0
    assert [curve["transfer"] for curve in stored["curves"]] == ["read", "write", "copy"]
    assert [floor["passes"] for floor in stored["floors"]] == [1, 2, 3]
    assert all(floor["batched_ns"] > 0 for floor in stored["floors"])
    assert "launch floor of 2 passes: " in ran.out
    assert "256 KiB" in ran.out
    assert (only_folder(tmp_path) / "plots" / "bandwidth.png").is_file()
    assert ran.err.count("is a CPU driver") <= 1


def test_bench_compares_a_variant_with_the_baseline(run_on_device: Run) -> None:
    arguments = ("bench", FAMILY, "--shape", SMALL, "--set", "split=count:2")
    measured = run_on_device(*arguments, "--json").json()
    assert [each["state"] for each in measured["records"]] == ["correct", "correct"]
    baseline, variant = (each["values"] for each in measured["records"])
    assert (baseline["strategy"], variant["split"]) == ("baseline", "count:2")
    assert [each["passes"] for each in measured["records"]] == [1, 2]
    assert [each["passes"] for each in measured["calibration"]["floors"]] == [1, 2]
    shown = run_on_device(*arguments, "--no-baseline", "--measure", "batched", code=0).out
    assert "variant: strategy=" in shown
    assert re.search(r"variant +[\d.,]+ .* \d+ x \d+ +(budget|precise|max_samples) ", shown)
    assert "launch floor of 2 passes: " in shown
    assert "baseline" not in shown


def test_verify_passes_and_counts(run_on_device: Run) -> None:
    ran = run_on_device("verify", FAMILY, "--variants", 3, "--shape", SMALL, code=0)
    assert "all answers are right" in ran.out
    assert "verified: 3/3" in ran.err
    writes = "cache_write:kv_heads=1,head_size=64,tokens=4"
    arguments = ("verify", "--all-families", "--variants", 2, "--shape", writes, "--json")
    batches = run_on_device(*arguments).json()["batches"]
    assert [each["family"] for each in batches] == ["cache_write_f32", "cache_write_q8"]
    assert [(each["variants"], each["failures"]) for each in batches] == [(2, [])] * 2


def test_verify_takes_only_the_variants_asked_for(run_on_device: Run) -> None:
    asked = {"strategy": ["teams"], "subgroups": [1, 4]}
    only = [w for name in asked for value in asked[name] for w in ("--only", f"{name}={value}")]
    report = run_on_device("verify", "kv_append_q8", *only, "--variants", "values", "--json").json()
    covered = report["covered"]["kv_append_q8"]
    assert {name: covered[name] for name in asked} == asked
    assert covered["halves"] == [1, 2]
    first, *others = (batch["variants"] for batch in report["batches"])
    assert first >= len(covered["lanes"]) > 1
    assert set(others) == {1}


def test_verify_asks_each_family_for_what_it_has_of_only(run_on_device: Run) -> None:
    writes = "cache_write:kv_heads=1,head_size=64,tokens=4"
    arguments = ["verify", "--all-families", "--shape", writes, "--variants", "values", "--json"]
    for text in ("strategy=direct", "strategy=teams", "threads=64", "lanes=8", "width=4"):
        arguments += ["--only", text]
    covered = run_on_device(*arguments).json()["covered"]
    assert set(covered) == {"cache_write_f32", "cache_write_q8"}
    of_floats, of_codes = covered["cache_write_f32"], covered["cache_write_q8"]
    assert (of_floats["strategy"], of_floats["threads"]) == (["direct"], [64])
    assert (of_codes["strategy"], of_codes["lanes"]) == (["teams"], [8])
    assert of_floats["width"] == of_codes["width"] == [4]
    refused = run_on_device(*arguments, "--only", "threads=65", code=2)
    assert "unknown value of threads of these families '65'" in refused.err


@pytest.mark.parametrize(
    ("only", "says"),
    [
        (["strategy"], "'strategy' is no assignment"),
        (["strategie=teams"], "did you mean strategy"),
        (["strategy=team"], "did you mean teams"),
        (["strategy=baseline", "halves=2"], "no such variant is legal"),
    ],
)
def test_verify_refuses_what_it_cannot_take_only(
    run_on_device: Run, only: list[str], says: str
) -> None:
    options = [word for text in only for word in ("--only", text)]
    assert says in run_on_device("verify", "kv_append_q8", *options, code=2).err


def test_times_of_the_hosts_clock_are_said_to_be_that(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_host_clock([made_record()])
    assert capsys.readouterr().err == ""
    trouble = "timestamps all read the same"
    warn_of_host_clock([made_record(), made_record(clock="host", clock_trouble=trouble)])
    assert f"these times are from the host's clock, because {trouble}" in capsys.readouterr().err
    warn_of_host_clock([made_record(clock="host")])
    assert "because this device has no timestamps" in capsys.readouterr().err
