"""Norm and rotary embedding: golden vectors, odd geometries, tables, kernels broken on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.family_kernels import Mistake, assert_caught, assert_right, launched
from tests.golden_vectors import Golden, load, names
from tests.made_devices import gpu
from tuner.errors import UsageError
from tuner.evaluate import ResidentCases
from tuner.kernels.base import Candidate, Operands
from tuner.kernels.indexer_operands import rope_table
from tuner.kernels.norm_rope import QK_NORM_ROPE, make_operands
from tuner.kernels.space import legal
from tuner.oracle import judge
from tuner.oracle.indexer import norm, rope
from tuner.oracle.norm_rope import norm_rope_reference
from tuner.problems import NormRopeProblem

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

GOLDEN = names("s3_norm_rope_*")
ORACLE = 1e-9
PROBLEM = NormRopeProblem(rows=3, query_heads=5, kv_heads=2, head_size=64, rotary=16)
JOINT = "teams launches=joint subgroups=2 lanes=8"
APART = "teams subgroups=1 lanes=4 width=4"


def golden_case(golden: Golden) -> tuple[NormRopeProblem, Operands]:
    """The file's heads as queries where they have gates, else as keys; the others are made up."""
    attributes, x = golden.attributes, golden.inputs["x"]
    gated = attributes["stride"] == 2 * attributes["head_dim"]
    problem = NormRopeProblem(
        rows=int(attributes["nb"]),
        query_heads=x.shape[1] if gated else 3,
        kv_heads=2 if gated else x.shape[1],
        head_size=int(attributes["head_dim"]),
        rotary=int(attributes["rot"]),
        one_plus=int(attributes["one_plus"]),
    )
    made = make_operands(problem, "random", 0)
    positions = int(attributes["base_pos"]) + np.arange(problem.rows)
    inputs = made.inputs | {
        "query_gate" if gated else "key": x,
        "query_weight": golden.inputs["w"],
        "key_weight": golden.inputs["w"],
        "rope_rows": rope_table(positions, problem.rotary, float(attributes["theta"])),
    }
    scalars = made.scalars | {
        "base_position": attributes["base_pos"],
        "epsilon": attributes["eps"],
        "theta": attributes["theta"],
    }
    return problem, Operands(inputs=inputs, outputs=made.outputs, scalars=scalars)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_oracle_agrees_with_golden(name: str) -> None:
    golden = load(name)
    attributes, half = golden.attributes, int(golden.attributes["rot"]) // 2
    positions = int(attributes["base_pos"]) + np.arange(int(attributes["nb"]))
    y = norm(
        golden.inputs["x"][..., : int(attributes["head_dim"])],
        golden.inputs["w"],
        eps=float(attributes["eps"]),
        one_plus=int(attributes["one_plus"]),
    )
    y = rope(y, positions, 2 * half, float(attributes["theta"]))
    turns = positions[:, None] * float(attributes["theta"]) ** (-np.arange(half) / half)
    found = {"y": y, "cos": np.cos(turns), "sin": np.sin(turns)}
    assert golden.differences(found, bound=ORACLE) == []


@pytest.mark.parametrize("name", GOLDEN)
def test_tables_agree_with_golden(name: str) -> None:
    golden = load(name)
    positions = int(golden.attributes["base_pos"]) + np.arange(int(golden.attributes["nb"]))
    table = rope_table(positions, int(golden.attributes["rot"]), float(golden.attributes["theta"]))
    found = {"y": golden.want["y"], "cos": table[..., 0], "sin": table[..., 1]}
    assert golden.differences(found) == []


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("text", ["baseline", JOINT, APART])
def test_kernels_agree_with_golden(vulkan_runner: VulkanRunner, name: str, text: str) -> None:
    golden = load(name)
    problem, operands = golden_case(golden)
    outputs = launched(vulkan_runner, QK_NORM_ROPE, problem, operands, text).outputs
    gated = golden.attributes["stride"] == 2 * golden.attributes["head_dim"]
    y = outputs["query_gate" if gated else "key"][..., : problem.head_size]
    known = {key: golden.want[key] for key in ("cos", "sin")}
    assert golden.differences({"y": y, **known}) == []
    verdict = judge(outputs, norm_rope_reference(operands), "f32", name)
    assert verdict.ok, verdict.message


def test_no_vector_is_missing() -> None:
    assert len(GOLDEN) == 4


@pytest.fixture(scope="module")
def cases(vulkan_runner: VulkanRunner) -> Iterator[ResidentCases]:
    resident = ResidentCases(vulkan_runner, QK_NORM_ROPE)
    yield resident
    resident.close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"head_size": 90, "rotary": 22}, "teams launches=joint lanes=8"),
        ({"head_size": 80, "rotary": 80}, "teams lanes=4 width=4 subgroups=4"),
        ({"head_size": 80, "rotary": 6, "one_plus": 1}, "baseline"),
        ({"head_size": 2, "rotary": 2}, "teams lanes=2"),
        ({"head_size": 33, "rotary": 2}, "baseline"),
    ],
)
def test_odd_geometries_are_right(
    vulkan_runner: VulkanRunner,
    cases: ResidentCases,
    changes: dict[str, int],
    text: str,
) -> None:
    fields = {"rows": 3, "query_heads": 3, "kv_heads": 2, **changes}
    problem = NormRopeProblem(**fields)
    assert_right(vulkan_runner, QK_NORM_ROPE, problem, text, cases)


MISTAKES = {
    "gates normalised too": Mistake(
        variant=JOINT,
        right="{\n    if (is_query) {\n        query_gate[at] = value;",
        wrong="{\n    if (is_query) {\n        query_gate[at + HEAD_SIZE] = value;",
    ),
    "epsilon left out": Mistake(variant=JOINT, right=" + epsilon", wrong=""),
    "epsilon left out of the baseline": Mistake(
        variant="baseline", right=" + push.epsilon", wrong=""
    ),
    "rotation the other way": Mistake(
        variant=APART, right="a * cosine - b * sine", wrong="a * cosine + b * sine"
    ),
    "neighbours rotate": Mistake(
        variant="baseline",
        right="a = values[team][pair], b = values[team][pair + PAIRS]",
        wrong="a = values[team][pair], b = values[team][pair + 1u]",
    ),
    "angles of the first row": Mistake(
        variant=JOINT, right="uint turn = row *", wrong="uint turn = 0u *"
    ),
    "mean over what rotates": Mistake(
        variant=JOINT, right="/ float(HEAD_SIZE)", wrong="/ float(2u * PAIRS)"
    ),
    "last team left out": Mistake(
        variant=JOINT, right="index < push.rows * HEADS", wrong="index + 1u < push.rows * HEADS"
    ),
    "key weight for queries": Mistake(
        variant=JOINT, right="return query_weight[at]", wrong="return key_weight[at]"
    ),
    "sum over half the lanes": Mistake(
        variant=JOINT, right="value += subgroupShuffleXor(value, 1u << bit);", wrong=""
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_a_broken_kernel_is_caught(
    vulkan_runner: VulkanRunner, cases: ResidentCases, mistake: Mistake
) -> None:
    assert_caught(vulkan_runner, QK_NORM_ROPE, PROBLEM, mistake, cases)


def test_gates_count_bit_for_bit() -> None:
    operands = make_operands(PROBLEM, "random", 0)
    reference = norm_rope_reference(operands)
    right = {"query_gate": operands.inputs["query_gate"].copy(), "key": reference.outputs["key"]}
    right["query_gate"][..., :64] = reference.outputs["query"]
    assert judge(right, reference, "f32", "as wanted").ok
    right["query_gate"].view(np.uint32)[1, 2, 64] ^= 1
    verdict = judge(right, reference, "f32", "one bit")
    assert not verdict.ok
    assert "gate_bits" in verdict.message


def test_a_position_far_out_is_as_exact_as_one_nearby() -> None:
    table = rope_table(np.array([262_143]), 64, 1e7)
    exact = np.cos(np.float64(262_143))
    assert abs(table[0, 0, 0] - exact) <= 2.0**-24


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 0}, "rows is 0"),
        ({"rotary": 66}, "rotary is 66, must be even and from 2 to head_size"),
        ({"rotary": 7}, "rotary is 7"),
        ({"one_plus": 2}, "one_plus is 2, must be 0 or 1"),
        ({"rows": 2**21}, "rows is 2097152, must be at most"),
    ],
)
def test_bad_problems_are_refused(changes: dict[str, int], message: str) -> None:
    fields = {"rows": 1, "query_heads": 2, "kv_heads": 1, "head_size": 64, "rotary": 16}
    with pytest.raises(UsageError, match=message):
        NormRopeProblem(**{**fields, **changes})


def test_a_grid_beyond_one_direction_covers_every_head() -> None:
    device = gpu()
    problem = NormRopeProblem(rows=9000, query_heads=24, kv_heads=2, head_size=64, rotary=16)
    for values in legal(QK_NORM_ROPE, problem, device):
        candidate = Candidate(values, problem, device)
        for each in QK_NORM_ROPE.passes(candidate, {}):
            x, y, _ = each.groups
            assert max(x, y) <= 65535
            teams = each.constants.get("teams", 4)
            assert isinstance(teams, int)
            heads = each.constants["heads"]
            assert isinstance(heads, int)
            assert 0 <= x * y * teams - 9000 * heads < teams * (y + 1)
