"""Devices: which one is meant, what is known of it, and what is said when there is none."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.toy_family import toy_device
from tuner.device_info import DeviceInfo
from tuner.errors import DeviceLostError, NoDeviceError, VulkanError

if TYPE_CHECKING:
    from tuner.runner.vulkan import VulkanRunner

pytestmark = [pytest.mark.vulkan, pytest.mark.usefixtures("vulkan_selector")]


def device(name: str, kind: Any, number: int) -> DeviceInfo:
    return toy_device(name=name, kind=kind, uuid=str(uuid.UUID(int=number)))


CPU = device("llvmpipe (LLVM 15.0.6, 256 bits)", "cpu", 0xAAAA << 112)
SMALL = device("Intel Graphics", "integrated", 0xBBBB << 112)
BIG = device("NVIDIA H200", "discrete", 0xCCC1 << 112)
TWIN = device("NVIDIA H200", "discrete", 0xCCC2 << 112)


# --- selection ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "selector", "index"),
    [
        ([CPU, SMALL, BIG, TWIN], None, 2),
        ([CPU, SMALL], None, 1),
        ([CPU], None, 0),
        ([CPU, SMALL, BIG], "0", 0),
        ([CPU, SMALL, BIG], "intel", 1),
        ([CPU, SMALL, BIG], " H200 ", 2),
        ([CPU, BIG, TWIN], "ccc2", 2),
        ([CPU, BIG, TWIN], TWIN.uuid.upper(), 2),
        ([CPU, BIG, TWIN], TWIN.uuid.replace("-", "")[:12], 2),
    ],
)
def test_a_selector_means_one_device(
    devices: list[DeviceInfo], selector: str | None, index: int
) -> None:
    from tuner.device import select

    assert select(devices, selector) == index


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("H200", "several devices match 'H200'"),
        ("radeon", "no device matches 'radeon'"),
        ("7", "no device matches '7'"),
        ("ccc", "no device matches 'ccc'"),
        ("", "no device matches ''"),
        ("-1", "no device matches '-1'"),
    ],
)
def test_any_other_selector_is_answered_with_the_devices(selector: str, message: str) -> None:
    from tuner.device import select

    with pytest.raises(NoDeviceError, match=message) as caught:
        select([CPU, BIG, TWIN], selector)
    for number, each in enumerate((CPU, BIG, TWIN)):
        assert f"{number}: {each.name} ({each.kind}, {each.uuid})" in str(caught.value)


def test_no_device_at_all_comes_with_a_way_out() -> None:
    from tuner.device import select

    with pytest.raises(NoDeviceError, match="mesa-vulkan-drivers"):
        select([], None)


# --- what is known of a device -----------------------------------------------------------------


def test_a_snapshot_makes_sense() -> None:
    from tuner.device import list_devices

    for info in list_devices():
        assert info.name
        assert info.slug
        assert info.driver.startswith(info.driver_name)
        assert uuid.UUID(info.uuid).int
        assert tuple(map(int, info.api_version.split("."))) >= (1, 1, 0)
        assert info.min_subgroup_size <= info.subgroup_size <= info.max_subgroup_size
        assert "basic" in info.subgroup_operations
        assert info.max_workgroup_invocations >= 128
        assert info.max_shared_memory_bytes >= 16 << 10
        assert info.max_storage_buffer_bytes >= 1 << 27
        assert info.max_allocation_bytes >= 1 << 30
        assert any(heap.device_local and heap.size_bytes for heap in info.memory_heaps)
        assert info.timestamp_period_ns > 0.0
        assert "VK_KHR_16bit_storage" in info.extensions or not info.storage_16bit
        assert bool(info.cooperative_matrix_shapes) == info.cooperative_matrix
        assert info.compute_units is None or info.compute_units > 0


def test_a_snapshot_survives_json() -> None:
    from tuner.device import list_devices

    for info in list_devices():
        assert msgspec.json.decode(msgspec.json.encode(info), type=DeviceInfo) == info


def test_a_cpu_driver_has_the_machines_cores() -> None:
    from tuner.device import list_devices

    for info in list_devices():
        if info.is_cpu:
            assert info.compute_units == os.cpu_count()


def test_budgets_are_told_where_the_driver_keeps_them() -> None:
    from tuner.device import list_devices

    for info in list_devices():
        for heap in info.memory_heaps:
            assert (heap.budget_bytes is not None) == info.memory_budget


def test_features_that_a_device_has_are_enabled(vulkan_runner: VulkanRunner) -> None:
    """The validation layer would object to SPIR-V that uses what is not enabled."""
    from tests.small_kernels import spirv
    from tuner.runner.protocol import Job, JobPass

    info = vulkan_runner.info
    needs = {
        "GL_EXT_shader_8bit_storage": info.storage_8bit and info.int8,
        "GL_EXT_shader_16bit_storage": info.storage_16bit and info.float16,
        "GL_KHR_shader_subgroup_arithmetic": "arithmetic" in info.subgroup_operations,
        "GL_EXT_shader_explicit_arithmetic_types": info.int16 and info.int64 and info.float16,
        "GL_EXT_integer_dot_product": info.integer_dot_product,
        "GL_EXT_shader_atomic_float": info.atomic_float_add,
    }
    bodies = {
        "GL_EXT_shader_8bit_storage": "bytes[i] = int8_t(i);",
        "GL_EXT_shader_16bit_storage": "halves[i] = float16_t(i);",
        "GL_KHR_shader_subgroup_arithmetic": "words[i] = subgroupAdd(i);",
        "GL_EXT_shader_explicit_arithmetic_types": "words[i] = uint(int16_t(i) * int64_t(i));",
        "GL_EXT_integer_dot_product": "words[i] = dotPacked4x8EXT(i, i);",
        "GL_EXT_shader_atomic_float": "atomicAdd(floats[0], 1.0);",
    }
    for extension in (name for name, present in needs.items() if present):
        blocks = {
            "words": "uint",
            "floats": "float",
            "bytes": "int8_t" if "8bit" in extension else "uint",
            "halves": "float16_t" if "16bit" in extension else "uint",
        }
        declared = "\n".join(
            f"layout(set = 0, binding = 0) buffer B{name} {{ {kind} {name}[]; }};"
            for name, kind in blocks.items()
        )
        source = f"""#version 460
        #extension {extension} : require
        #extension GL_EXT_shader_explicit_arithmetic_types : require
        layout(local_size_x = 32) in;
        {declared}
        void main() {{ uint i = gl_GlobalInvocationID.x; {bodies[extension]} }}
        """
        made = JobPass(name=extension, spirv=spirv(source), push=b"", groups=(1, 1, 1))
        job = Job(passes=(made,), bindings=("o",), scratch_bytes={})
        vulkan_runner.prepare([job])
        vulkan_runner.release([job])


# --- nothing to work with ----------------------------------------------------------------------


def _python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("error", "hint"),
    [("OSError", "libvulkan1"), ("ModuleNotFoundError", "pip install vulkan")],
)
def test_no_loader_or_package_comes_with_a_way_out(error: str, hint: str) -> None:
    code = f"""
import importlib
from tuner.errors import NoDeviceError

def missing(name):
    raise {error}("vulkan")

importlib.import_module = missing
try:
    import tuner.device
except NoDeviceError as error:
    print(error)
"""
    assert hint in _python(code)


def test_no_driver_comes_with_a_way_out() -> None:
    code = """
from tuner.device import list_devices, open_device
from tuner.errors import NoDeviceError

for attempt in (list_devices, open_device):
    try:
        print(attempt())
    except NoDeviceError as error:
        print(error)
"""
    nowhere = {"VK_DRIVER_FILES": "/nonexistent", "VK_ICD_FILENAMES": "/nonexistent"}
    said = _python(code, **nowhere).splitlines()
    assert len(said) == 2
    assert "mesa-vulkan-drivers" in said[-1]
    assert said[0] == "()" or "mesa-vulkan-drivers" in said[0]


def test_no_validation_layer_comes_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner import device as module

    monkeypatch.setattr(module, "has_validation_layer", lambda: False)
    with pytest.raises(NoDeviceError, match="vulkan-validationlayers"):
        module.open_device(validation=True)


def test_an_old_device_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner import device as module

    monkeypatch.setattr(module, "NEEDED_API", (9, 9))
    with pytest.raises(NoDeviceError, match=r"offers Vulkan 1\.\d+\.\d+, kernels need 9\.9"):
        module.open_device()


# --- the door to Vulkan ------------------------------------------------------------------------


def test_result_codes_become_errors_with_names() -> None:
    from tuner import _vk

    lost = _vk.error("vkQueueSubmit", -4)
    assert isinstance(lost, DeviceLostError)
    assert "vkQueueSubmit: VK_ERROR_DEVICE_LOST (-4): the driver gave the device up" in str(lost)
    with pytest.raises(VulkanError, match=r"vkX: VK_ERROR_UNKNOWN \(-13\)") as caught:
        _vk.check("vkX", -13)
    assert (caught.value.call, caught.value.name, caught.value.code) == (
        "vkX",
        "VK_ERROR_UNKNOWN",
        -13,
    )
    assert "unknown VkResult (-424242)" in str(_vk.error("vkX", -424242))
    assert _vk.check("vkX", 2, allow=(_vk.TIMEOUT,)) == 2


def test_structs_know_their_type_and_keep_what_they_point_to() -> None:
    from tuner import _vk

    info = _vk.struct(
        "VkApplicationInfo", pApplicationName=_vk.text("a name long enough to be noticed")
    )
    outer = _vk.struct("VkInstanceCreateInfo", pApplicationInfo=info)
    del info
    gc.collect()
    noise = [_vk.text("x" * 32) for _ in range(1000)]
    assert outer.sType == _vk.binding.VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO
    name = _vk.string(outer.pApplicationInfo.pApplicationName)
    assert name == "a name long enough to be noticed"
    assert len(noise) == 1000


def test_structs_by_value_and_arrays_keep_what_they_point_to() -> None:
    from tuner import _vk

    stage = _vk.struct("VkPipelineShaderStageCreateInfo", pName=_vk.text("a rather long name"))
    info = _vk.struct("VkComputePipelineCreateInfo", stage=stage)
    both = _vk.array("VkComputePipelineCreateInfo", [info, info])
    del stage, info
    gc.collect()
    noise = [_vk.text("y" * 18) for _ in range(1000)]
    assert _vk.string(both[1].stage.pName) == "a rather long name"
    assert len(noise) == 1000


def test_a_struct_that_the_binding_lacks_is_chained_and_read_back() -> None:
    from tuner import _vk

    values = (True, False, True)
    own = _vk.flags_struct(1000593000, values)
    head = _vk.struct("VkPhysicalDeviceFeatures2")
    assert _vk.chain([head, own]) == head
    assert head.pNext == _vk.ffi.cast("void *", own)
    assert own.sType == 1000593000
    assert _vk.flags(own, 3) == values


def test_the_feature_table_fits_the_binding() -> None:
    from tuner import _vk
    from tuner._features import BLOCKS

    for block in BLOCKS:
        if isinstance(block.struct, str):
            known = {name for name, _ in _vk.ffi.typeof(block.struct).fields}
            assert set(block.fields) <= known
            assert _vk.struct(block.struct).sType
    fields = [field for block in BLOCKS for field in block.fields]
    assert len(fields) == len(set(fields))


def test_only_what_is_there_is_enabled() -> None:
    from tuner import _vk
    from tuner._features import Features

    features = Features(
        {"shaderInt16": True, "shaderFloat16": True, "cooperativeMatrixReductions": True}, ()
    )
    core, v12, matrix2 = features.enabling()
    assert (core.features.shaderInt16, core.features.shaderInt64) == (1, 0)
    assert (v12.shaderFloat16, v12.shaderInt8) == (1, 0)
    assert _vk.flags(matrix2, 7) == (False, False, True, False, False, False, False)
    assert not core.features.robustBufferAccess
