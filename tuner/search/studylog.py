"""The durable study of one family on one problem: an Optuna journal, one trial a variant.

Any Optuna tool can open it. A trial is RUNNING while its variant is being prepared or run, COMPLETE
with its costs (the median in microseconds, millijoules a token, or both), PRUNED with state and
error as user attributes where the variant failed, and FAIL where the process was stopped or died.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.trial import FrozenTrial, TrialState

from tuner.errors import ResultsError
from tuner.kernels.base import Values
from tuner.records import Record
from tuner.search.encoding import Encoding
from tuner.search.journal import JournalFile, RunLock, cut_torn_line
from tuner.search.objective import Costs, Objective, costs
from tuner.search.settings import RETRIED

MAX_CRASHES = 3
"""A variant that was under way this often when a process died is not tried again."""
_COVERED, _SECONDS = "covered", "seconds"
_ISOLATED = "isolated"
"""User attribute of trials: the boot of the machine during which a worker process ran them."""
_WITH_RESULT = (TrialState.COMPLETE, TrialState.PRUNED)
_Cost = Annotated[float, msgspec.Meta(gt=0.0, lt=1e15)]
_DAMAGE = (
    *(ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError),
    *(OverflowError, optuna.exceptions.OptunaError, msgspec.ValidationError),
)
"""What Optuna raises, without checking first, over a journal that is not as it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A trial with a result. `costs` is None where the variant failed."""

    values: Values
    variant: str
    costs: Costs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Trials and seconds that a problem's search may take; None is no limit."""

    trials: int | None
    seconds: float | None

    def covers(self, other: Budget) -> bool:
        """Whether a study that was searched to the end of this budget has nothing left to do under
        `other`."""

        def reaches(mine: float | None, theirs: float | None) -> bool:
            return mine is None or (theirs is not None and theirs <= mine)

        return reaches(self.trials, other.trials) and reaches(self.seconds, other.seconds)


@dataclass(frozen=True, slots=True)
class Storage:
    """An open journal and the file it is in. `close` lets other runs write to it."""

    path: Path
    file: JournalFile
    journal: JournalStorage
    lock: RunLock

    def close(self) -> None:
        """Give the lock back; idempotent."""
        self.lock.close()


class StudyLog:
    """The study, open for writing. `start` and `finish` may be called by one thread at a time.

    Attributes:
        finished: trials with a result when the study was opened, the last one of each variant.
        objective: what its trials' values are.
        retry: variants that were under way when an earlier process was stopped or died, and those
            that are to be tried again.
        crashed: variants that were under way too often when one died.
        seconds: what the study has cost so far, in wall time.
        covered: the budget to whose end it was searched last, if it was.
    """

    def __init__(
        self,
        storage: Storage,
        name: str,
        encoding: Encoding,
        *,
        isolated: bool = False,
        retry_failed: bool = False,
        find: Callable[[str], Record | None] | None = None,
        objective: Objective = "time",
    ) -> None:
        """Open the study, or make it; trials left running by a dead process become failed.

        `isolated`: device work is done in another process, so that no variant can be why this one
        dies, unless the machine dies with it. Variants have no result if they are in one of the
        states `RETRIED`, with `retry_failed`, or if `find` knows no record of theirs: somebody may
        have cut off or deleted these.

        Raises:
            ResultsError: the storage is damaged, or it cannot be written, as all other methods.
        """
        self._encoding, self._path = encoding, storage.path
        self.objective: Objective = objective
        self._marks = {_ISOLATED: boot_id()} if isolated else {}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # Study.tell and Trial.set_user_attr re-read the study each time, the storage does not.
        self._storage: BaseStorage = storage.journal
        self._sync = storage.file.sync
        try:
            self._read(name, retry_failed, find)
        except _DAMAGE as error:
            raise _damaged(storage.path, error) from error

    def _read(
        self, name: str, retry_failed: bool, find: Callable[[str], Record | None] | None
    ) -> None:
        goals = 2 if self.objective == "both" else 1
        with self._writing():
            study = optuna.create_study(
                storage=self._storage,
                study_name=name,
                directions=["minimize"] * goals,
                load_if_exists=True,
            )
        self._study_id = self._storage.get_study_id_from_name(name)
        attributes = study.user_attrs
        self.seconds = float(attributes.get(_SECONDS, 0.0))
        covered = attributes.get(_COVERED)
        self.covered = Budget(**covered) if covered else None
        trials = study.get_trials(deepcopy=False)
        ended = {_identity(trial): trial for trial in trials if trial.state in _WITH_RESULT}
        again = {
            key: _values(trial)
            for key, trial in ended.items()
            if (retry_failed and trial.user_attrs.get("state") in RETRIED)
            or (find is not None and find(trial.user_attrs.get("variant", "")) is None)
        }
        if again:
            self.covered = None
        self.finished = tuple(_finished(ended[key], goals) for key in ended if key not in again)
        with self._writing():
            unfinished, self.crashed = self._take_over(trials)
        self.retry = (*unfinished, *again.values())

    def start(self, values: Values) -> int:
        """Note a variant as under way; returns the trial's id.

        On return it is on the disk, with all that was noted before: should the variant take the
        machine down, this is how the next run knows.
        """
        trial = optuna.create_trial(
            state=TrialState.RUNNING,
            params=self._encoding.params(values),
            distributions=self._encoding.distributions,
            user_attrs={"values": dict(values), **self._marks},
        )
        with self._writing():
            trial_id = self._storage.create_new_trial(self._study_id, template_trial=trial)
            self._sync()
        return trial_id

    def finish(self, trial_id: int, record: Record, *, known: bool) -> None:
        """Note the result. `known`: it came from earlier records, nothing was run."""
        attributes: dict[str, Any] = {"variant": record.variant, "state": record.state}
        if record.error is not None:
            attributes["error"] = record.error
        if known:
            attributes["known"] = True
        with self._writing():
            for name, value in attributes.items():
                self._storage.set_trial_user_attr(trial_id, name, value)
            found = costs(record, self.objective)
            if found is not None:
                self._storage.set_trial_state_values(trial_id, TrialState.COMPLETE, found)
            else:
                self._storage.set_trial_state_values(trial_id, TrialState.PRUNED)

    def drop(self, trial_id: int, why: str) -> None:
        """Note that a trial was given up without a result."""
        with self._writing():
            self._storage.set_trial_user_attr(trial_id, "ended", why)
            self._storage.set_trial_state_values(trial_id, TrialState.FAIL)

    def spend(self, seconds: float) -> None:
        """Add to the seconds that this study has cost."""
        self.seconds += seconds
        self._note(_SECONDS, self.seconds)

    def covers(self, budget: Budget) -> bool:
        """Whether earlier runs have done all that the budget allows."""
        return self.covered is not None and self.covered.covers(budget)

    def cover(self, budget: Budget) -> None:
        """Note on the disk that the study was searched to the end of a budget."""
        self.covered = budget
        self._note(_COVERED, {"trials": budget.trials, "seconds": budget.seconds})
        with self._writing():
            self._sync()

    def _note(self, name: str, value: object) -> None:
        with self._writing():
            self._storage.set_study_user_attr(self._study_id, name, value)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ResultsError(self._path, f"cannot keep the study: {error.strerror}") from error

    def _take_over(
        self, trials: list[FrozenTrial]
    ) -> tuple[tuple[Values, ...], tuple[Values, ...]]:
        """Close what is still running; says what to try again and what not to."""
        stale = [trial for trial in trials if trial.state is TrialState.RUNNING]
        suspects = [trial for trial in stale if trial.user_attrs.get(_ISOLATED) != boot_id()]
        for trial in stale:
            self.drop(trial._trial_id, "crashed" if trial in suspects else "killed")
        crashes = Counter(
            _identity(trial)
            for trial in trials
            if trial in suspects or trial.user_attrs.get("ended") == "crashed"
        )
        done = {_identity(trial) for trial in trials if trial.state in _WITH_RESULT}
        unfinished = {
            _identity(trial): _values(trial)
            for trial in trials
            if "values" in trial.user_attrs and _identity(trial) not in done
        }
        retry = {key: v for key, v in unfinished.items() if crashes[key] < MAX_CRASHES}
        crashed = {key: v for key, v in unfinished.items() if crashes[key] >= MAX_CRASHES}
        return tuple(retry.values()), tuple(crashed.values())


def open_storage(path: Path) -> Storage:
    """The journal file, made where it is missing; a last line cut off by a crash is taken away.

    Raises:
        ResultsError: it cannot be read or written, is no journal, or another run has it open.
    """
    with contextlib.ExitStack() as undo:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = RunLock(path)
            undo.callback(lock.close)
            cut_torn_line(path)
            file = JournalFile(path)
            journal = JournalStorage(file)
        except OSError as error:
            raise ResultsError(path, f"cannot keep the study here: {error.strerror}") from error
        except _DAMAGE as error:
            raise _damaged(path, error) from error
        undo.pop_all()
        return Storage(path, file, journal, lock)


def _damaged(path: Path, error: Exception) -> ResultsError:
    why = str(error) or type(error).__name__
    return ResultsError(
        path,
        f"is no journal of Optuna's, or damaged ({why}): move it away or use another --storage; "
        "what was measured is in the records and is not measured again",
    )


def boot_id() -> str:
    """Changes with each start of the machine; empty where the system does not tell."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _finished(trial: FrozenTrial, goals: int) -> Finished:
    found = None if trial.values is None else tuple(trial.values)
    if found is not None and len(found) != goals:
        raise ValueError(f"a trial with {len(found)} costs in a study of {goals}")
    return Finished(
        values=_values(trial),
        variant=msgspec.convert(trial.user_attrs.get("variant", ""), str),
        costs=msgspec.convert(found, tuple[_Cost, ...] | None),
    )


def _values(trial: FrozenTrial) -> Values:
    values: dict[str, int | str] = msgspec.convert(trial.user_attrs["values"], dict[str, int | str])
    return values


def _identity(trial: FrozenTrial) -> str:
    return repr(sorted(trial.user_attrs.get("values", {}).items()))
