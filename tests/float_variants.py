"""Problems and variants of the decode families over caches of floats."""

from __future__ import annotations

from typing import Any

from tests import decode_cases
from tests.family_kernels import variant
from tests.golden_floats import F16, F32
from tuner.device_info import DeviceInfo
from tuner.kernels.base import Family, Values
from tuner.problems import PagedDecodeProblem

FAMILIES = {"f32": F32, "f16": F16}
Geometry = tuple[int, int, int, int]
"""Head size, block size, query heads per KV head, KV heads."""


def problem(geometry: Geometry = (32, 16, 3, 2), **changes: Any) -> PagedDecodeProblem:
    return decode_cases.problem(*geometry, **changes)


WHOLE = "token_lanes=8 value_lanes=1"
SLICED = "token_lanes=8 value_lanes=1 prefetch=1 subgroups=4 head_slices=2 split=count:4"


def chosen(text: str, device: DeviceInfo) -> tuple[Family, Values]:
    """A family and a variant of it from "f16 packed_f16 token_lanes=8 …"."""
    cache, rest = text.split(" ", 1)
    return FAMILIES[cache], variant(FAMILIES[cache], rest, device)
