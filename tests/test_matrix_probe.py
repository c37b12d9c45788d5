"""The element mapping of matrices, as probed on the device under test."""

from __future__ import annotations

import itertools

import pytest

from tuner.device_info import Fragment
from tuner.runner.vulkan import VulkanRunner


def places(fragment: Fragment) -> set[tuple[int, int]]:
    lanes = zip(fragment.lane_row, fragment.lane_column, strict=True)
    elements = zip(fragment.element_row, fragment.element_column, strict=True)
    return {
        (row + more_rows, column + more_columns)
        for (row, column), (more_rows, more_columns) in itertools.product(lanes, list(elements))
    }


@pytest.mark.usefixtures("matrix_shape")
def test_lanes_hold_every_element_and_no_other(vulkan_runner: VulkanRunner) -> None:
    info = vulkan_runner.info
    for layout in info.matrix_layouts:
        m, n, k = layout.shape.m, layout.shape.n, layout.shape.k
        operands = ((layout.a, m, k), (layout.b, k, n), (layout.c, m, n))
        for fragment, rows, columns in operands:
            assert len(fragment.lane_row) == info.subgroup_size
            assert places(fragment) == set(itertools.product(range(rows), range(columns)))


def test_the_mapping_of_a_device_is_the_same_each_time(vulkan_runner: VulkanRunner) -> None:
    from tuner.compile import Compiler
    from tuner.runner.matrix_probe import probe_layouts

    assert probe_layouts(vulkan_runner, Compiler()) == vulkan_runner.info.matrix_layouts
