"""What `verify` found: the outcome of each variant, and a report of all as text and as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.cli.batches import Batch
from tuner.cli.output import print_table, say

if TYPE_CHECKING:
    from tuner.device_info import DeviceInfo
    from tuner.evaluate import Failure, Findings
    from tuner.kernels.base import Value, Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What came of a variant, and the seconds that it took to make and to run."""

    batch: Batch
    values: Values
    findings: Findings
    seconds: float

    @property
    def failure(self) -> Failure | None:
        """What went wrong, if anything did."""
        return self.findings.failure

    @property
    def variant(self) -> str:
        """The variant as `--set` takes it."""
        from tuner.cli.variants import describe

        return describe(self.batch.family, self.values)

    @property
    def heading(self) -> str:
        """How it failed, and on what."""
        state = self.failure.state if self.failure else "correct"
        return f"{state}: {self.batch.family.name} on {self.batch.problem.label}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that was verified on a device; `messages` are the validation layer's."""

    info: DeviceInfo
    batches: Sequence[Batch]
    findings: Sequence[Finding]
    messages: Sequence[str]

    @property
    def failed(self) -> list[Finding]:
        """What failed, in the order in which it was found."""
        return [each for each in self.findings if each.failure is not None]

    @property
    def ok(self) -> bool:
        """Whether every answer is right, and the validation layer silent."""
        return not self.failed and not self.messages

    def of(self, batch: Batch) -> list[Finding]:
        """What came of a batch's variants."""
        return [each for each in self.findings if each.batch is batch]

    def seconds(self, batch: Batch) -> float:
        """What a batch took, its variants added up whether they ran beside each other or not."""
        return sum(each.seconds for each in self.of(batch))

    def covered(self) -> dict[str, dict[str, list[Value]]]:
        """By family, the values of each parameter that were tried where it has a meaning."""
        tried: dict[str, dict[str, list[Value]]] = {}
        for family in {batch.family.name: batch.family for batch in self.batches}.values():
            mine = [v for each in self.batches if each.family is family for v in each.variants]
            held = {item for values in mine for item in family.meaningful(values).items()}
            tried[family.name] = {
                of.name: [value for value in of.values if (of.name, value) in held]
                for of in family.parameters
                if any((of.name, value) in held for value in of.values)
            }
        return tried


def print_report(report: Report, *, show_covered: bool) -> None:
    """The report as text; `show_covered` lists the values that were tried."""
    info = report.info
    say(f"Verified on {info.name} ({info.driver}), subgroups of {info.subgroup_size}:")
    print_table(
        ("family", "problem", "variants", "failed", "seconds"),
        [
            (
                batch.family.name,
                batch.problem.label,
                len(batch.variants),
                sum(each.failure is not None for each in report.of(batch)),
                f"{report.seconds(batch):.1f}",
            )
            for batch in report.batches
        ],
        right=("variants", "failed", "seconds"),
    )
    for name, tried in report.covered().items() if show_covered else ():
        say(f"\n{name} was tried with")
        for parameter, values in tried.items():
            say(f"  {parameter} = {' '.join(str(value) for value in values)}")
    for each in report.failed:
        assert each.failure is not None
        say(f"\n{each.heading}")
        say(f"  {each.failure.error}")
        say(f"  {each.variant}")
    for message in report.messages:
        say(f"\nvalidation layer: {message}")
    if report.ok:
        say("all answers are right")


def as_data(report: Report) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "device": report.info.name,
        "driver": report.info.driver,
        "batches": [
            {
                "family": batch.family.name,
                "problem": batch.problem,
                "variants": len(batch.variants),
                "seconds": round(report.seconds(batch), 3),
                "failures": [
                    {
                        "values": dict(each.values),
                        "state": each.failure.state,
                        "error": each.failure.error,
                    }
                    for each in report.of(batch)
                    if each.failure is not None
                ],
            }
            for batch in report.batches
        ],
        "covered": report.covered(),
        "validation_messages": report.messages,
    }
