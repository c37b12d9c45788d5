"""`plot`, `compare` and the exports count today's kernels, and say what they leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from tests.made_records import decode, made_record
from tuner import kernels, plots
from tuner.cli import app, tune
from tuner.cli.session import Opened
from tuner.compile import Compiler
from tuner.device_info import DeviceInfo
from tuner.evaluate import Currency, Evaluator
from tuner.kernels.base import Values
from tuner.kernels.space import canonical, reasons
from tuner.records import Record
from tuner.results import Store
from tuner.runner.fake import FakeRunner

FAMILY = kernels.family("paged_decode_q8")
PROBLEM = decode(1, 256, gqa=4)
CPU = Path(__file__).parents[1] / "results" / "published" / "llvmpipe" / "device.json"
INFO = msgspec.json.decode(CPU.read_bytes(), type=DeviceInfo)
BASELINE = canonical(FAMILY, FAMILY.baseline)
START = next(
    canonical(FAMILY, each)
    for each in FAMILY.starts
    if not reasons(FAMILY, canonical(FAMILY, each), PROBLEM, INFO)
)


def current(values: Values, median_us: float) -> Record:
    """A record as a search of today would leave it."""
    compiler = Compiler()
    draft = Evaluator(FakeRunner(INFO), compiler, FAMILY, PROBLEM).draft(values)
    return made_record(
        PROBLEM,
        dict(values),
        median_us=median_us,
        device=INFO,
        variant=draft.key,
        compiler=compiler.identity,
    )


def earlier(values: Values, median_us: float) -> Record:
    """A record under an identity that no kernel of today has."""
    return made_record(PROBLEM, dict(values), median_us=median_us, device=INFO, variant="5" * 32)


def write(folder: Path, *records: Record) -> Path:
    with Store(folder) as store:
        store.write_device(INFO)
        store.extend(records)
    return folder


def test_a_picture_that_cannot_be_drawn_costs_a_run_neither_export_nor_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug of a picture")

    monkeypatch.setitem(plots.PLOTS, "history", broken)
    folder = write(tmp_path, current(BASELINE, 100.0), current(START, 10.0))
    with Store(folder) as store:
        written = tune._write(store, Opened(FakeRunner(INFO), Compiler()))  # type: ignore[arg-type]
    assert written.best_config == folder / "best-config.json"
    assert {path.stem for path in written.plots} == set(plots.PLOTS) - {"history"}
    assert [len(outcome.records) for outcome in written.outcomes] == [2]
    assert written.error is not None
    assert "history.png: cannot be drawn: ZeroDivisionError: a bug of a picture" in written.error


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """The fastest record is of an earlier kernel."""
    made = (current(BASELINE, 900.0), current(START, 100.0), earlier(START, 50.0))
    return write(tmp_path / INFO.slug, *made)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return write(tmp_path / "before" / INFO.slug, earlier(START, 50.0))


def invoke(*arguments: str | Path, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def test_the_records_made_here_are_of_today(mixed: Path) -> None:
    sifted = Currency(INFO, Compiler().identity).sift(Store(mixed, read_only=True).records())
    assert [record.median_ns for record in sifted.current] == pytest.approx([900e3, 100e3], rel=0.1)


LEFT_OUT = "1 of 3 records are of earlier kernels (sources or compiler have changed since)"


def test_markdown_ranks_kernels_of_today(mixed: Path) -> None:
    told = invoke("export", mixed, "--format", "markdown")
    assert f"{LEFT_OUT} and left out; --earlier counts them, too" in told.stderr
    assert "| 100.0 (" in (mixed / "results.md").read_text()
    told = invoke("export", mixed, "--format", "markdown", "--earlier")
    assert told.stderr == ""
    assert "| 50.0 (" in (mixed / "results.md").read_text()


def test_csv_and_t4_list_every_record(mixed: Path) -> None:
    assert invoke("export", mixed, "--format", "csv").stderr == ""
    assert len((mixed / "results.csv").read_text().splitlines()) == 4
    (path,) = json.loads(invoke("export", mixed, "--format", "t4", "--json").stdout)["files"]
    assert len(json.loads(Path(path).read_text())["results"]) == 3


def test_plots_draw_kernels_of_today(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def watch(records: Any, device: Any) -> Any:
        drawn.append(len(records))
        return figure(records, device)

    from tuner import plots

    figure = plots.PLOTS["history"]
    monkeypatch.setattr(plots, "PLOTS", {"history": watch})
    assert LEFT_OUT in invoke("plot", mixed).stderr
    assert invoke("plot", mixed, "--earlier").stderr == ""
    assert drawn == [2, 3]


@pytest.mark.parametrize("command", [("plot",), ("export", "--format", "markdown")])
def test_where_all_records_are_earlier_the_ways_out_are_named(
    old: Path, command: tuple[str, ...]
) -> None:
    told = invoke(*command, old, code=1).stderr
    assert "all 1 records are of earlier kernels (sources or compiler have changed since)" in told
    assert "--earlier shows them, `tuner tune` measures those of today" in told
    assert invoke(*command, old, "--earlier").stderr == ""


def test_without_a_snapshot_all_count_and_it_is_said(mixed: Path) -> None:
    (mixed / "device.json").unlink()
    told = invoke("export", mixed, "--format", "markdown").stderr
    assert "no device.json tells which records are of today's kernels: all count" in told
    assert "| 50.0 (" in (mixed / "results.md").read_text()


def test_no_configuration_can_name_an_earlier_kernel(mixed: Path) -> None:
    told = invoke("export", mixed, "--earlier", code=2).stderr
    assert "kernels of earlier sources cannot be made any more" in told


def compared(*arguments: str | Path) -> tuple[dict[str, Any], str]:
    result = invoke("compare", *arguments, "--json")
    return json.loads(result.stdout), result.stderr


def test_compare_takes_kernels_of_today_where_a_side_has_any(mixed: Path, old: Path) -> None:
    found, told = compared(old, mixed)
    assert found["problems"][0]["ratio"] == pytest.approx(2.0)
    assert (found["a"]["left_out"], found["b"]["left_out"]) == (0, 1)
    assert f"note: {old}: all 1 records are of earlier kernels" in told
    assert f"note: {mixed}: {LEFT_OUT} and left out; --earlier counts them, too" in told


def test_compare_counts_all_if_asked_or_if_an_identity_says_so(mixed: Path, old: Path) -> None:
    found, told = compared(old, mixed, "--earlier")
    assert (found["problems"][0]["ratio"], told) == (pytest.approx(1.0), "")
    found, told = compared("@555555", "@best", "--out", mixed)
    assert found["problems"][0]["ratio"] == pytest.approx(2.0)
    assert (found["a"]["remark"], found["b"]["left_out"]) == (None, 1)


def test_compare_says_that_a_file_alone_tells_no_kernels_apart(mixed: Path, old: Path) -> None:
    kept = (mixed / "records.jsonl").rename(mixed / "kept.jsonl")
    found, told = compared(old, kept)
    assert found["problems"][0]["ratio"] == pytest.approx(1.0)
    assert f"{kept}: no device.json tells which records are of today's kernels: all count" in told
