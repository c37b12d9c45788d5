"""The package's errors: one root, one leaf per failure class, each with the data to act on.

An expected failure of a *variant* (it does not compile, answers wrongly, hangs) is not an exception
at the level of a run: `tuner.evaluate` turns these errors into a state in the variant's record.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST_LISTED = 60
"""Legal names that a message lists: all families, models and workloads, not every identity."""


class TunerError(Exception):
    """Root of all errors of this package. `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(TunerError):
    """The caller asked for something that cannot be: a bad value, an unknown name, a bad file."""

    exit_code = 2


class UnknownNameError(UsageError):
    """A name or value that is none of the legal ones; the message names the nearest of these."""

    def __init__(self, kind: str, name: object, choices: Iterable[object]) -> None:
        self.kind, self.name, self.choices = kind, name, tuple(choices)
        texts = [str(choice) for choice in self.choices]
        lowered = {text.lower(): text for text in texts}
        near = _nearest_numbers(str(name), texts) or difflib.get_close_matches(
            str(name).lower(), lowered, n=3, cutoff=0.4
        )
        hint = f"did you mean {' or '.join(lowered[text] for text in near)}? " if near else ""
        listed = ", ".join(texts[:MOST_LISTED]) + (", …" if len(texts) > MOST_LISTED else "")
        super().__init__(f"unknown {kind} {str(name)!r}: {hint}legal: {listed or '(none)'}")


def _nearest_numbers(name: str, texts: list[str]) -> list[str]:
    """The numbers next to `name`, the nearer first, if it and the choices are whole numbers."""
    if not texts or not all(text.removeprefix("-").isdecimal() for text in (name, *texts)):
        return []
    return sorted(texts, key=lambda text: abs(int(text) - int(name)))[:2]


class IllegalVariantError(UsageError):
    """A variant that the device or the problem rules out, with every reason."""

    def __init__(self, family: str, values: object, reasons: Iterable[str]) -> None:
        self.family, self.values, self.reasons = family, values, tuple(reasons)
        super().__init__(f"{family} {values}: " + "; ".join(self.reasons))


class InputFileError(UsageError):
    """A file of the user's that cannot be used: says which file, where in it, and why."""

    def __init__(self, path: object, message: str, line: int | None = None) -> None:
        self.path, self.line = str(path), line
        where = f"{path}:{line}" if line is not None else str(path)
        super().__init__(f"{where}: {message}")


class ResultsError(TunerError):
    """A results folder or file that cannot be read or written."""

    def __init__(self, path: object, message: str, line: int | None = None) -> None:
        self.path, self.line = str(path), line
        where = f"{path}:{line}" if line is not None else str(path)
        super().__init__(f"{where}: {message}")


class NoResultsError(ResultsError):
    """No results where the caller said there are some: bad input, not a damaged file."""

    exit_code = 2


class TemplateError(TunerError):
    """A kernel template that does not render: undefined name, syntax error, missing file."""

    def __init__(self, template: str, message: str, line: int | None = None) -> None:
        self.template, self.line = template, line
        super().__init__(f"{template}:{line or '?'}: {message}")


class CompileError(TunerError):
    """GLSL that the compiler refuses, with the place in the template it came from."""

    def __init__(self, *, template: str, values: object, line: int | None, message: str) -> None:
        self.template, self.values, self.line, self.compiler_message = (
            template,
            values,
            line,
            message,
        )
        super().__init__(f"{template}:{line or '?'} with {values}: {message}")


class VulkanError(TunerError):
    """A Vulkan call that failed: `call` and the result's `name` and `code`."""

    def __init__(self, call: str, name: str, code: int, hint: str = "") -> None:
        self.call, self.name, self.code = call, name, code
        super().__init__(f"{call}: {name} ({code})" + (f": {hint}" if hint else ""))


class DeviceLostError(VulkanError):
    """The device is gone; every object made on it must be made again.

    `faults` is what the driver knows of the cause, a line each, where it can tell.
    """

    def __init__(
        self, call: str, name: str, code: int, hint: str = "", *, faults: Iterable[str] = ()
    ) -> None:
        self.hint, self.faults = hint, tuple(faults)
        super().__init__(call, name, code, "; ".join((hint, *self.faults)).strip("; "))


class OutOfMemoryError(TunerError):
    """A workload that does not fit: `needed_bytes` against `available_bytes` of `holder`."""

    def __init__(
        self,
        what: str,
        needed_bytes: int,
        available_bytes: int,
        *,
        holder: str = "the device",
        way_out: str = "use fewer sequences or a shorter context",
    ) -> None:
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes
        self.holder = holder
        super().__init__(
            f"{what} needs {needed_bytes / 2**20:,.0f} MiB, {holder} has "
            f"{available_bytes / 2**20:,.0f} MiB to give: {way_out}"
        )


class NoDeviceError(UsageError):
    """No usable Vulkan loader, driver or device, or none that matches what was asked for."""


class RunTimeoutError(TunerError):
    """Work on the device that did not end within its deadline."""

    def __init__(self, what: str, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"{what} did not end within {seconds:.1f} s")


class WorkerDiedError(TunerError):
    """The process that does the device work ended by itself or by a signal."""


class NoWorkerError(TunerError):
    """There is no process to do the device work: it does not start, or was lost too often."""


class MeasurementError(TunerError):
    """Samples that cannot be a measurement: none at all, or times that are not above zero."""
