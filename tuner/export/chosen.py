"""From records to `best-config.json`: choose per problem, bundle the SPIR-V, write both safely."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import tuner
from tuner import kernels
from tuner.device_info import DeviceInfo
from tuner.errors import IllegalVariantError, ResultsError, TunerError, UnknownNameError
from tuner.export.best_config import (
    FILE_NAME,
    FORMAT_VERSION,
    SPIRV_FOLDER,
    Abi,
    AbiBinding,
    AbiPushConstant,
    BestConfig,
    CalibrationSummary,
    CheckSummary,
    Device,
    Dispatch,
    EnergyBest,
    Entry,
    EntryPass,
    Evidence,
    FamilyConfig,
    Tied,
    encode,
)
from tuner.kernels.base import Candidate, Family, Values
from tuner.kernels.space import canonical
from tuner.problems import Problem
from tuner.records import Record
from tuner.results import Outcome, Store, outcomes
from tuner.results.files import make_folder, write_atomic
from tuner.results.front import front
from tuner.results.outcomes import interval, leading
from tuner.runner.protocol import Job, JobPass

Build = Callable[[Family, Problem, Values], Job]
Identify = Callable[[Family, Record], str]

_PACK = {"uint": "I", "int": "i", "float": "f"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written: the file, how many entries it has, and what had to be left out and why."""

    path: Path
    entries: int
    left_out: tuple[str, ...]


def export_best_config(
    store: Store,
    *,
    info: DeviceInfo,
    build: Build,
    identify: Identify | None = None,
    family_of: Callable[[str], Family] = kernels.family,
) -> Exported:
    """Write `best-config.json` and the SPIR-V it names into the store's folder.

    Chosen is the best of the correct records of this device's name and driver: the fastest or, of
    those that were timed in turns and are tied with it, the simplest (see `tuner.results.Outcome`).
    `build` makes the chosen variant anew; `identify`, where given, computes the identity that a
    record's variant has today on the card that it was measured on: another card of the same model
    and driver is as good. Records of another identity (sources or compiler have changed since) are
    passed over.
    Each file is replaced by renaming, the configuration last, so what can be read is whole.

    Raises:
        ResultsError: no record can be exported, or the folder cannot be written to.
    """
    exporter = _Exporter(info=info, build=build, identify=identify, family_of=family_of)
    families: dict[str, FamilyConfig] = {}
    ours = [r for r in store.records() if (r.device, r.driver) == (info.name, info.driver)]
    for outcome in outcomes(ours, baseline_of=exporter.baseline_of):
        entry = exporter.entry(outcome)
        if entry is not None:
            abi = abi_of(family_of(outcome.family))
            before = families.get(outcome.family, FamilyConfig(abi=abi, entries=()))
            families[outcome.family] = FamilyConfig(abi=abi, entries=(*before.entries, entry))
    if not families:
        why, *others = exporter.left_out or [f"no records of {info.name} with {info.driver}"]
        also = f"; and so for {len(others)} more problems" if others else ""
        raise ResultsError(
            store.folder, f"nothing to export: {why}{also}; `tuner tune` measures what is missing"
        )
    config = BestConfig(
        schema_version=FORMAT_VERSION,
        generator=f"kvtune {tuner.__version__}",
        time=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        device=msgspec.convert(
            {name: getattr(info, name) for name in Device.__struct_fields__}, Device
        ),
        calibration=_calibration(store, info),
        families=families,
    )
    _write(store.folder, config, exporter.spirv)
    return Exported(
        path=store.folder / FILE_NAME,
        entries=sum(len(f.entries) for f in families.values()),
        left_out=tuple(exporter.left_out),
    )


def abi_of(family: Family) -> Abi:
    """Bindings and push constants that all variants of the family share."""
    return Abi(
        bindings=tuple(
            AbiBinding(
                binding=place if b.number is None else b.number,
                name=b.name,
                buffer=b.buffer,
                element=b.element,
                role=b.role,
            )
            for place, b in enumerate(family.bindings)
        ),
        push_constants=tuple(
            AbiPushConstant(name=f.name, type=f.type, offset=4 * place)
            for place, f in enumerate(family.push_fields)
        ),
    )


@dataclass(slots=True, kw_only=True)
class _Exporter:
    """Makes entries; gathers the SPIR-V they need and the reasons for those it cannot make."""

    info: DeviceInfo
    build: Build
    identify: Identify | None
    family_of: Callable[[str], Family]
    spirv: dict[str, bytes] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def baseline_of(self, name: str) -> Values | None:
        try:
            family = self.family_of(name)
        except UnknownNameError:
            return None
        return canonical(family, family.baseline)

    def entry(self, outcome: Outcome) -> Entry | None:
        """The entry for an outcome, or None with a reason added to `left_out`."""
        where = f"{outcome.family} on {outcome.problem.label}"
        try:
            family = self.family_of(outcome.family)
        except UnknownNameError as error:
            self.left_out.append(f"{where}: {error}")
            return None
        reasons: list[str] = []
        leaders = outcome.leaders
        order = (*leaders, *(record for record in outcome.ranked if record not in leaders))
        for place, record in enumerate(order):
            try:
                if not self._is_current(family, record):
                    reasons.append("sources or compiler have changed since")
                    continue
                job = self.build(family, record.problem, record.values)
            except IllegalVariantError as error:
                reasons.append(f"no variant of today: {'; '.join(error.reasons)}")
                continue
            except TunerError as error:
                reasons.append(str(error))
                continue
            rivals = leaders if place < len(leaders) else leading(order[place:])
            tied = self._current(family, [each for each in rivals if each is not record])
            return self._made(family, record, job, outcome, tied)
        why = f"none of {len(reasons)} correct variants is usable: {reasons[0]}" if reasons else ""
        self.left_out.append(f"{where}: {why or 'no correct variant'}")
        return None

    def _is_current(self, family: Family, record: Record) -> bool:
        if self.identify is None:
            return True
        return self.identify(family, record) == record.variant

    def _current(self, family: Family, records: Iterable[Record]) -> tuple[Record, ...]:
        current = []
        for record in records:
            try:
                if self._is_current(family, record):
                    current.append(record)
            except TunerError:
                continue  # A variant that is no longer legal is no alternative.
        return tuple(current)

    def _made(
        self, family: Family, record: Record, job: Job, outcome: Outcome, tied: Iterable[Record]
    ) -> Entry:
        entry = Entry(
            problem=record.problem,
            values=record.values,
            passes=tuple(self._pass(family, each) for each in job.passes),
            scratch_bytes=job.scratch_bytes,
            dispatch=self._dispatch(family, record),
            evidence=_evidence(record, outcome.baseline),
            tied=tuple(_tie(each) for each in tied),
            energy_best=self._energy_best(family, outcome),
        )
        check_groups(entry)
        return entry

    def _energy_best(self, family: Family, outcome: Outcome) -> EnergyBest | None:
        """The last variant of the front that can still be made as it was measured."""
        for record in reversed(front(outcome.records)):
            try:
                if self._is_current(family, record):
                    return _least_energy(record)
            except TunerError:
                continue  # It is no longer legal.
        return None

    def _pass(self, family: Family, job_pass: JobPass) -> EntryPass:
        digest = hashlib.sha256(job_pass.spirv).hexdigest()
        self.spirv[digest] = job_pass.spirv
        layout = "<" + "".join(_PACK[f.type] for f in family.push_fields)
        names = [f.name for f in family.push_fields]
        return EntryPass(
            name=job_pass.name,
            spirv=f"{SPIRV_FOLDER}/{digest}.spv",
            sha256=digest,
            subgroup_size=job_pass.subgroup_size,
            groups=job_pass.groups,
            push_constants=dict(zip(names, struct.unpack(layout, job_pass.push), strict=True)),
        )

    def _dispatch(self, family: Family, record: Record) -> Dispatch:
        if family.dispatch is None:
            return Dispatch(
                policy="fixed",
                facts={},
                groups={},
                text="launch each pass with the groups and push constants given, on this problem "
                "alone: the family declares no rule for others",
            )
        rule = family.dispatch(Candidate(record.values, record.problem, self.info))
        return Dispatch(
            policy=rule.policy, facts=dict(rule.facts), groups=dict(rule.groups), text=rule.text
        )


def check_groups(entry: Entry) -> None:
    """Evaluate the entry's dispatch rule on its own problem.

    Raises:
        ValueError: it does not give the groups that were measured; the family's rule is wrong.
    """
    for each in entry.passes:
        terms = entry.dispatch.groups.get(each.name)
        if terms is None:
            continue
        known = {**msgspec.to_builtins(entry.problem), **each.push_constants}
        groups = tuple(int(t) if t.isdecimal() else known[t] for t in terms)
        if groups != each.groups:
            raise ValueError(
                f"the dispatch rule {terms} gives {groups} for pass {each.name}, "
                f"measured was {each.groups}"
            )


def _evidence(record: Record, baseline: Record | None) -> Evidence:
    median_ns, gb_s = record.median_ns, record.gb_s
    assert median_ns is not None
    assert gb_s is not None
    low_us, high_us = _us(record)
    check = record.check
    baseline_ns = baseline.median_ns if baseline else None
    joules = record.energy_j_per_token
    return Evidence(
        variant=record.variant,
        median_us=median_ns / 1000,
        low_us=low_us,
        high_us=high_us,
        samples=len(record.samples_ns),
        gb_s=gb_s,
        utilisation=record.utilisation,
        baseline_us=baseline_ns / 1000 if baseline_ns else None,
        speedup=baseline_ns / median_ns if baseline_ns else None,
        check=CheckSummary(cases=check.cases, error=check.error, bound=check.bound)
        if check
        else None,
        energy_mj_per_token=None if joules is None else 1000 * joules,
        compiler=record.compiler,
        session=record.session,
        time=record.time,
    )


def _least_energy(record: Record) -> EnergyBest:
    joules, median_ns = record.energy_j_per_token, record.median_ns
    assert joules is not None
    assert median_ns is not None
    return EnergyBest(
        variant=record.variant,
        values=record.values,
        median_us=median_ns / 1000,
        energy_mj_per_token=1000 * joules,
    )


def _tie(record: Record) -> Tied:
    assert record.median_ns is not None
    low_us, high_us = _us(record)
    return Tied(
        values=record.values, median_us=record.median_ns / 1000, low_us=low_us, high_us=high_us
    )


def _us(record: Record) -> tuple[float, float]:
    low, high = interval(record)
    return low / 1000, high / 1000


def _calibration(store: Store, info: DeviceInfo) -> CalibrationSummary | None:
    found = store.calibration(info.driver)
    if found is None:
        return None
    return CalibrationSummary(read_gb_s=found.read_gb_s, time=found.time, method=found.method)


def _write(folder: Path, config: BestConfig, spirv: dict[str, bytes]) -> None:
    make_folder(folder / SPIRV_FOLDER)
    for digest, data in spirv.items():
        path = folder / SPIRV_FOLDER / f"{digest}.spv"
        if not path.is_file() or path.read_bytes() != data:
            write_atomic(path, data)
    write_atomic(folder / FILE_NAME, encode(config))
