"""From records to `best-config.json`: choose per problem, bundle the SPIR-V, write both safely."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

import tuner
from tuner import kernels
from tuner.device_info import DeviceInfo
from tuner.errors import IllegalVariantError, ResultsError, TunerError, UnknownNameError
from tuner.evaluate import unpack_push
from tuner.export import bundle
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
    EnergyBest,
    Entry,
    EntryPass,
    Evidence,
    FamilyConfig,
    Tied,
)
from tuner.export.launch_rule import FIXED, Dispatch, Term
from tuner.kernels.base import Candidate, DispatchRule, Family, Values
from tuner.kernels.space import canonical
from tuner.problems import Problem
from tuner.records import Record
from tuner.results import Outcome, Store, clocks, outcomes
from tuner.results.front import front
from tuner.results.outcomes import interval, leading
from tuner.results.validation import with_whole_check
from tuner.runner.protocol import Job, JobPass

Build = Callable[[Family, Problem, Values], Job]
Objection = Callable[[Record], str | None]


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
    objection: Objection | None = None,
    family_of: Callable[[str], Family] = kernels.family,
) -> Exported:
    """Write `best-config.json` and the SPIR-V it names into the store's folder.

    Chosen is the best of the correct records of this device's name and driver: the fastest or, of
    those that were timed in turns and are tied with it, the simplest (see `tuner.results.Outcome`).
    `build` makes the chosen variant anew. Records to which there is an `objection` (such as
    `tuner.evaluate.Currency`'s, that they are of earlier kernels) count for nothing here; if they
    leave only the baseline of a problem, that is no choice, and the problem is left out.
    Each file is replaced by renaming, the configuration last, so what can be read is whole. SPIR-V
    of earlier exports that it no longer names is removed then.

    Raises:
        ResultsError: no record can be exported, or the folder cannot be written to.
    """
    families: dict[str, FamilyConfig] = {}
    ours = [r for r in store.records() if (r.device, r.driver) == (info.name, info.driver)]
    states = () if info.is_cpu else tuple(record.clock_state for record in ours)
    exporter = _Exporter(
        info=info,
        build=build,
        objection=objection,
        family_of=family_of,
        measured=ours,
        reference_ns=clocks.fastest_ns(states),
    )
    for everything in outcomes(ours, baseline_of=lambda _: None):
        entry = exporter.entry(everything)
        if entry is not None:
            name = everything.family
            abi = abi_of(family_of(name))
            before = families.get(name, FamilyConfig(abi=abi, entries=()))
            families[name] = FamilyConfig(abi=abi, entries=(*before.entries, entry))
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
    bundle.write(store.folder, config, exporter.spirv)
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
    objection: Objection | None
    family_of: Callable[[str], Family]
    measured: Sequence[Record]
    reference_ns: float
    spirv: dict[str, bytes] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def entry(self, everything: Outcome) -> Entry | None:
        """The entry for all that is known of a problem, or None with a reason in `left_out`."""
        where = f"{everything.family} on {everything.problem.label}"
        try:
            family = self.family_of(everything.family)
        except UnknownNameError as error:
            self.left_out.append(f"{where}: {error}")
            return None
        objections = {record.variant: self._objection(record) for record in everything.records}
        reasons = [why for r in everything.ranked if (why := objections[r.variant]) is not None]
        # Of all that was measured: a variant may have been reached by the baseline's values before.
        sound = {variant for variant, why in objections.items() if why is None}
        usable = [record for record in self.measured if record.variant in sound]
        baseline = canonical(family, family.baseline)
        if reasons and usable and all(record.values == baseline for record in usable):
            self.left_out.append(
                f"{where}: only the baseline is of today's kernels, and no choice; of the other "
                f"{len(reasons)} correct variants: {reasons[0]}"
            )
            return None
        for outcome in outcomes(usable, baseline_of=lambda _: baseline):
            entry = self._best(family, outcome, reasons)
            if entry is not None:
                return entry
        why = f"none of {len(reasons)} correct variants is usable: {reasons[0]}" if reasons else ""
        self.left_out.append(f"{where}: {why or 'no correct variant'}")
        return None

    def _objection(self, record: Record) -> str | None:
        return None if self.objection is None else self.objection(record)

    def _best(self, family: Family, outcome: Outcome, reasons: list[str]) -> Entry | None:
        """The entry of the best variant that can be made; adds to `reasons` why others cannot."""
        leaders = outcome.leaders
        order = (*leaders, *(record for record in outcome.ranked if record not in leaders))
        for place, record in enumerate(order):
            try:
                job = self.build(family, record.problem, record.values)
            except IllegalVariantError as error:
                reasons.append(f"no variant of today: {'; '.join(error.reasons)}")
                continue
            except TunerError as error:
                reasons.append(str(error))
                continue
            rivals = leaders if place < len(leaders) else leading(order[place:])
            tied = [each for each in rivals if each is not record]
            return self._made(family, record, job, outcome, tied)
        return None

    def _made(
        self, family: Family, record: Record, job: Job, outcome: Outcome, tied: Iterable[Record]
    ) -> Entry:
        entry = Entry(
            problem=record.problem,
            counts=dict(record.problem.counts),
            values=record.values,
            passes=tuple(self._pass(family, each) for each in job.passes),
            scratch_bytes=job.scratch_bytes,
            dispatch=self._dispatch(family, record),
            evidence=_evidence(
                with_whole_check(record, self.measured), outcome.baseline, self.reference_ns
            ),
            tied=tuple(_tie(each) for each in tied),
            energy_best=_least_energy(outcome),
        )
        check_rule(entry)
        return entry

    def _pass(self, family: Family, job_pass: JobPass) -> EntryPass:
        digest = hashlib.sha256(job_pass.spirv).hexdigest()
        self.spirv[digest] = job_pass.spirv
        return EntryPass(
            name=job_pass.name,
            spirv=f"{SPIRV_FOLDER}/{digest}.spv",
            sha256=digest,
            subgroup_size=job_pass.subgroup_size,
            beside=job_pass.beside,
            groups=job_pass.groups,
            push_constants=unpack_push(family, job_pass.push),
        )

    def _dispatch(self, family: Family, record: Record) -> Dispatch:
        candidate = Candidate(record.values, record.problem, self.info)
        return published(None if family.dispatch is None else family.dispatch(candidate))


def published(rule: DispatchRule | None) -> Dispatch:
    """A family's rule as exports have it; None: there is none."""
    if rule is None:
        text = "launch each pass as it says, on this problem alone: there is no rule for others"
        rule = DispatchRule(policy=FIXED, groups={}, text=text)
    return Dispatch(
        policy=rule.policy,
        facts=dict(rule.facts),
        terms=tuple(Term(name=name, value=value) for name, value in rule.terms),
        groups=dict(rule.groups),
        push_constants=dict(rule.push),
        scratch_bytes=dict(rule.scratch),
        at_most=dict(rule.at_most),
        text=rule.text,
    )


def check_rule(entry: Entry) -> None:
    """Evaluate the entry's dispatch rule on its own problem.

    Raises:
        ValueError: it does not give the groups, push constants and scratch sizes that were
            measured; the family's rule is wrong.
        UsageError: one of its expressions is.
    """
    if entry.dispatch.policy == FIXED:
        return
    launch = entry.dispatch.launch(entry.problem)
    given: dict[str, object] = {"passes": sorted(launch.groups), "scratch": launch.scratch_bytes}
    measured: dict[str, object] = {
        "passes": sorted(each.name for each in entry.passes),
        "scratch": entry.scratch_bytes,
    }
    for each in entry.passes:
        given[f"groups of {each.name}"] = launch.groups.get(each.name)
        measured[f"groups of {each.name}"] = each.groups
        given[f"push constants of {each.name}"] = each.push_constants | launch.push_constants
        measured[f"push constants of {each.name}"] = each.push_constants
    for what, value in measured.items():
        if given[what] != value:
            raise ValueError(
                f"the dispatch rule of policy {entry.dispatch.policy} gives {given[what]} for "
                f"{what}, measured was {value}"
            )


def _evidence(record: Record, baseline: Record | None, reference_ns: float) -> Evidence:
    """`reference_ns`: the reference kernel's best time on the device; infinite if it counts not."""
    gb_s = record.gb_s
    assert gb_s is not None
    low_us, high_us = _us(record)
    check = record.check
    baseline_ns = baseline.median_ns if baseline else None
    joules = record.energy_j_per_token
    return Evidence(
        variant=record.variant,
        median_us=record.timed_ns / 1000,
        low_us=low_us,
        high_us=high_us,
        samples=len(record.samples_ns),
        gb_s=gb_s,
        utilisation=record.utilisation,
        baseline_us=baseline_ns / 1000 if baseline_ns else None,
        speedup=baseline_ns / record.timed_ns if baseline_ns else None,
        check=CheckSummary(cases=check.cases, error=check.error, bound=check.bound)
        if check
        else None,
        energy_mj_per_token=None if joules is None else 1000 * joules,
        lower_clock=_lower_clock(record, baseline, reference_ns),
        compiler=record.compiler,
        session=record.session,
        time=record.time,
    )


def _lower_clock(
    record: Record, baseline: Record | None, reference_ns: float
) -> tuple[Literal["median_us", "baseline_us"], ...]:
    lower: tuple[Literal["median_us", "baseline_us"], ...] = ()
    if clocks.is_lower(record, reference_ns):
        lower += ("median_us",)
    if baseline is not None and clocks.is_lower(baseline, reference_ns):
        lower += ("baseline_us",)
    return lower


def _least_energy(outcome: Outcome) -> EnergyBest | None:
    """The last variant of the front, if energy was measured."""
    last = front(outcome.records)[-1:]
    if not last:
        return None
    (record,) = last
    joules = record.energy_j_per_token
    assert joules is not None
    return EnergyBest(
        variant=record.variant,
        values=record.values,
        median_us=record.timed_ns / 1000,
        energy_mj_per_token=1000 * joules,
    )


def _tie(record: Record) -> Tied:
    low_us, high_us = _us(record)
    return Tied(
        values=record.values, median_us=record.timed_ns / 1000, low_us=low_us, high_us=high_us
    )


def _us(record: Record) -> tuple[float, float]:
    low, high = interval(record)
    return low / 1000, high / 1000


def _calibration(store: Store, info: DeviceInfo) -> CalibrationSummary | None:
    found = store.calibration(info.driver)
    if found is None:
        return None
    return CalibrationSummary(read_gb_s=found.read_gb_s, time=found.time, method=found.method)
