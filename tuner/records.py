"""The types of results: what one trial leaves behind, and what was calibrated. Plain data only.

States are the words of the T4 auto-tuning results format: "correct" has samples, every other state
has `error`. `tuner.results` stores these.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tuner.problems import AnyProblem

SCHEMA_VERSION = 1

BufferRole = Literal["input", "output", "scratch", "state", "counter"]
"""Who fills a buffer: see `tuner.kernels.base.Binding`."""
POISON_WORD = 0xFFFFFFFF
"""What outputs are filled with before a launch, so that what a kernel left out can be told."""

State = Literal["correct", "constraints", "compile", "runtime", "timeout", "correctness"]
Measure = Literal["isolated", "batched"]
"""What a sample is: one launch between two timestamps, or many back to back, by their number."""
Transfer = Literal["read", "write", "copy"]


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


class ClockState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the device's clock stood while something was measured.

    `reference_ns`: the time of the fixed reference kernel behind each submission of samples; it
    follows the clock, so its change is the clock's. `settled_ms`: load before the first sample,
    because the device had idled. `steady`: False where the reference kernel still changed by more
    than a per cent when that load had lasted as long as it may. `repeated`: the clock had slowed
    under earlier samples, which were thrown away.
    """

    reference_ns: tuple[float, ...] = ()
    settled_ms: float = 0.0
    steady: bool = True
    repeated: bool = False


CLOCK_SETTINGS = frozenset({"applications clocks setting", "display clocks setting", "sync boost"})
"""Reasons for a lowered clock that someone has chosen: they do not come and go with the load."""


class Observation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the system's own sensors said, in `looks` looks; None for what they do not tell.

    Clocks are (least, most) in MHz; `power_w` is the mean, `temperature_c` the highest;
    `throttled` names every reason for a lowered clock that was seen.
    """

    source: str
    looks: int
    power_w: float | None = None
    core_mhz: tuple[float, float] | None = None
    memory_mhz: tuple[float, float] | None = None
    temperature_c: float | None = None
    throttled: tuple[str, ...] = ()

    @property
    def held_down(self) -> bool:
        """Whether power or heat lowered the clock, as they would in use."""
        return any(reason not in CLOCK_SETTINGS for reason in self.throttled)


class Energy(msgspec.Struct, frozen=True, kw_only=True):
    """Energy of launches back to back, all of the device's, what it takes idle included.

    `method`: from a counter of energy, or from the mean of power readings over `seconds`.
    """

    joules_per_launch: float
    launches: int
    seconds: float
    method: Literal["counter", "mean power"]


class IntervalTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Raw samples, in nanoseconds, of one stretch of a launch: the passes between two barriers.

    `passes` names them; a stretch ends when all of them have, and begins where the one before it
    ended, so that its barrier counts with it.
    """

    passes: tuple[str, ...]
    samples_ns: tuple[float, ...]


FINAL = "final"
"""The note of records that hold the last measurement of the best variants, timed in turns."""
REFERENCE = "reference"
"""The note of records of a variant that a search times again and again, to see drift."""


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
    rounds: tuple[int, ...] = ()
    """Samples of each round, where they were taken in several, with others' rounds in between."""
    interleaved: str = ""
    """A name that records share whose rounds were taken in turns."""
    rounds_repeated: int = 0
    """Rounds thrown away and taken again, because the reference variant changed meanwhile."""
    reference_ns: tuple[float, ...] = ()
    """Medians of the reference variant before each round, also of those repeated, and at the end.
    """
    median_ns: float | None = None
    low_ns: float | None = None
    high_ns: float | None = None
    bytes_moved: int = 0
    read_gb_s: float | None = None
    """The device's read bandwidth measured in the same session, GB/s."""
    copies: int = 1
    clock: str = "gpu_timestamps"
    """Which clock was read: "gpu_timestamps" or "host"."""
    clock_trouble: str = ""
    """Why the device's timestamps were not read although it has some."""
    ended_by: str = ""
    measure: Measure = "isolated"
    launches: int = 1
    """Launches of one sample, by whose number it is divided."""
    passes: int = 0
    """Dispatches of a launch; 0 in records that do not tell."""
    breakdown: tuple[IntervalTimes, ...] = ()
    """Where the time of a launch with several passes goes, from launches of their own."""
    clock_state: ClockState | None = None
    observed: Observation | None = None
    energy: Energy | None = None
    compile_seconds: float = 0.0
    pipeline_seconds: float = 0.0
    validate_seconds: float = 0.0
    measure_seconds: float = 0.0
    statistics: tuple[PassStatistics, ...] = ()
    sampler: str = ""
    note: str = ""

    @property
    def is_timed(self) -> bool:
        """Whether it is correct and has a time."""
        return self.state == "correct" and bool(self.median_ns)

    @property
    def timed_ns(self) -> float:
        """The median of a record that is known to be timed."""
        assert self.median_ns is not None
        return self.median_ns

    @property
    def gb_s(self) -> float | None:
        """Achieved bandwidth in GB/s (1e9 bytes), None unless correct."""
        return self.bytes_moved / self.median_ns if self.median_ns else None

    @property
    def energy_j_per_token(self) -> float | None:
        """Energy of a launch for each token that it works for (in a decode step one of each
        sequence), J; None without a measured one."""
        if self.energy is None:
            return None
        return self.energy.joules_per_launch / self.problem.step_tokens

    @property
    def utilisation(self) -> float | None:
        """Achieved bandwidth over the measured read bandwidth, None if either is unknown."""
        if self.gb_s is None or not self.read_gb_s:
            return None
        return self.gb_s / self.read_gb_s


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Bandwidth against size: `points` pairs bytes of the buffer with GB/s, ascending.

    The buffer is gone through again and again, so sizes that a cache holds show the cache. A copy
    counts what it reads and what it writes; its two buffers have the given size each.
    """

    transfer: Transfer
    points: tuple[tuple[int, float], ...]


class LaunchFloor(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of launches that do nothing, in `passes` dispatches with barriers between them."""

    passes: int
    isolated_ns: float
    batched_ns: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a device with a driver can do at best, measured at `time` (UTC).

    `points` pairs bytes read, from memory and not from a cache, with GB/s, ascending; `read_gb_s`
    is the largest point's. The rest is there in full calibrations only: see `is_full`. `reason`
    says why one was made. `submission_ns` is the host's time for an empty submission,
    `timer_step_ns` the smallest difference of two timestamps.
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
    reason: str = ""
    curves: tuple[Curve, ...] = ()
    floors: tuple[LaunchFloor, ...] = ()
    submission_ns: float | None = None
    timer_step_ns: float | None = None
    clock_state: ClockState | None = None
    observed: Observation | None = None

    @property
    def is_full(self) -> bool:
        """Whether it has curves and launch floors, and not the read bandwidth alone."""
        return bool(self.curves)

    def floor(self, passes: int) -> LaunchFloor | None:
        """The launch floor of so many dispatches, if it was measured."""
        return next((floor for floor in self.floors if floor.passes == passes), None)
