"""CSV: every record as one row, for spreadsheets and other tools."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from tuner.records import Record
from tuner.results.frame import rows


def text(records: Sequence[Record]) -> str:
    """CSV with a header; columns as in `tuner.results.row`, empty where a record has no value."""
    columns, found = rows(records)
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return out.getvalue()
