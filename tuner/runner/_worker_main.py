"""The worker: a process that makes a runner and does what its parent asks, until that is gone.

Started as `python -m tuner.runner._worker_main DESCRIPTOR`. Each channel has a thread of its own,
so that pipelines are made in several threads at once, beside a launch.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from tuner.errors import TunerError
from tuner.runner._worker_arrays import pack, unpack
from tuner.runner._worker_channel import Channel, ClosedError
from tuner.runner._worker_jobs import Jobs
from tuner.runner._worker_messages import (
    BandwidthCurve,
    Close,
    Control,
    EmptyLaunch,
    Execute,
    Executed,
    Hello,
    KeepWarm,
    Load,
    Measure,
    Numbered,
    Observe,
    Prepare,
    ReadBandwidth,
    Release,
    Reply,
    Request,
    Start,
    Unload,
    ValidationMessages,
    raised,
    reply_with,
)
from tuner.runner.protocol import Execution, Job, Runner

BUG_STATUS = 70
"""Exit status after an exception that is none of the package's errors."""


def main() -> NoReturn:
    """Serve the socket with the descriptor that is the only argument."""
    _settle_in()
    control = Channel(socket.socket(fileno=int(sys.argv[1])))
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[1]),), daemon=True).start()
    try:
        start, _ = control.receive(Start)
        try:
            runner = _make(start)
        except TunerError as error:
            control.send(Reply(raised=raised(error)))
            os._exit(0)
        control.send(reply_with(Hello(runner.info)))
        _serve_control(control, runner)
    except ClosedError:
        os._exit(0)
    except BaseException:
        _die_of_bug(*sys.exc_info())
        raise


def _settle_in() -> None:
    """Ctrl-C is for the parent; dying shall be quick, and when memory runs out it is this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.excepthook = lambda hook: _die_of_bug(
        hook.exc_type, hook.exc_value, hook.exc_traceback
    )
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")


def _end_with_parent(control: int) -> None:
    """Whatever other threads do, on the device or in its driver, must not outlive the parent."""
    hung_up = select.poll()
    hung_up.register(control, select.POLLHUP)
    hung_up.poll()
    os._exit(0)


def _die_of_bug(kind: Any, error: Any, trace: Any) -> None:
    traceback.print_exception(kind, error, trace)
    sys.stderr.flush()
    os._exit(BUG_STATUS)


def _make(start: Start) -> Runner:
    module, _, name = start.factory.partition(":")
    arguments = dict(start.arguments)
    if arguments.get("cache_dir") is not None:
        arguments["cache_dir"] = Path(arguments["cache_dir"])
    if start.known is not None:
        arguments["known"] = start.known
    return cast("Runner", getattr(importlib.import_module(module), name)(**arguments))


def _serve_control(control: Channel, runner: Runner) -> NoReturn:
    jobs = Jobs()
    while True:
        message, descriptor = control.receive(Control)
        if isinstance(message, Close):
            runner.close()
            control.send(Reply())
            os._exit(0)
        channel = Channel(socket.socket(fileno=descriptor))
        threading.Thread(target=_serve, args=(channel, runner, jobs), daemon=True).start()


def _serve(channel: Channel, runner: Runner, jobs: Jobs) -> None:
    """Answer what comes on one channel until the parent closes it."""
    with channel, contextlib.suppress(ClosedError):
        while True:
            request, descriptor = channel.receive(Request)
            answers = _answers(runner, jobs, request, descriptor)
            # Large operands must not outlive the request that brought them.
            del request
            try:
                for result, made in answers:
                    channel.send(reply_with(result), descriptor=made)
                    if made is not None:
                        os.close(made)
            except TunerError as error:
                channel.send(Reply(raised=raised(error)))


def _answers(
    runner: Runner, jobs: Jobs, request: Any, descriptor: int | None
) -> Iterator[tuple[object, int | None]]:
    """What the runner answers, part by part, each with the descriptor that goes with it."""
    match request:
        case Prepare():
            for numbered in _prepared(runner, jobs, request.jobs):
                yield numbered, None
        case Execute():
            assignments = [(jobs.find(job), workload) for job, workload in request.assignments]
            yield from map(_executed, runner.execute(assignments))
        case _:
            yield _answer(runner, jobs, request, descriptor), None


def _prepared(runner: Runner, jobs: Jobs, wanted: Sequence[Job]) -> Iterator[Numbered]:
    """Each as soon as it is prepared; if one fails, none of them stays so."""
    with contextlib.ExitStack() as undo:
        for job in wanted:
            (prepared,) = runner.prepare([job])
            number = jobs.enter(job)
            undo.callback(_release, runner, jobs, {number: 1})
            yield Numbered(number=number, prepared=prepared)
        undo.pop_all()


def _executed(execution: Execution) -> tuple[Executed, int | None]:
    outputs, made = pack("outputs", execution.outputs)
    executed = Executed(
        outputs=outputs,
        broken_guards=execution.broken_guards,
        dirty_counters=execution.dirty_counters,
    )
    return executed, made


def _release(runner: Runner, jobs: Jobs, times: Mapping[int, int]) -> None:
    for number, count in times.items():
        runner.release([jobs.leave(number, count)] * count)


def _answer(runner: Runner, jobs: Jobs, request: Any, descriptor: int | None) -> object:
    """What the runner answers to a request of one part."""
    match request:
        case Load():
            inputs = unpack(request.inputs, descriptor)
            runner.load(request.name, inputs, request.outputs, copies=request.copies)
            return None
        case Unload():
            runner.unload(request.name)
            return None
        case Release():
            _release(runner, jobs, request.times)
            return None
        case Measure():
            return runner.measure(jobs.find(request.job), request.workload, request.plan)
        case ReadBandwidth():
            return runner.read_bandwidth(request.nbytes, samples=request.samples)
        case BandwidthCurve():
            return runner.bandwidth_curve(request.transfer, request.sizes)
        case EmptyLaunch():
            return runner.empty_launches(request.passes)
        case KeepWarm():
            runner.keep_warm(request.load_ms)
            return None
        case Observe():
            return runner.observe()
        case ValidationMessages():
            return tuple(getattr(runner, "messages", ()))
    raise AssertionError(f"no such request: {type(request).__name__}")


if __name__ == "__main__":
    main()
