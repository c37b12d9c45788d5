"""`best-config.json`: its types, its published schema, reading it, finding an entry in it.

Needs neither Vulkan nor pandas. The file is made by `tuner.export.chosen`.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from tuner.errors import InputFileError, UnknownNameError, UsageError
from tuner.export.launch_rule import Dispatch
from tuner.problems import AnyProblem, Problem
from tuner.records import BufferRole

FORMAT_VERSION = 2
FILE_NAME = "best-config.json"
SPIRV_FOLDER = "spirv"

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
SpirvName = Annotated[str, msgspec.Meta(pattern=r"^spirv/[0-9a-f]{64}\.spv$")]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """The device and driver that everything in the file was measured with."""

    name: str
    kind: Literal["discrete", "integrated", "virtual", "cpu", "other"]
    uuid: str
    vendor_id: int
    device_id: int
    driver_name: str
    driver_info: str
    driver_version: int
    api_version: str


class CalibrationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Read bandwidth of the device in GB/s (1e9 bytes), when (UTC) and how it was measured."""

    read_gb_s: float
    time: str
    method: str


class AbiBinding(msgspec.Struct, frozen=True, kw_only=True):
    """One storage buffer of descriptor set 0. Bindings may share a `buffer`."""

    binding: int
    name: str
    buffer: str
    element: str
    role: BufferRole


class AbiPushConstant(msgspec.Struct, frozen=True, kw_only=True):
    """One push constant of 4 bytes, `offset` bytes into the block."""

    name: str
    type: Literal["uint", "int", "float"]
    offset: int


class Abi(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine binds and pushes: the same for all variants and passes of a family."""

    bindings: tuple[AbiBinding, ...]
    push_constants: tuple[AbiPushConstant, ...]


class EntryPass(msgspec.Struct, frozen=True, kw_only=True):
    """One dispatch. Before each but the first a barrier must make all writes visible, unless it
    may run `beside` the pass before it: it needs nothing that the passes since the last barrier
    write, and the time of the entry was measured without one.

    `spirv` is a file beside the configuration, named by the SHA-256 of its content; the entry point
    is `main`. `groups` and `push_constants` hold for exactly the entry's problem. `subgroup_size`
    is the size that the pipeline must require, null where any will do.
    """

    name: str
    spirv: SpirvName
    sha256: Sha256
    subgroup_size: int | None
    beside: bool
    groups: tuple[int, int, int]
    push_constants: dict[str, int | float]

    def read_spirv(self, folder: Path | str) -> bytes:
        """The pass's SPIR-V from below the configuration's folder, its checksum verified.

        Raises:
            InputFileError: the file is missing, as after another export that no longer names it, or
                not the one that was exported.
        """
        path = Path(folder) / self.spirv
        if not path.exists():
            raise InputFileError(path, f"is not there: load {FILE_NAME} anew, or export again")
        data = _read(path)
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise InputFileError(path, "is not the SPIR-V that was exported: export again")
        return data


class CheckSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Validation before timing: different cases passed (small problems that exercise every code
    path, and the timed operands), the worst relative error (2-norm) and its bound."""

    cases: int
    error: float
    bound: float


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the choice rests on. Times in microseconds, bandwidth in GB/s, utilisation of 1.

    `low_us` to `high_us` is the interval of the median, `samples` how many were taken.
    `variant` is the identity of the record in `records.jsonl`. `energy_mj_per_token` is the
    energy of the whole device for a decoded token in millijoules, where it was measured.
    `lower_clock` names the times that were taken on a lower clock than others of this device,
    without power or heat as a reason: they are too long, if anything.
    """

    variant: str
    median_us: float
    low_us: float
    high_us: float
    samples: int
    gb_s: float
    utilisation: float | None
    baseline_us: float | None
    speedup: float | None
    check: CheckSummary | None
    energy_mj_per_token: float | None = None
    lower_clock: tuple[Literal["median_us", "baseline_us"], ...]
    compiler: str
    session: str
    time: str


class Tied(msgspec.Struct, frozen=True, kw_only=True):
    """Another variant that the samples do not show to be slower than the fastest."""

    values: dict[str, int | str]
    median_us: float
    low_us: float
    high_us: float


class EnergyBest(msgspec.Struct, frozen=True, kw_only=True):
    """The variant that takes the least energy for a decoded token, where energy was measured."""

    variant: str
    values: dict[str, int | str]
    median_us: float
    energy_mj_per_token: float


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen variant for one problem: the fastest.

    `scratch_bytes` is the size of each scratch and counter buffer for this problem, `counts` what
    `dispatch` may need of this problem beside its fields: sums and maxima of a batch's lengths.
    """

    problem: AnyProblem
    counts: dict[str, int]
    values: dict[str, int | str]
    passes: tuple[EntryPass, ...]
    scratch_bytes: dict[str, int]
    dispatch: Dispatch
    evidence: Evidence
    tied: tuple[Tied, ...]
    energy_best: EnergyBest | None = None


class FamilyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel family: how it is called, and the chosen variant per problem."""

    abi: Abi
    entries: tuple[Entry, ...]


class Match(NamedTuple):
    """The entry found, and how: ``exact``, or ``nearest`` at `distance` (see `lookup`)."""

    entry: Entry
    how: Literal["exact", "nearest"]
    distance: float


class BestConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The tuned configuration of one device: what an engine reads."""

    schema_version: Annotated[int, msgspec.Meta(ge=FORMAT_VERSION, le=FORMAT_VERSION)]
    generator: str
    time: str
    device: Device
    calibration: CalibrationSummary | None
    families: dict[str, FamilyConfig]

    def lookup(self, family: str, problem: Problem) -> Match:
        """The entry for a problem: the very problem if it was tuned, else the nearest.

        All fields but the problem's `SIZES` and `lengths` must be equal: they are compiled into the
        kernels. Among these entries the distance is counted in doublings, for decode steps
        ``abs(log2(sequences ratio)) + abs(log2(context ratio))`` with a context of 0 counted as 1.
        Equal distances go to the entry with the same `lengths`, then to the longer context, then to
        more sequences. A nearest entry is launched by its `dispatch` rule, not by its `groups`.

        An entry whose rule does not hold there is passed over (policy ``fixed``: everywhere).

        Raises:
            UnknownNameError: no such family in the file.
            UsageError: no entry has the problem's head geometry, or none that has it can be
                launched on these sizes; the message says why.
        """
        if family not in self.families:
            raise UnknownNameError("family in this configuration", family, self.families)
        entries = self.families[family].entries
        for entry in entries:
            if entry.problem == problem:
                return Match(entry, "exact", 0.0)
        fitting = [e for e in entries if _geometry(e.problem) == _geometry(problem)]
        if not fitting:
            listed = sorted({_words(_geometry(e.problem)) for e in entries})
            idle = "; no context reaches beyond the window: look it up without, as it is tuned"
            raise UsageError(
                f"{family} was not tuned for {_words(_geometry(problem))}: "
                f"there is {' | '.join(listed) or 'no entry at all'}"
                f"{'' if problem.effective == problem else idle}"
            )
        refusals = [entry.dispatch.refusal(problem) for entry in fitting]
        fitting = [e for e, refusal in zip(fitting, refusals, strict=True) if refusal is None]
        if not fitting:
            raise UsageError(
                f"{family} was not tuned for {problem.label}, and cannot be launched there as what "
                f"was tuned: {refusals[0]}; `tuner tune` measures that problem"
            )
        nearest = min(fitting, key=lambda entry: _nearness(entry.problem, problem))
        return Match(nearest, "nearest", _nearness(nearest.problem, problem)[0])


def load(path: str | os.PathLike[str]) -> BestConfig:
    """Read a configuration, given the file or its folder.

    Raises:
        InputFileError: see `tuner.load_best_config`.
    """
    path = Path(path)
    if path.is_dir():
        path /= FILE_NAME
    data = _read(path)
    try:
        version = msgspec.json.decode(data, type=_Version).schema_version
        if version != FORMAT_VERSION:
            raise InputFileError(
                path,
                f"has schema version {version}, this version of the tuner reads {FORMAT_VERSION}: "
                "export it again",
            )
        return msgspec.json.decode(data, type=BestConfig)
    except msgspec.ValidationError as error:
        raise InputFileError(path, f"is no best configuration: {error}") from error
    except msgspec.DecodeError as error:
        raise InputFileError(
            path, f"is no JSON, or was cut off: {error}", _line(data, str(error))
        ) from error
    except (UsageError, RecursionError) as error:
        if isinstance(error, InputFileError):
            raise
        raise InputFileError(path, f"is no best configuration: {error}") from error


def encode(config: BestConfig) -> bytes:
    """The configuration as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of the file, as published in `best-config.schema.json`."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"kvtune {FILE_NAME}, version {FORMAT_VERSION}",
        **msgspec.json.schema(BestConfig),
    }


class _Version(msgspec.Struct, frozen=True):
    schema_version: int


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputFileError(path, f"cannot read: {error.strerror}") from error


def _line(data: bytes, message: str) -> int:
    found = re.search(r"\(byte (\d+)\)", message)
    place = int(found[1]) if found else len(data)
    return data.count(b"\n", 0, place) + 1


def _geometry(problem: Problem) -> dict[str, Any]:
    fields = msgspec.to_builtins(problem)
    free = (*problem.SIZES, "lengths")
    return {name: value for name, value in fields.items() if name not in free}


def _words(geometry: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in geometry.items() if name != "kind")


def _nearness(candidate: Problem, wanted: Problem) -> tuple[float, bool, list[int]]:
    """Sort key: the smallest is the nearest. Both have the same geometry, so the same type."""
    doublings = (
        abs(math.log2(max(1, getattr(candidate, name)) / max(1, getattr(wanted, name))))
        for name in candidate.SIZES
    )
    lengths = [getattr(problem, "lengths", None) for problem in (candidate, wanted)]
    larger = [-int(getattr(candidate, name)) for name in reversed(candidate.SIZES)]
    return sum(doublings), lengths[0] != lengths[1], larger
