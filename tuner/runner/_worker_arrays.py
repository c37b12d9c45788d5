"""Arrays on their way to another process: small ones in the message, large ones in shared memory.

The shared memory has no name, only a descriptor that travels with the message: it is gone with the
last process that holds it, however these end.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping

import msgspec
import numpy as np

from tuner._host_memory import HOST, available_host_bytes
from tuner.errors import OutOfMemoryError
from tuner.runner.protocol import Array

INLINE_BYTES = 256 << 10
"""Up to this size arrays go with the message; a mapping would cost more than copying them."""
_ALIGNMENT = 64
_PIECE_BYTES = 64 << 20


class Part(msgspec.Struct, frozen=True):
    """Where one array lies in the block, and what it is."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class Packed(msgspec.Struct, frozen=True):
    """Arrays by name in one block of `nbytes`: `inline`, or where that is None in shared memory."""

    parts: dict[str, Part]
    nbytes: int
    inline: bytearray | None = None


def pack(what: str, arrays: Mapping[str, Array]) -> tuple[Packed, int | None]:
    """The arrays as a message, and the descriptor that has to go with it, which the caller closes.

    Raises:
        OutOfMemoryError: the host has no room for `what`.
    """
    parts: dict[str, Part] = {}
    nbytes = 0
    for name, array in arrays.items():
        parts[name] = Part(array.dtype.str, array.shape, nbytes)
        nbytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    if nbytes > INLINE_BYTES:
        return Packed(parts, nbytes), _shared(what, arrays, parts, nbytes)
    block = bytearray(nbytes)
    for name, array in arrays.items():
        start = parts[name].offset
        block[start : start + array.nbytes] = np.ascontiguousarray(array).tobytes()
    return Packed(parts, nbytes, block), None


def unpack(packed: Packed, descriptor: int | None) -> dict[str, Array]:
    """The arrays, writable; they keep the memory they share alive. Closes the descriptor."""
    block: bytearray | mmap.mmap | None = packed.inline
    if descriptor is not None:
        try:
            block = mmap.mmap(descriptor, packed.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(descriptor)
    return {
        name: np.ndarray(part.shape, part.dtype, buffer=block, offset=part.offset)
        for name, part in packed.parts.items()
    }


def _shared(what: str, arrays: Mapping[str, Array], parts: Mapping[str, Part], nbytes: int) -> int:
    descriptor = os.memfd_create("kvtune arrays")
    try:
        os.ftruncate(descriptor, nbytes)
        for name, array in arrays.items():
            _write(descriptor, array, parts[name].offset)
    except OSError:
        os.close(descriptor)
        raise OutOfMemoryError(
            f"{what}, to be handed to the worker,",
            nbytes,
            available_host_bytes(),
            holder=HOST,
        ) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _write(descriptor: int, array: Array, offset: int) -> None:
    """Writing fills new shared memory at twice the speed of storing into a mapping of it."""
    rest = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    while rest:
        written = os.pwrite(descriptor, rest[:_PIECE_BYTES], offset)
        rest, offset = rest[written:], offset + written
