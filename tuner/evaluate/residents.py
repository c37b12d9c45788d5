"""What stays on the device between trials: the validation cases and the timed operands.

Operands and references are made once and serve all variants; only outputs come back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from tuner.device_info import DeviceInfo
from tuner.errors import OutOfMemoryError
from tuner.kernels.base import ArithmeticClass, Array, Family, Operands, Reference, ValidationCase
from tuner.oracle import Verdict, judge
from tuner.problems import Problem
from tuner.records import Check
from tuner.runner.protocol import Execution, OutputSpec, Runner

GPU_FOOTPRINT_BYTES = 512 * 2**20
CPU_FOOTPRINT_BYTES = 64 * 2**20
MOST_BYTES = 8 * 2**30
MOST_COPIES = 1024
"""Each costs the host a descriptor set, and a launch that finds it cold. Operands of which even so
many fit in a cache come from the kernel before, out of that cache, in an engine, too."""
BUDGET_SHARE = 0.8
"""Share of the device's memory that the timed copies may take."""
TIMING_INPUTS = "timing"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentCase:
    """A validation case on the device: its workload's name, its scalars and the right answer."""

    case: ValidationCase
    workload: str
    scalars: dict[str, int | float]
    reference: Reference

    def verdict(self, execution: Execution, arithmetic: ArithmeticClass) -> Verdict:
        """Judge a launch."""
        broken = _broken_guards(execution, self.case.name)
        return broken or judge(execution.outputs, self.reference, arithmetic, self.case.name)


class ResidentCases:
    """The validation cases of a family that are on the device, kept from problem to problem.

    Problems of one geometry have the same cases, so these are made and uploaded once a run.
    """

    def __init__(self, runner: Runner, family: Family) -> None:
        self._runner, self._family = runner, family
        self._resident: dict[ValidationCase, ResidentCase] = {}
        self._made: dict[ValidationCase, tuple[Operands, Reference]] = {}
        self._lock = threading.Lock()

    def scalars(self, case: ValidationCase) -> dict[str, int | float]:
        """The scalars of a case's operands; any thread may ask."""
        return self._operands(case)[0].scalars

    def reference(self, case: ValidationCase) -> Reference:
        """The right answer to a case; any thread may ask."""
        return self._operands(case)[1]

    def use(
        self, cases: Iterable[ValidationCase], idled: Callable[[], None] = lambda: None
    ) -> tuple[ResidentCase, ...]:
        """Make exactly these cases resident; `idled` is called after each that was not.

        Raises:
            OutOfMemoryError and other errors of `Runner.load`.
        """
        wanted = tuple(cases)
        for case in set(self._resident) - set(wanted):
            self._runner.unload(self._resident.pop(case).workload)
        for case in wanted:
            if case not in self._resident:
                self._resident[case] = self._load(case)
                idled()
        return tuple(self._resident[case] for case in wanted)

    def close(self) -> None:
        """Unload all cases."""
        self.use(())

    def _operands(self, case: ValidationCase) -> tuple[Operands, Reference]:
        with self._lock:
            if case not in self._made:
                operands = self._family.operands(case.problem, case.inputs, case.seed)
                reference = self._family.reference(operands)
                self._made[case] = (operands, with_cached_bounds(reference))
            return self._made[case]

    def _load(self, case: ValidationCase) -> ResidentCase:
        operands, reference = self._operands(case)
        workload = f"{self._family.name}/{case.name}/{case.problem.key}/{case.seed}"
        _load(
            self._runner,
            workload,
            operands,
            what=f"validation case {case.name} ({case.problem.label})",
            way_out="it is small: see what else holds memory",
        )
        return ResidentCase(
            case=case, workload=workload, scalars=operands.scalars, reference=reference
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedWorkload:
    """The operands that are timed, on the device in `copies`, with the answer to a few groups."""

    workload: str
    copies: int
    reference: Reference

    def verdict(self, execution: Execution, arithmetic: ArithmeticClass) -> Verdict:
        """Judge the sampled groups of a launch."""
        case = "timed operands (sampled)"
        broken = _broken_guards(execution, case)
        return broken or judge(execution.outputs, self.reference, arithmetic, case)


def load_timed(
    runner: Runner,
    family: Family,
    problem: Problem,
    operands: Operands,
    *,
    reference: Reference,
    footprint_bytes: int | None,
) -> TimedWorkload:
    """Upload the operands in as many copies as make caches useless.

    `reference` is the right answer to a few groups of them.

    Raises:
        OutOfMemoryError: not even one copy fits.
    """
    nbytes = operand_bytes(operands)
    read_bytes = min(nbytes, family.bytes_moved(problem))
    copies = copies_for(nbytes, runner.info, read_bytes, footprint_bytes)
    workload = f"{family.name}/{TIMING_INPUTS}/{problem.key}"
    what = f"{problem.label} in {copies} copies" if copies > 1 else problem.label
    _load(runner, workload, operands, copies=copies, what=what, way_out=problem.way_smaller)
    return TimedWorkload(workload=workload, copies=copies, reference=reference)


def _load(
    runner: Runner, workload: str, operands: Operands, *, what: str, way_out: str, copies: int = 1
) -> None:
    """`Runner.load`, whose refusal names what the user asked for and not the workload."""
    try:
        runner.load(workload, operands.inputs, output_specs(operands), copies=copies)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(
            what,
            error.needed_bytes,
            error.available_bytes,
            holder=error.holder,
            way_out=way_out,
        ) from error


def copies_for(
    nbytes: int, device: DeviceInfo, read_bytes: int, footprint_bytes: int | None = None
) -> int:
    """How many copies of operands of `nbytes`, of which a launch reads some, samples rotate over.

    As many as make what all of them read up to `footprint_bytes` (default: 512 MiB, several times
    the last-level cache of any GPU), at least one, but no more than 1,024, and in all no more than
    8 GiB and 80 % of the device's memory: a kernel that reads a few KiB finds them in the cache. On
    CPU drivers, whose memory is the host's, all copies make up 64 MiB.
    """
    if footprint_bytes is None:
        footprint_bytes = CPU_FOOTPRINT_BYTES if device.is_cpu else GPU_FOOTPRINT_BYTES
    heaps = [
        heap.size_bytes if heap.budget_bytes is None else min(heap.budget_bytes, heap.size_bytes)
        for heap in device.memory_heaps
        if heap.device_local
    ]
    counted = nbytes if device.is_cpu else read_bytes
    wanted = -(-footprint_bytes // max(1, counted))
    room = min(MOST_BYTES, int(BUDGET_SHARE * max(heaps))) if heaps else 0
    fitting = room // max(1, nbytes)
    return max(1, min(wanted, fitting, MOST_COPIES))


def operand_bytes(operands: Operands) -> int:
    """Bytes of the input and output buffers."""
    outputs = sum(spec.nbytes for spec in output_specs(operands).values())
    return outputs + sum(array.nbytes for array in operands.inputs.values())


def output_specs(operands: Operands) -> dict[str, OutputSpec]:
    """The outputs in the runner's terms."""
    return {
        name: OutputSpec(shape=shape, dtype=np.dtype(dtype).name)
        for name, (shape, dtype) in operands.outputs.items()
    }


def with_cached_bounds(reference: Reference) -> Reference:
    """The same reference, deriving the bounds of each arithmetic class only once; any thread may
    ask, and one that asks for a class which is known need not wait for others."""
    derive, lock = reference.bounds, threading.Lock()
    known: dict[ArithmeticClass, dict[str, Array]] = {}

    def bounds(arithmetic: ArithmeticClass) -> dict[str, Array]:
        if arithmetic not in known:
            with lock:
                if arithmetic not in known:
                    known[arithmetic] = derive(arithmetic)
        return known[arithmetic]

    return replace(reference, bounds=bounds)


def _broken_guards(execution: Execution, case: str) -> Verdict | None:
    if execution.broken_guards:
        message = f"case {case}: wrote past the end of {', '.join(execution.broken_guards)}"
    elif execution.dirty_counters:
        message = f"case {case}: left {', '.join(execution.dirty_counters)} other than zero"
    else:
        return None
    check = Check(cases=1, error=0.0, bound=0.0, worst=message)
    return Verdict(ok=False, check=check, message=message)
