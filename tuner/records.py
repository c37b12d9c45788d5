"""The types of results: what one trial leaves behind, and what was calibrated. Plain data only.

States are the words of the T4 auto-tuning results format: "correct" has samples, every other state
has `error`. `tuner.results` stores these.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tuner.problems import AnyProblem

SCHEMA_VERSION = 1

State = Literal["correct", "constraints", "compile", "runtime", "timeout", "correctness"]


class PassStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver says of one pipeline ("Register Count" …), where it says anything."""

    name: str
    statistics: dict[str, int | float | str | bool]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """How validation went: over all cases, the worst error beside the bound it had to keep.

    `error` and `bound` are relative 2-norms over the last axis (see `tuner.oracle`); `worst` says
    where ("case ragged: out[3, 7]").
    """

    cases: int
    error: float
    bound: float
    worst: str


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One trial: a variant of a family on a problem on a device, and what came of it.

    `variant` is the identity under which nothing is measured twice: a hash of family, parameter
    values, problem, rendered sources, compiler, device and driver (see `tuner.evaluate`).
    Times are medians in nanoseconds; `low_ns` and `high_ns` are the interval of the median.
    """

    variant: str
    time: str
    session: str
    device: str
    device_uuid: str
    driver: str
    compiler: str
    family: str
    problem: AnyProblem
    values: dict[str, int | str]
    state: State
    error: str | None = None
    check: Check | None = None
    samples_ns: tuple[float, ...] = ()
    median_ns: float | None = None
    low_ns: float | None = None
    high_ns: float | None = None
    bytes_moved: int = 0
    read_gb_s: float | None = None
    """The device's read bandwidth measured in the same session, GB/s."""
    copies: int = 1
    clock: str = "gpu_timestamps"
    ended_by: str = ""
    compile_seconds: float = 0.0
    pipeline_seconds: float = 0.0
    validate_seconds: float = 0.0
    measure_seconds: float = 0.0
    statistics: tuple[PassStatistics, ...] = ()
    sampler: str = ""
    note: str = ""

    @property
    def gb_s(self) -> float | None:
        """Achieved bandwidth in GB/s (1e9 bytes), None unless correct."""
        return self.bytes_moved / self.median_ns if self.median_ns else None

    @property
    def utilisation(self) -> float | None:
        """Achieved bandwidth over the measured read bandwidth, None if either is unknown."""
        if self.gb_s is None or not self.read_gb_s:
            return None
        return self.gb_s / self.read_gb_s


class Calibration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Read bandwidth of a device with a driver, measured at `time` (UTC).

    `points` pairs bytes read with GB/s, ascending; `read_gb_s` is the largest point's.
    """

    time: str
    session: str
    device: str
    device_uuid: str
    driver: str
    read_gb_s: float
    points: tuple[tuple[int, float], ...]
    samples_ns: tuple[float, ...]
    """Raw samples of the largest point."""
    method: str
