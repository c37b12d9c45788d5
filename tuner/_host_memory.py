"""How much memory this process may still take, as far as the system tells."""

from __future__ import annotations

import os
from pathlib import Path

HOST = "the host"
"""The holder of memory that an `OutOfMemoryError` names."""
_MEMINFO = Path("/proc/meminfo")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def available_host_bytes(meminfo: Path = _MEMINFO, group_limit: Path = _GROUP_LIMIT) -> int:
    """What can be had without swapping, else all memory there is; no more than a container may."""
    free = _available(meminfo)
    if free is None:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _text(group_limit).strip()
    return min(free, int(limit)) if limit.isdecimal() else free


def _available(meminfo: Path) -> int | None:
    """The kernel's own estimate, which counts caches that it would give up."""
    for line in _text(meminfo).splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return 1024 * int(amount.split()[0])
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
