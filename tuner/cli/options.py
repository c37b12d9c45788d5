"""Options that several commands share, and the problems that they choose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tuner.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.device_info import DeviceInfo
    from tuner.kernels.base import Family
    from tuner.problems import Problem

Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="INDEX|NAME|UUID",
        help="Index of a device, part of its name, or start of its UUID. Default: a discrete GPU, "
        "else an integrated one, else a CPU driver.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set a parameter; the others keep the values of a known-good variant. Repeatable; or "
        "several in quotes, as tune prints a variant.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="NAME=VALUE",
        help="Take only variants with this value. Repeatable; values of the same parameter are "
        "alternatives.",
    ),
]
RESULTS = Path("results")
PUBLISHED = "published"
"""In a clone, the folder of committed results in that of the user's own."""
Out = Annotated[
    Path,
    typer.Option(
        "--out", metavar="FOLDER", help="Folder of results; each device has its own in it."
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="FOLDER",
        help="Folder of compiled kernels. Default: a folder in the user's cache.",
    ),
]

InProcess = Annotated[
    bool,
    typer.Option(
        "--in-process",
        help="Do without a worker process: a kernel that crashes or hangs then ends the command.",
    ),
]

SHAPES_NAMED = 4
"""Of several problems where one is needed, so many are named."""
DEFAULT = "default"
"""The workload that stands for the default problems of a family on the device at hand."""
Shape = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="SHAPE",
        help="A problem: SEQUENCESxCONTEXT:hQUERY/KV:dHEAD[:bBLOCK][:LENGTHS], such as "
        "8x16k:h32/8:d128, or KIND:NAME=VALUE,… Repeatable.",
    ),
]
Model = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="NAME", help="The attention of a model. Repeatable."),
]
Sequences = Annotated[
    str | None,
    typer.Option(
        "--sequences",
        metavar="N,…",
        help="With --model: numbers of sequences in a batch. Default: 1; for tune 1,8.",
    ),
]
Context = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="N,…",
        help="With --model: context lengths in tokens. Default: 4096; for verify 1024.",
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        metavar="SPREAD",
        help="With --model: how lengths differ in a batch: equal, uniform:LO, lognormal:LO or "
        "straggler:SHORT. Default: equal.",
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        "--block-size",
        metavar="N",
        min=1,
        help="With --model: tokens in a cache block. Default: 16.",
    ),
]
Workload = Annotated[
    str | None,
    typer.Option(
        "--workload", metavar="FILE|NAME", help="Problems from a TOML file, or a named workload."
    ),
]


T = TypeVar("T", bound=str)


def one_of(kind: str, text: str, choices: Sequence[T]) -> T:
    """The choice that the user's text is.

    Raises:
        UnknownNameError: it is none; names the nearest.
    """
    for choice in choices:
        if choice == text:
            return choice
    raise UnknownNameError(kind, text, choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemChoice:
    """What the user said of the problems; nothing said means the workload `default`.

    `sequences`, `context`, `lengths` and `block_size` are of the models; where they are None the
    usual ones count.

    Raises:
        UsageError: one of these four without a model: it would have no effect.
    """

    shapes: list[str] | None = None
    models: list[str] | None = None
    sequences: str | None = None
    context: str | None = None
    lengths: str | None = None
    block_size: int | None = None
    workload: str | None = None
    usual_sequences: str = "1"
    usual_context: str = "4096"

    def __post_init__(self) -> None:
        if self.models:
            return
        for option, value in (
            ("--sequences", self.sequences),
            ("--context", self.context),
            ("--lengths", self.lengths),
            ("--block-size", self.block_size),
        ):
            if value is not None:
                raise UsageError(
                    f"{option} {value} goes with --model, and no model is given: name one, or say "
                    "it in --shape or in a workload file"
                )

    @property
    def said(self) -> bool:
        """Whether the user chose at all."""
        return bool(self.shapes or self.models or self.workload)

    def problems(self, family: Family, device: DeviceInfo | None) -> tuple[Problem, ...]:
        """The problems for a family, each once, in the order of shapes, models, workload.

        What the user named but is of another kind is left out; where nothing is said, these are the
        default problems of the family's kind that it solves on the device.

        Raises:
            UsageError: something in what the user said is wrong.
        """
        found = self.named()
        if self.workload == DEFAULT or not self.said:
            found += _defaults(family, device)
        return tuple(dict.fromkeys(p for p in found if type(p) is family.problem_type))

    def required(self, family: Family, device: DeviceInfo | None) -> tuple[Problem, ...]:
        """As `problems`, for a command about this family alone.

        Raises:
            UsageError: the family solves none of what the user named.
        """
        from tuner import kernels

        found = self.problems(family, device)
        if not found:
            given = tuple({type(problem) for problem in self.named()})
            others = kernels.families()
            able = [each.name for each in others if each.problem_type in given]
            raise UsageError(
                f"{family.name} solves problems of the kind {family.kind}, and none of these was "
                f"given: write --shape {family.kind}:NAME=VALUE,…, or choose a family that solves "
                f"what was given: {', '.join(able)}"
            )
        return found

    def one(self, family: Family, device: DeviceInfo | None) -> Problem:
        """The one problem chosen for a family; the first of its defaults if nothing is said.

        Raises:
            UsageError: several are, or none that the family solves.
        """
        from tuner import shapes

        found = self.required(family, device)
        if self.said and len(found) > 1:
            texts = [shapes.format_shape(problem) for problem in found[:SHAPES_NAMED]]
            more = " …" if len(found) > SHAPES_NAMED else ""
            raise UsageError(
                f"{len(found)} problems where one is needed: give one of them, --shape "
                f"{' or --shape '.join(texts)}{more}"
            )
        return found[0]

    def named(self) -> list[Problem]:
        """What the user named, of every kind.

        Raises:
            UsageError: something in it is wrong.
        """
        from tuner import shapes, workloads

        sequences = self.usual_sequences if self.sequences is None else self.sequences
        context = self.usual_context if self.context is None else self.context
        found: list[Problem] = [shapes.parse_shape(text) for text in self.shapes or ()]
        for name in self.models or ():
            found += workloads.model_problems(
                name,
                sequences=shapes.parse_counts("--sequences", sequences),
                contexts=shapes.parse_counts("--context", context),
                lengths="equal" if self.lengths is None else self.lengths,
                block_size=16 if self.block_size is None else self.block_size,
            )
        if self.workload not in (None, DEFAULT):
            found += workloads.load_workload(self.workload)
        return found


def _defaults(family: Family, device: DeviceInfo | None) -> tuple[Problem, ...]:
    """The default problems of the family's kind: those that it solves, or all if that is none."""
    from tuner import workloads
    from tuner.kernels import space

    found = workloads.default_problems(family.kind, on_cpu=device is None or device.is_cpu)
    if device is None:
        return found
    return tuple(p for p in found if not space.refusals(family, p, device)) or found
