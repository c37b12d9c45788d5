"""Shape texts, model names, workload files and the workloads that come with the package."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.made_devices import gpu
from tuner import kernels, shapes, workloads
from tuner.errors import InputFileError, UnknownNameError, UsageError
from tuner.kernels.space import reasons
from tuner.problems import KINDS, PagedDecodeProblem

LLAMA_8B = {"query_heads": 32, "kv_heads": 8, "head_size": 128}


@st.composite
def problems(draw: st.DrawFn) -> PagedDecodeProblem:
    """Any legal problem of moderate size, with every kind of lengths."""
    sequences = draw(st.integers(1, 9))
    context = draw(st.integers(1, 9_000))
    low = draw(st.integers(1, context))
    others = st.lists(st.integers(0, context), min_size=sequences - 1, max_size=sequences - 1)
    listed = [context, *draw(others)]
    kv_heads = draw(st.integers(1, 9))
    kinds = ("equal", f"uniform:{low}", f"lognormal:{low}", f"straggler:{low}")
    return PagedDecodeProblem(
        sequences=sequences,
        context=context,
        kv_heads=kv_heads,
        query_heads=kv_heads * draw(st.integers(1, 16)),
        head_size=draw(st.sampled_from((64, 80, 96, 112, 128, 192, 256))),
        block_size=draw(st.integers(1, 64)),
        lengths=draw(st.sampled_from((*kinds, "list:" + ",".join(map(str, listed))))),
    )


@given(problems())
def test_every_problem_has_a_shape_text_that_means_it(problem: PagedDecodeProblem) -> None:
    assert shapes.parse_shape(shapes.format_shape(problem)) == problem


def test_shape_parts_come_in_any_order_and_case_and_with_k() -> None:
    expected = PagedDecodeProblem(sequences=8, context=16_384, block_size=32, **LLAMA_8B)
    assert shapes.parse_shape("8x16k:h32/8:d128:b32") == expected
    assert shapes.parse_shape(" 8X16384:B32:D128:H32/8:equal ") == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "part ''"),
        ("8", "part '8'"),
        ("8x16m:h32/8:d128", "part '8x16m'"),
        ("8x16:h32:d128", "part 'h32'"),
        ("8x16:h32/8", "dHEAD is missing"),
        ("8x16:d128", "hQUERY/KV is missing"),
        ("8x16:h32/8:d128:d64", "part 'd64' comes twice"),
        ("8x16:h32/8:d128:z3", "part 'z3'"),
        ("8x16:h32/7:d128", "multiple of kv_heads"),
        ("8x16:h32/8:d0", "head_size is 0"),
        ("0x16:h32/8:d128", "sequences is 0"),
        ("99999999x16:h32/8:d128", "sequences is 99999999"),
        ("8x16:h32/8:d128:lognormal", "lengths 'lognormal'"),
        ("8x16:h32/8:d128:lognormal:17", "'lognormal:17': must be from 1 to context (16)"),
        ("8x16:h32/8:d128:uniform:17", "'uniform:17': must be from 0 to context (16)"),
        ("8x16:h32/8:d128:list:1,2", "needs 8 numbers"),
    ],
)
def test_a_bad_shape_is_refused_naming_the_part(text: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        shapes.parse_shape(text)
    assert told in str(caught.value)
    assert shapes.SHAPE_SYNTAX in str(caught.value)


LETTERS = "0123456789xhdb/:k,lognormaleqi -"


@st.composite
def nearly_shapes(draw: st.DrawFn) -> str:
    """The text of a shape with one character changed, left out or put in, which may be one, too."""
    text = shapes.format_shape(draw(problems()))
    at = draw(st.integers(0, len(text) - 1))
    return text[:at] + draw(st.text(LETTERS, max_size=1)) + text[at + draw(st.integers(0, 1)) :]


@given(st.one_of(st.text(LETTERS, max_size=40), nearly_shapes()))
def test_any_text_is_a_shape_or_a_usage_error(text: str) -> None:
    try:
        problem = shapes.parse_shape(text)
    except UsageError:
        return
    assert shapes.parse_shape(shapes.format_shape(problem)) == problem


def test_counts_name_the_option_and_the_entry() -> None:
    assert shapes.parse_counts("--context", "4096,16k, 7") == (4096, 16_384, 7)
    with pytest.raises(UsageError, match=r"--context '4,x': 'x' is no whole number"):
        shapes.parse_counts("--context", "4,x")


def test_models_are_found_in_any_case_and_unknown_ones_get_the_nearest() -> None:
    shape = workloads.model("LLAMA-3.1-8b")
    assert (shape.query_heads, shape.kv_heads, shape.head_size) == (32, 8, 128)
    with pytest.raises(UnknownNameError, match=r"did you mean Llama-3\.1-8B or"):
        workloads.model("llama-3-8b")


def test_every_model_of_the_table_makes_problems() -> None:
    known = workloads.models()
    names = [shape.name for shape in known]
    assert len(names) == len(set(names)) == 22
    for shape in known:
        found = workloads.model_problems(shape.name, sequences=(1, 8), contexts=(64, 128, 64))
        sizes = [(1, 64), (1, 128), (8, 64), (8, 128)]
        kinds = len(shape.layers)
        assert [(p.sequences, p.context) for p in found[::kinds]] == sizes
        assert len(found) == kinds * len(sizes)
        assert (shape.window > 0) == (0 < shape.window_layers <= shape.attention_layers)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("Llama-3.1-8B", [{}]),
        ("Mistral-7B-v0.1", [{"window": 4096}]),
        ("Gemma-2-9B", [{"softcap": 50.0}, {"window": 4096, "softcap": 50.0}]),
        ("Gemma-3-27B", [{}, {"window": 1024}]),
        ("gpt-oss-120b", [{"sinks": 1}, {"window": 128, "sinks": 1}]),
        ("MPT-7B", [{"alibi": 1}]),
        ("DeepSeek-V2-Lite", [{"value_head_size": 128}]),
    ],
)
def test_a_model_has_the_switches_of_its_layers(name: str, layers: list[dict[str, object]]) -> None:
    found = workloads.model_problems(name, sequences=(2,), contexts=(8192,))
    assert [problem.switched for problem in found] == layers
    table = f'[[problem]]\nmodel = "{name}"\nsequences = 2\ncontext = 8192\n'
    assert workloads.parse_workload(table, path="own.toml") == found


def test_a_workload_file_multiplies_sequences_and_contexts_and_drops_repeats() -> None:
    text = """
[[problem]]
model = "llama-3.1-8b"
sequences = [1, 4]
context = [512, 1024]

[[problem]]   # the first problem again, by geometry
query_heads = 32
kv_heads = 8
head_size = 128
sequences = 1
context = 512

[[problem]]
model = "Phi-4"
sequences = 3
context = 700
lengths = "lognormal:100"
block_size = 8
"""
    found = workloads.parse_workload(text, path="own.toml")
    assert [(p.sequences, p.context) for p in found] == [
        (1, 512),
        (1, 1024),
        (4, 512),
        (4, 1024),
        (3, 700),
    ]
    assert (found[4].lengths, found[4].block_size, found[4].group) == ("lognormal:100", 8, 4)


GOOD = '[[problem]]\nmodel = "Phi-4"\nsequences = 1\ncontext = 64\n\n'


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("a = [", 1, "malformed TOML"),
        (GOOD + "[[problem]\nmodel = 1\n", 6, "malformed TOML"),
        ("", None, "needs at least one [[problem]] table"),
        ("# nothing\nproblem = 3\n", 2, "needs at least one [[problem]] table"),
        (GOOD + "[other]\nx = 1\n", 6, "unknown key 'other'"),
        (GOOD + '[[problem]]\n\nmodel = "Phi-5"\n', 8, "did you mean Phi-4"),
        (GOOD + "[[problem]]\nmodel = 4\n", 7, "must be a name"),
        (GOOD + '[[problem]]\nmodel = "Phi-4"\nsequences = 1\n', 6, "context is missing"),
        (GOOD + "[[problem]]\nsequences = 1\ncontext = 1\n", 6, "query_heads is missing"),
        (GOOD + '[[problem]]\nmodel = "Phi-4"\nhead_size = 64\n', 8, "beside model"),
        (GOOD + '[[problem]]\nmodel = "Phi-4"\nwindow = 64\n', 8, "window beside model"),
        (GOOD + '[[problem]]\nmodel = "Phi-4"\nseqs = 1\n', 8, "unknown key 'seqs'"),
        (GOOD.replace("64", '"64"'), 4, "context is '64'"),
        (GOOD.replace("64", "6.4"), 4, "context is 6.4"),
        (GOOD.replace("64", "[]"), 4, "context is []"),
        (GOOD.replace("64", "-1"), 4, "context is -1"),
        (GOOD.replace("sequences = 1", "sequences = true"), 3, "sequences is True"),
        (GOOD + 'lengths = "log"', 6, "lengths 'log'"),
        (GOOD + "lengths = 1", 6, "lengths is 1"),
        (GOOD + "block_size = [8, 16]", 6, "block_size is [8, 16]"),
    ],
)
def test_a_bad_workload_file_is_refused_with_file_and_line(
    tmp_path: Path, text: str, line: int | None, told: str
) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputFileError) as caught:
        workloads.load_workload(str(path))
    assert (caught.value.path, caught.value.line) == (str(path), line)
    assert told in str(caught.value)


def test_a_workload_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"absent\.toml: No such file"):
        workloads.load_workload(str(tmp_path / "absent.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(InputFileError, match=r"folder\.toml: "):
        workloads.load_workload(str(tmp_path / "folder.toml"))
    (tmp_path / "latin.toml").write_bytes(b"# \n# caf\xe9\n")
    with pytest.raises(InputFileError, match=r"latin\.toml:2: not UTF-8"):
        workloads.load_workload(str(tmp_path / "latin.toml"))


def test_default_is_chosen_by_the_kind_of_device() -> None:
    on_cpu = workloads.default_problems("paged_decode", on_cpu=True)
    assert on_cpu == workloads.load_workload("paged_decode-cpu")
    on_gpu = workloads.default_problems("paged_decode", on_cpu=False)
    assert on_gpu == workloads.load_workload("paged_decode-gpu")
    cached_tokens = [p.sequences * p.context for p in on_cpu]
    assert max(cached_tokens) <= 2048, "a software driver must end the default in about a minute"


def test_named_workloads_all_load_and_say_what_they_are() -> None:
    named = workloads.named_workloads()
    assert "h200-decode" in named
    for name, summary in named.items():
        assert workloads.load_workload(name)
        assert summary
    with pytest.raises(UnknownNameError, match="did you mean .*h200-decode"):
        workloads.load_workload("h200")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_defaults_and_geometries(kind: str) -> None:
    of_kind = KINDS[kind]
    for problems in (
        workloads.default_problems(kind, on_cpu=True),
        workloads.default_problems(kind, on_cpu=False),
        workloads.geometries(kind),
    ):
        assert problems
        assert {type(problem) for problem in problems} == {of_kind}
        for problem in problems:
            assert shapes.parse_shape(shapes.format_shape(problem)) == problem
    labels = [problem.label for problem in workloads.geometries(kind)]
    assert len(set(labels)) == len(labels)


def test_fields_name_every_problem() -> None:
    text = "paged_decode:sequences=8,context=16k,query_heads=32,kv_heads=8,head_size=128"
    assert shapes.parse_shape(text) == shapes.parse_shape("8x16k:h32/8:d128")
    lengths = f"{text.replace('8,c', '2,c', 1)},lengths=list:16384,7"
    assert shapes.parse_shape(lengths).context_lens().tolist() == [16384, 7]  # type: ignore[attr-defined]
    for wrong, message in (
        (text.replace("head_size=128", "head_siz=128"), "did you mean head_size"),
        (text.replace(",head_size=128", ""), "needs head_size"),
        (text.replace("=8,c", "=many,c"), "'many' is no whole number"),
        (text + ",context=1", "context comes twice"),
        ("paged_dcode:sequences=8", "did you mean paged_decode"),
    ):
        with pytest.raises(UsageError, match=message):
            shapes.parse_shape(wrong)


def test_h200_decode_is_the_published_table() -> None:
    sizes = {(64, 16384), (8, 16384), (1, 131072), (64, 4096), (8, 4096), (1, 16384), (1, 4096)}
    found = workloads.load_workload("h200-decode")
    assert {(p.sequences, p.context, p.group) for p in found} == {
        (*size, group) for size in sizes for group in (4, 8)
    }
    assert {(p.head_size, p.kv_heads, p.lengths) for p in found} == {(128, 8, "equal")}


def test_h200_switches_has_each_switch_of_the_int8_family_and_nothing_else() -> None:
    family = kernels.family("paged_decode_q8_switched")
    found = workloads.load_workload("h200-switches")
    assert {name for p in found for name in p.switched} == {"window", "softcap", "alibi", "sinks"}
    assert not any(reasons(family, family.baseline, p, gpu()) for p in found)
