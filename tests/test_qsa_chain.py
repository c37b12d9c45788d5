"""The whole decode step: golden vectors, geometries, rejected drafts, mistakes, launches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from tests.family_kernels import COMPILER, judged, launched
from tests.golden_vectors import Array, Golden, load, names
from tests.made_devices import gpu, narrow_cpu
from tuner import templates
from tuner.device_info import DeviceInfo
from tuner.errors import UsageError
from tuner.evaluate import Evaluator, ResidentCases, render_passes
from tuner.kernels import family
from tuner.kernels.base import Candidate, Operands, Values
from tuner.kernels.indexer_operands import block_table, rope_table
from tuner.kernels.qsa_operands import make_operands, scalars_of
from tuner.kernels.space import canonical, legal, pairwise, parse_values, reasons
from tuner.oracle import judge
from tuner.oracle.qsa_chain import chain_reference, chain_step, selective_rows
from tuner.planar import PlanarLayout
from tuner.problems import QsaStepProblem
from tuner.templates import Rendered
from tuner.workloads import geometries, load_workload

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

CHAIN = family("qsa_chain")
GOLDEN = names("s3_chain_*")
ORACLE = 1e-6
"""What the vectors' README asks of a float64 oracle in a chain, relative 2-norm."""
TUNED = "schedule=fresh light_steps=registers score=lanes4 attend=f32 combine=groups4"
VARIANTS = {"baseline": "", "tuned": f"{TUNED} select=workgroup split=count:16"}
IN_PARTS = f"{TUNED} select=parts32 split=count:16"
BUFFERS = {
    "query_gate": "qg",
    "key": "k",
    "value": "v",
    "index_projection": "iqk",
    "index_keys": "ikc_bits",
    "block_keys": "blk_bits",
    "key_cache": "kc",
    "value_cache": "vc",
    "query_weight": "w_q",
    "key_weight": "w_k",
    "index_query_weight": "w_iq",
    "index_key_weight": "w_ik",
}


def variant(text: str, subgroup_size: int) -> Values:
    """A variant from its assignments; what is not said is as in the baseline."""
    size = [f"subgroup_size={subgroup_size}"] if text else []
    return canonical(CHAIN, parse_values(CHAIN, [*size, *text.split()], CHAIN.baseline))


def dense_text(text: str) -> str:
    """The same for a step without an indexer."""
    dense = (word for word in text.split() if not word.startswith(("score=", "select=")))
    return " ".join(dense).replace("schedule=fresh", "schedule=beside")


def golden_problem(golden: Golden) -> QsaStepProblem:
    given = golden.attributes
    return QsaStepProblem(
        rows=int(given["nb"]),
        context=int(given["base_pos"] + given["nb"]),
        capacity=int(given["max_t"]),
        query_heads=int(given["num_heads"]),
        kv_heads=int(given["num_kv_heads"]),
        head_size=int(given["head_dim"]),
        index_heads=int(given["index_heads"]),
        index_dim=int(given["index_dim"]),
        ratio=int(given["ratio"]),
        budget=int(given["budget"]),
        rotary=int(given["rot"]),
        theta=given["theta"],
        eps=given["eps"],
        one_plus=int(given["one_plus"]),
    )


def golden_operands(golden: Golden) -> Operands:
    """The operands of a golden step; the tables of angles are the host's."""
    problem = golden_problem(golden)
    made = make_operands(problem, "timing", 0)
    index = problem.indexer
    inputs = {name: golden.inputs[theirs] for name, theirs in BUFFERS.items()}
    inputs |= {
        "rope_rows": rope_table(index.positions(), problem.rotary, problem.theta),
        "rope_blocks": block_table(index),
        "row_tokens": golden.want["nvis"],
    }
    assert {name: array.shape for name, array in inputs.items()} == {
        name: array.shape for name, array in made.inputs.items()
    }
    return Operands(inputs=inputs, outputs=made.outputs, scalars=scalars_of(problem))


def as_golden(golden: Golden, left: Mapping[str, Array], exact_keys: Array) -> dict[str, Array]:
    """Buffers after the step by the names of the vectors."""
    given = {key: int(golden.attributes[key]) for key in ("nb", "base_pos", "b0", "b1", "row")}
    rows = slice(given["base_pos"], given["base_pos"] + given["nb"])
    layout = PlanarLayout(int(golden.attributes["max_t"]), given["row"])
    got = {
        "ikc_rows": left["index_keys"][rows],
        "blk_keys": exact_keys,
        "blk_rows": left["block_keys"][given["b0"] : given["b1"]],
        "iq": left["index_query"],
        "score": left["scores"],
        "vis": left["visible"],
        "nvis": left["visible_count"],
        "k_roped": left.get("key_exact", left["key"]),
        "attn_out": left["out"],
    }
    for side in ("key", "value"):
        codes, scales = layout.planes(left[f"{side}_cache"])
        got[f"{side[0]}_codes"] = codes[rows]
        got[f"{side[0]}_scale_bits"] = scales[rows].view(np.uint16)
    return got


def test_no_vector_is_missing() -> None:
    assert len(GOLDEN) == 7


@pytest.mark.parametrize("name", GOLDEN)
def test_the_oracle_agrees_with_every_step(name: str) -> None:
    golden, operands = load(name), golden_operands(load(name))
    assert selective_rows(operands).tolist() == golden.want["selective"].tolist()
    left = chain_step(operands)
    got = as_golden(golden, left, left["block_keys_exact"])
    assert golden.differences(got, bound=ORACLE) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, VARIANTS["baseline"]) for name in GOLDEN),
        ("s3_chain_crossing_nb4", VARIANTS["tuned"]),
        ("s3_chain_ties_nb2", IN_PARTS),
    ],
)
def test_every_buffer_is_as_golden(vulkan_runner: VulkanRunner, name: str, text: str) -> None:
    golden, operands = load(name), golden_operands(load(name))
    values = variant(text, vulkan_runner.info.subgroup_size)
    execution = launched(vulkan_runner, CHAIN, golden_problem(golden), operands, values)
    assert golden.differences(as_golden(golden, execution.outputs, golden.want["blk_keys"])) == []
    verdict = judge(execution.outputs, chain_reference(operands), CHAIN.arithmetic(values), name)
    assert verdict.ok, verdict.message


def test_host_and_oracle_count_alike() -> None:
    for name in GOLDEN:
        golden = load(name)
        problem = golden_problem(golden)
        assert problem.row_tokens().tolist() == golden.want["nvis"].tolist()
        assert problem.selective().tolist() == golden.want["selective"].tolist()


# Rejected drafts


def test_a_step_over_rejected_drafts_is_the_step_that_never_saw_them(
    vulkan_runner: VulkanRunner,
) -> None:
    """Two drafts complete a block and are rejected; the next token completes it anew."""
    golden = load("s3_chain_selected_nb1")
    problem, operands = golden_problem(golden), golden_operands(golden)
    fresh = chain_step(operands)
    drafts = msgspec.structs.replace(problem, rows=3, context=problem.context + 2)
    drafted = replace(make_operands(drafts, "timing", 3), scalars=scalars_of(drafts))
    shared = ("index_keys", "block_keys", "key_cache", "value_cache")
    caches = {name: operands.inputs[name] for name in shared}
    weights = {name: operands.inputs[name] for name in operands.inputs if "weight" in name}
    drafted = replace(drafted, inputs={**drafted.inputs, **caches, **weights})
    values = variant(VARIANTS["tuned"], vulkan_runner.info.subgroup_size)
    after = launched(vulkan_runner, CHAIN, drafts, drafted, values).outputs
    assert (after["block_keys"] != operands.inputs["block_keys"]).any()
    rewound = replace(operands, inputs={**operands.inputs, **{n: after[n] for n in shared}})
    left = launched(vulkan_runner, CHAIN, problem, rewound, values).outputs
    last = slice(problem.base_pos // 4, problem.context // 4)
    np.testing.assert_array_equal(left["visible"], fresh["visible"])
    np.testing.assert_allclose(left["out"], fresh["out"], rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(
        left["block_keys"][last].view(np.float16).astype(float),
        fresh["block_keys_exact"],
        atol=2e-3,
    )


# Every geometry


@pytest.fixture(scope="module")
def cases(vulkan_runner: VulkanRunner) -> Iterator[ResidentCases]:
    resident = ResidentCases(vulkan_runner, CHAIN)
    yield resident
    resident.close()


@pytest.mark.parametrize("place", range(len(geometries("qsa_step"))))
@pytest.mark.parametrize("text", VARIANTS.values(), ids=list(VARIANTS))
def test_every_geometry_is_right(
    vulkan_runner: VulkanRunner, cases: ResidentCases, place: int, text: str
) -> None:
    problem = geometries("qsa_step")[place]
    assert isinstance(problem, QsaStepProblem)
    if not problem.budget:
        text = dense_text(text)
    values = variant(text, vulkan_runner.info.subgroup_size)
    evaluator = Evaluator(vulkan_runner, COMPILER, CHAIN, problem, cases=cases)
    trial = evaluator.prepare(evaluator.draft(values))
    found = evaluator.validate(trial).followed_by(evaluator.check_sampled(trial))
    evaluator.release(trial)
    evaluator.close()
    assert found.failure is None
    assert found.check is not None
    assert found.check.cases >= 3


@pytest.mark.parametrize("place", [0, 3], ids=["selected", "dense"])
def test_attention_by_matrices_is_right_where_the_device_has_them(
    vulkan_runner: VulkanRunner, cases: ResidentCases, place: int
) -> None:
    if not any(each.shape.a_type == "float16" for each in vulkan_runner.info.matrix_layouts):
        pytest.skip("this device has no cooperative matrices of 16-bit floats")
    text = "schedule=beside attend=matrix_shared split=count:16"
    values = variant(text, vulkan_runner.info.subgroup_size)
    problem = geometries("qsa_step")[place]
    found = judged(vulkan_runner, CHAIN, problem, values, cases=cases)
    assert found.failure is None
    assert found.check is not None


# Mistakes


class Mistaken:
    """Renders the passes of one step with `right` replaced by `wrong`."""

    def __init__(self, step: str, right: str, wrong: str) -> None:
        self.step, self.right, self.wrong = step, right, wrong

    def __call__(self, template: str, context: Mapping[str, Any]) -> Rendered:
        rendered = templates.render(template, context)
        if not context["step_template"].startswith(self.step):
            return rendered
        assert self.right in rendered.text, f"no longer in the template: {self.right}"
        return replace(rendered, text=rendered.text.replace(self.right, self.wrong))


ATTEND = "attn_partials_q8"
MAIN = "void main() {"
SKIPPED = "void main() { return;"
MISTAKES = {
    "raw keys are not appended": ("index_append", MAIN, SKIPPED),
    "an old block key is kept": ("index_blocks", MAIN, SKIPPED),
    "queries are not made": ("index_q", MAIN, SKIPPED),
    "no scores": ("index_score", MAIN, SKIPPED),
    "no lists": ("index_select", MAIN, SKIPPED),
    "no norm": ("norm_rope", MAIN, SKIPPED),
    "new tokens are not cached": ("kv_append", MAIN, SKIPPED),
    "selective one block early": (ATTEND, "/ 4u > 4u", "/ 4u > 3u"),
    "never selective": (ATTEND, "/ 4u > 4u", "/ 4u > 400u"),
    "the list of the first row": (ATTEND, "visible[row * push", "visible[0u * push"),
    "gate forgotten": ("gated_combine", " * gate(row, head, dim)", ""),
}
SMALL = QsaStepProblem(
    rows=4,
    context=64,
    query_heads=4,
    kv_heads=2,
    head_size=64,
    index_heads=2,
    index_dim=32,
    budget=16,
    rotary=16,
)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_chain_broken_on_purpose_is_found(
    vulkan_runner: VulkanRunner, cases: ResidentCases, name: str
) -> None:
    values = variant("schedule=beside", vulkan_runner.info.subgroup_size)
    values = {**values, "subgroup_size": 8}
    render = Mistaken(*MISTAKES[name])
    found = judged(vulkan_runner, CHAIN, SMALL, values, cases=cases, render=render)
    assert found.failure is not None
    assert found.failure.state == "correctness"


# What is launched


def launches(problem: QsaStepProblem, text: str) -> list[list[str]]:
    """Names of the passes between barriers."""
    values = variant(text, 32)
    stretches: list[list[str]] = []
    for each in CHAIN.passes(Candidate(values, problem, gpu()), scalars_of(problem)):
        if not each.beside:
            stretches.append([])
        stretches[-1].append(each.name)
    return stretches


def test_steps_without_work_are_not_launched() -> None:
    text = f"{TUNED} select=workgroup"
    attention = [["attn_partials_q8"], ["gated_combine"]]
    appends = ["kv_append_q8", "index_append"]
    begun = ["qk_norm_rope", "index_q"]
    selective = msgspec.structs.replace(SMALL, rows=1)
    end = [["index_score", *appends], ["index_select"], *attention]
    assert launches(selective, text) == [[*begun, "index_blocks"], *end]
    assert launches(selective, f"{text} schedule=beside") == [
        [*begun, "index_append"],
        ["index_blocks", "kv_append_q8"],
        ["index_score"],
        ["index_select"],
        *attention,
    ]
    within_a_block = msgspec.structs.replace(selective, context=65)
    assert launches(within_a_block, text) == [begun, *end]
    short = msgspec.structs.replace(selective, context=17)
    assert launches(short, text) == [["qk_norm_rope"], appends, *attention]
    dense = msgspec.structs.replace(selective, budget=0)
    assert launches(dense, dense_text(TUNED)) == [
        ["qk_norm_rope"],
        ["kv_append_q8"],
        *attention,
    ]


def test_a_serial_schedule_has_a_barrier_before_every_step() -> None:
    assert all(len(stretch) == 1 for stretch in launches(SMALL, ""))


def test_a_device_needs_no_more_than_32_buffers_and_128_bytes() -> None:
    assert len(CHAIN.slots) <= 32
    assert 4 * len(CHAIN.push_fields) <= 128


def test_timed_kernels_are_the_validated_ones() -> None:
    problem = load_workload("qsa-chain")[0]
    assert isinstance(problem, QsaStepProblem)
    case = next(case for case in CHAIN.validation_cases(problem) if case.name == "rewind")
    crossing = case.problem
    assert isinstance(crossing, QsaStepProblem)
    assert crossing.selects
    assert crossing.completes
    for values in pairwise(legal(CHAIN, problem, gpu()))[::5]:
        checked = CHAIN.validation_values(Candidate(values, problem, gpu()), case)
        wanted = {
            each.rendered.text
            for each in render_passes(CHAIN, values, problem, gpu(), scalars=scalars_of(problem))
        }
        got = {
            each.rendered.text
            for each in render_passes(CHAIN, checked, crossing, gpu(), scalars=scalars_of(crossing))
        }
        assert wanted <= got


def test_the_named_workload_holds_each_length_sparse_and_dense() -> None:
    problems = load_workload("qsa-chain")
    assert {(p.context, p.budget) for p in problems if isinstance(p, QsaStepProblem)} == {
        (context, budget) for context in (8192, 65536, 131072, 262144) for budget in (2048, 0)
    }


def test_problems_say_what_they_refuse() -> None:
    with pytest.raises(UsageError, match="rows is 65"):
        QsaStepProblem(rows=65, context=100)
    with pytest.raises(UsageError, match="budget is -4"):
        QsaStepProblem(context=100, budget=-4)
    with pytest.raises(UsageError, match=r"budget \(18\) must be a multiple of ratio"):
        QsaStepProblem(context=100, budget=18)


@pytest.mark.parametrize("device", [gpu(), narrow_cpu()], ids=["gpu", "cpu"])
@pytest.mark.parametrize("place", range(len(geometries("qsa_step"))))
def test_every_geometry_has_a_variant_to_begin_with(place: int, device: DeviceInfo) -> None:
    problem = geometries("qsa_step")[place]
    known = CHAIN.portable if device.is_cpu else CHAIN.starts
    assert any(not reasons(CHAIN, canonical(CHAIN, each), problem, device) for each in known)
