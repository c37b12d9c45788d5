"""What lies on the device: workloads in several copies, one scratch region, guards around all.

A guarded buffer is laid out as head guard, payload (padded to 4 bytes), tail guard. Kernels see the
payload *and* the tail guard: a driver that clamps accesses to the bound range would otherwise hide
a write past the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner import _vk
from tuner._memory import Arena, Memory
from tuner.errors import OutOfMemoryError, UsageError
from tuner.records import POISON_WORD, BufferRole
from tuner.runner._commands import Commands
from tuner.runner._staging import Bytes, Region, Staging, copy_region
from tuner.runner.protocol import Array, OutputSpec

GUARD_BYTES = 4096
GUARD_WORDS: dict[BufferRole, int] = {
    "input": 0xFFC0DEAD,
    "output": 0xFFC1BEEF,
    "scratch": 0xFFC2FACE,
    "state": 0xFFC3CAFE,
    "counter": 0xFFC4D00D,
}
"""NaNs as float32, and different ones: arithmetic passes a NaN's bits on, so that a kernel which
reads one guard and writes another would otherwise leave no trace."""
POISON_BYTE = 0xFF


@dataclass(frozen=True, slots=True)
class Guarded:
    """A payload of `nbytes` between guards, `base` bytes into a Vulkan buffer.

    `origin` holds what a buffer of role "state" contains before a launch.
    """

    buffer: Any
    nbytes: int
    role: BufferRole
    base: int = 0
    origin: Guarded | None = None

    @property
    def padded(self) -> int:
        """Bytes from the payload's start to the tail guard."""
        return -(-self.nbytes // 4) * 4

    @property
    def payload(self) -> int:
        """Offset of the payload."""
        return self.base + GUARD_BYTES

    @property
    def tail(self) -> int:
        """Offset of the tail guard."""
        return self.payload + self.padded

    @property
    def bound_bytes(self) -> int:
        """Bytes that a kernel sees: the payload and the tail guard."""
        return self.padded + GUARD_BYTES

    @property
    def guards(self) -> tuple[Region, Region]:
        """Head and tail guard as regions."""
        return (
            (self.buffer, self.base, GUARD_BYTES),
            (self.buffer, self.tail, GUARD_BYTES),
        )

    @property
    def contents(self) -> Region:
        """The padded payload as a region."""
        return self.buffer, self.payload, self.padded

    def is_intact(self, guard: Bytes) -> bool:
        """Whether a guard that was read back still holds its pattern."""
        return bool((guard.view("<u4") == GUARD_WORDS[self.role]).all())

    def record_guards(self, recording: Any) -> None:
        """Record fills that (re)write both guards."""
        for buffer, offset, nbytes in self.guards:
            _vk.lib.vkCmdFillBuffer(recording, buffer, offset, nbytes, GUARD_WORDS[self.role])

    def record_contents(self, recording: Any) -> None:
        """Record what the payload holds before a launch: poison, unless its role says otherwise."""
        if self.role == "input" or not self.padded:
            return
        if self.origin is not None:
            copy_region(recording, self.origin.contents, self.buffer, self.payload)
            return
        word = 0 if self.role == "counter" else POISON_WORD
        _vk.lib.vkCmdFillBuffer(recording, self.buffer, self.payload, self.padded, word)


def guarded_bytes(nbytes: int) -> int:
    """Bytes that a payload of `nbytes` takes with its guards."""
    return 2 * GUARD_BYTES + -(-nbytes // 4) * 4


class Workload:
    """Operands resident in several copies, each at addresses of its own.

    Made in steps: `require` that it fits, `allocate`, then `upload` or `tile`.

    Attributes:
        outputs: the output buffers by name.
        copies: every operand of each copy by name, once allocated.
    """

    def __init__(
        self,
        name: str,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, OutputSpec],
        copies: int,
    ) -> None:
        if copies < 1:
            raise UsageError(f"copies is {copies}, must be at least 1")
        for key in inputs.keys() & outputs.keys():
            if inputs[key].nbytes != outputs[key].nbytes:
                raise UsageError(
                    f"{key} has {inputs[key].nbytes} bytes going in and {outputs[key].nbytes} "
                    "coming out: state must keep its size"
                )
        self.outputs = dict(outputs)
        self.copies: tuple[dict[str, Guarded], ...] = ()
        self._name = f"workload {name!r}" + (f" in {copies} copies" if copies > 1 else "")
        self._count = copies
        self._inputs = {key: array.nbytes for key, array in inputs.items()}
        self._sizes = self._inputs | {key: spec.nbytes for key, spec in outputs.items()}
        self._origins: dict[str, Guarded] = {}
        self._arena: Arena | None = None

    @property
    def total_bytes(self) -> int:
        """Device memory it takes: all copies and the state's origins, with guards."""
        copies = self._count * sum(map(guarded_bytes, self._sizes.values()))
        return copies + sum(guarded_bytes(self._sizes[name]) for name in self._state)

    @property
    def _state(self) -> list[str]:
        return [name for name in self._inputs if name in self.outputs]

    def _role(self, name: str) -> BufferRole:
        if name not in self._inputs:
            return "output"
        return "state" if name in self.outputs else "input"

    def require(self, memory: Memory, *, replacing: Workload | None = None) -> None:
        """Refuse beforehand what does not fit, given that `replacing` makes room.

        Raises:
            OutOfMemoryError: a buffer is larger than a kernel can bind, or all do not fit.
        """
        require_bindable(memory, self._name, self._sizes)
        freed = replacing.total_bytes if replacing is not None else 0
        memory.require(self._name, self.total_bytes, freed)

    def allocate(self, memory: Memory) -> None:
        """Take the memory.

        Raises:
            OutOfMemoryError: the driver has less than it said.
        """
        sizes = [guarded_bytes(size) for size in self._sizes.values()]
        origins = [guarded_bytes(self._sizes[name]) for name in self._state]
        self._arena = Arena(memory, self._name, sizes * self._count + origins)
        handles = self._arena.buffers
        first_origin = len(sizes) * self._count
        self._origins = {
            name: Guarded(handle, self._sizes[name], "input")
            for name, handle in zip(self._state, handles[first_origin:], strict=True)
        }
        left = iter(handles)
        self.copies = tuple(
            {
                name: Guarded(next(left), size, self._role(name), origin=self._origins.get(name))
                for name, size in self._sizes.items()
            }
            for _ in range(self._count)
        )

    def upload(self, staging: Staging, commands: Commands, inputs: Mapping[str, Array]) -> None:
        """Fill every copy: inputs from the host once, then from copy to copy on the device."""
        first = self.copies[0]
        for name, array in inputs.items():
            target = first[name]
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            staging.write(target.buffer, target.payload, data)
            word = POISON_WORD if name in self.outputs else GUARD_WORDS["input"]
            padding = np.frombuffer(word.to_bytes(4, "little"), np.uint8)
            missing = target.padded - target.nbytes
            staging.write(target.buffer, target.tail - missing, padding[4 - missing :])
        self._seal(staging, commands)

    def tile(self, staging: Staging, commands: Commands, pattern: Bytes) -> None:
        """Fill every copy of every input with `pattern`, repeated."""
        for name in self._inputs:
            target = self.copies[0][name]
            for start in range(0, target.nbytes, len(pattern)):
                piece = pattern[: target.nbytes - start]
                staging.write(target.buffer, target.payload + start, piece)
        self._seal(staging, commands)

    def _seal(self, staging: Staging, commands: Commands) -> None:
        """Write guards, finish the upload, replicate the first copy's inputs."""
        for target in itertools.chain.from_iterable(copy.values() for copy in self.copies):
            for buffer, offset, nbytes in target.guards:
                staging.fill(buffer, offset, nbytes, GUARD_WORDS[target.role])
        staging.flush()
        if len(self.copies) > 1 or self._origins:
            commands.run("copying operands", self._record_replication)

    def _record_replication(self, recording: Any) -> None:
        for copy in (*self.copies[1:], self._origins):
            for name in self._inputs.keys() & copy.keys():
                source, target = self.copies[0][name], copy[name]
                if source.padded:
                    copy_region(recording, source.contents, target.buffer, target.payload)

    def close(self) -> None:
        """Free the memory; the device must not use it any more."""
        if self._arena is not None:
            self._arena.close()
            self._arena, self.copies, self._origins = None, (), {}


class Scratch:
    """One region that grows to the largest job's needs; each job lays its own buffers into it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._arena: Arena | None = None
        self._capacity = 0

    def layout(
        self, sizes: Mapping[str, int], counters: Collection[str], commands: Commands
    ) -> dict[str, Guarded]:
        """Buffers of these sizes in bytes, some of them counters. What was laid out before is
        overlaid.

        Raises:
            OutOfMemoryError: the region cannot grow that far.
        """
        if not sizes:
            return {}
        require_bindable(self._memory, "scratch", sizes)
        spans = [_aligned(guarded_bytes(size)) for size in sizes.values()]
        arena = self._grown(sum(spans), commands)
        bases = itertools.accumulate(spans, initial=0)
        return {
            name: Guarded(
                arena.buffers[0], size, "counter" if name in counters else "scratch", base
            )
            for (name, size), base in zip(sizes.items(), bases, strict=False)
        }

    def close(self) -> None:
        """Free the region; the device must not use it any more."""
        if self._arena is not None:
            self._arena.close()
            self._arena, self._capacity = None, 0

    def _grown(self, needed: int, commands: Commands) -> Arena:
        if self._arena is not None and needed <= self._capacity:
            return self._arena
        if self._arena is not None:
            commands.when_idle(self._arena.close)
            self._arena, self._capacity = None, 0
        self._memory.require("scratch", needed)
        self._arena = Arena(self._memory, "scratch", [needed])
        self._capacity = needed
        return self._arena


def require_bindable(memory: Memory, what: str, sizes: Mapping[str, int]) -> None:
    """Refuse buffers that no kernel could bind as a whole.

    Raises:
        OutOfMemoryError: one is larger than the device's limit on storage buffers.
    """
    limit = memory.device.info.max_storage_buffer_bytes
    for name, size in sizes.items():
        if size > limit:
            holder = "a single storage buffer of this device"
            raise OutOfMemoryError(f"{what}: buffer {name!r}", size, limit, holder=holder)


def record_fresh(recording: Any, buffers: Iterable[Guarded]) -> None:
    """Record what makes a launch checkable: guards anew, and what it may write as it shall be."""
    for buffer in buffers:
        buffer.record_guards(recording)
        buffer.record_contents(recording)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // GUARD_BYTES) * GUARD_BYTES
