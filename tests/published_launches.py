"""An engine in miniature: it reads `best-config.json` as docs/engine.md says, with the standard
library alone, and knows no kernel family."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tuner.runner.protocol import Job, JobPass

TOKEN = re.compile(r"\d+|[a-z_][a-z0-9_]*|[-+*(),]")
PACKED = {"uint": "I", "int": "i", "float": "f"}
FUNCTIONS = {
    "ceil_div": lambda a, b: (a + b - 1) // b,
    "floor_div": lambda a, b: a // b,
    "round_up": lambda a, b: (a + b - 1) // b * b,
    "min": min,
    "max": max,
}


class Expression:
    """One expression of a dispatch rule, by the grammar of docs/engine.md."""

    def __init__(self, text: str, known: Mapping[str, int]) -> None:
        self.tokens, self.known = TOKEN.findall(text), known

    def value(self) -> int:
        found = self.sum()
        assert not self.tokens, f"{self.tokens} is left over"
        return found

    def sum(self) -> int:
        found = self.product()
        while self.tokens and self.tokens[0] in "+-":
            found += self.product() if self.tokens.pop(0) == "+" else -self.product()
        return found

    def product(self) -> int:
        found = self.factor()
        while self.tokens and self.tokens[0] == "*":
            self.tokens.pop(0)
            found *= self.factor()
        return found

    def factor(self) -> int:
        token = self.tokens.pop(0)
        if token.isdecimal():
            return int(token)
        if token == "(":
            found = self.sum()
            self.tokens.pop(0)
            return found
        if not self.tokens or self.tokens[0] != "(":
            return self.known[token]
        self.tokens.pop(0)
        given = [self.sum()]
        while self.tokens.pop(0) == ",":
            given.append(self.sum())
        return int(FUNCTIONS[token](*given))


@dataclass(frozen=True)
class Engine:
    """What an engine does with a folder that the tuner has exported."""

    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "best-config.json").read_text())
        return found

    def job(self, family: str, batch: Mapping[str, int], own: Mapping[str, int]) -> Job:
        """What to launch for a batch, given its sizes and counts, and the strides and capacities
        of the engine's own buffers."""
        abi = self.config["families"][family]["abi"]
        (entry,) = self.config["families"][family]["entries"]
        rule = entry["dispatch"]
        known = {**batch, **rule["facts"], **own}
        for term in rule["terms"]:
            known.setdefault(term["name"], Expression(term["value"], known).value())
        for text, most in rule["at_most"].items():
            assert Expression(text, known).value() <= most, f"{text} is above {most}"
        sized = {
            name: own.get(name, Expression(text, known).value())
            for name, text in rule["push_constants"].items()
        }
        by_number = {each["binding"]: each["buffer"] for each in abi["bindings"]}
        roles = {each["buffer"]: each["role"] for each in abi["bindings"]}
        return Job(
            passes=tuple(
                self._pass(each, rule["groups"][each["name"]], sized, abi, known)
                for each in entry["passes"]
            ),
            bindings=tuple(by_number[number] for number in sorted(by_number)),
            scratch_bytes={
                name: Expression(text, known).value()
                for name, text in rule["scratch_bytes"].items()
            },
            counters=tuple(name for name, role in roles.items() if role == "counter"),
        )

    def _pass(
        self,
        each: dict[str, Any],
        counts: list[str],
        sized: Mapping[str, int],
        abi: dict[str, Any],
        known: Mapping[str, int],
    ) -> JobPass:
        push = b""
        for constant in abi["push_constants"]:
            assert constant["offset"] == len(push)
            value = (each["push_constants"] | sized)[constant["name"]]
            push += struct.pack("<" + PACKED[constant["type"]], value)
        x, y, z = (Expression(text, known).value() for text in counts)
        return JobPass(
            name=each["name"],
            spirv=(self.folder / each["spirv"]).read_bytes(),
            push=push,
            groups=(x, y, z),
            subgroup_size=each["subgroup_size"],
            beside=each["beside"],
        )
