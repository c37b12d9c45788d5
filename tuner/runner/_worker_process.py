"""The parent's side of one worker: start it, ask it, notice its death and whose fault that was."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tuner.device_info import DeviceInfo
from tuner.errors import DeviceLostError, RunTimeoutError, TunerError, WorkerDiedError
from tuner.runner._worker_channel import Channel, ClosedError
from tuner.runner._worker_messages import (
    Close,
    Hello,
    OpenChannel,
    Prepare,
    Reply,
    Start,
    decode,
    raised_error,
)
from tuner.runner.protocol import JobKey

_LAST_LINES, _LAST_CHARACTERS = 4, 400
_SAID_BYTES = 1 << 20
"""What a worker may write to its standard error before what is old is thrown away."""
_ENOUGH = 0.5
"""Part of its time that a call which did not end must have had to itself to be known as guilty."""
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM})
"""What ends a process for no reason of its own: sent by a person or a system short of memory."""
_EXIT_S = 5.0
"""How long a process may take to be gone once it has closed its sockets or was killed."""


_How = Literal["said", "late", "ended", "unread", "beside", "given up"]
"""How a call notices that the worker is lost: the runner said so in its reply, or in a reply beside
a launch; no reply came in time; the process ended, perhaps before it had read the request; an
interrupt."""


class LostError(Exception):
    """The worker is gone in the middle of a call. `guilty`: it is known to be gone because of it.

    `error` is what to tell the caller. `given_up`: nobody wants results any more.
    """

    def __init__(self, error: TunerError, *, guilty: bool, given_up: bool = False) -> None:
        self.error, self.guilty, self.given_up = error, guilty, given_up
        super().__init__(str(error))


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """The number that stands for a job in its worker, and how often it was prepared there."""

    number: int
    times: int


@dataclass(frozen=True, slots=True)
class Step:
    """A part of a request: what it is, for messages, and how long it may take."""

    what: str
    seconds: float


@dataclass(slots=True, eq=False)
class _Call:
    """A request under way, since `begun`: the step that it is at, and when that has to be done."""

    step: Step
    begun: float
    deadline: float

    @classmethod
    def at(cls, step: Step) -> _Call:
        """A call that begins now."""
        now = time.monotonic()
        return cls(step, now, now + step.seconds)

    def enter(self, step: Step) -> None:
        """Go on to a step, which begins now."""
        self.step, self.deadline = step, time.monotonic() + step.seconds

    def may_delay(self, other: _Call) -> bool:
        """Whether it may be why `other` does not end: it is there for most of that one's time."""
        return time.monotonic() - self.begun > _ENOUGH * other.step.seconds


class Worker:
    """One worker process. Any number of threads may `ask` at once.

    A worker that is gone stays gone: every call that was under way, and every later one, raises
    `LostError`. Guilty is, once and for all,

    - a launch that has lost the device;
    - a call whose deadline has passed, if no other was there for long enough to delay it;
    - the only call under way when the process ended by itself, if that had read the request.

    Otherwise none is known to be: of several calls, or of a process that was killed from outside.

    Attributes:
        info: the snapshot of its device.
        dismissed: whether it was closed while it was alive: such a worker is not lost.
        loaded: names of the workloads that are resident in it; for the owner's use.
        prepared: the jobs that are prepared in it, by their keys; for the owner's use.
    """

    def __init__(self, start: Start, *, seconds: float) -> None:
        """Start a process and wait for its runner.

        Raises:
            WorkerDiedError, RunTimeoutError: no process starts, or it ends, or it takes too long.
            TunerError: what making the runner raises.
        """
        self.dismissed = False
        self.loaded: set[str] = set()
        self.prepared: dict[JobKey, PreparedJob] = {}
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        self._free: list[Channel] = []
        self._death: TunerError | None = None
        self._culprit: _Call | None = None
        self._given_up = False
        self._control_lock = threading.Lock()
        try:
            self._process, self._control, self._said = _spawn()
        except OSError as error:
            raise WorkerDiedError(f"no worker process starts: {error.strerror}") from error
        try:
            self.info = self._hello(start, seconds)
        except BaseException:
            self._stop()
            raise

    @property
    def alive(self) -> bool:
        """Whether the process runs and has not been given up."""
        return self._death is None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ask(
        self,
        request: Any,
        kind: Any,
        *,
        what: str,
        seconds: float,
        descriptor: int | None = None,
    ) -> Any:
        """Send a request and wait for its result, a `kind`. Raises as `ask_each`."""
        steps = [Step(what, seconds)]
        ((result, _),) = self.ask_each(request, kind, steps, descriptor=descriptor)
        return result

    def ask_each(
        self,
        request: Any,
        kind: Any,
        steps: Sequence[Step],
        *,
        descriptor: int | None = None,
    ) -> Iterator[tuple[Any, int | None]]:
        """Send a request of several steps; yield the result of each, a `kind`, with the descriptor
        that came with it.

        A step has its time from the end of the one before. Who does not fetch all results has to
        close the worker.

        Raises:
            LostError: the worker is gone, or gone from now on.
            TunerError: what the worker's runner raised, its last word; the worker lives.
        """
        if not steps:
            return
        call = self._begin(steps[0])
        try:
            with self._channel(call.deadline) as channel:
                channel.send(request, descriptor=descriptor, deadline=call.deadline)
                for step in steps:
                    call.enter(step)
                    reply, came = channel.receive(Reply, deadline=call.deadline)
                    yield self._result(call, request, reply, kind), came
        except TimeoutError:
            error = RunTimeoutError(call.step.what, call.step.seconds)
            raise self._lost(call, "late", error) from None
        except ClosedError as closed:
            raise self._lost(call, "unread" if closed.unread else "ended") from None
        except (LostError, TunerError, GeneratorExit):
            raise
        except BaseException:
            # An interrupt: nobody will fetch the reply any more.
            self._lost(call, "given up", WorkerDiedError(f"given up during {call.step.what}"))
            raise
        finally:
            with self._lock:
                self._calls.discard(call)

    def close(self, seconds: float) -> None:
        """Let the worker tear its runner down; kill it if that takes longer. Idempotent.

        Calls that are under way lose their worker, and none of them is guilty.
        """
        deadline = time.monotonic() + seconds
        with self._lock:
            orderly = self.alive
            self.dismissed = self.dismissed or orderly
            self._death = self._death or WorkerDiedError("the worker was closed")
        if orderly:
            with contextlib.suppress(ClosedError, TimeoutError), self._control_lock:
                self._control.send(Close(), deadline=deadline)
                self._control.receive(Reply, deadline=deadline)
        with self._lock:
            self._stop()

    def _hello(self, start: Start, seconds: float) -> DeviceInfo:
        what, deadline = "starting the worker", time.monotonic() + seconds
        try:
            self._control.send(start, deadline=deadline)
            reply, _ = self._control.receive(Reply, deadline=deadline)
        except TimeoutError:
            raise RunTimeoutError(what, seconds) from None
        except ClosedError:
            raise WorkerDiedError(self._how_it_ended(what)) from None
        if reply.raised is not None:
            raise raised_error(reply.raised)
        info: DeviceInfo = decode(reply.result, Hello).info
        return info

    def _begin(self, step: Step) -> _Call:
        call = _Call.at(step)
        with self._lock:
            if self._death is not None:
                raise LostError(self._death, guilty=False, given_up=self._given_up)
            self._calls.add(call)
            if os.fstat(self._said).st_size > _SAID_BYTES:
                os.ftruncate(self._said, 0)
        return call

    @contextlib.contextmanager
    def _channel(self, deadline: float) -> Iterator[Channel]:
        """A channel that no other call uses; closed if it is left before the last reply."""
        channel = self._idle_channel(deadline)
        try:
            yield channel
        except TunerError:
            # The runner's last word.
            self._put_back(channel)
            raise
        except BaseException:
            channel.close()
            raise
        self._put_back(channel)

    def _put_back(self, channel: Channel) -> None:
        with self._lock:
            if self._death is None:
                self._free.append(channel)
            else:
                channel.close()

    def _idle_channel(self, deadline: float) -> Channel:
        """The one last used of those that wait for a request; a new one if none does."""
        with self._lock:
            if self._free:
                return self._free.pop()
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._control_lock:
                self._control.send(OpenChannel(), descriptor=theirs.fileno(), deadline=deadline)
        except BaseException:
            ours.close()
            raise
        return Channel(ours)

    def _result(self, call: _Call, request: Any, reply: Reply, kind: Any) -> Any:
        if reply.raised is None:
            return decode(reply.result, kind)
        error = raised_error(reply.raised)
        if isinstance(error, (DeviceLostError, RunTimeoutError)):
            # A launch in another thread may have lost the device under pipelines being made.
            beside = isinstance(request, Prepare) and isinstance(error, DeviceLostError)
            raise self._lost(call, "beside" if beside else "said", error)
        raise error

    def _lost(self, call: _Call, how: _How, error: TunerError | None = None) -> LostError:
        """Give the worker up, unless another call was first to do so, and tell this call's part."""
        with self._lock:
            if self._death is None:
                self._death = error or WorkerDiedError(self._how_it_ended(call.step.what))
                self._given_up = how == "given up"
                self._culprit = call if self._is_guilty(call, how) else None
                self._stop()
            return LostError(
                error or WorkerDiedError(str(self._death)),
                guilty=self._culprit is call,
                given_up=self._given_up,
            )

    def _is_guilty(self, call: _Call, how: _How) -> bool:
        """Whether the worker is known to be lost because of that call, the first to notice."""
        others = self._calls - {call}
        match how:
            case "said" | "given up":
                return True
            case "late":
                return not any(other.may_delay(call) for other in others)
            case "ended":
                return not others and -(self._process.returncode or 0) not in _FROM_OUTSIDE
            case "beside":
                return not others
            case "unread":
                return False

    def _stop(self) -> None:
        """Kill what still runs of the process, and free what belongs to it."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # A process that hangs in its driver, deep in the kernel, outlives even that.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)
        self._control.close()
        while self._free:
            self._free.pop().close()
        if self._said >= 0:
            os.close(self._said)
            self._said = -1

    def _how_it_ended(self, what: str) -> str:
        """In words, with the last lines of its standard error."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        status = self._process.returncode
        if status is None:
            end = "closed its connection"
        elif status < 0:
            end = f"was killed by {_signal_name(-status)}"
        else:
            end = f"ended with exit status {status}"
        last = self._last_lines()
        return f"the worker {end} during {what}" + (f"; it last said: {last}" if last else "")

    def _last_lines(self) -> str:
        size = os.fstat(self._said).st_size
        said = os.pread(self._said, 4096, max(0, size - 4096)).decode("utf-8", "replace")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        return " | ".join(lines[-_LAST_LINES:])[-_LAST_CHARACTERS:]


def _spawn() -> tuple[subprocess.Popen[bytes], Channel, int]:
    """The process, the channel to it, and the file that takes what it says.

    It gets a process group of its own: a Ctrl-C on the terminal is not for it.

    Raises:
        OSError: the system gives no process or no descriptors.
    """
    paths = [path or str(Path.cwd()) for path in sys.path]
    with contextlib.ExitStack() as undo:
        said = os.memfd_create("kvtune worker said")
        undo.callback(os.close, said)
        fcntl.fcntl(said, fcntl.F_SETFL, os.O_APPEND)
        ours, theirs = socket.socketpair()
        undo.callback(ours.close)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tuner.runner._worker_main", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=(theirs.fileno(),),
                process_group=0,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        undo.pop_all()
    return process, Channel(ours), said


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} ({signal.strsignal(number)})"
