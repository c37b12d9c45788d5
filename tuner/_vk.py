"""The only door to the `vulkan` package: raw calls, result codes as errors, structs that own.

The package's own wrappers are not used: their exceptions have no text, they drop fields whose
value is 0, and they cost a microsecond a call. Its cffi library and declarations are: `lib.vkX(…)`
calls Vulkan and releases the GIL, `call` and `create` check the result.

Importing this module raises `NoDeviceError` where the package or the Vulkan loader is missing.
Handles and structs are cffi objects, hence `Any`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from tuner.errors import DeviceLostError, NoDeviceError, VulkanError


def _load() -> Any:
    try:
        return importlib.import_module("vulkan")
    except ModuleNotFoundError as error:
        raise NoDeviceError(
            "the Python package 'vulkan' is not installed: run `pip install vulkan`"
        ) from error
    except OSError as error:
        raise NoDeviceError(
            "no Vulkan loader (libvulkan) on this machine: install it with a driver, on Debian or "
            "Ubuntu `apt-get install libvulkan1 mesa-vulkan-drivers`"
        ) from error


binding: Any = _load()
"""The package itself, for its constants: `binding.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT`."""
lib: Any = binding.lib
ffi: Any = binding.ffi
NULL: Any = ffi.NULL

SUCCESS = 0
TIMEOUT = 2
INCOMPLETE = 5
INCOMPATIBLE_DRIVER = -9
OUT_OF_MEMORY = (-1, -2)
"""VK_ERROR_OUT_OF_HOST_MEMORY and VK_ERROR_OUT_OF_DEVICE_MEMORY."""
_DEVICE_LOST = -4

_HINTS = {
    -1: "the host is out of memory",
    -2: "the device is out of memory: use a smaller workload or close other programs",
    -3: "the driver failed to initialise: try `vulkaninfo`, and that you may open its device files",
    _DEVICE_LOST: "the driver gave the device up, most often because a kernel hung or read or "
    "wrote out of bounds; open the device again",
    -6: "a layer that was asked for is not installed",
    -7: "an extension that was asked for is not there",
    -9: "no driver fits: install one for this device, or Mesa's CPU driver",
}


def error(call_name: str, code: int) -> VulkanError:
    """The error for a result code: DeviceLostError if the device is gone, else VulkanError."""
    name = ffi.typeof("VkResult").elements.get(code, "unknown VkResult")
    kind = DeviceLostError if code == _DEVICE_LOST else VulkanError
    return kind(call_name, name, code, _HINTS.get(code, ""))


def call(name: str, *arguments: Any, allow: Sequence[int] = ()) -> int:
    """Call `lib.name(*arguments)` and return its result code.

    Raises:
        VulkanError, DeviceLostError: the code is neither 0 nor in `allow`.
    """
    return check(name, getattr(lib, name)(*arguments), allow)


def check(name: str, code: int, allow: Sequence[int] = ()) -> int:
    """Return `code` if it is 0 or in `allow`, else raise as `call` does."""
    if code != SUCCESS and code not in allow:
        raise error(name, code)
    return code


def create(name: str, ctype: str, *arguments: Any) -> Any:
    """Call a function whose last parameter returns one `ctype`, and return that.

    Raises:
        VulkanError, DeviceLostError: the call failed.
    """
    out = ffi.new(f"{ctype} *")
    call(name, *arguments, out)
    return out[0]


def procedure(instance: Any, name: str) -> Any:
    """The function pointer of an extension's function, which the loader does not export.

    Raises:
        VulkanError: the instance does not know the function.
    """
    pointer = lib.vkGetInstanceProcAddr(instance, text(name))
    if pointer == NULL:
        raise VulkanError("vkGetInstanceProcAddr", "no such function", 0, name)
    return ffi.cast(f"PFN_{name}", pointer)


def listed(function: Any, ctype: str, *arguments: Any) -> Any:
    """Both calls of an enumerating function (count, then data): an array of `ctype`.

    Structs that are extensible have their `sType` filled in. `function` is one of `lib` or from
    `procedure`.

    Raises:
        VulkanError, DeviceLostError: a call failed.
    """
    name = f"enumerating {ctype}"
    count = ffi.new("uint32_t *")
    check(name, function(*arguments, count, NULL) or SUCCESS, (INCOMPLETE,))
    items = ffi.new(f"{ctype}[]", count[0])
    structure_type = _structure_type(ctype)
    if structure_type is not None:
        for item in items:
            item.sType = structure_type
    if count[0]:
        check(name, function(*arguments, count, items) or SUCCESS, (INCOMPLETE,))
    return items


def struct(name: str, /, **fields: Any) -> Any:
    """A pointer to a new struct, `sType` filled in, that keeps alive whatever its fields point to.

    A field that is a struct by value takes a pointer to one, too.
    """
    pointer = ffi.new(f"{name} *")
    structure_type = _structure_type(name)
    if structure_type is not None:
        pointer.sType = structure_type
    for field, value in fields.items():
        setattr(pointer, field, _by_value(name, field, value))
    return _owning(pointer, tuple(fields.values()))


def array(ctype: str, items: Iterable[Any]) -> Any:
    """A C array of `ctype` made from values or from pointers to structs, which it keeps alive.

    Returned as a pointer to its first element: it does not know its length.
    """
    kept = tuple(items)
    by_value = ffi.typeof(ctype).kind == "struct"
    memory = ffi.new(f"{ctype}[]", [item[0] for item in kept] if by_value else kept)
    return _owning(ffi.cast(f"{ctype} *", memory), (memory, *kept))


def text(value: str) -> Any:
    """A C string."""
    return ffi.new("char[]", value.encode())


def texts(values: Sequence[str]) -> Any:
    """A C array of C strings, NULL if there are none."""
    return array("char *", [text(value) for value in values]) if values else NULL


def string(characters: Any) -> str:
    """The Python string in a C character array."""
    return str(ffi.string(characters).decode("utf-8", "replace"))


def chain(structs: Sequence[Any]) -> Any:
    """Link structs through `pNext` in the given order and return the first (NULL if none).

    The caller keeps all of them alive while the chain is in use.
    """
    for here, following in itertools.pairwise(structs):
        ffi.cast("VkBaseOutStructure *", here).pNext = ffi.cast("VkBaseOutStructure *", following)
    return structs[0] if structs else NULL


def flags_struct(structure_type: int, values: Sequence[bool]) -> Any:
    """A feature struct that the binding does not know: `sType`, `pNext` and one VkBool32 a value.

    Returned as `VkBaseOutStructure *`; `flags` reads the values back.
    """
    header = ffi.sizeof("VkBaseOutStructure")
    memory = ffi.new("uint64_t[]", (header + 4 * len(values) + 7) // 8)
    pointer = ffi.cast("VkBaseOutStructure *", memory)
    pointer.sType = structure_type
    ffi.cast("uint32_t *", memory)[header // 4 : header // 4 + len(values)] = [*map(int, values)]
    return _owning(pointer, (memory,))


def flags(pointer: Any, count: int) -> tuple[bool, ...]:
    """The values of a `flags_struct`."""
    start = ffi.sizeof("VkBaseOutStructure") // 4
    words = ffi.cast("uint32_t *", pointer)
    return tuple(bool(words[start + i]) for i in range(count))


def version(number: int) -> tuple[int, int, int]:
    """Major, minor and patch of a packed Vulkan version."""
    return (number >> 22) & 0x7F, (number >> 12) & 0x3FF, number & 0xFFF


def packed_version(major: int, minor: int) -> int:
    """A Vulkan version as one number."""
    return major << 22 | minor << 12


@functools.cache
def _structure_type(name: str) -> int | None:
    """The binding's constructors carry the structure type as their first default."""
    constructor: Any = getattr(binding, name, None)
    code = getattr(constructor, "__code__", None)
    if code is None or code.co_varnames[:1] != ("sType",):
        return None
    return int(constructor.__defaults__[0])


@functools.cache
def _struct_fields(name: str) -> frozenset[str]:
    return frozenset(
        field for field, info in ffi.typeof(name).fields if info.type.kind in ("struct", "union")
    )


def _by_value(name: str, field: str, value: Any) -> Any:
    if field in _struct_fields(name) and isinstance(value, ffi.CData):
        return value[0] if ffi.typeof(value).kind == "pointer" else value
    return value


def _owning(pointer: Any, kept: tuple[Any, ...]) -> Any:
    """`pointer` with `kept` (and its own memory) alive for as long as it is."""
    return ffi.gc(pointer, functools.partial(_forget, (pointer, kept)))


def _forget(_kept: object, _pointer: object) -> None:
    """Called by cffi when a struct dies; what it kept dies with the partial that holds it."""
