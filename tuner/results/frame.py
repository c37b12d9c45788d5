"""Records as flat rows: one mapping a record for CSV, one pandas frame for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from tuner.records import Record
from tuner.results.outcomes import Outcome
from tuner.timing import summarise

if TYPE_CHECKING:
    import pandas

Cell = str | int | float | bool | None

PROBLEM_PREFIX = "problem_"
PARAMETER_PREFIX = "param_"


def row(record: Record) -> dict[str, Cell]:
    """The record as one flat row.

    The problem's fields carry the prefix ``problem_``, the parameters ``param_``. Times are in
    microseconds or, where the name says so, in seconds; `utilisation` is a fraction of 1.
    """
    problem = msgspec.to_builtins(record.problem)
    return {
        "family": record.family,
        "problem": record.problem.label,
        **{PROBLEM_PREFIX + name: value for name, value in problem.items() if name != "kind"},
        **{PARAMETER_PREFIX + name: value for name, value in record.values.items()},
        "state": record.state,
        **_times(record),
        **_verdict(record),
        **_measurement(record),
        **{name: getattr(record, name) for name in _ORIGIN},
        "problem_key": record.problem.key,
        "variant": record.variant,
    }


_ORIGIN = ("sampler", "note", "device", "device_uuid", "driver", "compiler", "session", "time")


def _times(record: Record) -> dict[str, Cell]:
    """How long it takes, how sure that is, and what it makes of the bandwidth."""
    summary = summarise(record.samples_ns, record.rounds) if record.samples_ns else None
    return {
        "median_us": _micro(record.median_ns),
        "low_us": _micro(record.low_ns),
        "high_us": _micro(record.high_ns),
        "samples": len(record.samples_ns),
        "spread": summary.spread if summary else None,
        "stable": summary.stable if summary else None,
        "bimodal": summary.bimodal if summary else None,
        "autocorrelated": summary.autocorrelated if summary else None,
        "gb_s": record.gb_s,
        "utilisation": record.utilisation,
        "read_gb_s": record.read_gb_s,
        "bytes_moved": record.bytes_moved,
    }


def _verdict(record: Record) -> dict[str, Cell]:
    """Whether it is right, and how long it took to find out."""
    check = record.check
    return {
        "check_error": check.error if check else None,
        "check_bound": check.bound if check else None,
        "error": record.error,
        "compile_s": record.compile_seconds,
        "pipeline_s": record.pipeline_seconds,
        "validate_s": record.validate_seconds,
        "measure_s": record.measure_seconds,
    }


def _measurement(record: Record) -> dict[str, Cell]:
    """How the samples were taken, and what was observed meanwhile."""
    clocks, observed = record.clock_state, record.observed
    return {
        "clock": record.clock,
        "copies": record.copies,
        "ended_by": record.ended_by,
        "measure": record.measure,
        "launches": record.launches,
        "reference_us": _micro(_last(clocks.reference_ns)) if clocks else None,
        "power_w": observed.power_w if observed else None,
        "throttled": ", ".join(observed.throttled) if observed else None,
        "energy_j_per_token": record.energy_j_per_token,
    }


def rows(records: Iterable[Record]) -> tuple[tuple[str, ...], list[dict[str, Cell]]]:
    """(column names, rows): columns are the union over all records, parameters kept together."""
    found = [row(record) for record in records]
    names: dict[str, None] = {}
    for each in found:
        names.update(dict.fromkeys(each))
    order = [PROBLEM_PREFIX, PARAMETER_PREFIX]
    head = [n for n in names if n in ("family", "problem")]
    spread = [n for prefix in order for n in names if n.startswith(prefix) and n != "problem_key"]
    rest = [n for n in names if n not in head and n not in spread]
    return (*head, *spread, *rest), found


def to_frame(records: Iterable[Record]) -> pandas.DataFrame:
    """A frame with one row a record, in their order; the columns are those of `row`."""
    import pandas

    columns, found = rows(records)
    return _numeric(pandas.DataFrame(found, columns=list(columns)))


def outcomes_to_frame(found: Iterable[Outcome]) -> pandas.DataFrame:
    """A frame with one row an outcome: the best variant of a problem, beside the baseline.

    Columns are named as in `row`; `speedup` is the baseline's time over the best's, `tied` counts
    the variants not proven slower, `trials` all that were tried and `failed` those not correct.
    """
    import pandas

    rows_found = [_outcome_row(outcome) for outcome in found]
    return _numeric(pandas.DataFrame(rows_found, columns=_OUTCOME_COLUMNS))


_OUTCOME_COLUMNS = [
    "device",
    "driver",
    "family",
    "problem",
    "median_us",
    "low_us",
    "high_us",
    "gb_s",
    "utilisation",
    "baseline_us",
    "speedup",
    "tied",
    "trials",
    "failed",
    "best",
]


_MEASURED = (
    "median_us",
    "low_us",
    "high_us",
    "spread",
    "gb_s",
    "utilisation",
    "read_gb_s",
    "check_error",
    "check_bound",
    "baseline_us",
    "speedup",
    "reference_us",
    "power_w",
    "energy_j_per_token",
)


def _numeric(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Measured columns as floats, also where there is nothing in them but None."""
    return frame.astype({name: float for name in _MEASURED if name in frame})


def _outcome_row(outcome: Outcome) -> dict[str, Cell]:
    best, baseline = outcome.best, outcome.baseline
    return {
        "device": outcome.device,
        "driver": outcome.driver,
        "family": outcome.family,
        "problem": outcome.problem.label,
        "median_us": _micro(best.median_ns) if best else None,
        "low_us": _micro(best.low_ns) if best else None,
        "high_us": _micro(best.high_ns) if best else None,
        "gb_s": best.gb_s if best else None,
        "utilisation": best.utilisation if best else None,
        "baseline_us": _micro(baseline.median_ns) if baseline else None,
        "speedup": outcome.speedup,
        "tied": len(outcome.tied),
        "trials": len(outcome.records),
        "failed": sum(outcome.failures.values()),
        "best": " ".join(f"{k}={v}" for k, v in best.values.items()) if best else None,
    }


def _last(samples_ns: tuple[float, ...]) -> float | None:
    return samples_ns[-1] if samples_ns else None


def _micro(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1000
