"""One checked launch: poison and guards before it, outputs and guards read back behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tuner.runner._commands import COMPUTE_TO_TRANSFER, TRANSFER_TO_COMPUTE, Commands
from tuner.runner._launch import Launch
from tuner.runner._resident import POISON_BYTE, Guarded, record_fresh
from tuner.runner._staging import Bytes, Staging
from tuner.runner.protocol import Array, Execution, OutputSpec


def run_checked(
    launch: Launch,
    buffers: Mapping[str, Guarded],
    outputs: Mapping[str, OutputSpec],
    *,
    staging: Staging,
    commands: Commands,
) -> Execution:
    """Launch once on copy 0, whose buffers (scratch among them) are `buffers`.

    Raises:
        RunTimeoutError, DeviceLostError: the launch hangs or kills the device.
    """

    def record(recording: Any) -> None:
        record_fresh(recording, buffers.values())
        TRANSFER_TO_COMPUTE.record(recording)
        launch.record(recording, 0)
        COMPUTE_TO_TRANSFER.record(recording)

    guards = [region for buffer in buffers.values() for region in buffer.guards]
    payloads = [buffers[name].contents for name in outputs]
    counters = [name for name, buffer in buffers.items() if buffer.role == "counter"]
    counts = [buffers[name].contents for name in counters]
    read = staging.read(commands, "one launch", record, [*guards, *payloads, *counts])
    broken = _broken(buffers, read[: len(guards)])
    contents, counted = read[len(guards) :][: len(payloads)], read[len(guards) + len(payloads) :]
    arrays: dict[str, Array] = {}
    for (name, spec), content in zip(outputs.items(), contents, strict=True):
        if (content[spec.nbytes :] != POISON_BYTE).any():
            broken.add(name)
        arrays[name] = content[: spec.nbytes].view(np.dtype(spec.dtype)).reshape(spec.shape)
    in_order = tuple(name for name in buffers if name in broken)
    dirty = tuple(name for name, each in zip(counters, counted, strict=True) if each.any())
    return Execution(outputs=arrays, broken_guards=in_order, dirty_counters=dirty)


def _broken(buffers: Mapping[str, Guarded], guards: Sequence[Bytes]) -> set[str]:
    """Names of the buffers of which a guard (two each, in order) has lost its pattern."""
    return {
        name
        for number, (name, buffer) in enumerate(buffers.items())
        if not all(map(buffer.is_intact, guards[2 * number : 2 * number + 2]))
    }
