"""The driver's own cache of pipelines, kept on disk from one process to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tuner import _vk
from tuner._kept_files import keep, read_kept
from tuner.device import Device

_HEADER = b"kvtune pipelines 1\n"


class PipelineCache:
    """A cache that is read when it is made and saved when it is closed.

    The file holds a header, the SHA-256 of the driver's bytes, and these: drivers look at little
    more than their own header, and damage further on would crash every process that opens the
    device.
    """

    def __init__(self, device: Device, folder: Path | None) -> None:
        """Nothing is kept where `folder` is None; each device and driver has a file of its own."""
        self._device = device
        info = device.info
        name = f"pipelines-{info.uuid}-{info.driver_version:x}.bin"
        self._path = folder / name if folder else None
        data = read_kept(self._path, _HEADER) if self._path else None
        create_info = _vk.struct(
            "VkPipelineCacheCreateInfo",
            initialDataSize=len(data or b""),
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
        keep(path, _HEADER, _vk.ffi.buffer(data, size[0])[:])
