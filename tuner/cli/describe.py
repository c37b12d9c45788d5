"""What there is: `devices`, `families` and `show`."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuner.cli import options
from tuner.cli.output import mebibytes, note, print_json, print_table, say

if TYPE_CHECKING:
    from tuner.device_info import DeviceInfo
    from tuner.evaluate.building import RenderedPass
    from tuner.kernels.base import Family, Values
    from tuner.problems import Problem
    from tuner.search import Task

FamilyName = Annotated[str, typer.Argument(metavar="FAMILY", help="A kernel family.")]


def devices(*, json: options.Json = False) -> None:
    """List the Vulkan devices, with their limits and features."""
    from tuner.device import list_devices

    found = list_devices()
    if json:
        print_json(found)
        return
    print_table(
        ("", "device", "kind", "driver", "subgroup", "shared", "memory", "features"),
        [
            (
                index,
                info.name,
                info.kind,
                info.driver,
                _subgroup_sizes(info),
                f"{info.max_shared_memory_bytes // 1024} KiB",
                mebibytes(max((h.size_bytes for h in info.memory_heaps), default=0)),
                ", ".join(_features(info)),
            )
            for index, info in enumerate(found)
        ],
    )


def _subgroup_sizes(info: DeviceInfo) -> str:
    low, high = info.min_subgroup_size, info.max_subgroup_size
    return str(info.subgroup_size) if low == high else f"{low} to {high}"


def _features(info: DeviceInfo) -> list[str]:
    dot = "integer dot product" + ("" if info.integer_dot_product_accelerated else " (emulated)")
    matrices = len(info.cooperative_matrix_shapes)
    return [
        word
        for word, present in (
            ("float16", info.float16),
            ("int8", info.int8),
            (dot, info.integer_dot_product),
            (f"cooperative matrix ({matrices} shapes)", info.cooperative_matrix),
            ("cooperative matrix 2", bool(info.cooperative_matrix2)),
            ("pipeline statistics", info.pipeline_executable_properties),
        )
        if present
    ]


def families(
    name: Annotated[
        str | None, typer.Argument(metavar="FAMILY", help="One family, in detail.")
    ] = None,
    *,
    device: options.Device = None,
    shape: options.Shape = None,
    model: options.Model = None,
    sequences: options.Sequences = None,
    context: options.Context = None,
    json: options.Json = False,
) -> None:
    """List the kernel families, or describe one.

    With --shape or --model, lists the families for problems of these kinds; one that cannot solve
    such a problem has 0 legal variants. With a name, prints the family's parameters and their
    values; those that no legal variant has on this device are in brackets.
    """
    from tuner import kernels
    from tuner.cli.variants import find_device
    from tuner.errors import NoDeviceError

    chosen = kernels.family(name) if name else None
    choice = options.ProblemChoice(shapes=shape, models=model, sequences=sequences, context=context)
    info: DeviceInfo | None = None
    try:
        info = find_device(device)
    except NoDeviceError as error:
        if device is not None:
            raise
        note(f"no device, so the size of the legal spaces is unknown: {error}")
    pairs = [(chosen, choice.one(chosen, info))] if chosen else _all_with_problems(choice, info)
    described = [_describe_family(family, info, problem) for family, problem in pairs]
    if json:
        print_json(described)
        return
    if name is not None:
        _print_family(described[0])
    if info is not None:
        say(f"Legal variants on {info.name}:")
    print_table(
        ("family", "for problem", "legal", "combinations", "parameters", "summary"),
        [
            (
                entry["family"],
                entry["problem"].label,
                "-" if entry["legal_variants"] is None else f"{entry['legal_variants']:,}",
                f"{entry['combinations']:,}",
                len(entry["parameters"]),
                entry["summary"],
            )
            for entry in described
        ],
        right=("legal", "combinations", "parameters"),
    )


def _all_with_problems(choice: options.ProblemChoice, info: DeviceInfo | None) -> list[Task]:
    """Every family with the first of its default problems, or with those of its kind that the user
    named."""
    from tuner import kernels

    found = [(family, choice.problems(family, info)) for family in kernels.families()]
    return [(f, p) for f, problems in found for p in (problems if choice.said else problems[:1])]


def _describe_family(family: Family, info: DeviceInfo | None, problem: Problem) -> dict[str, Any]:
    from math import prod

    from tuner.cli.variants import legal_values
    from tuner.kernels import space

    legal = None if info is None else space.legal(family, problem, info)
    return {
        "family": family.name,
        "summary": family.summary,
        "parameters": [
            {
                "name": parameter.name,
                "values": parameter.values,
                "help": parameter.help,
                "legal_values": None if legal is None else legal_values(legal, parameter.name),
            }
            for parameter in family.parameters
        ],
        "baseline": dict(family.baseline),
        "problem": problem,
        "device": None if info is None else info.name,
        "combinations": prod(len(parameter.values) for parameter in family.parameters),
        "legal_variants": None if legal is None else len(legal),
    }


def _print_family(described: dict[str, Any]) -> None:
    """The parameters with their values (those never legal here in brackets) and meaning."""
    say(f"{described['family']}: {described['summary']}")
    for parameter in described["parameters"]:
        legal = parameter["legal_values"]
        values = [
            str(value) if legal is None or value in legal else f"({value})"
            for value in parameter["values"]
        ]
        say()
        say(_wrapped(f"{parameter['name']} = {' | '.join(values)}", indent=""))
        say(_wrapped(parameter["help"], indent="    "))
    say()


def _wrapped(text: str, *, indent: str) -> str:
    return textwrap.fill(
        text, 96, initial_indent=indent, subsequent_indent="    ", break_on_hyphens=False
    )


def show(
    family: FamilyName,
    *,
    assignments: options.Set = None,
    pass_name: Annotated[
        str | None, typer.Option("--pass", metavar="NAME", help="Only this pass.")
    ] = None,
    device: options.Device = None,
    shape: options.Shape = None,
    model: options.Model = None,
    sequences: options.Sequences = None,
    context: options.Context = None,
    json: options.Json = False,
) -> None:
    """Print the GLSL of a variant, with its parameters as a header."""
    from tuner import kernels
    from tuner.cli.variants import chosen_variant, find_device
    from tuner.errors import UnknownNameError
    from tuner.evaluate import render_passes

    chosen = kernels.family(family)
    info = find_device(device)
    choice = options.ProblemChoice(shapes=shape, models=model, sequences=sequences, context=context)
    problem = choice.one(chosen, info)
    values = chosen_variant(chosen, assignments, problem, info)
    passes = render_passes(chosen, values, problem, info)
    names = [each.declared.name for each in passes]
    if pass_name is not None and pass_name not in names:
        raise UnknownNameError("pass of this variant", pass_name, names)
    passes = tuple(each for each in passes if pass_name in (None, each.declared.name))
    if json:
        shown = {"family": chosen.name, "problem": problem, "device": info.name, "values": values}
        print_json({**shown, "passes": [_pass_as_data(each) for each in passes]})
        return
    say(_header(chosen, values, problem, info))
    for each in passes:
        groups = " x ".join(map(str, each.declared.groups))
        size = each.declared.subgroup_size
        required = "" if size is None else f", subgroup size {size} required"
        say(f"\n// pass {each.declared.name}: {groups} workgroups{required}")
        say(each.rendered.text.rstrip())


def _pass_as_data(each: RenderedPass) -> dict[str, Any]:
    return {
        "name": each.declared.name,
        "groups": each.declared.groups,
        "subgroup_size": each.declared.subgroup_size,
        "glsl": each.rendered.text,
    }


def _header(family: Family, values: Values, problem: Problem, info: DeviceInfo) -> str:
    lines = [f"{family.name} for {problem.label} on {info.name} ({info.driver})"]
    lines += [f"  --set {name}={value}" for name, value in family.meaningful(values).items()]
    return "\n".join(f"// {line}" for line in lines)
