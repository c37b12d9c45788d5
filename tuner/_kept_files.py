"""Files that only save time: they are whole, or as if they were not there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from pathlib import Path

_DIGEST_BYTES = hashlib.sha256().digest_size


def read_kept(path: Path, header: bytes) -> bytes | None:
    """What `keep` wrote there under that header; None if it is missing, damaged or another's."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    start = len(header) + _DIGEST_BYTES
    data = raw[start:]
    return data if raw[:start] == header + hashlib.sha256(data).digest() else None


def keep(path: Path, header: bytes, data: bytes) -> OSError | None:
    """Replace the file, from any thread or process: a reader sees all of it or none.

    Returns why it could not be written, which is no reason to fail.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(header + hashlib.sha256(data).digest() + data)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        return error
    return None
