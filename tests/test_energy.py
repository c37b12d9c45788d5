"""Energy as a second goal: what is minimised, the front, and what the export says of it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from tests.made_records import gpu, made_record, software
from tests.toy_export import BASE, FAST, export, toy_record
from tests.toy_family import TOY, ToyCompiler, toy_device, toy_problem, toy_render, toy_runner
from tuner import plots
from tuner.errors import UsageError
from tuner.evaluate import Session
from tuner.evaluate.timings import timing_fields
from tuner.kernels.base import Parameter, Values
from tuner.kernels.space import legal
from tuner.records import FINAL, REFERENCE, ClockState, Energy, Observation, Record
from tuner.results import Store
from tuner.results.front import front
from tuner.runner.fake import Workload
from tuner.runner.protocol import Job, Measurement, MeasurePlan
from tuner.search import Objective, RunResult, SamplerName, Settings, tune
from tuner.search.objective import costs
from tuner.search.proposer import Proposer
from tuner.shapes import parse_shape

PROBLEM = toy_problem(4, 4096)
PLAN = MeasurePlan(min_samples=5, max_samples=8, budget_ms=0.01)


def watts(job: Job, _: Workload) -> float:
    """More power the shorter the kernel's text, so that the fastest need not be the thriftiest."""
    return 100.0 + 3.0 * (sum(job.passes[0].spirv) % 100)


def metered(values: dict[str, int | str], us: float, mj: float | None, **changes: Any) -> Record:
    """A record of 2 sequences with a time and an energy for each of its tokens."""
    record = toy_record(values, us, **changes)
    if mj is None:
        return record
    energy = Energy(joules_per_launch=2 * mj / 1e3, launches=9, seconds=1.0, method="counter")
    return msgspec.structs.replace(record, energy=energy)


def search(folder: Path, objective: Objective, trials: int = 30, **options: Any) -> RunResult:
    with Store(folder / "store") as store:
        return tune(
            toy_runner(watts=options.pop("watts", watts), noise=0.0),
            ToyCompiler(),
            [(TOY, PROBLEM)],
            store,
            storage=folder / "journal",
            settings=Settings(workers=1, trials=trials, objective=objective, **options),
            session=Session(name="s", plan=PLAN, read_gb_s=1000.0),
            render=toy_render,
        )


def records(folder: Path) -> tuple[Record, ...]:
    return Store(folder / "store", read_only=True).records()


# ---- energy in records


def test_a_launch_decodes_a_token_of_each_sequence() -> None:
    assert metered(BASE, 10.0, 3.0).energy_j_per_token == pytest.approx(0.003)
    assert toy_record(BASE).energy_j_per_token is None


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        ("8x16k:h32/8:d128", 8),
        ("kv_append:rows=5,context=100,kv_heads=2,head_size=64", 5),
        (
            "paged_attention:batch=3,query_tokens=4,context=64,query_heads=8,kv_heads=2,head_size=64",
            12,
        ),
    ],
)
def test_problems_know_their_tokens(shape: str, tokens: int) -> None:
    assert parse_shape(shape).step_tokens == tokens


def test_several_measurements_become_one_record() -> None:
    def measurement(joules: float, launches: int, mhz: float, heat: float) -> Measurement:
        return Measurement(
            samples_ns=(10.0, 11.0, 12.0),
            copies=1,
            warmup_launches=1,
            ended_by="budget",
            clock_state=ClockState(reference_ns=(mhz,), settled_ms=5.0, steady=mhz > 1500),
            observed=Observation(
                source="nvml",
                looks=int(heat),
                power_w=heat,
                core_mhz=(mhz, mhz + 10),
                temperature_c=heat,
                throttled=("power",) if mhz < 1500 else (),
            ),
            energy=Energy(
                joules_per_launch=joules, launches=launches, seconds=1.0, method="counter"
            ),
        )

    fields = timing_fields([measurement(2.0, 10, 1980, 60), measurement(1.0, 30, 1400, 20)])
    assert fields["energy"] == Energy(
        joules_per_launch=1.25, launches=40, seconds=2.0, method="counter"
    )
    assert fields["clock_state"] == ClockState(
        reference_ns=(1980, 1400), settled_ms=10.0, steady=False
    )
    assert fields["observed"] == Observation(
        source="nvml",
        looks=80,
        power_w=50.0,
        core_mhz=(1400, 1990),
        temperature_c=60.0,
        throttled=("power",),
    )


def test_records_of_before_still_load_and_new_ones_come_back(tmp_path: Path) -> None:
    new = metered(FAST, 5.0, 1.0)
    with Store(tmp_path) as store:
        store.append(new)
        store.append(toy_record(BASE))
    kept = Store(tmp_path, read_only=True).records()
    assert kept == (new, toy_record(BASE))
    assert (kept[1].measure, kept[1].launches, kept[1].observed) == ("isolated", 1, None)
    raw = (tmp_path / "records.jsonl").read_text().splitlines()[1]
    assert not any(name in raw for name in ('"energy"', '"launches"', '"clock_state"'))


# ---- the front


@given(
    st.lists(
        st.tuples(st.floats(1.0, 1e3), st.none() | st.floats(0.1, 1e3)), min_size=1, max_size=12
    )
)
def test_the_front_is_what_none_beats(pairs: list[tuple[float, float | None]]) -> None:
    made = [
        metered({**BASE, "width": n}, us, mj, problem=PROBLEM) for n, (us, mj) in enumerate(pairs)
    ]
    found = front(made)
    priced = {r.variant: costs(r, "both") for r in made if r.energy}
    assert {r.variant for r in found} <= set(priced)
    for one, two in itertools.pairwise(found):
        (fast, dear), (slow, thrifty) = priced[one.variant], priced[two.variant]  # type: ignore[misc]
        assert fast < slow
        assert dear > thrifty
    for price in priced.values():
        assert price is not None
        assert any(
            priced[r.variant][0] <= price[0] and priced[r.variant][1] <= price[1]  # type: ignore[index]
            for r in found
        )


def test_the_last_record_of_a_variant_counts() -> None:
    first, again = metered(BASE, 10.0, 9.0), metered(BASE, 10.0, 4.0)
    other = metered(FAST, 20.0, 5.0)
    assert front([first, other]) == (first, other)
    assert front([first, other, again]) == (again,)
    failed = msgspec.structs.replace(again, state="timeout", error="slow")
    assert front([other, failed]) == (other,)


# ---- the search


def test_each_goal_finds_its_best(tmp_path: Path) -> None:
    everything = search(tmp_path / "all", "both", trials=1000, sampler="grid")
    (all_of_it,) = everything.problems
    assert all_of_it.ended == "exhausted"
    priced = [r for r in records(tmp_path / "all") if r.note not in (FINAL, REFERENCE)]
    fastest = min(priced, key=lambda r: r.median_ns or 0)
    thriftiest = min(priced, key=lambda r: r.energy_j_per_token or 0)
    assert fastest.variant != thriftiest.variant
    assert all_of_it.best is not None
    assert all_of_it.best.median_ns == fastest.median_ns
    assert all_of_it.front[0].variant == fastest.variant
    assert all_of_it.front[-1].variant == thriftiest.variant
    assert len(all_of_it.front) > 1


@pytest.mark.parametrize("objective", ["energy", "both"])
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_the_study_holds_what_was_minimised(
    tmp_path: Path, objective: Objective, sampler: Any
) -> None:
    result = search(tmp_path, objective, trials=24, sampler=sampler)
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "journal")))
    (summary,) = optuna.get_all_study_summaries(storage)
    study = optuna.load_study(study_name=summary.study_name, storage=storage)
    by_variant = {r.variant: r for r in records(tmp_path) if r.note not in (FINAL, REFERENCE)}
    done = [t for t in study.get_trials(deepcopy=False) if t.values is not None]
    assert len(done) == len(by_variant) == 24
    for trial in done:
        expected = costs(by_variant[trial.user_attrs["variant"]], objective)
        assert trial.values == pytest.approx(expected)
    assert len(study.directions) == (2 if objective == "both" else 1)
    assert all(r.energy is not None for r in records(tmp_path) if r.note != REFERENCE)
    assert result.problems[0].front


def test_two_goals_together_are_approached_faster_than_by_chance() -> None:
    """On 4,096 variants of which `a` costs time, `b` energy and the rest both."""
    names = "abcdef"
    family = replace(
        TOY,
        parameters=tuple(Parameter(name=n, values=(1, 2, 4, 8), help="") for n in names),
        constraints=(),
        baseline=dict.fromkeys(names, 1),
    )
    space = legal(family, PROBLEM, toy_device())

    def price(values: Values) -> tuple[float, float]:
        shared = sum(abs(int(values[n]) - 4) * i for i, n in enumerate(names[2:], 2))
        return 50.0 + shared + 9 * int(values["a"]), 50.0 + shared + 9 * int(values["b"])

    def best(sampler: SamplerName, seed: int) -> float:
        proposer = Proposer(space, sampler, seed, objectives=2)
        found = []
        for _ in range(50):
            proposal = proposer.next()
            assert proposal is not None
            found.append(price(proposal.values))
            proposer.tell(proposal, found[-1] if len(found) % 9 else None)
        return min(time + energy for time, energy in found)

    assert sum(best("tpe", s) for s in range(3)) < sum(best("random", s) for s in range(3))


def test_a_run_goes_on_where_it_was_and_goals_have_studies_of_their_own(tmp_path: Path) -> None:
    search(tmp_path, "both", trials=10)
    again = search(tmp_path, "both", trials=10)
    assert again.problems[0].ended == "met before"
    more = search(tmp_path, "both", trials=14)
    assert (more.problems[0].measured, more.problems[0].trials) == (4, 14)
    other = search(tmp_path, "time", trials=10)
    assert other.problems[0].trials == 10


def test_what_was_timed_without_a_meter_is_measured_again_for_energy(tmp_path: Path) -> None:
    search(tmp_path, "time", trials=6)
    assert not any(r.energy for r in records(tmp_path))
    result = search(tmp_path, "energy", trials=6)
    assert result.problems[0].measured == 6
    repeated = search(tmp_path, "both", trials=6)
    assert repeated.problems[0].measured < 6


def test_energy_needs_a_meter_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"needs the energy of .*no sensors were found.*time"):
        search(tmp_path, "energy", watts=None)
    with pytest.raises(UsageError, match="objective 'heat'"):
        Settings(objective="heat")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'cmaes' knows one objective"):
        Settings(objective="both", sampler="cmaes")


# ---- exports and plots


def test_the_export_keeps_the_fastest_and_names_the_thriftiest(tmp_path: Path) -> None:
    thrifty = {**BASE, "width": 128}
    made = [metered(BASE, 30.0, 9.0), metered(FAST, 10.0, 5.0), metered(thrifty, 12.0, 2.0)]
    config, _ = export(tmp_path, made)
    (entry,) = config.families["toy"].entries
    assert entry.values == FAST
    assert entry.evidence.energy_mj_per_token == pytest.approx(5.0)
    assert entry.energy_best is not None
    assert entry.energy_best.values == thrifty
    assert entry.energy_best.energy_mj_per_token == pytest.approx(2.0)
    assert entry.energy_best.median_us == pytest.approx(12.0)


def test_without_energy_the_export_names_none(tmp_path: Path) -> None:
    config, _ = export(tmp_path, [toy_record(BASE), toy_record(FAST, 5.0)])
    (entry,) = config.families["toy"].entries
    assert (entry.energy_best, entry.evidence.energy_mj_per_token) == (None, None)


@pytest.mark.parametrize("device", [gpu(), software(), toy_device()], ids=lambda d: d.name)
def test_the_plot_shows_every_priced_variant_and_the_front(device: Any) -> None:
    made = [metered({**BASE, "width": n}, 10.0 + n, 9.0 - n % 4, device=device) for n in range(9)]
    figure = plots.energy_against_time([*made, made_record(device=device)], device)
    variants, best = figure.axes[0].lines
    assert len(variants.get_xdata()) == 9
    assert list(best.get_xdata()) == [10.0, 11.0, 12.0, 13.0]
    assert plots.energy_against_time([]).texts
