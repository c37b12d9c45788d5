"""What parent and worker say to each other: plain structs, and errors that survive the journey.

The parent begins with `Start` and is answered with `Hello`. After that `OpenChannel` gives the
worker another socket, on which each request is answered by a `Reply`, or by one for each of its
parts.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from tuner import errors
from tuner.device_info import DeviceInfo
from tuner.errors import TunerError
from tuner.records import Transfer
from tuner.runner._worker_arrays import Packed
from tuner.runner.protocol import Job, MeasurePlan, OutputSpec, Prepared


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what the parent says; the tag is the name of the class."""


class Start(Message, frozen=True, kw_only=True):
    """Make a runner: `factory` is "module:callable", `arguments` its keyword arguments.

    `known` is one more of these, the snapshot of an earlier worker's device, if there was one.
    """

    factory: str
    arguments: dict[str, Any]
    known: DeviceInfo | None = None


class OpenChannel(Message, frozen=True, kw_only=True):
    """Serve the socket whose descriptor comes with the message."""


class Close(Message, frozen=True, kw_only=True):
    """Close the runner, answer, and end."""


class Load(Message, frozen=True, kw_only=True):
    """`Runner.load`; the arrays may lie in shared memory."""

    name: str
    inputs: Packed
    outputs: dict[str, OutputSpec]
    copies: int


class Unload(Message, frozen=True, kw_only=True):
    """`Runner.unload`."""

    name: str


class Prepare(Message, frozen=True, kw_only=True):
    """`Runner.prepare`; answered by `Numbered` for each job, up to an error."""

    jobs: tuple[Job, ...]


class Release(Message, frozen=True, kw_only=True):
    """`Runner.release` of jobs by their numbers, each so many times."""

    times: dict[int, int]


class Execute(Message, frozen=True, kw_only=True):
    """`Runner.execute`; answered by `Executed` for each, up to an error or a broken guard.

    A job that is prepared goes by its number.
    """

    assignments: tuple[tuple[Job | int, str], ...]


class Measure(Message, frozen=True, kw_only=True):
    """`Runner.measure`; a job that is prepared goes by its number."""

    job: Job | int
    workload: str
    plan: MeasurePlan


class ReadBandwidth(Message, frozen=True, kw_only=True):
    """`Runner.read_bandwidth`."""

    nbytes: int
    samples: int


class BandwidthCurve(Message, frozen=True, kw_only=True):
    """`Runner.bandwidth_curve`."""

    transfer: Transfer
    sizes: tuple[int, ...]


class EmptyLaunch(Message, frozen=True, kw_only=True):
    """`Runner.empty_launches`."""

    passes: int


class KeepWarm(Message, frozen=True, kw_only=True):
    """`Runner.keep_warm`."""

    load_ms: float


class Observe(Message, frozen=True, kw_only=True):
    """`Runner.observe`."""


class ValidationMessages(Message, frozen=True, kw_only=True):
    """What the validation layer has said so far."""


Request = (
    Load
    | Unload
    | Prepare
    | Release
    | Execute
    | Measure
    | ReadBandwidth
    | BandwidthCurve
    | EmptyLaunch
    | KeepWarm
    | Observe
    | ValidationMessages
)
Control = OpenChannel | Close


class Hello(msgspec.Struct, frozen=True):
    """The worker is ready."""

    info: DeviceInfo


class Numbered(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared job, and the number that stands for it from now on: its SPIR-V may be large."""

    number: int
    prepared: Prepared


class Executed(msgspec.Struct, frozen=True, kw_only=True):
    """An `Execution` whose arrays may lie in shared memory."""

    outputs: Packed
    broken_guards: tuple[str, ...]
    dirty_counters: tuple[str, ...] = ()


class Raised(msgspec.Struct, frozen=True, kw_only=True):
    """An error of the package's: the class's name, the message, the attributes."""

    kind: str
    message: str
    facts: dict[str, Any]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A result, to be decoded as what the request asks for, or the error that was raised."""

    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    raised: Raised | None = None


def encode(message: object) -> bytes:
    """Any of the structs as MessagePack; what it has no form for becomes a number or text."""
    return msgspec.msgpack.encode(message, enc_hook=_plain)


def decode(body: bytes | bytearray | msgspec.Raw, kind: Any) -> Any:
    """What `encode` made of a value of that type or union."""
    return _decoder(kind).decode(body)


def reply_with(result: object) -> Reply:
    """The reply to a request that succeeded."""
    return Reply(result=msgspec.Raw(encode(result)))


def raised(error: TunerError) -> Raised:
    """The error as a message; a class from elsewhere becomes its nearest base in `tuner.errors`."""
    kind = next(
        each.__name__
        for each in type(error).__mro__
        if getattr(errors, each.__name__, None) is each
    )
    return Raised(kind=kind, message=str(error), facts=dict(error.__dict__))


def raised_error(said: Raised) -> TunerError:
    """The error that `raised` was given: its class, its text, its attributes."""
    kind = getattr(errors, said.kind)
    error: TunerError = kind.__new__(kind, said.message)
    error.__dict__.update(said.facts)
    return error


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Kept, since to make one for all requests takes longer than most of them."""
    return msgspec.msgpack.Decoder(kind)


def _plain(value: object) -> object:
    """NumPy's scalars as Python's; anything else as text."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)
