"""Find and render the Jinja GLSL of `kernel_templates/`; an undefined name is an error.

A rendered text knows where each of its lines came from, through includes and macros. For this a
Jinja extension puts an invisible mark before every line end of the template's own text; the marks
travel with the text wherever it goes and are taken out again after rendering.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, overload

import jinja2
import jinja2.ext
import jinja2.runtime
from jinja2.lexer import Token, TokenStream

from tuner.errors import TemplateError

TEMPLATE_DIR = Path(__file__).parent / "kernel_templates"
"""Where the kernel templates are: in the package, or behind its link to the top-level folder."""

# Two control characters of ASCII: no template has them, no string method splits or strips at them,
# and texts with them still take one byte a character.
_OPEN, _CLOSE = "\x01", "\x02"
_MARK = re.compile(f"{_OPEN}[^{_CLOSE}]*{_CLOSE}")


@dataclass(frozen=True, slots=True)
class Origin:
    """A line of a template file; lines count from 1."""

    template: str
    line: int


@dataclass(frozen=True, slots=True)
class Rendered:
    """Rendered GLSL: `line_map[i]` is where line i + 1 of `text` came from.

    A line that a macro or a Python value put in the middle of another belongs to the line it was
    put in; a line of its own belongs to the file it is written in. `reads` are the names of the
    context that were looked up: the text depends on nothing else of it. None: that is not known.
    """

    template: str
    text: str
    line_map: Sequence[Origin]
    reads: frozenset[str] | None = field(default=None, compare=False)

    def origin(self, line: int) -> Origin:
        """The template line behind `line` (from 1) of the text; the nearest if out of range."""
        return self.line_map[min(max(line, 1), len(self.line_map)) - 1]


def render(template: str, context: Mapping[str, Any], *, folder: Path = TEMPLATE_DIR) -> Rendered:
    """Render `template`, a file name in `folder`, with the names in `context`.

    Beside these a template may call `fail(message)`, for values that it knows nothing about.
    Trailing blanks go, and runs of empty lines become one.

    Raises:
        TemplateError: no such file, a syntax error, an undefined name or attribute, an operation
            that fails; with the file and line at fault.
    """
    reads: set[str] = set()
    outer = _READS.set(reads)
    try:
        marked = _environment(folder).get_template(template).render(context)
    except jinja2.TemplateSyntaxError as error:
        message = error.message or "syntax error"
        raise TemplateError(error.name or template, message, error.lineno) from error
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        origin = _origin_of(error, folder)
        name, line = (origin.template, origin.line) if origin else (template, None)
        raise TemplateError(name, _describe(error, folder), line) from error
    finally:
        _READS.reset(outer)
    return Rendered(template, _text(marked), _LineMap(template, marked), frozenset(reads))


_READS: ContextVar[set[str]] = ContextVar("names looked up in the rendering under way")


class _NotedContext(jinja2.runtime.Context):
    """A context that notes which names are looked up in it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._reads = _READS.get()

    def resolve_or_missing(self, key: str) -> Any:
        self._reads.add(key)
        return super().resolve_or_missing(key)


class _LineMarks(jinja2.ext.Extension):
    """Puts `_OPEN name:line _CLOSE` before each line end of a template's own text.

    Marking line ends only leaves text without line ends unmarked, so that the output of a one-line
    macro still compares, measures and converts as usual.
    """

    def filter_stream(self, stream: TokenStream) -> Iterable[Token]:
        for token in stream:
            if token.type != "data":
                yield token
                continue
            *ended, rest = token.value.split("\n")
            marked = [
                f"{line}{_OPEN}{stream.name}:{token.lineno + offset}{_CLOSE}\n"
                for offset, line in enumerate(ended)
            ]
            yield Token(token.lineno, token.type, "".join(marked) + rest)


@functools.cache
def _environment(folder: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        extensions=[_LineMarks],
    )
    environment.context_class = _NotedContext
    environment.globals["fail"] = _fail
    return environment


def _fail(message: str) -> NoReturn:
    raise jinja2.TemplateRuntimeError(message)


def _origin_of(error: BaseException, folder: Path) -> Origin | None:
    """The innermost template line of the traceback, which Jinja rewrites to name templates."""
    origin = None
    trace = error.__traceback__
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path.is_relative_to(folder):
            origin = Origin(path.relative_to(folder).as_posix(), trace.tb_lineno)
        trace = trace.tb_next
    return origin


def _describe(error: BaseException, folder: Path) -> str:
    if isinstance(error, jinja2.TemplateNotFound):
        names = sorted(p.name for p in folder.glob("*.jinja"))
        return f"no template {error.name!r} in {folder}; there are: {', '.join(names) or 'none'}"
    if isinstance(error, jinja2.TemplateError):
        return error.message or type(error).__name__
    return f"{type(error).__name__}: {error}"


def _text(marked: str) -> str:
    """The clean text."""
    lines = [line.rstrip() for line in _MARK.sub("", marked.removesuffix("\n")).split("\n")]
    kept = (line for line, before in zip(lines, ["", *lines], strict=False) if line or before)
    return "\n".join(kept) + "\n"


class _LineMap(Sequence[Origin]):
    """The origins of the lines of `_text`, found out when the first is asked for: few ever are."""

    def __init__(self, template: str, marked: str) -> None:
        self._template, self._marked = template, marked

    @overload
    def __getitem__(self, index: int) -> Origin: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Origin, ...]: ...

    def __getitem__(self, index: int | slice) -> Origin | tuple[Origin, ...]:
        return self._origins[index]

    def __len__(self) -> int:
        return len(self._origins)

    @functools.cached_property
    def _origins(self) -> tuple[Origin, ...]:
        """The mark that counts is the last of a line, which stands before its line end. A line
        without one (a value with line ends in it) belongs to the next that has one.
        """
        origins: list[Origin | None] = []
        empty = True
        for raw in self._marked.removesuffix("\n").split("\n"):
            before, empty = empty, not _MARK.sub("", raw).rstrip()
            if not (empty and before):
                _, opened, tail = raw.rpartition(_OPEN)
                origins.append(_marked_origin(tail.partition(_CLOSE)[0]) if opened else None)
        following = next((o for o in reversed(origins) if o), Origin(self._template, 1))
        line_map: list[Origin] = []
        for origin in reversed(origins):
            following = origin or following
            line_map.append(following)
        return tuple(reversed(line_map)) or (following,)


@functools.cache
def _marked_origin(mark: str) -> Origin:
    """The line that a mark names: one object a template line, however many texts have it."""
    template, _, line = mark.rpartition(":")
    return Origin(template, int(line))
