"""What the record of a later measurement says of a variant's validation."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.made_records import made_record, software
from tuner.records import Check, Record
from tuner.results.validation import with_whole_check

WHOLE = made_record(median_us=10.0)
FINAL = msgspec.structs.replace(
    WHOLE, note="final", check=Check(cases=1, error=1e-5, bound=2e-3, worst="timing: out[0]")
)


def changed(record: Record, **fields: Any) -> Record:
    return msgspec.structs.replace(record, **fields)


def test_a_final_has_the_cases_and_the_worst_error_of_its_trial() -> None:
    found = with_whole_check(FINAL, [WHOLE])
    assert found.check == WHOLE.check
    assert changed(found, check=FINAL.check) == FINAL


def test_a_worse_error_in_the_end_stays() -> None:
    assert FINAL.check is not None
    worse = changed(FINAL, check=changed_check(FINAL.check, error=1e-3))
    found = with_whole_check(worse, [WHOLE]).check
    assert found is not None
    assert (found.cases, found.error, found.worst) == (9, 1e-3, "timing: out[0]")


def changed_check(check: Check, **fields: Any) -> Check:
    return msgspec.structs.replace(check, **fields)


@pytest.mark.parametrize(
    "other",
    [
        made_record(median_us=10.0, device=software()),
        changed(WHOLE, variant="another"),
        changed(WHOLE, driver="another"),
        changed(WHOLE, state="correctness"),
        changed(WHOLE, check=None),
    ],
)
def test_nothing_is_taken_from_other_kernels_devices_or_failures(other: Record) -> None:
    assert with_whole_check(FINAL, [other]) is FINAL


def test_a_failure_keeps_the_check_that_says_why() -> None:
    failed = changed(FINAL, state="correctness")
    assert with_whole_check(failed, [WHOLE]) is failed
