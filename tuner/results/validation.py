"""What all measurements of a variant show of its validation.

A variant is validated on every case when it is first tried. Where it is measured again it is only
checked on the timed operands once more: the record of that measurement is given the whole check.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tuner.oracle import worst_of
from tuner.records import Record


def with_whole_check(record: Record, others: Iterable[Record]) -> Record:
    """The record with the check of all correct records of its variant on its device and driver.

    The error is the worst of them, the number of cases the largest: a case that passed once more
    is no other case. Records that are not correct keep their own check, which says why.
    """
    if record.state != "correct" or record.check is None:
        return record
    checks = [record.check]
    checks += [
        other.check
        for other in others
        if other.state == "correct"
        and other.check is not None
        and (other.variant, other.device_uuid, other.driver)
        == (record.variant, record.device_uuid, record.driver)
    ]
    worst = msgspec.structs.replace(worst_of(checks), cases=max(check.cases for check in checks))
    return record if worst == record.check else msgspec.structs.replace(record, check=worst)
