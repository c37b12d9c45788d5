"""T4, the exchange format of auto-tuning results, version 1.0.0: one document per search space.

Readers need more than the schema asks: `metadata.timeunit`; a non-empty `objectives`; and for what
failed a measurement named after the objective, with the name of an error class of Kernel Tuner's as
its value, which has none for a wrong answer or a time-out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

import tuner
from tuner.records import Record

SCHEMA_VERSION = "1.0.0"
OBJECTIVE = "time"

_ERROR_CLASS = {
    "constraints": "InvalidConfig",
    "compile": "CompilationFailedConfig",
    "runtime": "RuntimeFailedConfig",
    "timeout": "RuntimeFailedConfig",
    "correctness": "RuntimeFailedConfig",
}


def document(records: Sequence[Record]) -> dict[str, Any]:
    """The T4 document of records of one family, problem, device and driver. Times in milliseconds.

    `records` must not be empty.
    """
    first = records[0]
    return {
        "schema_version": SCHEMA_VERSION,
        "metadata": {
            "compute_api": "Vulkan",
            "platform": first.driver,
            "device": first.device,
            "autotuner": "kvtune",
            "autotuner_version": tuner.__version__,
            "timestamp": max(record.time for record in records),
            "timeunit": "milliseconds",
            "kernel": first.family,
            "problem": msgspec.to_builtins(first.problem),
            "compiler": first.compiler,
        },
        "results": [_result(record) for record in records],
    }


def text(records: Sequence[Record]) -> str:
    """The same as JSON text."""
    return json.dumps(document(records), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _result(record: Record) -> dict[str, Any]:
    correct = record.state == "correct"
    result = {
        "timestamp": record.time,
        "configuration": dict(record.values),
        "times": {
            "compilation": 1000 * (record.compile_seconds + record.pipeline_seconds),
            "validation": 1000 * record.validate_seconds,
            "benchmark": 1000 * record.measure_seconds,
            "framework": 0.0,
            "search_algorithm": 0.0,
            "runtimes": [sample / 1e6 for sample in record.samples_ns],
        },
        "invalidity": record.state,
        "correctness": 1.0 if correct else 0.0,
        "measurements": _measurements(record) if correct else [_failed(record)],
        "objectives": [OBJECTIVE],
    }
    return result if correct else result | {"error": record.error or ""}


def _failed(record: Record) -> dict[str, Any]:
    return {"name": OBJECTIVE, "value": _ERROR_CLASS[record.state], "unit": ""}


def _measurements(record: Record) -> list[dict[str, Any]]:
    values: list[tuple[str, float | None, str]] = [
        (OBJECTIVE, record.median_ns / 1e6 if record.median_ns else None, "ms"),
        ("GB/s", record.gb_s, "GB/s"),
        ("utilisation", record.utilisation, ""),
    ]
    for each in record.statistics:
        values += [
            (f"{each.name}.{name}", value, "")
            for name, value in each.statistics.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
    return [
        {"name": name, "value": value, "unit": unit}
        for name, value, unit in values
        if value is not None
    ]
