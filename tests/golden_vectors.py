"""Reads golden vectors and compares results by the rule each of them carries.

The files were computed independently of this project; `Golden.differences` applies the comparison
rules of their README, which suit any float32 implementation. An oracle passes `bound` to demand
more than the rule does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Rule = Mapping[str, Any]

FOLDER = Path(__file__).parent / "golden"


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """One file: the operation `op`, its inputs and scalars, the results wanted and their rules."""

    name: str
    op: str
    text: str
    inputs: dict[str, Array]
    attributes: dict[str, int | float]
    want: dict[str, Array]
    rules: dict[str, Rule]

    def differences(self, got: Mapping[str, Array], *, bound: float | None = None) -> list[str]:
        """What is wrong with `got`, a sentence for each array; nothing if all is right.

        Every array that is no mere information must be there. `bound` replaces the bounds of the
        rules rel2, mixed, prefix and partials, and makes flagged integers compare exactly.
        """
        found = []
        for name, rule in self.rules.items():
            if rule["kind"] == "info":
                continue
            if name not in got:
                found.append(f"{self.name}: {name} is missing")
                continue
            message = self._compare(name, got[name], rule, bound)
            if message:
                found.append(f"{self.name}: {name}: {message}")
        return found

    def _compare(self, name: str, got: Array, rule: Rule, bound: float | None) -> str:
        want = self.want[name]
        if got.shape != want.shape:
            return f"shape {got.shape}, wanted {want.shape}"
        comparison = Comparison(golden=self, rule=rule, strict=bound is not None, bound=bound)
        if "rows" in rule:
            rows = self.want[rule["rows"]].astype(bool)
            return comparison.run(got[rows], want[rows], rows)
        return comparison.run(got, want, slice(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One rule applied to one array; `rows` are the rows of companion arrays that belong to it."""

    golden: Golden
    rule: Rule
    strict: bool
    bound: float | None

    def run(self, got: Array, want: Array, rows: Any) -> str:
        """An empty string if `got` passes, else what is wrong."""
        kinds: dict[str, Callable[[Array, Array, Any], str]] = {
            "exact": self._exact,
            "rel2": self._rel2,
            "mixed": self._mixed,
            "codes": self._codes,
            "packed": self._packed,
            "ulp": self._ulp,
            "token_words": self._token_words,
            "planar": self._planar,
            "half_keys": self._half_keys,
            "prefix": self._prefix,
            "exact_prefix": self._exact_prefix,
            "partials": self._partials,
        }
        return kinds[self.rule["kind"]](got, want, rows)

    @property
    def _limit(self) -> float:
        return float(self.rule["bound"] if self.bound is None else self.bound)

    def _near(self, key: str, rows: Any) -> Array:
        near = self.golden.want[key][rows].astype(bool)
        return np.zeros_like(near) if self.strict else near

    def _exact(self, got: Array, want: Array, rows: Any) -> str:
        if got.dtype != want.dtype:
            return f"dtype {got.dtype}, wanted {want.dtype}"
        as_bytes = np.dtype(f"V{want.dtype.itemsize}")
        same = np.ascontiguousarray(got).view(as_bytes) == np.ascontiguousarray(want).view(as_bytes)
        return _first_wrong(~same, got, want)

    def _rel2(self, got: Array, want: Array, rows: Any) -> str:
        axes = tuple(self.rule["axes"])
        error = np.sqrt(((got.astype(np.float64) - want) ** 2).sum(axis=axes, keepdims=True))
        norm = np.sqrt((want.astype(np.float64) ** 2).sum(axis=axes, keepdims=True))
        wrong = ~(error <= self._limit * norm)
        share = np.where(norm > 0, error / np.where(norm > 0, norm, 1), error)
        return _first_wrong(wrong, share, np.broadcast_to(self._limit, share.shape))

    def _mixed(self, got: Array, want: Array, rows: Any) -> str:
        allowed = self._limit * np.maximum(1, np.abs(want))
        return _first_wrong(~(np.abs(got.astype(np.float64) - want) <= allowed), got, want)

    def _codes(self, got: Array, want: Array, rows: Any) -> str:
        near = self._near(self.rule["near"], rows)
        off = np.abs(got.astype(np.int64) - want.astype(np.int64))
        return _first_wrong(off > near, got, want)

    def _packed(self, got: Array, want: Array, rows: Any) -> str:
        return self._codes(_signed_bytes(got), _signed_bytes(want), rows)

    def _ulp(self, got: Array, want: Array, rows: Any) -> str:
        off = np.abs(_float_bits(got).astype(np.int64) - want.astype(np.int64))
        return _first_wrong(off > (0 if self.strict else self.rule["ulp"]), got, want)

    def _token_words(self, got: Array, want: Array, rows: Any) -> str:
        return self._codes(
            _signed_bytes(got[..., :-1]), _signed_bytes(want[..., :-1]), rows
        ) or self._ulp(got[..., -1], want[..., -1], rows)

    def _planar(self, got: Array, want: Array, rows: Any) -> str:
        side, row, first = self.rule["side"], self.rule["row"], self.rule["base_pos"]
        scales = self.rule["scale_off"]
        got_bytes, want_bytes = got.view(np.uint8).copy(), want.view(np.uint8).copy()
        for key, start, width, dtype in (
            (f"{side}_near", first * row, row, np.int8),
            (f"{side}_scale_near", scales + first * row // 32 * 2, row // 32, np.uint16),
        ):
            near = self._near(key, slice(None)).reshape(-1, width)
            part = slice(start, start + near.size * np.dtype(dtype).itemsize)
            written = got_bytes[part].view(dtype).astype(np.int64)
            off = np.abs(written - want_bytes[part].view(dtype)).reshape(near.shape)
            message = _first_wrong(off > near, off, near)
            if message:
                return message
            got_bytes[part] = want_bytes[part]
        return _first_wrong(got_bytes != want_bytes, got_bytes, want_bytes)

    def _half_keys(self, got: Array, want: Array, rows: Any) -> str:
        exact, first = self.golden.want[self.rule["exact"]], self.rule.get("first", 0)
        if exact.shape[0] != got.shape[0] and "first" not in self.rule:
            first = int(self.golden.attributes["b0"])
        part = slice(first, first + len(exact))
        value = got[part].view(np.float16).astype(np.float64)
        largest = np.abs(exact).max(axis=-1, keepdims=True, initial=0)
        unit = np.spacing(np.abs(exact).astype(np.float16)).astype(np.float64)
        wrong = ~(np.abs(value - exact) <= unit / 2 + self.rule["bound"] * largest)
        others = np.ones(len(got), bool)
        others[part] = False
        return _first_wrong(wrong, value, exact) or self._exact(got[others], want[others], rows)

    def _prefix(self, got: Array, want: Array, rows: Any) -> str:
        counts = self.golden.want[self.rule["count"]][rows]
        for row, count in enumerate(counts.astype(int)):
            head, tail = want[row, :count], got[row, count:]
            allowed = np.where(head == 0, 0, self._limit * head.max(initial=0))
            wrong = ~(np.abs(got[row, :count].astype(np.float64) - head) <= allowed)
            if wrong.any() or not np.isnan(tail).all():
                return f"row {row}: {_first_wrong(wrong, got[row, :count], head) or 'tail written'}"
        return ""

    def _exact_prefix(self, got: Array, want: Array, rows: Any) -> str:
        counts = self.golden.want[self.rule["count"]][rows]
        poisoned = counts == 0xFFFFFFFF
        visible = np.arange(want.shape[1]) < np.where(poisoned, want.shape[1], counts)[:, None]
        return _first_wrong((got != want) & visible, got, want)

    def _partials(self, got: Array, want: Array, rows: Any) -> str:
        def whole(part: Array) -> tuple[Array, Array]:
            part = part.astype(np.float64)
            total = part[..., 1]
            return part[..., 0] + np.log2(total), part[..., 2:] / total[..., None]

        (got_sum, got_out), (want_sum, want_out) = whole(got), whole(want)
        axes = Comparison(
            golden=self.golden,
            rule={"axes": [-1], "bound": self.rule["bound"]},
            strict=self.strict,
            bound=self.bound,
        )
        return self._mixed(got_sum, want_sum, rows) or axes._rel2(got_out, want_out, rows)


def load(name: str, folder: Path = FOLDER) -> Golden:
    """The golden vectors in `name`.npz."""
    with np.load(folder / f"{name}.npz") as archive:
        arrays = {key: archive[key] for key in archive.files}

    def section(prefix: str) -> dict[str, Array]:
        return {key[len(prefix) :]: v for key, v in arrays.items() if key.startswith(prefix)}

    return Golden(
        name=name,
        op=str(arrays["op"]),
        text=str(arrays["text"]),
        inputs=section("in."),
        attributes={key: value.item() for key, value in section("attr.").items()},
        want=section("want."),
        rules={key: json.loads(str(value)) for key, value in section("rule.").items()},
    )


def names(pattern: str = "*", folder: Path = FOLDER) -> list[str]:
    """Names of the golden files that match a glob pattern, sorted."""
    return sorted(path.stem for path in folder.glob(f"{pattern}.npz"))


def _first_wrong(wrong: Array, got: Array, want: Array) -> str:
    if not wrong.any():
        return ""
    place = np.unravel_index(int(wrong.argmax()), wrong.shape)
    index = ", ".join(map(str, place))
    return f"{int(wrong.sum())} wrong, first [{index}]: {got[place]} against {want[place]}"


def _signed_bytes(words: Array) -> Array:
    return np.ascontiguousarray(words).astype("<u4").view(np.int8)


def _float_bits(values: Array) -> Array:
    return values.view(np.uint32) if values.dtype == np.float32 else values
