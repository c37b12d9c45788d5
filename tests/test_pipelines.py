"""Jobs made ready: what is refused beforehand, what reaches the driver, what it tells."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from tests.small_kernels import COUNT, executed, job, kernel, operands, outputs, run, spirv, step
from tuner.errors import UsageError, VulkanError
from tuner.runner.protocol import Job, JobPass, OutputSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.runner._programs import Program, ProgramKey
    from tuner.runner.vulkan import VulkanRunner


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"subgroup_size": 4096}, "subgroup size 4096, the device offers"),
        ({"groups": (1, 2**31 + 1, 1)}, "workgroups, the device takes"),
    ],
)
def test_what_breaks_a_limit_is_refused_with_the_limit(
    loaded_runner: VulkanRunner, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        loaded_runner.prepare([job(step("scale", **fields))])


def test_more_buffers_than_a_pipeline_may_have_are_refused(loaded_runner: VulkanRunner) -> None:
    limit = loaded_runner.info.max_storage_buffers
    if limit > 10_000:
        pytest.skip(f"this device takes {limit} storage buffers")
    names = tuple(f"b{number}" for number in range(limit + 1))
    made = msgspec.structs.replace(job(step("scale")), bindings=names)
    with pytest.raises(UsageError, match=f"{limit + 1} storage buffers, the device takes {limit}"):
        loaded_runner.prepare([made])


@pytest.mark.parametrize("code", [b"", b"not SPIR-V at all!!", b"\x03\x02\x23\x07x"])
def test_bytes_that_are_no_spirv_never_reach_the_driver(
    loaded_runner: VulkanRunner, code: bytes
) -> None:
    made = JobPass(name="junk", spirv=code, push=b"", groups=(1, 1, 1))
    with pytest.raises(UsageError, match="no SPIR-V"):
        loaded_runner.prepare([Job(passes=(made,), bindings=("a",), scratch_bytes={})])


def test_a_binding_without_a_buffer_is_named(loaded_runner: VulkanRunner) -> None:
    made = msgspec.structs.replace(job(step("scale")), bindings=("a", "t", "elsewhere"))
    loaded_runner.prepare([made])
    with pytest.raises(UsageError, match="'elsewhere'"):
        executed(loaded_runner, made)
    loaded_runner.release([made])


def test_a_required_subgroup_size_reaches_the_kernel(loaded_runner: VulkanRunner) -> None:
    if not loaded_runner.info.subgroup_size_control:
        pytest.skip("this device has no control over the subgroup size")
    source = """#version 460
    #extension GL_KHR_shader_subgroup_basic : require
    layout(local_size_x = 64) in;
    layout(set = 0, binding = 0, std430) buffer O { uint o[]; };
    void main() { o[gl_GlobalInvocationID.x] = gl_SubgroupSize; }
    """
    loaded_runner.load("sizes", {}, {"o": OutputSpec(shape=(64,), dtype="uint32")})
    for size in {loaded_runner.info.min_subgroup_size, loaded_runner.info.max_subgroup_size}:
        asking = JobPass(
            name="ask", spirv=spirv(source), push=b"", groups=(1, 1, 1), subgroup_size=size
        )
        made = Job(passes=(asking,), bindings=("o",), scratch_bytes={})
        assert (run(loaded_runner, made, "sizes").outputs["o"] == size).all()
    loaded_runner.unload("sizes")


def test_jobs_that_run_the_same_code_share_its_pipeline(
    loaded_runner: VulkanRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, made = loaded_runner._pipelines.programs, []
    make = programs._make
    monkeypatch.setattr(programs, "_make", lambda key: made.append(key) or make(key))
    before = len(programs)
    first, second = job(step("scale", factor=3.0)), job(step("scale", count=64, factor=5.0))
    both = job(step("stage"), step("scale", factor=7.0), scratch=2 * COUNT)
    for each in (first, second, both):
        loaded_runner.prepare([each])
    assert [key.spirv for key in made] == [kernel("scale"), kernel("stage")]
    loaded_runner.release([first])
    loaded_runner.release([both])
    assert len(programs) == before + 1
    np.testing.assert_array_equal(
        executed(loaded_runner, second).outputs["o"][:64], 5.0 * operands()["a"][:64]
    )
    loaded_runner.release([second])
    assert len(programs) == before


def test_what_changes_a_pipeline_keeps_jobs_apart(loaded_runner: VulkanRunner) -> None:
    info = loaded_runner.info
    plain = step("scale")
    others = [msgspec.structs.replace(plain, push=plain.push + bytes(4))]
    if info.subgroup_size_control:
        others.append(msgspec.structs.replace(plain, subgroup_size=info.max_subgroup_size))
    jobs = [job(each) for each in (plain, *others)]
    jobs.append(msgspec.structs.replace(jobs[0], bindings=("a", "t", "o", "a")))
    for each in jobs:
        loaded_runner.prepare([each])
    assert len(loaded_runner._pipelines.programs) == len(jobs)
    for each in jobs:
        loaded_runner.release([each])


def test_threads_that_prepare_the_same_code_at_once_share_it(
    loaded_runner: VulkanRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, destroyed = loaded_runner._pipelines.programs, []
    make, destroy = programs._make, programs._destroy
    everyone = Barrier(4, timeout=60)

    def make_together(key: ProgramKey) -> Program:
        everyone.wait()
        return make(key)

    monkeypatch.setattr(programs, "_make", make_together)
    monkeypatch.setattr(programs, "_destroy", lambda old: destroyed.append(old) or destroy(old))
    jobs = [job(step("loop", factor=float(number))) for number in range(4)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(loaded_runner.prepare, [[each] for each in jobs]))
    assert len(programs) == 1
    assert len(destroyed) == len(jobs) - 1
    for each in jobs:
        executed(loaded_runner, each)
        loaded_runner.release([each])
    assert len(programs) == 0


def test_a_job_that_the_driver_refuses_leaves_no_program_behind(
    loaded_runner: VulkanRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = loaded_runner._pipelines.programs
    make = programs._make

    def refuse(key: ProgramKey) -> Program:
        if key.spirv == kernel("finish"):
            raise VulkanError("vkCreateComputePipelines", "VK_ERROR_UNKNOWN", -13)
        return make(key)

    monkeypatch.setattr(programs, "_make", refuse)
    with pytest.raises(VulkanError):
        loaded_runner.prepare([job(step("scale")), job(step("stage"), step("finish"))])
    assert len(programs) == 0
    with pytest.raises(UsageError, match="not prepared"):
        executed(loaded_runner, job(step("scale")))


def test_the_width_of_a_workgroup_is_read_from_spirv() -> None:
    from tuner.runner._programs import local_size_x

    assert local_size_x(kernel("scale")) == 64
    assert local_size_x(kernel("scale")[:20]) == 1


def test_statistics_are_translated_whatever_their_format(
    loaded_runner: VulkanRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner import _vk

    told = [("Register Count", 2, "u64", 96), ("Spilled", 0, "b32", 1), ("Waves", 3, "f64", 2.5)]

    def statistics(_device: object, _info: object, count: Any, items: Any) -> int:
        count[0] = len(told)
        for number, (name, form, field, value) in enumerate(told if items else []):
            assert items[number].sType
            items[number].name = name.encode()
            items[number].format = form
            setattr(items[number].value, field, value)
        return 0

    vocal = msgspec.structs.replace(loaded_runner.info, pipeline_executable_properties=True)
    monkeypatch.setattr(loaded_runner._device, "info", vocal)
    monkeypatch.setattr(loaded_runner._device, "procedure", lambda _name: statistics)
    kept = loaded_runner._pipelines.programs._statistics(_vk.NULL)
    assert kept == {"Register Count": 96, "Spilled": 1, "Waves": 2.5}


def test_the_drivers_statistics_are_kept(loaded_runner: VulkanRunner) -> None:
    if not loaded_runner.info.pipeline_executable_properties:
        pytest.skip("this driver has no statistics")
    scale = job(step("scale"))
    (prepared,) = loaded_runner.prepare([scale])
    (statistics,) = prepared.statistics
    loaded_runner.release([scale])
    assert statistics.name == "scale"
    assert statistics.statistics


def test_pipelines_are_kept_for_the_next_process(
    open_runner: Callable[..., VulkanRunner], tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    for _ in range(2):
        runner = open_runner(cache_dir=folder)
        runner.load("w", operands(), outputs())
        output = run(runner, job(step("scale"))).outputs["o"]
        np.testing.assert_array_equal(output, 2.0 * operands()["a"])
        runner.close()
        (kept,) = folder.iterdir()
        assert kept.stat().st_size > 16


def test_a_damaged_or_unwritable_cache_does_no_harm(
    open_runner: Callable[..., VulkanRunner], tmp_path: Path
) -> None:
    open_runner(cache_dir=tmp_path).close()
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:20] + b"junk")
    runner = open_runner(cache_dir=tmp_path)
    runner.prepare([job(step("scale"))])
    runner.close()
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")
    open_runner(cache_dir=blocked).close()
