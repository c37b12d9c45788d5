"""What a search proposes: samplers and their settings, and how they see variants."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.toy_family import TOY, toy_device, toy_problem
from tests.toy_search import BASELINE, PROBLEM, SPACE, Records, run, searched
from tuner.errors import UsageError
from tuner.kernels.base import Parameter, Values
from tuner.kernels.space import legal
from tuner.search import SamplerName, Settings
from tuner.search.encoding import Encoding
from tuner.search.model import make_sampler
from tuner.search.proposer import Proposer


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid", "cmaes"])
def test_every_sampler_tries_legal_variants_once_and_the_baseline_first(
    sampler: SamplerName, journal: Path
) -> None:
    store = Records()
    result = run(journal, store=store, sampler=sampler, trials=30)
    tried = [record.values for record in searched(store)]
    assert tried[0] == BASELINE
    assert tried[1] == TOY.starts[0]
    assert len(tried) == 30
    assert all(values in SPACE for values in tried)
    assert len({str(values) for values in tried}) == 30
    assert {record.sampler for record in store.kept} == {sampler}
    (problem,) = result.problems
    assert (problem.ended, problem.trials, problem.measured) == ("trials", 30, 30)
    assert problem.legal == len(SPACE)


def test_grid_goes_through_the_whole_space_in_order(journal: Path) -> None:
    store = Records()
    result = run(journal, store=store, sampler="grid", trials=None)
    tried = [record.values for record in searched(store)]
    rest = [v for v in SPACE if v not in (BASELINE, TOY.starts[0])]
    assert tried[2:] == rest
    assert result.problems[0].ended == "exhausted"


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_equal_seeds_propose_alike_and_others_do_not(sampler: SamplerName, tmp_path: Path) -> None:
    def tried(name: str, seed: int) -> list[Any]:
        store = Records()
        run(tmp_path / name, store=store, sampler=sampler, seed=seed, overlap=False, trials=25)
        return [record.values for record in searched(store)]

    assert tried("a", 1) == tried("b", 1)
    assert tried("a2", 1) != tried("c", 2)


def test_tpe_finds_better_variants_than_chance(tmp_path: Path) -> None:
    """On a smooth space of 16,384 variants, with equal budgets and several seeds."""
    names = "abcdefg"
    parameters = tuple(Parameter(name=n, values=(1, 2, 4, 8), help="") for n in names)
    family = replace(
        TOY,
        parameters=parameters,
        constraints=(),
        baseline=dict.fromkeys(names, 1),
        starts=(),
        arithmetic=lambda values: "f32",
        passes=lambda candidate, scalars: TOY.passes(
            replace(candidate, values={**TOY.baseline, "split": 1}), scalars
        ),
        scratch_bytes=lambda candidate: {"partial": 4},
    )
    space = legal(family, PROBLEM, toy_device())

    def cost(values: Values) -> float:
        return 1000.0 + sum(abs(int(values[n]) - 4) * (i + 1) for i, n in enumerate(names))

    def best(sampler: SamplerName, seed: int) -> float:
        proposer = Proposer(space, sampler, seed)
        found = []
        for _ in range(60):
            proposal = proposer.next()
            assert proposal is not None
            found.append(cost(proposal.values))
            proposer.tell(proposal, (found[-1],))
        return min(found)

    seeds = range(4)
    assert sum(best("tpe", s) for s in seeds) < sum(best("random", s) for s in seeds)


def test_gp_needs_torch_and_says_so(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    with pytest.raises(UsageError, match="needs torch"):
        make_sampler("gp", 0)
    with pytest.raises(UsageError, match="kvtune"):
        run(journal, sampler="gp")


@pytest.mark.parametrize(
    "settings",
    [
        {"sampler": "annealing"},
        {"trials": 0},
        {"seconds": -1.0},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"workers": 0},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        Settings(**settings)


@pytest.mark.parametrize("ordinal", [False, True])
def test_encodings_go_there_and_back(ordinal: bool) -> None:
    small = legal(TOY, toy_problem(1, 1), toy_device())
    encoding = Encoding(small, ordinal=ordinal)
    assert "split" not in encoding.distributions
    for values in small:
        assert encoding.values(encoding.params(values)) == values
    kinds = {type(d).__name__ for d in encoding.distributions.values()}
    assert kinds == ({"IntDistribution"} if ordinal else {"CategoricalDistribution"})


def test_digests_tell_spaces_apart() -> None:
    spaces = [SPACE, legal(TOY, toy_problem(1, 1), toy_device())]
    digests = {Encoding(s, ordinal=o).digest for s, o in itertools.product(spaces, (False, True))}
    assert len(digests) == 4
