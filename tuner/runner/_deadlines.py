"""How long device work may take before its process is given up."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.device_info import DeviceInfo
from tuner.runner.protocol import MeasurePlan

GPU_LAUNCH_S, CPU_LAUNCH_S = 20.0, 90.0
"""How long a launch may take; a CPU driver compiles the kernel in the first one."""
STARVED_FACTOR = 4
"""So many times longer it may take on a CPU driver beside others that leave it little time."""

_SHAPES = 4
"""Launch shapes that a calibration tries, the last measurement included."""
_LOOKS = 3
"""Launches that are slower than planned before a measurement knows how slow they are."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a submission is waited for: `seconds`, and on, up to `starved_seconds`, while the
    process that computes it has not got as much time of the processors since."""

    seconds: float
    starved_seconds: float

    @classmethod
    def of(cls, info: DeviceInfo, launch_s: float | None = None) -> Patience:
        """With that device: `launch_s` to the second, or what suits the kind of device."""
        if launch_s is not None:
            return cls(launch_s, launch_s)
        if info.is_cpu:
            return cls(CPU_LAUNCH_S, STARVED_FACTOR * CPU_LAUNCH_S)
        return cls(GPU_LAUNCH_S, GPU_LAUNCH_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds that each kind of call may take.

    `launch_s` is for one submission (None: by the kind of device), `prepare_s` for the pipelines of
    one job, `start_s` for a new process and `close_s` for its end. Calls of several steps get as
    much for each; `spare_s` is added, so that the runner itself is the first to notice.
    """

    start_s: float = 60.0
    launch_s: float | None = None
    prepare_s: float = 120.0
    close_s: float = 20.0
    spare_s: float = 10.0
    upload_bytes_per_s: float = 50e6

    def launch(self, info: DeviceInfo) -> float:
        """Of one submission, at most."""
        return Patience.of(info, self.launch_s).starved_seconds

    def upload(self, info: DeviceInfo, nbytes: int) -> float:
        """Of making a workload resident, `nbytes` in all its copies."""
        return self.launch(info) + nbytes / self.upload_bytes_per_s + self.spare_s

    def execute(self, info: DeviceInfo) -> float:
        """Of one checked launch."""
        return 2 * self.launch(info) + self.spare_s

    def measure(self, info: DeviceInfo, plan: MeasurePlan) -> float:
        """Of a measurement: what the plan spends, and the launches that teach it to spend less."""
        planned_ms = 4 * (plan.warmup_ms + plan.budget_ms + plan.max_submission_ms)
        planned_ms += plan.settle_max_ms + 2 * plan.energy_ms
        planned_ms += plan.max_submission_ms if plan.breakdown_samples else 0
        return _LOOKS * self.launch(info) + planned_ms / 1000 + self.spare_s

    def read_bandwidth(self, info: DeviceInfo, nbytes: int) -> float:
        """Of a calibration with reads of `nbytes`."""
        return self.upload(info, nbytes) + _SHAPES * self.measure(info, MeasurePlan())

    def bandwidth_curve(self, info: DeviceInfo, sizes: tuple[int, ...]) -> float:
        """Of a transfer over buffers of these sizes, the largest of which is uploaded."""
        points = len(sizes) * _SHAPES * self.measure(info, MeasurePlan())
        return self.upload(info, 2 * max(sizes, default=0)) + points
