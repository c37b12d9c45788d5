"""Bytes between host and device through a bounded ring of mapped memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner import _vk
from tuner._memory import Arena, Memory
from tuner.runner._commands import TRANSFER_TO_HOST, Commands
from tuner.runner._deadlines import Patience

SLOT_BYTES = 16 << 20
_SLOTS = 2

Bytes = npt.NDArray[np.uint8]
Region = tuple[Any, int, int]
"""A Vulkan buffer, an offset in it and a length, in bytes."""


class Staging:
    """A ring of mapped slots: one is filled by the host while the device empties another.

    What is read back has a slot of its own: after a time-out the device may still write to it.
    """

    def __init__(self, memory: Memory, patience: Patience) -> None:
        self._arenas: list[Arena] = []
        self._slots: list[_Slot] = []
        for _ in range(_SLOTS):
            buffer, mapped = self._mapped(memory)
            self._slots.append(_Slot(buffer, mapped, Commands(memory.device, patience)))
        self._read_buffer, self._read_bytes = self._mapped(memory)
        self._current = 0

    def write(self, buffer: Any, offset: int, data: Bytes) -> None:
        """Queue a write of `data` into a device buffer; `flush` makes it happen."""
        done = 0
        while done < len(data):
            slot = self._open_slot()
            count = min(len(data) - done, SLOT_BYTES - slot.used)
            slot.bytes[slot.used : slot.used + count] = data[done : done + count]
            staged = (slot.buffer, slot.used, count)
            copy_region(slot.recording, staged, buffer, offset + done)
            slot.used += count
            done += count
            if slot.used == SLOT_BYTES:
                self._submit()

    def fill(self, buffer: Any, offset: int, nbytes: int, word: int) -> None:
        """Queue a fill with a 32-bit word; offset and length are multiples of 4."""
        if nbytes:
            _vk.lib.vkCmdFillBuffer(self._open_slot().recording, buffer, offset, nbytes, word)

    def flush(self) -> None:
        """Submit what is queued and wait until all of it is in device memory."""
        self._submit()
        for slot in self._slots:
            slot.commands.wait("an upload")

    def read(
        self,
        commands: Commands,
        what: str,
        record: Callable[[Any], None],
        regions: Sequence[Region],
    ) -> list[Bytes]:
        """Record work, copy regions back behind it in the same submission, return their bytes.

        `record` must leave the regions ready to be read by transfer commands. Regions beyond one
        slot take further submissions.
        """
        results = [np.empty(nbytes, np.uint8) for _, _, nbytes in regions]
        for number, batch in enumerate(_batches([nbytes for _, _, nbytes in regions])):
            recording = commands.begin()
            if number == 0:
                record(recording)
            for index, start, count, at in batch:
                buffer, offset, _ = regions[index]
                copy_region(recording, (buffer, offset + start, count), self._read_buffer, at)
            TRANSFER_TO_HOST.record(recording)
            commands.submit()
            commands.wait(what)
            for index, start, count, at in batch:
                results[index][start : start + count] = self._read_bytes[at : at + count]
        return results

    def settle(self) -> bool:
        """Wait for unfinished transfers; False if the device does not answer."""
        settled = [slot.commands.settle() for slot in self._slots]
        return all(settled)

    def when_idle(self, destroy: Callable[[], None]) -> None:
        """Call `destroy` now, or as soon as no transfer is under way."""
        for slot in self._slots:
            if slot.commands.busy:
                slot.commands.when_idle(lambda: self.when_idle(destroy))
                return
        destroy()

    def close(self) -> None:
        """Destroy everything; the device must be idle."""
        for slot in self._slots:
            slot.commands.close()
        self._slots.clear()
        for arena in self._arenas:
            arena.close()

    def _mapped(self, memory: Memory) -> tuple[Any, Bytes]:
        arena = Arena(memory, "the staging ring", [SLOT_BYTES], host=True)
        self._arenas.append(arena)
        mapped = np.frombuffer(arena.allocations[0].map(), np.uint8, SLOT_BYTES)
        return arena.buffers[0], mapped

    def _open_slot(self) -> _Slot:
        slot = self._slots[self._current]
        if slot.recording is None:
            slot.recording = slot.commands.begin()
            slot.used = 0
        return slot

    def _submit(self) -> None:
        slot = self._slots[self._current]
        if slot.recording is not None:
            slot.recording = None
            slot.commands.submit()
            self._current = (self._current + 1) % _SLOTS


class _Slot:
    __slots__ = ("buffer", "bytes", "commands", "recording", "used")

    def __init__(self, buffer: Any, mapped: Bytes, commands: Commands) -> None:
        self.buffer = buffer
        self.bytes = mapped
        self.commands = commands
        self.recording: Any = None
        self.used = 0


def copy_region(recording: Any, source: Region, target: Any, offset: int) -> None:
    """Record a copy of a region into another buffer."""
    buffer, start, nbytes = source
    region = _vk.struct("VkBufferCopy", srcOffset=start, dstOffset=offset, size=nbytes)
    _vk.lib.vkCmdCopyBuffer(recording, buffer, target, 1, region)


def _batches(sizes: Sequence[int]) -> list[list[tuple[int, int, int, int]]]:
    """Cut regions into slot-sized batches of (region, start in it, bytes, place in the slot)."""
    batches: list[list[tuple[int, int, int, int]]] = [[]]
    used = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if used == SLOT_BYTES:
                batches.append([])
                used = 0
            count = min(size - start, SLOT_BYTES - used)
            batches[-1].append((index, start, count, used))
            start, used = start + count, used + count
    return batches
