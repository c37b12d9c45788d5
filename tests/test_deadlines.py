"""How long a launch is waited for, by the kind of device and by what others leave it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from tests.made_records import gpu, software
from tuner import _vk
from tuner.errors import RunTimeoutError
from tuner.runner._commands import STARVED_LOOK_S, Commands
from tuner.runner._deadlines import CPU_LAUNCH_S, GPU_LAUNCH_S, Deadlines, Patience

PATIENCE = Patience(10.0, 40.0)


def test_patience_suits_the_kind_of_device_unless_seconds_are_given() -> None:
    assert Patience.of(gpu()) == Patience(GPU_LAUNCH_S, GPU_LAUNCH_S)
    assert Patience.of(software()) == Patience(CPU_LAUNCH_S, 4 * CPU_LAUNCH_S)
    assert Patience.of(software(), 3.0) == Patience(3.0, 3.0)
    assert Deadlines().execute(software()) > 2 * 4 * CPU_LAUNCH_S
    assert Deadlines(launch_s=3.0, spare_s=1.0).execute(software()) == 7.0


class Clockwork:
    """A fence that is signalled after so many seconds of the processors' time, of which a second
    brings `share`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, needs_s: float, share: float) -> None:
        self.waited_s, self._share, self._needs_s = 0.0, share, needs_s
        monkeypatch.setattr(time, "process_time", lambda: self.waited_s * self._share)
        monkeypatch.setattr(_vk, "lib", SimpleNamespace(vkWaitForFences=self._wait))
        monkeypatch.setattr(_vk, "call", lambda *_: None)

    def _wait(self, _device: object, _n: int, _fences: object, _all: int, nanoseconds: int) -> int:
        end = self._needs_s / self._share if self._share else float("inf")
        until = self.waited_s + nanoseconds / 1e9
        self.waited_s = min(until, max(end, self.waited_s))
        return 0 if end <= until else _vk.TIMEOUT

    def wait(self, patience: Patience = PATIENCE) -> None:
        commands = Commands.__new__(Commands)
        commands._device = SimpleNamespace(handle=None, check=lambda *_: None)  # type: ignore[assignment]
        commands.patience, commands.busy = patience, True
        commands._fences, commands._fence, commands._pending = None, None, []
        commands._lock = threading.Lock()
        commands.wait("one launch")
        assert not commands.busy


def test_a_launch_that_others_starve_gets_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clockwork(monkeypatch, needs_s=9.0, share=0.25)
    clock.wait()
    assert clock.waited_s == pytest.approx(36.0)


@pytest.mark.parametrize(
    ("share", "patience", "after_s"),
    [
        (1.0, PATIENCE, 10.0),  # It has had its time.
        (0.5, PATIENCE, 20.0),
        (0.0, PATIENCE, 40.0),  # It sleeps, so it hangs.
        (0.0, Patience(10.0, 10.0), 10.0),
    ],
)
def test_patience_ends(
    monkeypatch: pytest.MonkeyPatch, share: float, patience: Patience, after_s: float
) -> None:
    clock = Clockwork(monkeypatch, needs_s=1000.0, share=share)
    with pytest.raises(RunTimeoutError) as told:
        clock.wait(patience)
    assert clock.waited_s == pytest.approx(after_s, abs=STARVED_LOOK_S)
    assert told.value.seconds == pytest.approx(clock.waited_s)
