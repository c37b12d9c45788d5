"""Texts that name problems: compact ones for decode steps, `KIND:name=value,…` for all others.

Whatever is wrong with what the user wrote raises a `UsageError` that names the part.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tuner.errors import UnknownNameError, UsageError
from tuner.problems import KINDS, PagedDecodeProblem, Problem

SHAPE_SYNTAX = "SEQUENCESxCONTEXT:hQUERY/KV:dHEAD[:bBLOCK][:LENGTHS]"
FIELDS_SYNTAX = "KIND:NAME=VALUE,NAME=VALUE,…"
LENGTH_KINDS = ("equal", "uniform", "lognormal", "straggler", "list")


def parse_shape(text: str) -> Problem:
    """The problem that a text names.

    A decode step may be written ``8x16k:h32/8:d128:b16:lognormal:128``: the parts after the first
    come in any order, `LENGTHS` last. Every problem may be written as its kind and its fields,
    ``paged_decode:sequences=8,context=16k,…``. Whole numbers may end in ``k`` (1,024).

    Raises:
        UsageError: the text is no shape; the message names the part at fault.
    """
    kind, colon, fields = text.strip().partition(":")
    if colon and kind in KINDS:
        return _parse_fields(kind, fields)
    if colon and re.fullmatch(r"[a-z]\w*", kind):
        raise UnknownNameError("kind of problem", kind, KINDS)
    return _parse_decode(text)


def format_shape(problem: Problem) -> str:
    """The text of a problem: what `parse_shape` turns back into it."""
    if isinstance(problem, PagedDecodeProblem) and not problem.switched:
        return _format_decode(problem)
    given = problem.stated
    kind = given.pop("kind")
    return f"{kind}:" + ",".join(f"{name}={value}" for name, value in given.items())


def made_problem(kind: str, fields: dict[str, Any]) -> Problem:
    """The problem of that kind with these fields; whole numbers may be text (``16k``).

    Raises:
        UsageError: an unknown or missing field, or a value that makes no problem.
    """
    problem_type = KINDS[kind]
    known = {field.name: field for field in msgspec.structs.fields(problem_type)}
    values = dict(fields)
    for name, value in fields.items():
        if name not in known:
            raise UnknownNameError(f"field of {kind}", name, known)
        if known[name].type is int and isinstance(value, str):
            values[name] = parse_tokens(value)
    for name, field in known.items():
        if field.required and name not in values:
            raise UsageError(f"{kind} needs {name}")
    try:
        return msgspec.convert({"kind": kind, **values}, problem_type, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(str(error)) from None


def _parse_fields(kind: str, text: str) -> Problem:
    fields: dict[str, Any] = {}
    for part in re.split(r",(?=\s*[a-z_]+=)", text):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise UsageError(f"shape {part!r}: part of {kind} is not NAME=VALUE; {FIELDS_SYNTAX}")
        if name in fields:
            raise UsageError(f"shape {text!r}: {name} comes twice")
        fields[name] = value
    try:
        return made_problem(kind, fields)
    except UsageError as error:
        raise UsageError(f"shape {kind}:{text}: {error}") from None


def _parse_decode(text: str) -> PagedDecodeProblem:
    size, *parts = text.strip().split(":")
    try:
        fields: dict[str, Any] = _shape_size(size)
        while parts:
            if parts[0].lower() in LENGTH_KINDS:
                fields["lengths"], parts = ":".join(parts).lower(), []
            else:
                _add_shape_part(fields, parts.pop(0))
        for name, part in (("query_heads", "hQUERY/KV"), ("head_size", "dHEAD")):
            if name not in fields:
                raise UsageError(f"part {part} is missing")
        return PagedDecodeProblem(**fields)
    except UsageError as error:
        raise UsageError(f"shape {text!r}: {error}; write {SHAPE_SYNTAX}") from None


def _format_decode(problem: PagedDecodeProblem) -> str:
    text = (
        f"{problem.sequences}x{problem.context}:h{problem.query_heads}/{problem.kv_heads}"
        f":d{problem.head_size}:b{problem.block_size}"
    )
    return text if problem.lengths == "equal" else f"{text}:{problem.lengths}"


def _shape_size(part: str) -> dict[str, Any]:
    match = re.fullmatch(r"(\d{1,10})x(\d{1,10}k?)", part.lower())
    if not match:
        raise UsageError(f"part {part!r} is not SEQUENCESxCONTEXT, such as 8x16384 or 8x16k")
    return {"sequences": int(match[1]), "context": parse_tokens(match[2])}


def _add_shape_part(fields: dict[str, Any], part: str) -> None:
    for pattern, names in (
        (r"h(\d{1,9})/(\d{1,9})", ("query_heads", "kv_heads")),
        (r"d(\d{1,9})", ("head_size",)),
        (r"b(\d{1,9})", ("block_size",)),
    ):
        match = re.fullmatch(pattern, part.lower())
        if match and names[0] in fields:
            raise UsageError(f"part {part!r} comes twice")
        if match:
            fields.update(zip(names, map(int, match.groups()), strict=True))
            return
    raise UsageError(
        f"part {part!r} is none of hQUERY/KV (h32/8), dHEAD (d128), bBLOCK (b16) "
        f"or lengths ({', '.join(LENGTH_KINDS)})"
    )


def parse_tokens(text: str) -> int:
    """A number of tokens: ``16384`` or ``16k``.

    Raises:
        UsageError: it is neither.
    """
    match = re.fullmatch(r"(\d{1,10})(k?)", text.strip().lower())
    if not match:
        raise UsageError(f"{text!r} is no whole number of up to 10 digits, such as 16384 or 16k")
    return int(match[1]) * (1024 if match[2] else 1)


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """The numbers of a comma-separated list, as ``--context 4096,16k`` takes it.

    Raises:
        UsageError: an entry is no number; the message names `option` and the entry.
    """
    try:
        return tuple(parse_tokens(part) for part in text.split(","))
    except UsageError as error:
        raise UsageError(f"{option} {text!r}: {error}") from None
