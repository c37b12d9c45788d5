"""What was measured, kept: the append-only store of a device's results, and ways to read it.

`results/<device slug>/` holds `records.jsonl`, `calibrations.jsonl` (both append-only, see
`tuner.results.journal`) and `device.json`, the snapshot of the device. One process at a time may
write to a folder; reading needs no permission.
"""

from __future__ import annotations

from tuner.results.frame import outcomes_to_frame, row, to_frame
from tuner.results.journal import Repair
from tuner.results.outcomes import Outcome, latest, outcomes
from tuner.results.peers import Peer, best_by_context, read_peers
from tuner.results.repeats import between_measurements, series
from tuner.results.sides import Pair, Side, SideBySide, Unpaired, side_by_side
from tuner.results.store import Merged, Store, device_folders, merge

__all__ = [
    "Merged",
    "Outcome",
    "Pair",
    "Peer",
    "Repair",
    "Side",
    "SideBySide",
    "Store",
    "Unpaired",
    "best_by_context",
    "between_measurements",
    "device_folders",
    "latest",
    "merge",
    "outcomes",
    "outcomes_to_frame",
    "read_peers",
    "row",
    "series",
    "side_by_side",
    "to_frame",
]
