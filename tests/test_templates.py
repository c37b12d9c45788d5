"""Rendering: undefined names, where errors are, and where each rendered line came from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner import templates
from tuner.errors import TemplateError
from tuner.kernels.base import Binding, PushField


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "macros.jinja").write_text(
        "{# Two lines\n   of comment. #}\n"
        "{% macro pair(x) %}\nfirst {{ x }};\nsecond {{ x }};\n{% endmacro %}\n"
        "{% macro word(x) %}<{{ x }}>{% endmacro %}\n"
    )
    (tmp_path / "part.jinja").write_text("part one\npart {{ two }}\n")
    return tmp_path


def render(folder: Path, source: str, **context: object) -> templates.Rendered:
    (folder / "main.jinja").write_text(source)
    return templates.render("main.jinja", context, folder=folder)


def where(rendered: templates.Rendered) -> list[tuple[str, str, int]]:
    lines = rendered.text.splitlines()
    assert len(lines) == len(rendered.line_map)
    origins = (rendered.origin(number) for number in range(1, len(lines) + 1))
    return [(text, o.template, o.line) for text, o in zip(lines, origins, strict=True)]


def test_each_line_knows_its_origin_through_macros_includes_and_loops(folder: Path) -> None:
    rendered = render(
        folder,
        '{% import "macros.jinja" as m %}\n'
        "top\n"
        "{{ m.pair(7) | indent(2, first=true) }}\n"
        '{% include "part.jinja" %}\n'
        "{% for i in [1,\n      2] %}\n"
        "loop {{ i }}\n"
        "{% endfor %}\n"
        "x = {{ m.word(3) }} + {{ lines }};\n"
        "end",
        two=2,
        lines="a +\nb",
    )
    assert where(rendered) == [
        ("top", "main.jinja", 2),
        ("  first 7;", "macros.jinja", 4),
        ("  second 7;", "macros.jinja", 5),
        ("", "main.jinja", 3),
        ("part one", "part.jinja", 1),
        ("part 2", "part.jinja", 2),
        ("loop 1", "main.jinja", 7),
        ("loop 2", "main.jinja", 7),
        ("x = <3> + a +", "main.jinja", 9),
        ("b;", "main.jinja", 9),
        ("end", "main.jinja", 9),
    ]


def test_output_of_a_one_line_macro_is_an_ordinary_string(folder: Path) -> None:
    source = '{% import "macros.jinja" as m %}\n{% if m.word(1) == "<1>" %}\nequal\n{% endif %}\n'
    assert render(folder, source).text == "equal\n"


def test_rendered_text_has_no_trailing_blanks_nor_runs_of_empty_lines(folder: Path) -> None:
    assert render(folder, "\n\na  \n\n \n\nb\n").text == "a\n\nb\n"


@given(numbers=st.lists(st.integers(0, 9), max_size=12))
def test_every_line_of_a_plain_template_maps_to_itself(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("plain")
    lines = ["#version 460", *(f"{n}" if n else "" for n in numbers), "end"]
    rendered = render(folder, "\n".join(lines) + "\n")
    for text, _, line in where(rendered):
        assert lines[line - 1] == text
    kept = [text for text in rendered.text.splitlines() if text]
    assert kept == [text for text in lines if text]


@pytest.mark.parametrize(
    ("source", "template", "line", "words"),
    [
        ("a\n\n{{ nope }}\n", "main.jinja", 3, "'nope' is undefined"),
        ("a\n{% if nope > 1 %}{% endif %}\n", "main.jinja", 2, "'nope' is undefined"),
        ("a\n{{ two.nope }}\n", "main.jinja", 2, "has no attribute 'nope'"),
        ("a\n{% if %}\n", "main.jinja", 2, "Expected an expression"),
        ("a\n{{ 1 // 0 }}\n", "main.jinja", 2, "ZeroDivisionError"),
        ('\n{{ fail("no strategy " ~ 3) }}\n', "main.jinja", 2, "no strategy 3"),
        ('\n{% include "absent.jinja" %}\n', "main.jinja", 2, "absent.jinja"),
        ('{% import "macros.jinja" as m %}\n{{ m.pair() }}', "macros.jinja", 4, "'x'"),
    ],
)
def test_errors_name_file_and_line(
    folder: Path, source: str, template: str, line: int, words: str
) -> None:
    with pytest.raises(TemplateError) as caught:
        render(folder, source, two=2)
    error = caught.value
    assert (error.template, error.line) == (template, line)
    assert words in str(error)


def test_undefined_name_in_an_included_file_points_there(folder: Path) -> None:
    with pytest.raises(TemplateError) as caught:
        render(folder, 'a\nb\n{% include "part.jinja" %}\n')
    assert (caught.value.template, caught.value.line) == ("part.jinja", 2)


def test_names_that_were_looked_up_are_told_wherever_that_was(folder: Path) -> None:
    """Also those that are not there, and none of a branch that was not taken."""
    source = (
        '{% import "macros.jinja" as m %}{% if wanted %}{% include "part.jinja" %}{% endif %}'
        "{{ m.word(one) }}{{ 1 if absent is defined else 2 }}"
    )
    context = {"one": 1, "two": 2, "three": 3, "wanted": True}
    names = {*context, "absent"}
    assert render(folder, source, **context).reads & names == {"one", "two", "wanted", "absent"}
    context["wanted"] = False
    assert render(folder, source, **context).reads & names == {"one", "wanted", "absent"}


def test_unknown_template_lists_those_there_are(folder: Path) -> None:
    with pytest.raises(TemplateError, match=r"no template 'x\.jinja'.*macros\.jinja"):
        templates.render("x.jinja", {}, folder=folder)


def test_package_folder_holds_the_declarations() -> None:
    assert (templates.TEMPLATE_DIR / "_declare.glsl.jinja").is_file()


def declarations(
    tmp_path: Path, bindings: tuple[Binding, ...], fields: tuple[PushField, ...]
) -> str:
    source = (templates.TEMPLATE_DIR / "_declare.glsl.jinja").read_text()
    (tmp_path / "_declare.glsl.jinja").write_text(source)
    return render(
        tmp_path,
        '{% import "_declare.glsl.jinja" as declare %}\n'
        "{{ declare.buffers(bindings) }}{{ declare.push_constants(fields) }}",
        bindings=bindings,
        fields=fields,
    ).text


def test_declarations_are_numbered_qualified_and_never_restrict_two_views(tmp_path: Path) -> None:
    text = declarations(
        tmp_path,
        (
            Binding(name="query", buffer="query", element="float", role="input"),
            Binding(name="keys", buffer="cache", element="uint", role="input"),
            Binding(name="keys4", buffer="cache", element="uvec4", role="input"),
            Binding(name="partial", buffer="partial", element="float", role="scratch"),
            Binding(name="outValues", buffer="out", element="float", role="output"),
        ),
        (PushField(name="count", type="uint"), PushField(name="scale", type="float")),
    )
    layout = "layout(set = 0, binding = {}, std430)"
    assert text.splitlines() == [
        layout.format(0) + " readonly restrict buffer Query_ { float query[]; };",
        layout.format(1) + " readonly buffer Keys_ { uint keys[]; };",
        layout.format(2) + " readonly buffer Keys4_ { uvec4 keys4[]; };",
        layout.format(3) + " coherent restrict buffer Partial_ { float partial[]; };",
        layout.format(4) + " restrict buffer OutValues_ { float outValues[]; };",
        "layout(push_constant, std430) uniform Push_ {",
        "    uint count;",
        "    float scale;",
        "} push;",
    ]


def test_no_push_fields_no_block(tmp_path: Path) -> None:
    only = (Binding(name="a", buffer="a", element="uint", role="output"),)
    assert "push_constant" not in declarations(tmp_path, only, ())


def test_no_loop_to_be_unrolled_has_a_step_that_doubles() -> None:
    """Mesa before 23 unrolls none of these: `_across.glsl.jinja` has loops that count instead."""
    doubling = re.compile(r"\[\[unroll\]\].*\*= 2u")
    found = {
        path.relative_to(templates.TEMPLATE_DIR).as_posix()
        for path in templates.TEMPLATE_DIR.rglob("*.jinja")
        if doubling.search(path.read_text())
    }
    assert not {name for name in found if not name.startswith("paged_attention/")}
