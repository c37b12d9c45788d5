"""Split policies: every token is in one part, and each policy keeps its word."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tuner.kernels.splits import MANY_PARTS, POLICIES, SplitPlan, split_plan, workgroups_dealt

CONTEXTS = st.integers(0, 200_000)
GRANULES = st.integers(1, 2048)
WORKGROUPS = st.integers(1, 512)
UNITS = st.integers(1, 256)


def plan_of(
    policy: str, context: int, *, granule: int = 1, workgroups: int = 1, units: int | None = 1
) -> SplitPlan:
    return split_plan(
        policy, context=context, workgroups=workgroups, compute_units=units, granule=granule
    )


@given(st.sampled_from(POLICIES), CONTEXTS, GRANULES, WORKGROUPS, UNITS)
@example("count:64", 0, 1, 1, 1)
@example("tokens:256", 1, 2048, 1, 1)
def test_parts_cover_the_context_and_none_is_empty(
    policy: str, context: int, granule: int, workgroups: int, units: int
) -> None:
    plan = plan_of(policy, context, granule=granule, workgroups=workgroups, units=units)
    assert plan.parts >= 1
    assert plan.tokens % granule == 0
    assert plan.tokens > 0
    assert plan.parts * plan.tokens >= context
    assert (plan.parts - 1) * plan.tokens < max(1, context)


@given(st.sampled_from(POLICIES), CONTEXTS, GRANULES, WORKGROUPS, UNITS)
def test_only_one_part_goes_without_a_combine_pass(
    policy: str, context: int, granule: int, workgroups: int, units: int
) -> None:
    plan = plan_of(policy, context, granule=granule, workgroups=workgroups, units=units)
    assert plan.combined or plan.parts == 1
    assert plan.combined or not policy.startswith("count:")
    assert plan.combined == (plan.parts > 1) or policy.startswith("count:")


@given(CONTEXTS, GRANULES)
def test_none_makes_one_part(context: int, granule: int) -> None:
    plan = plan_of("none", context, granule=granule)
    assert (plan.parts, plan.combined) == (1, False)


@given(st.integers(1, 64), CONTEXTS, GRANULES)
def test_count_makes_that_many_parts_of_nearly_equal_size(
    count: int, context: int, granule: int
) -> None:
    plan = plan_of(f"count:{count}", context, granule=granule)
    assert plan.parts <= count
    assert plan.tokens < max(1, context) / count + granule + 1


def test_count_is_met_where_granules_allow() -> None:
    assert plan_of("count:8", 8192, granule=64) == SplitPlan(8, 1024, combined=True)
    assert plan_of("count:8", 100, granule=64) == SplitPlan(2, 64, combined=True)
    assert plan_of("count:8", 64, granule=64) == SplitPlan(1, 64, combined=True)


@given(st.sampled_from([256, 1024, 4096]), CONTEXTS, GRANULES)
def test_tokens_bounds_the_part_by_the_next_granule(
    tokens: int, context: int, granule: int
) -> None:
    plan = plan_of(f"tokens:{tokens}", context, granule=granule)
    assert plan.tokens <= -(-tokens // granule) * granule


@given(st.sampled_from([1, 3, 8]), CONTEXTS, GRANULES, WORKGROUPS, UNITS)
def test_device_never_launches_more_workgroups_than_it_says(
    each: int, context: int, granule: int, workgroups: int, units: int
) -> None:
    plan = plan_of(f"device:{each}", context, granule=granule, workgroups=workgroups, units=units)
    assert plan.parts == 1 or plan.parts * workgroups <= each * units


def test_device_fills_the_device() -> None:
    assert plan_of("device:4", 16384, workgroups=64, units=132).parts == 8
    assert plan_of("device:1", 16384, workgroups=512, units=132) == SplitPlan(1, 16384)


@pytest.mark.parametrize("granule", [1, 16, 64, 512])
def test_the_policy_of_many_parts_cuts_what_is_validated(granule: int) -> None:
    assert plan_of(MANY_PARTS, 1032, granule=granule).parts >= 3
    assert MANY_PARTS in POLICIES


@given(st.sampled_from(POLICIES), st.integers(0, 2**32), WORKGROUPS, UNITS)
def test_work_is_dealt_to_one_workgroup_at_least(
    policy: str, tokens: int, pairs: int, units: int
) -> None:
    dealt = workgroups_dealt(policy, tokens=tokens, pairs=pairs, compute_units=units)
    assert dealt >= 1
    wanted = {
        "none": pairs,
        "count:4": 4 * pairs,
        "tokens:256": max(1, -(-tokens // 256)),
        "device:3": 3 * units,
    }
    assert dealt == wanted.get(policy, dealt)


@given(st.integers(1, 4), WORKGROUPS, UNITS)
def test_what_fits_gives_whole_pairs_or_whole_workgroups(
    count: int, pairs: int, units: int
) -> None:
    dealt = workgroups_dealt(f"fit:{count}", tokens=0, pairs=pairs, compute_units=units)
    assert dealt <= count * units
    if pairs <= count * units:
        assert dealt % pairs == 0
        assert dealt + pairs > count * units
    else:
        most = -(-pairs // dealt)
        assert most == -(-pairs // (count * units)), "more pairs in a share than need be"
