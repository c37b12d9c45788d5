"""How much memory this process may still take, as far as the system tells."""

from __future__ import annotations

import os
from pathlib import Path

HOST = "the host"
"""The holder of memory that an `OutOfMemoryError` names."""
_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def available_host_bytes(meminfo: Path = _MEMINFO, group: Path = _GROUP) -> int:
    """What can be had without swapping, else all memory there is; no more than a container may.

    Args:
        meminfo: the kernel's file of that name.
        group: the folder of this process's control group (version 2), as a container sees it.
    """
    free = _available(meminfo)
    if free is None:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = _left_to(group)
    return free if left is None else min(free, left)


def _left_to(group: Path) -> int | None:
    """What a group's processes may still take, files that can be dropped not counted as taken."""
    limit = _text(group / "memory.max").strip()
    if not limit.isdecimal():
        return None
    taken = int(_text(group / "memory.current") or 0)
    droppable = _amount(_text(group / "memory.stat"), "inactive_file") or 0
    return max(0, int(limit) - max(0, taken - droppable))


def _available(meminfo: Path) -> int | None:
    """The kernel's own estimate, which counts caches that it would give up."""
    kibibytes = _amount(_text(meminfo), "MemAvailable:")
    return None if kibibytes is None else 1024 * kibibytes


def _amount(text: str, name: str) -> int | None:
    """The number after a name, in a file with one name and number to a line."""
    for line in text.splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
