"""From what the user said to a device and a variant: what `--device` and `--set` mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.device_info import DeviceInfo
    from tuner.kernels.base import Family, Value, Values
    from tuner.kernels.selection import Variants
    from tuner.problems import Problem


def find_device(selector: str | None) -> DeviceInfo:
    """The snapshot of the device that is meant; it is opened only where it must be probed, which a
    worker process does.

    Raises:
        NoDeviceError: no driver, or none or several devices that match.
    """
    from tuner.device import list_devices, select

    found = list_devices()
    info = found[select(found, selector)]
    if not info.cooperative_matrix:
        return info
    # What is legal depends on the element mapping of its matrices, which only kernels can tell.
    from tuner.cli.session import opened

    with opened(selector) as device:
        return device.info


def starting_variant(family: Family, problem: Problem, device: DeviceInfo) -> Values:
    """The first known-good variant that is legal here, else the first legal one, else the baseline.

    This is what `--set` changes. Of a CPU it is one for any device: the others are good on a GPU.
    """
    from tuner.kernels import space

    known = (*family.starts, *family.portable, family.baseline)
    for values in (*family.portable, *known) if device.is_cpu else known:
        if not space.reasons(family, values, problem, device):
            return values
    legal = space.legal(family, problem, device)
    return legal[0] if legal else family.baseline


def chosen_variant(
    family: Family, assignments: Sequence[str] | None, problem: Problem, device: DeviceInfo
) -> Values:
    """The starting variant changed by assignments "name=value".

    Raises:
        UnknownNameError: no such parameter or value; names the nearest.
        IllegalVariantError: with every reason, and the nearest legal variant.
    """
    from tuner.errors import IllegalVariantError
    from tuner.kernels import selection, space

    base = starting_variant(family, problem, device)
    values = space.parse_values(family, assignments or (), base)
    reasons = space.reasons(family, values, problem, device)
    if not reasons:
        return values
    legal = space.legal(family, problem, device)
    if legal:
        nearest = selection.nearest_legal(values, legal)
        changes = {name: value for name, value in nearest.items() if values.get(name) != value}
        reasons = (*reasons, f"nearest legal: change to {space.describe(changes)}")
    raise IllegalVariantError(family.name, describe(family, values), reasons)


def describe(family: Family, values: Values) -> str:
    """The variant as `--set` takes it, without the parameters that mean nothing in it."""
    from tuner.kernels import space

    return space.describe(family.meaningful(values))


def legal_values(variants: Variants, name: str) -> list[Value]:
    """The values of the parameter `name` that occur in any of the variants, in declared order."""
    import numpy as np

    column = list(variants.domains).index(name)
    return [variants.domains[name][code] for code in np.unique(variants.codes[:, column])]
