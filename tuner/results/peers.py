"""What other implementations reach on a device: a table kept beside its records, for plots."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tuner.errors import InputFileError
from tuner.problems import PagedDecodeProblem, Problem

PEERS_NAME = "peers.csv"


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One measured decode step of another implementation, sequences of equal length.

    `kv_type` is the cache's element type, `percent_of_read` the bytes of that cache over the
    device's read bandwidth.
    """

    sequences: int
    context: int
    query_heads: int
    kv_heads: int
    head_size: int
    kv_type: str
    api: str
    peer: str
    median_us: float
    percent_of_read: float

    @property
    def kind(self) -> str:
        """Cache type and API: what is compared as one line, the best peer at each context."""
        return f"{self.kv_type} ({self.api})"

    def solves(self, problem: Problem) -> bool:
        """Whether it is of the problem's heads and batch, whatever the context."""
        return (
            isinstance(problem, PagedDecodeProblem)
            and problem.lengths == "equal"
            and not problem.switched
            and (problem.sequences, problem.query_heads, problem.kv_heads, problem.head_size)
            == (self.sequences, self.query_heads, self.kv_heads, self.head_size)
        )


def read_peers(folder: Path) -> tuple[Peer, ...]:
    """The peers in `peers.csv` of a device's folder; none where there is no such file.

    Columns are named as the fields of `Peer`, others are ignored.

    Raises:
        InputFileError: the file cannot be read, or a row is wrong; with the line.
    """
    path = folder / PEERS_NAME
    if not path.exists():
        return ()
    try:
        rows = list(csv.DictReader(path.read_text("utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise InputFileError(path, f"cannot be read: {error}") from None
    peers = []
    for line, row in enumerate(rows, 2):
        try:
            peers.append(msgspec.convert(row, Peer, strict=False))
        except msgspec.ValidationError as error:
            raise InputFileError(path, str(error), line) from None
    return tuple(peers)


def best_by_context(peers: Iterable[Peer]) -> dict[str, list[tuple[int, float]]]:
    """(context, % of read bandwidth) of the fastest peer of each kind, by context."""
    fastest: dict[str, dict[int, Peer]] = {}
    for peer in peers:
        line = fastest.setdefault(peer.kind, {})
        known = line.get(peer.context)
        if known is None or peer.median_us < known.median_us:
            line[peer.context] = peer
    return {
        kind: [(context, peer.percent_of_read) for context, peer in sorted(line.items())]
        for kind, line in sorted(fastest.items())
    }
