"""Options that several commands share, and the problems that they choose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.errors import UsageError

if TYPE_CHECKING:
    from tuner.problems import PagedDecodeProblem

Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="INDEX|NAME|UUID",
        help="Device by index, part of its name, or UUID; default: discrete before integrated "
        "before CPU.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A parameter value, on top of the nearest known-good variant; repeatable.",
    ),
]
RESULTS = Path("results")
Out = Annotated[
    Path, typer.Option("--out", metavar="FOLDER", help="Results folder; one folder a device in it.")
]
Cache = Annotated[
    Path | None,
    typer.Option("--cache", metavar="FOLDER", help="Compile cache; default: in the user's cache."),
]

InProcess = Annotated[
    bool,
    typer.Option(
        "--in-process",
        help="Do device work in this process: a kernel that crashes or hangs takes it down.",
    ),
]

_PROBLEMS = "Problems"
Shape = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="SHAPE",
        help="SEQUENCESxCONTEXT:hQUERY/KV:dHEAD[:bBLOCK][:LENGTHS], such as 8x16k:h32/8:d128; "
        "repeatable.",
    ),
]
Model = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="NAME", help="A model's attention geometry; repeatable."),
]
Sequences = Annotated[
    str, typer.Option("--sequences", metavar="N,…", help="With --model: sequences of a batch.")
]
Context = Annotated[
    str, typer.Option("--context", metavar="N,…", help="With --model: context lengths in tokens.")
]
Lengths = Annotated[
    str,
    typer.Option(
        "--lengths",
        metavar="SPREAD",
        help="With --model: equal, uniform:LO, lognormal:LO or straggler:SHORT.",
    ),
]
BlockSize = Annotated[
    int, typer.Option("--block-size", min=1, help="With --model: tokens of a cache block.")
]
Workload = Annotated[
    str | None,
    typer.Option("--workload", metavar="FILE|NAME", help="A TOML file, or a named workload."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemChoice:
    """What the user said of the problems; nothing said means the workload `default`."""

    shapes: list[str] | None = None
    models: list[str] | None = None
    sequences: str = "1,8"
    context: str = "4096"
    lengths: str = "equal"
    block_size: int = 16
    workload: str | None = None

    @property
    def said(self) -> bool:
        """Whether the user chose at all."""
        return bool(self.shapes or self.models or self.workload)

    def problems(self, *, on_cpu: bool) -> tuple[PagedDecodeProblem, ...]:
        """The problems, each once, in the order of shapes, models, workload.

        Raises:
            UsageError: something in what the user said is wrong.
        """
        from tuner import workloads

        found = [workloads.parse_shape(text) for text in self.shapes or ()]
        for name in self.models or ():
            found += workloads.model_problems(
                name,
                sequences=workloads.parse_counts("--sequences", self.sequences),
                contexts=workloads.parse_counts("--context", self.context),
                lengths=self.lengths,
                block_size=self.block_size,
            )
        if self.workload or not found:
            found += workloads.load_workload(self.workload or "default", on_cpu=on_cpu)
        return tuple(dict.fromkeys(found))

    def one(self, *, on_cpu: bool) -> PagedDecodeProblem:
        """The one problem chosen; the first of the default workload if nothing is said.

        Raises:
            UsageError: several are.
        """
        found = self.problems(on_cpu=on_cpu)
        if self.said and len(found) > 1:
            raise UsageError(
                f"{len(found)} problems where one is needed: give one --shape, or one --model with "
                "one number in --sequences and in --context"
            )
        return found[0]
