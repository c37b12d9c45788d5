"""Vulkan instances and devices: list them, pick one, open it, tear it down."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tuner import _vk
from tuner._device_fault import fault_lines
from tuner._features import Features, Version, supported
from tuner._snapshot import api_version, memory_heaps, snapshot
from tuner.device_info import DeviceInfo, DeviceKind
from tuner.errors import DeviceLostError, NoDeviceError

VALIDATION_LAYER = "VK_LAYER_KHRONOS_validation"
NEEDED_API: Version = (1, 3)
"""Kernels are compiled to SPIR-V 1.6, which needs Vulkan 1.3."""

_PREFERENCE: tuple[DeviceKind, ...] = ("discrete", "integrated", "virtual", "cpu", "other")
_UUID_PREFIX_DIGITS = 4
_SYNCHRONISATION_SETTINGS = ("validate_sync", "syncval_shader_accesses_heuristic")
_ENUMERATE_PORTABILITY = 1
"""VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR: list drivers like MoltenVK, too."""


def list_devices() -> tuple[DeviceInfo, ...]:
    """Snapshots of all devices, in the driver's order: a device's index is its place here.

    Raises:
        NoDeviceError: no Vulkan loader, or no driver.
    """
    with contextlib.ExitStack() as stack:
        instance = _open_instance(stack, validation=False)
        return tuple(candidate.info for candidate in _candidates(instance.handle))


def has_validation_layer() -> bool:
    """Whether `open_device(validation=True)` can work on this machine."""
    layers = _vk.listed(_vk.lib.vkEnumerateInstanceLayerProperties, "VkLayerProperties")
    return any(_vk.string(layer.layerName) == VALIDATION_LAYER for layer in layers)


def select(devices: Sequence[DeviceInfo], selector: str | None) -> int:
    """Index of the device that `selector` means: an index, a part of the name, a UUID (prefix).

    None means the first of the best kind: discrete, then integrated, virtual, CPU.

    Raises:
        NoDeviceError: there is none, or several fit; the message lists the devices.
    """
    if not devices:
        raise NoDeviceError(
            "Vulkan reports no device: install a driver, or Mesa's CPU driver "
            "(`apt-get install mesa-vulkan-drivers`)"
        )
    if selector is None:
        return min(range(len(devices)), key=lambda i: _PREFERENCE.index(devices[i].kind))
    wanted = selector.strip().lower()
    if wanted.isdecimal() and int(wanted) < len(devices):
        return int(wanted)
    found = [i for i, info in enumerate(devices) if _means(wanted, info)]
    if len(found) == 1:
        return found[0]
    listing = "; ".join(
        f"{i}: {info.name} ({info.kind}, {info.uuid})" for i, info in enumerate(devices)
    )
    problem = "no device matches" if not found else "several devices match"
    raise NoDeviceError(
        f"{problem} {selector!r}: give an index, a part of one name or the start of a UUID; "
        f"devices: {listing}"
    )


def _means(wanted: str, info: DeviceInfo) -> bool:
    digits, own = wanted.replace("-", ""), info.uuid.replace("-", "")
    by_uuid = len(digits) >= _UUID_PREFIX_DIGITS and own.startswith(digits)
    return bool(wanted) and (wanted in info.name.lower() or by_uuid)


def open_device(selector: str | None = None, *, validation: bool = False) -> Device:
    """Open a device with every feature the tuner knows that it has.

    With `validation` the Khronos layer checks every call, synchronisation included, and
    `Device.messages` collects what it says.

    Raises:
        NoDeviceError: no loader, driver or device; the selector fits none or several; the device
            is older than Vulkan 1.3 or cannot compute; the validation layer is not installed.
        VulkanError: the driver refuses.
    """
    with contextlib.ExitStack() as stack:
        instance = _open_instance(stack, validation=validation)
        candidates = _candidates(instance.handle)
        chosen = candidates[select([c.info for c in candidates], selector)]
        if chosen.api < NEEDED_API:
            raise NoDeviceError(
                f"{chosen.info.name} offers Vulkan {chosen.info.api_version}, kernels need "
                f"{NEEDED_API[0]}.{NEEDED_API[1]}: update its driver or choose another device"
            )
        handle = _logical_device(chosen)
        stack.callback(_vk.lib.vkDestroyDevice, handle, _vk.NULL)
        queue = _vk.ffi.new("VkQueue *")
        _vk.lib.vkGetDeviceQueue(handle, chosen.queue_family, 0, queue)
        return Device(
            info=chosen.info,
            physical=chosen.physical,
            handle=handle,
            queue=queue[0],
            queue_family=chosen.queue_family,
            instance=instance.handle,
            messages=instance.messages,
            teardown=stack.pop_all(),
        )


class Device:
    """An open device with one compute queue. `close` destroys it and its instance.

    Attributes:
        info: the snapshot taken when it was opened.
        messages: what the validation layer said, warnings and errors; grows while it is in use.
    """

    def __init__(
        self,
        *,
        info: DeviceInfo,
        physical: Any,
        handle: Any,
        queue: Any,
        queue_family: int,
        instance: Any,
        messages: list[str],
        teardown: contextlib.ExitStack,
    ) -> None:
        self.info = info
        self.physical = physical
        self.handle = handle
        self.queue = queue
        self.queue_family = queue_family
        self.instance = instance
        self.messages = messages
        self._teardown = teardown

    def procedure(self, name: str) -> Any:
        """An extension's function.

        Raises:
            VulkanError: the driver has none of that name.
        """
        return _vk.procedure(self.instance, name)

    def check(self, name: str, code: int) -> None:
        """As `_vk.check`; where the device is lost, with what the driver knows of the cause.

        Raises:
            VulkanError, DeviceLostError: the code is not 0.
        """
        try:
            _vk.check(name, code)
        except DeviceLostError as lost:
            if not self.info.device_fault:
                raise
            faults = fault_lines(self.procedure("vkGetDeviceFaultInfoEXT"), self.handle)
            raise DeviceLostError(name, lost.name, code, lost.hint, faults=faults) from None

    def free_bytes(self, heap: int) -> int | None:
        """What is left of a heap by the driver's account, None where it keeps none."""
        heaps = memory_heaps(self.physical, budgets=self.info.memory_budget)
        return heaps[heap].budget_bytes

    def close(self) -> None:
        """Destroy the device and its instance; everything made on it must be gone. Idempotent."""
        self._teardown.close()


@dataclass(frozen=True, slots=True)
class _Instance:
    handle: Any
    messages: list[str]


@dataclass(frozen=True, slots=True)
class _Candidate:
    physical: Any
    api: Version
    features: Features
    queue_family: int
    info: DeviceInfo


def _candidates(instance: Any) -> list[_Candidate]:
    """Every device with a compute queue that speaks Vulkan 1.1, in the loader's order."""
    found = []
    for physical in _vk.listed(_vk.lib.vkEnumeratePhysicalDevices, "VkPhysicalDevice", instance):
        api = api_version(physical)
        family = _compute_queue(physical)
        if family is None or api < (1, 1):
            continue
        extensions = frozenset(
            _vk.string(item.extensionName)
            for item in _vk.listed(
                _vk.lib.vkEnumerateDeviceExtensionProperties,
                "VkExtensionProperties",
                physical,
                _vk.NULL,
            )
        )
        features = supported(physical, api, extensions)
        index, valid_bits = family
        info = snapshot(
            instance,
            physical,
            features=features,
            extensions=extensions,
            timestamp_valid_bits=valid_bits,
        )
        found.append(_Candidate(physical, api, features, index, info))
    return found


def _compute_queue(physical: Any) -> tuple[int, int] | None:
    """Index and timestamp bits of the first compute family, one with timestamps if there is one."""
    families = _vk.listed(
        _vk.lib.vkGetPhysicalDeviceQueueFamilyProperties, "VkQueueFamilyProperties", physical
    )
    able = [
        (index, int(family.timestampValidBits))
        for index, family in enumerate(families)
        if family.queueFlags & _vk.binding.VK_QUEUE_COMPUTE_BIT
    ]
    return next((pair for pair in able if pair[1]), able[0] if able else None)


def _logical_device(candidate: _Candidate) -> Any:
    priorities = _vk.array("float", [1.0])
    queue = _vk.struct(
        "VkDeviceQueueCreateInfo",
        queueFamilyIndex=candidate.queue_family,
        queueCount=1,
        pQueuePriorities=priorities,
    )
    structs = candidate.features.enabling()
    extensions = candidate.features.extensions
    info = _vk.struct(
        "VkDeviceCreateInfo",
        pNext=structs[0],
        queueCreateInfoCount=1,
        pQueueCreateInfos=queue,
        enabledExtensionCount=len(extensions),
        ppEnabledExtensionNames=_vk.texts(extensions),
    )
    return _vk.create("vkCreateDevice", "VkDevice", candidate.physical, info, _vk.NULL)


def _open_instance(stack: contextlib.ExitStack, *, validation: bool) -> _Instance:
    """An instance that `stack` destroys, with a messenger if it is to validate."""
    if validation and not has_validation_layer():
        raise NoDeviceError(
            f"{VALIDATION_LAYER} is not installed: `apt-get install vulkan-validationlayers`, or "
            "run without validation"
        )
    layers = [VALIDATION_LAYER] if validation else []
    portability = "VK_KHR_portability_enumeration" in _instance_extensions(_vk.NULL)
    extensions = ["VK_KHR_portability_enumeration"] if portability else []
    messages: list[str] = []
    messenger, checks = _vk.NULL, _vk.NULL
    if validation:
        messenger = _messenger_info(stack, messages)
        by, checks = _synchronisation_checks(messenger)
        extensions += ["VK_EXT_debug_utils", by]
    info = _vk.struct(
        "VkInstanceCreateInfo",
        pNext=checks,
        flags=_ENUMERATE_PORTABILITY if portability else 0,
        pApplicationInfo=_vk.struct(
            "VkApplicationInfo",
            pApplicationName=_vk.text("kvtune"),
            apiVersion=_vk.packed_version(*NEEDED_API),
        ),
        enabledLayerCount=len(layers),
        ppEnabledLayerNames=_vk.texts(layers),
        enabledExtensionCount=len(extensions),
        ppEnabledExtensionNames=_vk.texts(extensions),
    )
    handle = _create_instance(info)
    stack.callback(_vk.lib.vkDestroyInstance, handle, _vk.NULL)
    if validation:
        _attach_messenger(stack, handle, messenger)
    return _Instance(handle, messages)


def _instance_extensions(layer: Any) -> set[str]:
    """What the loader and the drivers offer, or, with its C string, a layer."""
    function = _vk.lib.vkEnumerateInstanceExtensionProperties
    items = _vk.listed(function, "VkExtensionProperties", layer)
    return {_vk.string(item.extensionName) for item in items}


def _create_instance(info: Any) -> Any:
    out = _vk.ffi.new("VkInstance *")
    code = _vk.lib.vkCreateInstance(info, _vk.NULL, out)
    if code == _vk.INCOMPATIBLE_DRIVER:
        raise NoDeviceError(
            "no Vulkan driver: install one for your device, or Mesa's CPU driver "
            "(`apt-get install mesa-vulkan-drivers`)"
        )
    _vk.check("vkCreateInstance", code)
    return out[0]


def _synchronisation_checks(following: Any) -> tuple[str, Any]:
    """The struct that has the layer check synchronisation, and the extension that it belongs to.

    Layers since 2024 leave out what shaders access unless a setting asks for it; older ones have
    no settings.
    """
    if "VK_EXT_layer_settings" in _instance_extensions(_vk.text(VALIDATION_LAYER)):
        settings = [_setting(name) for name in _SYNCHRONISATION_SETTINGS]
        return "VK_EXT_layer_settings", _vk.struct(
            "VkLayerSettingsCreateInfoEXT",
            pNext=following,
            settingCount=len(settings),
            pSettings=_vk.array("VkLayerSettingEXT", settings),
        )
    enabled = _vk.array(
        "VkValidationFeatureEnableEXT",
        [_vk.binding.VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT],
    )
    return "VK_EXT_validation_features", _vk.struct(
        "VkValidationFeaturesEXT",
        pNext=following,
        enabledValidationFeatureCount=1,
        pEnabledValidationFeatures=enabled,
    )


def _setting(name: str) -> Any:
    """A setting of the validation layer that is to be true."""
    return _vk.struct(
        "VkLayerSettingEXT",
        pLayerName=_vk.text(VALIDATION_LAYER),
        pSettingName=_vk.text(name),
        type=_vk.binding.VK_LAYER_SETTING_TYPE_BOOL32_EXT,
        valueCount=1,
        pValues=_vk.ffi.new("VkBool32 *", 1),
    )


def _messenger_info(stack: contextlib.ExitStack, messages: list[str]) -> Any:
    def collect(_severity: int, _types: int, data: Any, _user: Any) -> int:
        name = _vk.string(data.pMessageIdName) if data.pMessageIdName else "message"
        messages.append(f"{name}: {_vk.string(data.pMessage)}")
        return 0

    callback = _vk.ffi.callback("PFN_vkDebugUtilsMessengerCallbackEXT", collect)
    stack.callback(lambda: callback)  # keeps it alive: the driver holds no reference that counts
    vk = _vk.binding
    return _vk.struct(
        "VkDebugUtilsMessengerCreateInfoEXT",
        messageSeverity=vk.VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT
        | vk.VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT,
        messageType=vk.VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT,
        pfnUserCallback=callback,
    )


def _attach_messenger(stack: contextlib.ExitStack, instance: Any, info: Any) -> None:
    made = _vk.ffi.new("VkDebugUtilsMessengerEXT *")
    create = _vk.procedure(instance, "vkCreateDebugUtilsMessengerEXT")
    destroy = _vk.procedure(instance, "vkDestroyDebugUtilsMessengerEXT")
    _vk.check("vkCreateDebugUtilsMessengerEXT", create(instance, info, _vk.NULL, made))
    stack.callback(destroy, instance, made[0], _vk.NULL)
