"""Which records tell of kernels of today, and which of earlier ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec

from tuner import kernels, templates
from tuner.device_info import DeviceInfo
from tuner.errors import IllegalVariantError, TunerError
from tuner.evaluate.building import Render, RenderMemo, named
from tuner.kernels.base import Family
from tuner.kernels.space import Rules
from tuner.problems import Problem
from tuner.records import Record

REMEMBERED = 4096
"""Sources kept: records of one kernel lie far apart, as they stand in the order of time."""
CHANGED = "sources or compiler have changed since"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sifted:
    """Records of today's kernels, those of earlier ones, and why most of these are so."""

    current: tuple[Record, ...]
    earlier: tuple[Record, ...]
    reason: str = ""


class Currency:
    """Judges the records of one device's results by the kernels that could be made today.

    A record is current if its variant, made anew by today's space, sources and compiler for the
    card that it was measured on, has the identity under which it was stored, and the device's
    driver is still the same. Other cards of the same model are as good.

    Args:
        info: the device, with the driver that counts as today's.
        compiler: identity of today's compiler.
        family_of, render: stand in for `tuner.kernels.family` and `tuner.templates.render` in
            tests.
    """

    def __init__(
        self,
        info: DeviceInfo,
        compiler: str,
        *,
        family_of: Callable[[str], Family] = kernels.family,
        render: Render = templates.render,
    ) -> None:
        self._info, self._compiler, self._family_of = info, compiler, family_of
        self._render = RenderMemo(_without_lines(render), remembered=REMEMBERED)
        self._objections: dict[str, str | None] = {}
        self._places: dict[tuple[str, Problem, str], tuple[DeviceInfo, Rules]] = {}

    def objection(self, record: Record) -> str | None:
        """Why a record is of an earlier kernel; None if it is current."""
        if record.variant not in self._objections:
            self._objections[record.variant] = self._found(record)
        return self._objections[record.variant]

    def sift(self, records: Iterable[Record]) -> Sifted:
        """The records, told apart; each part in their order."""
        listed = tuple(records)
        earlier = tuple(record for record in listed if self.objection(record) is not None)
        reasons = Counter(_briefly(self.objection(record)) for record in earlier)
        return Sifted(
            current=tuple(record for record in listed if self.objection(record) is None),
            earlier=earlier,
            reason=reasons.most_common(1)[0][0] if reasons else "",
        )

    def _found(self, record: Record) -> str | None:
        if record.device != self._info.name:
            return f"measured on {record.device}"
        if record.driver != self._info.driver:
            return f"measured with the driver {record.driver}"
        try:
            return None if self._identity(record) == record.variant else CHANGED
        except IllegalVariantError as error:
            return f"no variant of today: {'; '.join(error.reasons)}"
        except TunerError as error:
            return str(error)

    def _identity(self, record: Record) -> str:
        """The identity that the record's variant has today, on the card it was measured on.

        Raises:
            UnknownNameError, IllegalVariantError: there is no such variant any more.
        """
        family, problem = self._family_of(record.family), record.problem
        if type(problem) is not family.problem_type:
            kind = f"the family solves problems of the kind {family.kind}"
            raise IllegalVariantError(family.name, problem.label, (kind,))
        card, rules = self._place(family, problem, record.device_uuid)
        return named(
            *(family, record.values, problem, card, self._compiler),
            render=self._render,
            rules=rules,
        ).key

    def _place(self, family: Family, problem: Problem, uuid: str) -> tuple[DeviceInfo, Rules]:
        """A card, and what a family demands there: many records are of each."""
        key = family.name, problem, uuid
        if key not in self._places:
            card = msgspec.structs.replace(self._info, uuid=uuid)
            self._places[key] = card, Rules(family, problem, card)
        return self._places[key]


def _without_lines(render: Render) -> Render:
    """Renders the same and forgets where lines came from, which takes more room than the text."""
    return lambda template, context: replace(render(template, context), line_map=())


def _briefly(objection: str | None) -> str:
    """An objection without its particulars, which follow a colon."""
    return (objection or "").partition(": ")[0]
