"""What befalls a search: lost devices, full disks, damaged journals, processes that die."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.toy_family import TOY, toy_problem, toy_runner
from tests.toy_search import PROBLEM, SPACE, Records, only_study, run, searched
from tuner.errors import DeviceLostError, ResultsError, TunerError
from tuner.records import FINAL, REFERENCE
from tuner.runner.fake import Call, FakeRunner
from tuner.runner.protocol import Job, MeasurePlan
from tuner.search.encoding import Encoding
from tuner.search.studylog import MAX_CRASHES, StudyLog, open_storage


def test_a_lost_device_ends_the_run_with_its_record(journal: Path) -> None:
    def faults(call: Call) -> TunerError | None:
        if (call.method, call.number) == ("measure", 4):
            return DeviceLostError("vkWaitForFences", "VK_ERROR_DEVICE_LOST", -4)
        return None

    store = Records()
    problems = (PROBLEM, toy_problem(1, 64))
    result = run(journal, store=store, runner=toy_runner(faults=faults), problems=problems)
    assert result.error is not None
    assert "VK_ERROR_DEVICE_LOST" in result.error
    assert [p.ended for p in result.problems] == ["device lost"]
    assert [record.state for record in store.kept] == ["correct"] * 4 + ["runtime"]
    again = run(journal, store=store, problems=problems)
    lost = store.kept[4].values
    assert lost not in [r.values for r in store.kept[5:] if r.problem == PROBLEM]
    assert again.error is None


def test_a_lost_device_is_not_asked_to_clean_up(journal: Path) -> None:
    """Whatever is called on a lost device fails, and must not hide the record of the trial."""

    class Lost(FakeRunner):
        lost = False

        def measure(self, job: Job, workload: str, plan: MeasurePlan) -> Any:
            self.lost = True
            raise DeviceLostError("vkWaitForFences", "VK_ERROR_DEVICE_LOST", -4)

        def release(self, jobs: Sequence[Job]) -> None:
            if self.lost:
                raise DeviceLostError("vkDestroyPipeline", "VK_ERROR_DEVICE_LOST", -4)
            super().release(jobs)

        def unload(self, name: str) -> None:
            if self.lost:
                raise DeviceLostError("vkFreeMemory", "VK_ERROR_DEVICE_LOST", -4)
            super().unload(name)

    store, made = Records(), toy_runner()
    result = run(journal, store=store, runner=Lost(made.info, outputs=made._outputs), workers=3)
    assert "vkWaitForFences" in (result.error or "")
    assert [record.state for record in store.kept] == ["runtime"]


def test_a_full_disk_stops_the_run_and_loses_nothing(journal: Path) -> None:
    store, runner = Records(), toy_runner()
    store.fail_after = 7
    with pytest.raises(ResultsError, match="No space left"):
        run(journal, store=store, runner=runner, trials=20)
    assert len(store.kept) == 7
    assert runner.jobs == []
    store.fail_after = None
    assert run(journal, store=store, trials=20).problems[0].trials == 20


def test_a_read_only_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="cannot keep the study here"):
        run(tmp_path / "file" / "study.journal")


def test_a_file_that_is_no_journal_is_said(journal: Path) -> None:
    journal.write_text("not a journal\nat all\n")
    with pytest.raises(ResultsError, match="no journal of Optuna's, or damaged"):
        run(journal)


def test_a_torn_last_line_of_the_journal_is_cut(journal: Path) -> None:
    store = Records()
    run(journal, store=store, trials=5)
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code": 4, "stu')
    assert run(journal, store=store, trials=8).problems[0].measured == 3


KILLED = """
    import os, signal, sys
    from pathlib import Path
    sys.path.insert(0, {root!r})
    from tests import toy_search
    from tuner.results import Store

    class Killed(toy_search.Watch):
        def trial_started(self, values, status):
            super().trial_started(values, status)
            if len(self.started) == {at}:
                os.kill(os.getpid(), signal.SIGKILL)

    with Store(Path({folder!r}) / "store") as store:
        toy_search.run(
            Path({folder!r}) / "journal", store=store, progress=Killed(), trials=14, workers=2
        )
"""


def test_kill_9_loses_one_trial_and_the_next_run_goes_on(tmp_path: Path) -> None:
    from tuner.results import Store

    root = str(Path(__file__).parent.parent)
    script = textwrap.dedent(KILLED).format(root=root, folder=str(tmp_path), at=5)
    died = subprocess.run([sys.executable, "-c", script], check=False, timeout=120)
    assert died.returncode == -signal.SIGKILL
    with Store(tmp_path / "store") as store:
        assert len(store.records()) == 4
        result = run(tmp_path / "journal", store=store, trials=14, workers=2)  # type: ignore[arg-type]
        assert result.problems[0].trials == 14
        tried = [str(r.values) for r in store.records() if r.note not in (FINAL, REFERENCE)]
        assert len(tried) == len(set(tried)) == 14


def test_a_variant_under_way_at_every_crash_is_given_up(journal: Path) -> None:
    store = Records()
    guilty = {**TOY.baseline, "width": 64}
    encoding = Encoding(SPACE, ordinal=False)
    run(journal, store=store, trials=3)
    name = only_study(journal).study_name
    for _ in range(MAX_CRASHES):
        with contextlib.closing(open_storage(journal)) as storage:
            StudyLog(storage, name, encoding).start(guilty)
    result = run(journal, store=store, trials=10)
    record = next(r for r in store.kept if r.values == guilty)
    assert record.state == "runtime"
    assert "died 3 times" in (record.error or "")
    assert result.problems[0].trials == 10
    assert not [r for r in store.kept if r.values == guilty and r.median_ns]


@pytest.mark.parametrize(("boots", "given_up"), [("abc", True), ("aaa", False)])
def test_with_a_worker_only_the_death_of_the_machine_counts_against_a_variant(
    journal: Path, monkeypatch: pytest.MonkeyPatch, boots: str, given_up: bool
) -> None:
    guilty = {**TOY.baseline, "width": 64}
    run(journal, trials=3)
    name = only_study(journal).study_name
    for boot in boots:
        monkeypatch.setattr("tuner.search.studylog.boot_id", lambda boot=boot: boot)
        with contextlib.closing(open_storage(journal)) as storage:
            StudyLog(storage, name, Encoding(SPACE, ordinal=False), isolated=True).start(guilty)
    monkeypatch.setattr("tuner.search.studylog.boot_id", lambda: boots[-1].replace("c", "d"))
    store = Records()
    run(journal, store=store, trials=10)
    (record,) = (record for record in searched(store) if record.values == guilty)
    assert (record.state == "runtime") == given_up
