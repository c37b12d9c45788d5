"""The files of an export: the configuration and the SPIR-V it names, whole at every moment."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Mapping
from pathlib import Path

from tuner.errors import ResultsError
from tuner.export.best_config import FILE_NAME, SPIRV_FOLDER, BestConfig, encode
from tuner.results.files import make_folder, reason, write_atomic
from tuner.results.lock import FolderLock

EXPORT_LOCK, EXPORT_WAIT_S = ".export.lock", 10.0
_WHOLE = re.compile(r"[0-9a-f]{64}\.spv")
_HALF = re.compile(r"\.[0-9a-f]{64}\.spv\.[0-9a-f]{8}\.tmp")
"""Names of `tuner.results.files.write_atomic` before it renames."""


def write(folder: Path, config: BestConfig, spirv: Mapping[str, bytes]) -> None:
    """Write the SPIR-V, then the configuration; then remove what earlier ones named.

    So there is no moment at which the configuration names a file that is not there. One export at
    a time writes to a folder, also beside a search, lest one removes what another is to name.

    Args:
        spirv: what the configuration names, by the SHA-256 of the content.

    Raises:
        ResultsError: another process is exporting here, or the folder cannot be written to.
    """
    bundle = folder / SPIRV_FOLDER
    make_folder(bundle)
    lock = FolderLock(folder, name=EXPORT_LOCK, wait_s=EXPORT_WAIT_S)
    try:
        for digest, data in spirv.items():
            path = bundle / f"{digest}.spv"
            if not path.is_file() or path.read_bytes() != data:
                write_atomic(path, data)
        write_atomic(folder / FILE_NAME, encode(config))
        _remove_others(bundle, spirv)
    finally:
        lock.release()


def _remove_others(bundle: Path, named: Container[str]) -> None:
    """Remove SPIR-V that an export has written and none names any more.

    Raises:
        ResultsError: a file cannot be removed.
    """
    for path in bundle.iterdir():
        try:
            if path.name.removesuffix(".spv") not in named and _is_ours(path):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise ResultsError(
                path, f"cannot remove this file, which {FILE_NAME} no longer names: {reason(error)}"
            ) from error


def _is_ours(path: Path) -> bool:
    """Whether an export has written the file: its name is the hash of its content, or that of a
    file which an export left half written."""
    if path.is_symlink() or not path.is_file():
        return False
    if _WHOLE.fullmatch(path.name):
        return hashlib.sha256(path.read_bytes()).hexdigest() == path.stem
    return _HALF.fullmatch(path.name) is not None
