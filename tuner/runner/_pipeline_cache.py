"""The driver's own cache of pipelines, kept on disk from one process to the next."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

from tuner import _vk
from tuner.device import Device

_HEADER = b"kvtune pipelines 1\n"


class PipelineCache:
    """A cache that is read when it is made and saved when it is closed.

    It only saves time: a folder that cannot be read or written is no reason to fail. The file holds
    a header, the SHA-256 of the driver's bytes, and these: drivers look at little more than their
    own header, and damage further on would crash every process that opens the device.
    """

    def __init__(self, device: Device, folder: Path | None) -> None:
        """Nothing is kept where `folder` is None; each device and driver has a file of its own."""
        self._device = device
        info = device.info
        name = f"pipelines-{info.uuid}-{info.driver_version:x}.bin"
        self._path = folder / name if folder else None
        data = b""
        if self._path is not None:
            with contextlib.suppress(OSError):
                data = _sound(self._path.read_bytes())
        create_info = _vk.struct(
            "VkPipelineCacheCreateInfo",
            initialDataSize=len(data),
            pInitialData=_vk.ffi.new("char[]", data) if data else _vk.NULL,
        )
        self.handle: Any = _vk.create(
            "vkCreatePipelineCache", "VkPipelineCache", device.handle, create_info, _vk.NULL
        )

    def close(self) -> None:
        """Save what the driver has gathered, and destroy the cache."""
        if self._path is not None:
            self._save(self._path)
        _vk.lib.vkDestroyPipelineCache(self._device.handle, self.handle, _vk.NULL)

    def _save(self, path: Path) -> None:
        size = _vk.ffi.new("size_t *")
        arguments = (self._device.handle, self.handle, size)
        _vk.call("vkGetPipelineCacheData", *arguments, _vk.NULL)
        data = _vk.ffi.new("char[]", size[0])
        _vk.call("vkGetPipelineCacheData", *arguments, data, allow=(_vk.INCOMPLETE,))
        gathered = _vk.ffi.buffer(data, size[0])[:]
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(_HEADER + hashlib.sha256(gathered).digest() + gathered)
            part.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


def _sound(raw: bytes) -> bytes:
    """The driver's bytes in a file; none if they are not what was written."""
    start = len(_HEADER) + hashlib.sha256().digest_size
    data = raw[start:]
    sound = raw[:start] == _HEADER + hashlib.sha256(data).digest()
    return data if sound else b""
