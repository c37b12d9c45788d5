"""`tuner compare`: what A and B may be, verdicts, the exit code, JSON, the picture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.made_records import CHOICES, decode, gpu, made_record, software
from tuner.cli import app
from tuner.cli import compare as compare_command
from tuner.device_info import DeviceInfo
from tuner.records import Record
from tuner.results import Store
from tuner.results.outcomes import declared_baseline

BASELINE = dict(declared_baseline("paged_decode_q8") or {})
PROBLEMS = [decode(8, 16_384), decode(1, 4096)]
FAST = {name: choice[0] for name, choice in CHOICES.items()}
SLOW = {name: choice[-1] for name, choice in CHOICES.items()}


def records_of(device: DeviceInfo, factor: float = 1.0) -> Iterator[Record]:
    for problem in PROBLEMS:
        made = {"device": device, "problem": problem}
        yield made_record(values=BASELINE, median_us=900.0 * factor, **made)
        yield made_record(values=FAST, median_us=100.0 * factor, **made)
        yield made_record(values=SLOW, median_us=130.0 * factor, **made)


def write(folder: Path, records: Iterator[Record], device: DeviceInfo) -> Path:
    with Store(folder) as store:
        store.write_device(device)
        store.extend(records)
    return folder


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Results of two devices; the second takes ten times as long."""
    for device, factor in ((gpu(), 1.0), (software(), 10.0)):
        write(tmp_path / "results" / device.slug, records_of(device, factor), device)
    return tmp_path / "results"


def compare(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def compared(*arguments: str | Path) -> dict[str, Any]:
    result = compare(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_two_folders(results: Path, tmp_path: Path) -> None:
    changed = write(tmp_path / "new", records_of(gpu(), 0.9), gpu())
    found = compared(results / gpu().slug, changed)
    assert [p["label"] for p in found["problems"]] == [p.label for p in PROBLEMS]
    for problem in found["problems"]:
        assert problem["ratio"] == pytest.approx(0.9)
        assert problem["low"] < 0.9 < problem["high"] < 1
        assert problem["verdict"] == "faster"
        assert problem["a"]["values"] == problem["b"]["values"] == FAST
    assert found["geometric_mean"] == pytest.approx(0.9)


def test_a_records_file_will_do(results: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_bytes((results / gpu().slug / "records.jsonl").read_bytes())
    found = compared(kept, results / gpu().slug)
    assert {problem["verdict"] for problem in found["problems"]} == {"no difference shown"}


def test_two_devices_by_name(results: Path) -> None:
    a, b = gpu().name.split()[-1].lower(), software().name[:6]
    found = compared(a, b, "--out", results)
    assert [p["ratio"] for p in found["problems"]] == pytest.approx([10.0, 10.0])
    assert found["problems"][0]["b"]["device"] == software().name


def test_published_results_stand_in_for_devices_without_own(tmp_path: Path) -> None:
    out = tmp_path / "results"
    for device, factor in ((gpu(), 1.0), (software(), 10.0)):
        write(out / "published" / device.slug, records_of(device, factor), device)
    assert compared("h200", "llvmpipe", "--out", out)["geometric_mean"] == pytest.approx(10.0)
    write(out / software().slug, records_of(software(), 20.0), software())
    assert compared("h200", "llvmpipe", "--out", out)["geometric_mean"] == pytest.approx(20.0)
    told = compare("radv", "llvmpipe", "--out", out)
    assert (told.exit_code, "legal: llvmpipe, nvidia-h200" in told.stderr) == (2, True)


@pytest.mark.parametrize("variant", ["values", "identity"])
def test_two_variants_of_one_folder(results: Path, variant: str) -> None:
    folder = results / gpu().slug
    slow = next(r for r in Store(folder, read_only=True).records() if r.values == SLOW)
    name, value = next((n, v) for n, v in SLOW.items() if v not in (FAST[n], BASELINE.get(n)))
    wanted = f"{name}={value}" if variant == "values" else slow.variant[:10]
    found = compared("@baseline", f"@{wanted}", "--out", folder)
    assert found["problems"][0]["ratio"] == pytest.approx(130 / 900)
    assert found["problems"][0]["b"]["variant"] == slow.variant
    assert len(found["problems"]) == (2 if variant == "values" else 1)
    assert len(found["not_compared"]) == (0 if variant == "values" else 1)


def test_the_table_says_what_is_compared_and_names_what_was_not(
    results: Path, tmp_path: Path
) -> None:
    one = write(tmp_path / "one", (r for r in records_of(gpu()) if r.problem == PROBLEMS[0]), gpu())
    result = compare(results / gpu().slug, one)
    assert result.exit_code == 0
    assert "no difference shown" in result.stdout
    assert f"A: {results / gpu().slug} · {gpu().name}" in result.stdout
    assert f"not compared: paged_decode_q8 {PROBLEMS[1].label}" in result.stderr
    assert "has no such problem" in result.stderr


@pytest.mark.parametrize(
    ("factor", "limit", "code"),
    [(1.05, "3%", 3), (1.05, "10 %", 0), (1.0, "0%", 0), (0.9, "0%", 0), (1.05, None, 0)],
)
def test_the_exit_code_for_continuous_integration(
    results: Path, tmp_path: Path, factor: float, limit: str | None, code: int
) -> None:
    changed = write(tmp_path / "new", records_of(gpu(), factor), gpu())
    options = () if limit is None else ("--fail-if-slower", limit)
    assert compare(results / gpu().slug, changed, *options).exit_code == code


def test_a_variant_that_fails_now_is_worse_than_any_limit(results: Path, tmp_path: Path) -> None:
    kept = list(records_of(gpu()))[:3]
    failed = made_record(PROBLEMS[1], FAST, state="correctness")
    changed = write(tmp_path / "new", iter([*kept, failed]), gpu())
    result = compare(results / gpu().slug, changed, "--fail-if-slower", "50%")
    assert result.exit_code == 3
    assert "has no correct variant" in result.stderr


def test_the_picture_is_written(results: Path, tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "ratios.png"
    folder = results / gpu().slug
    result = compare("@baseline", "@best", "--out", folder, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_would_not_be_what_its_name_says_is_refused(
    results: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "ratios.pdf"
    result = compare("@baseline", "@best", "--out", results / gpu().slug, "--plot", picture)
    assert result.exit_code == 2
    assert "name a file that ends in .png" in result.stderr
    assert not picture.exists()


@pytest.mark.parametrize(
    ("between", "told"),
    [
        (None, "no variant was measured often enough"),
        (0.0, "differ no more than their samples explain"),
        (0.0059, "differ by 0.59 % more than their samples explain"),
    ],
)
def test_how_repeated_measurements_differ_is_said(between: float | None, told: str) -> None:
    assert told in compare_command._told(between)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("@bst", "@best", "variant 'bst' of @bst: use best, baseline"),
        ("@split=none,tokens=3", "@best", "unknown parameter 'tokens'"),
        ("nowhere", "@best", "nowhere: no such file or folder, and no device has results below"),
        ("@best", "@best", "stands for several devices: name one of"),
    ],
)
def test_what_cannot_be_found_is_named(results: Path, a: str, b: str, message: str) -> None:
    out = results if (a, b) == ("@best", "@best") else results / gpu().slug
    result = compare(a, b, "--out", out)
    assert result.exit_code == 2
    assert message in result.stderr


def test_nothing_in_common_says_what_each_side_has(tmp_path: Path) -> None:
    folders = [
        write(
            tmp_path / problem.label, (r for r in records_of(gpu()) if r.problem == problem), gpu()
        )
        for problem in PROBLEMS
    ]
    result = compare(*folders)
    assert result.exit_code == 2
    assert "no problem has a time on both sides" in result.stderr
    assert f"{PROBLEMS[0].label}: {folders[1]} has no such problem" in result.stderr


def test_a_limit_needs_its_unit(results: Path) -> None:
    result = compare("@best", "@best", "--out", results / gpu().slug, "--fail-if-slower", "3")
    assert result.exit_code == 2
    assert "write a percentage, such as 3%" in result.stderr


def test_different_measures_are_not_compared(tmp_path: Path) -> None:
    folders = []
    for measure in ("isolated", "batched"):
        record = made_record(PROBLEMS[0], FAST, measure=measure)
        folders.append(write(tmp_path / measure, iter([record]), gpu()))
    result = compare(*folders)
    assert result.exit_code == 2
    assert "has isolated samples" in result.stderr
