"""The judge: outputs against a reference and its bounds, with the worst element named."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tuner.records import Check

if TYPE_CHECKING:
    from tuner.kernels.base import ArithmeticClass, Reference

Array = npt.NDArray[Any]

NOT_A_NUMBER_ERROR = sys.float_info.max
"""The error of a group with a NaN or an infinity in it: finite, so that records stay JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether outputs are right, the worst group's figures, and the same in words."""

    ok: bool
    check: Check
    message: str


def judge(
    outputs: Mapping[str, Array],
    reference: Reference,
    arithmetic: ArithmeticClass,
    case: str,
) -> Verdict:
    """Compare outputs with the reference, group by group (a group is one vector of the last axis).

    A group is right if the 2-norm of its error is within the bound of the arithmetic class. A group
    wanted all zero must be exactly zero, unless the reference says otherwise. NaN is never right.
    `check` holds the group with the largest share of its bound, both figures relative to the wanted
    norm (absolute if that is 0).

    Raises:
        ValueError: an output is missing or has another shape than the reference.
    """
    bounds, verdicts = reference.bounds(arithmetic), []
    seen = reference.seen(outputs)
    for name, wanted in reference.outputs.items():
        got = seen.get(name)
        if got is None or got.shape != wanted.shape:
            found = "missing" if got is None else f"of shape {got.shape}"
            raise ValueError(f"case {case}: output {name} is {found}, wanted {wanted.shape}")
        verdicts.append(_judge_output(f"case {case}: {name}", got, reference, name, bounds[name]))
    return max(verdicts, key=lambda verdict: _share(verdict.check))


def worst_of(checks: Iterable[Check]) -> Check:
    """The check nearest to its bound or farthest beyond it, counting the cases of all.

    Raises:
        ValueError: there are no checks.
    """
    every = list(checks)
    worst = max(every, key=_share)
    return Check(
        cases=sum(check.cases for check in every),
        error=worst.error,
        bound=worst.bound,
        worst=worst.worst,
    )


def _share(check: Check) -> float:
    if check.bound > 0:
        return check.error / check.bound
    return float("inf") if check.error else 0.0


def _judge_output(label: str, got: Array, reference: Reference, name: str, bound: Array) -> Verdict:
    wanted, names = reference.outputs[name], reference.names.get(name)
    if not wanted.size:
        check = Check(cases=1, error=0.0, bound=0.0, worst=f"{label} is empty")
        return Verdict(ok=True, check=check, message=check.worst)
    width = wanted.shape[-1]
    got_rows, wanted_rows = got.reshape(-1, width), wanted.reshape(-1, width)
    error, norm = _norms(got_rows, wanted_rows)
    lenient = name in reference.zero_may_differ
    allowed = bound.ravel() if lenient else np.where(norm > 0, bound.ravel(), 0.0)
    with np.errstate(over="ignore"):
        share = np.divide(error, allowed, out=np.where(error > 0, np.inf, 0.0), where=allowed > 0)
    worst, wrong = int(share.argmax()), int((share > 1).sum())
    unit = float(norm[worst]) or 1.0
    group = np.unravel_index(worst, wanted.shape[:-1]) if names is None else (names[worst],)
    place = ", ".join(map(str, group))
    check = Check(
        cases=1,
        error=min(float(error[worst]) / unit, NOT_A_NUMBER_ERROR),
        bound=float(allowed[worst]) / unit,
        worst=f"{label}[{place}]",
    )
    element = _worst_element(got_rows[worst], wanted_rows[worst])
    message = (
        f"{check.worst} is off by {_figure(float(error[worst]), unit)} "
        f"({'relative' if norm[worst] else 'absolute'} 2-norm over {width} elements), "
        f"{check.bound:.2e} is allowed; worst element [{place}, {element}]: "
        f"got {got_rows[worst, element]:.9g}, wanted {wanted_rows[worst, element]:.9g}; "
        f"{wrong} of {share.size} groups are wrong"
    )
    return Verdict(ok=wrong == 0, check=check, message=message)


def _norms(got: Array, wanted: Array) -> tuple[Array, Array]:
    """2-norms of the error and of the wanted rows; `NOT_A_NUMBER_ERROR` where no number is."""
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.linalg.norm(got.astype(np.float64) - wanted, axis=-1)
    return np.where(np.isfinite(error), error, NOT_A_NUMBER_ERROR), np.linalg.norm(wanted, axis=-1)


def _worst_element(got: Array, wanted: Array) -> int:
    broken = ~np.isfinite(got)
    return int(broken.argmax() if broken.any() else np.abs(got - wanted).argmax())


def _figure(error: float, unit: float) -> str:
    return "NaN or infinity" if error >= NOT_A_NUMBER_ERROR else f"{error / unit:.2e}"
