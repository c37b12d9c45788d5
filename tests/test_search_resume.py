"""What a search has of earlier ones: nothing is measured twice, no other kernel's record counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.toy_family import toy_device, toy_problem, toy_runner
from tests.toy_search import (
    PLAN,
    PROBLEM,
    SPACE,
    Interrupting,
    Records,
    Watch,
    only_study,
    run,
    searched,
)
from tuner.evaluate import Session
from tuner.kernels.base import Values
from tuner.records import FINAL
from tuner.search.run import _template_digest


def test_records_answer_when_the_study_is_gone(tmp_path: Path) -> None:
    store, watch = Records(), Watch()
    run(tmp_path / "one", store=store, trials=15, overlap=False)
    finals = sum(record.note == FINAL for record in store.kept)
    runner = toy_runner()
    again = run(
        tmp_path / "two", store=store, runner=runner, trials=15, progress=watch, overlap=False
    )
    assert (again.problems[0].trials, again.problems[0].known) == (15, 15)
    assert again.measured == 0
    assert not [call for call in runner.calls if call.method == "execute"]
    assert sum(record.note == FINAL for record in store.kept) == finals
    known = [t for t in only_study(tmp_path / "two").trials if t.user_attrs.get("known")]
    assert len(known) == 15


@pytest.mark.parametrize(
    "changed",
    [
        lambda values: {name: value for name, value in values.items() if name != "tile"},
        lambda values: {**values, "vector": 4},
        lambda values: {**values, "mode": "gone"},
        lambda values: {**values, "width": 64},
    ],
    ids=["parameter came", "parameter went", "value went", "sources changed"],
)
def test_what_is_no_kernel_of_today_is_neither_best_nor_measured_again(
    changed: Callable[[Values], dict[str, Any]], tmp_path: Path
) -> None:
    """Records as another version of the family left them, faster than anything of today."""
    store = Records()
    run(tmp_path / "one", store=store, trials=5)
    old = [
        msgspec.structs.replace(
            record,
            variant=f"old {record.variant}",
            values=changed(record.values),
            median_ns=record.median_ns and record.median_ns / 10,
            note=FINAL,
        )
        for record in store.kept
    ]
    again = Records(tuple(old))
    other = toy_problem(5, 4096)
    result = run(tmp_path / "two", store=again, problems=(PROBLEM, other), trials=10)
    new = again.kept[len(old) :]
    assert {str(record.values) for record in new} <= {str(values) for values in SPACE}
    for problem in result.problems:
        assert problem.best in new
        assert problem.baseline in new


@pytest.mark.parametrize(
    "change",
    [
        {"runner": toy_runner(info=toy_device(driver_info="2.0"))},
        {"runner": toy_runner(info=toy_device(uuid="other"))},
        {"problems": (toy_problem(4, 4097),)},
    ],
)
def test_another_driver_device_or_problem_starts_anew(
    change: dict[str, Any], journal: Path
) -> None:
    store = Records()
    run(journal, store=store, trials=5)
    assert run(journal, store=store, trials=5, **change).measured == 5


def test_a_session_is_made_only_for_what_is_left_to_measure(journal: Path) -> None:
    made: list[Session] = []

    def make() -> Session:
        made.append(Session(name=f"session {len(made)}", plan=PLAN, read_gb_s=1000.0))
        return made[-1]

    store, problems = Records(), (PROBLEM, toy_problem(1, 64))
    run(journal, store=store, problems=problems, trials=10, session=make)
    assert len(made) == 1
    assert {record.session for record in store.kept} == {"session 0"}
    assert run(journal, store=store, problems=problems, trials=10, session=make).measured == 0
    assert len(made) == 1
    assert run(journal, store=store, problems=problems, trials=12, session=make).measured == 2
    assert len(made) == 2
    assert searched(store)[-1].session == "session 1"


def test_a_stopped_run_goes_on_where_it_was(journal: Path) -> None:
    store = Records()
    run(journal, store=store, progress=Interrupting(6), trials=20, workers=2)
    under_way = [
        t.user_attrs["values"]
        for t in only_study(journal).trials
        if t.user_attrs.get("ended") == "stopped"
    ]
    assert under_way
    result = run(journal, store=store, trials=20, workers=2)
    assert (result.problems[0].trials, result.problems[0].measured) == (20, 14)
    tried = [record.values for record in searched(store)]
    assert len({str(values) for values in tried}) == len(tried) == 20
    assert all(values in tried[6:9] for values in under_way)


def test_a_study_knows_templates_of_one_name_by_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(texts: dict[str, str]) -> str:
        root = tmp_path / "-".join(texts)
        for folder, text in texts.items():
            (root / folder).mkdir(parents=True)
            (root / folder / "part.jinja").write_text(text)
        monkeypatch.setattr("tuner.templates.TEMPLATE_DIR", root)
        return _template_digest()

    assert digest({"a": "same"}) != digest({"b": "same"})
