"""Where problems come from: model names, workload files and named workloads.

A *workload* is a tuple of problems to tune for. Whatever is wrong with what the user wrote raises a
`UsageError` that names the part, or an `InputFileError` with file and line.
"""

from __future__ import annotations

import csv
import itertools
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, cast

import msgspec

from tuner.errors import InputFileError, UnknownNameError, UsageError
from tuner.problems import KINDS, PagedDecodeProblem, Problem
from tuner.shapes import made_problem

_GEOMETRY = ("query_heads", "kv_heads", "head_size")
_OF_A_MODEL = (*_GEOMETRY, *PagedDecodeProblem.SWITCHES)
"""Fields of a decode problem that a model's name stands for."""
_DATA = resources.files("tuner") / "data"


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The attention geometry of a published model, and the switches that its layers need.

    `window_layers` of the `attention_layers` see a window of tokens only, the others all of them.
    For the switches see `PagedDecodeProblem`.
    """

    name: str
    query_heads: int
    kv_heads: int
    head_size: int
    attention_layers: int
    window: int = 0
    window_layers: int = 0
    softcap: float = 0.0
    sinks: int = 0
    alibi: int = 0
    value_head_size: int = 0
    note: str = ""

    @property
    def layers(self) -> tuple[dict[str, int | float], ...]:
        """Heads and switches of each kind of layer, as fields of a decode problem: of those that
        see all tokens, then of those that see a window."""
        layer = {name: getattr(self, name) for name in _OF_A_MODEL}
        whole = (layer | {"window": 0},) if self.window_layers < self.attention_layers else ()
        return (*whole, layer) if self.window_layers else whole


# ------------------------------------------------------------------ models


def models() -> tuple[ModelShape, ...]:
    """All models that are known by name, in the order of the table."""
    text = (_DATA / "model_shapes.csv").read_text("utf-8")
    return tuple(
        ModelShape(
            name=row["model"],
            query_heads=int(row["query_heads"]),
            kv_heads=int(row["kv_heads"]),
            head_size=int(row["head_dim"]),
            attention_layers=int(row["attention_layers"]),
            window=int(row["window"] or 0),
            window_layers=int(row["window_layers"] or 0),
            softcap=float(row["softcap"] or 0),
            sinks=int(row["sinks"] or 0),
            alibi=int(row["alibi"] or 0),
            value_head_size=int(row["value_head_dim"] or 0),
            note=row["note"],
        )
        for row in csv.DictReader(text.splitlines())
    )


def model(name: str) -> ModelShape:
    """The model of that name, upper or lower case.

    Raises:
        UnknownNameError: there is none; the message names the nearest.
    """
    for shape in models():
        if shape.name.lower() == name.strip().lower():
            return shape
    raise UnknownNameError("model", name, [shape.name for shape in models()])


def model_problems(
    name: str,
    *,
    sequences: Iterable[int],
    contexts: Iterable[int],
    lengths: str = "equal",
    block_size: int = 16,
) -> tuple[PagedDecodeProblem, ...]:
    """A model's decode problems: every number of sequences with every context length, in each kind
    of layer.

    Raises:
        UsageError: unknown model (`UnknownNameError`), or numbers that make no problem.
    """
    return _in_layers(
        model(name).layers,
        sequences=sequences,
        contexts=tuple(contexts),
        others={"block_size": block_size, "lengths": lengths},
    )


def _in_layers(
    layers: Iterable[Mapping[str, int | float]],
    *,
    sequences: Iterable[int],
    contexts: Sequence[int],
    others: Mapping[str, Any],
) -> tuple[PagedDecodeProblem, ...]:
    """A problem for every number of sequences, context and layer, each once."""
    problems = (
        made_problem("paged_decode", {**others, **layer, "sequences": count, "context": context})
        for count in sequences
        for context in contexts
        for layer in layers
    )
    return tuple(dict.fromkeys(cast("Iterable[PagedDecodeProblem]", problems)))


# ------------------------------------------------------------------ workload files


def named_workloads() -> dict[str, str]:
    """The workloads that come with the package: name to the comment in the file's first line."""
    files = sorted((_DATA / "workloads").iterdir(), key=lambda file: file.name)
    return {
        file.name.removesuffix(".toml"): file.read_text("utf-8").partition("\n")[0].lstrip("# ")
        for file in files
        if file.name.endswith(".toml")
    }


def default_problems(kind: str, *, on_cpu: bool) -> tuple[Problem, ...]:
    """What problems of a kind are tuned where nothing is said: workload KIND-cpu or KIND-gpu."""
    return load_workload(f"{kind}-{'cpu' if on_cpu else 'gpu'}")


def geometries(kind: str) -> tuple[Problem, ...]:
    """Small problems of a kind that differ in all that is compiled into kernels."""
    return load_workload(f"{kind}-geometries")


def load_workload(name: str) -> tuple[Problem, ...]:
    """The problems of a workload file, or of the named workload.

    `name` is a path if it ends in ``.toml`` or has a folder in it.

    Raises:
        UnknownNameError: no workload has that name.
        InputFileError: the file cannot be read, or something in it is wrong.
    """
    if name.endswith(".toml") or len(Path(name).parts) > 1:
        return _read_file(Path(name))
    known = named_workloads()
    if name not in known:
        raise UnknownNameError("workload", name, [*known, "FILE.toml"])
    text = (_DATA / "workloads" / f"{name}.toml").read_text("utf-8")
    return parse_workload(text, path=f"{name}.toml")


def _read_file(path: Path) -> tuple[Problem, ...]:
    try:
        return parse_workload(path.read_text("utf-8"), path=path)
    except OSError as error:
        raise InputFileError(path, error.strerror or "cannot be read") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InputFileError(path, "not UTF-8 text", line) from None


def parse_workload(text: str, *, path: object) -> tuple[Problem, ...]:
    """The problems in the text of a workload file, each once, in order.

    Raises:
        InputFileError: malformed TOML, an unknown key, or values that make no problem, with the
            line; `path` is only for the message.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        told = re.search(r"line (\d+)", str(error))
        last_line = text.count("\n") + 1
        line = int(told[1]) if told else last_line
        raise InputFileError(path, f"malformed TOML: {error}", line) from None
    tables = document.pop("problem", None)
    for key in document:
        raise InputFileError(path, f"unknown key {key!r}, legal: problem", _line_of(text, key))
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        where = _line_of(text, "problem")
        raise InputFileError(path, "needs at least one [[problem]] table", where)
    found: list[Problem] = []
    for place, table in enumerate(tables):
        try:
            found += _table_problems(table)
        except UsageError as error:
            key = error.key if isinstance(error, _KeyError) else str(error).split(" ", 1)[0]
            raise InputFileError(path, str(error), _line_of(text, key, place)) from None
    return tuple(dict.fromkeys(found))


class _KeyError(UsageError):
    """A value of a table that is wrong, with its key."""

    def __init__(self, key: str, message: str) -> None:
        self.key = key
        super().__init__(message)


def _table_problems(table: dict[str, Any]) -> Sequence[Problem]:
    """The problems of one table; `kind` says of which kind, decode steps if it is missing."""
    fields = dict(table)
    kind = fields.pop("kind", "paged_decode")
    if kind not in KINDS:
        raise _KeyError("kind", str(UnknownNameError("kind of problem", str(kind), KINDS)))
    if kind == "paged_decode":
        return _decode_problems(fields)
    lists = {name: value for name, value in fields.items() if isinstance(value, list)}
    for name, value in lists.items():
        if not value:
            raise _KeyError(name, f"{name} is an empty list")
    return [
        made_problem(kind, fields | dict(zip(lists, choice, strict=True)))
        for choice in itertools.product(*lists.values())
    ]


def _decode_problems(table: dict[str, Any]) -> tuple[PagedDecodeProblem, ...]:
    known = [field.name for field in msgspec.structs.fields(PagedDecodeProblem)]
    for key in table:
        if key not in ("model", *known):
            raise _KeyError(key, str(UnknownNameError("key", key, ["kind", "model", *known])))
    layers = _table_layers(table)
    block_size = _numbers(table, "block_size", default=16)[0]
    contexts = _numbers(table, "context")
    lengths = table.get("lengths", "equal")
    if not isinstance(lengths, str):
        raise _KeyError("lengths", f"lengths is {lengths!r}, must be text such as 'lognormal:128'")
    handled = ("model", *_GEOMETRY, "block_size", "lengths", "sequences", "context")
    others = {key: value for key, value in table.items() if key not in handled}
    return _in_layers(
        layers,
        sequences=_numbers(table, "sequences"),
        contexts=contexts,
        others={**others, "block_size": block_size, "lengths": lengths},
    )


def _table_layers(table: dict[str, Any]) -> tuple[dict[str, int | float], ...]:
    if "model" not in table:
        return ({key: _numbers(table, key)[0] for key in _GEOMETRY},)
    for key in _OF_A_MODEL:
        if key in table:
            raise _KeyError(key, f"{key} beside model: give one or the other")
    name = table["model"]
    if not isinstance(name, str):
        raise _KeyError("model", f"model is {name!r}, must be a name such as 'Llama-3.1-8B'")
    try:
        return model(name).layers
    except UnknownNameError as error:
        raise _KeyError("model", str(error)) from None


def _numbers(table: dict[str, Any], key: str, default: int | None = None) -> list[int]:
    """The whole number of `key`, or the numbers where a list is allowed; never empty."""
    value = table.get(key, default)
    if value is None:
        raise _KeyError("", f"{key} is missing")
    listable = key in ("sequences", "context")
    values = value if isinstance(value, list) and listable else [value]
    if not values or not all(type(number) is int for number in values):
        form = "a whole number or a list of them" if listable else "a whole number"
        raise _KeyError(key, f"{key} is {value!r}, must be {form}")
    return list(values)


def _line_of(text: str, key: str, table: int | None = None) -> int | None:
    """Line of `key` (of the header, if it is not found) in the given [[problem]] table."""
    lines = text.splitlines()
    header = re.compile(r"\s*\[\[\s*problem\s*\]\]")
    starts = [number for number, line in enumerate(lines) if header.match(line)]
    first, last = 0, len(lines)
    fallback: int | None = None
    if table is not None and table < len(starts):
        first, last = starts[table], [*starts, len(lines)][table + 1]
        fallback = first + 1
    assignment = re.compile(rf"\s*\[*\s*[\"']?{re.escape(key)}[\"']?\s*[=.\]]") if key else None
    for number in range(first, last):
        if assignment and assignment.match(lines[number]):
            return number + 1
    return fallback
