"""The records that the driver writes of a run: events, texts, failures. Callers never wait for the store.

The failures of a run are counted over all its starts and stored in the run as `attempts/deaths.json`. Every start
continues the count, whether a person or a scheduler gave the command, so that a failure that restarts do not cure ends
the run. Only the newest start writes the file.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal

from pydantic import ValidationError

from checkpoints.attempt import Attempt
from data_service.formats import NEWER_REMEDY, StrictRecord, is_from_newer_version, newer_version_message
from data_service.store.base import Store
from data_service.store.errors import KeyMissing, StoreError
from launcher.errors import RunError
from launcher.runtime.cluster.group_record import GroupRecord
from launcher.runtime.policies.failures import Failure, RestartDecision, StopDecision, decide_after_failure
from launcher.runtime.run.log import OPERATOR_ATTEMPT, BackgroundWriter, record_operator_event

DEATHS_KEY = "attempts/deaths.json"
MAX_STORED_FAILURES = 32  # number of newest failures that are stored; the policy uses fewer
_ERROR_CHARACTERS = 500  # largest number of characters of a stored error


class _DeathsRecord(StrictRecord):
    format: Literal[1] = 1
    failures: tuple[Failure, ...]


class FailureHistory:
    """The failures of a run in the memory of its newest start.

    Attributes:
        failures: the newest failures of all starts, in order of time.
        committed: steps done in the newest known checkpoint.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = list(failures)
        self.committed = failures[-1].committed if failures else 0
        self._reached = 0  # steps done by the last group that died

    def add(self, failure: Failure) -> None:
        """Add the failure of a group of ranks."""
        self.failures = [*self.failures, failure][-MAX_STORED_FAILURES:]
        self._reached = failure.step

    def note_resume(self, step: int) -> int:
        """Note that the ranks have loaded the checkpoint of step `step`. Return how many steps they repeat."""
        again, self._reached, self.committed = max(0, self._reached - step), 0, step
        return again

    def decide(self, node_count: int) -> RestartDecision | StopDecision:
        """Return what the failure policy decides. A decision to end the run also clears the count, since whoever
        starts it again is expected to have repaired something."""
        if not self.failures:
            return RestartDecision()
        decision = decide_after_failure(self.failures, node_count)
        if isinstance(decision, StopDecision):
            self.failures = []
        return decision


def read_deaths(store: Store, note: Callable[[str], None]) -> list[Failure]:
    """Return the failures on record, the oldest first. A damaged record counts as no failures, and `note` tells the
    operator so. Raises StoreError; RunError if a newer version of Maskfleet wrote the record."""
    try:
        data = store.get(DEATHS_KEY)
        return list(_DeathsRecord.model_validate_json(data).failures)
    except KeyMissing:
        return []
    except ValidationError as error:
        if is_from_newer_version(data, known=1, error=error):
            raise RunError(newer_version_message(f"{store.uri}/{DEATHS_KEY}"), remedy=NEWER_REMEDY) from error
        note(f"{store.uri}/{DEATHS_KEY} is damaged: earlier failures of the run are not counted")
        return []


def write_deaths(store: Store, failures: Sequence[Failure]) -> None:
    """Replace the record by the newest `failures`. Raises StoreError."""
    newest = (
        replace(one, error=one.error and one.error[:_ERROR_CHARACTERS]) for one in failures[-MAX_STORED_FAILURES:]
    )
    store.put(DEATHS_KEY, _DeathsRecord(failures=tuple(newest)).model_dump_json().encode())


def past_failures(attempt: Attempt, *, committed: int, now: float, note: Callable[[str], None]) -> list[Failure]:
    """Return the failures on record. If the start before `attempt` left no record of its end, its driver was killed:
    this is added as one more failure. Call the function after `attempt` is claimed.

    `committed`: steps of the newest checkpoint. `now`: seconds since 1970. Raises StoreError.
    """
    store = attempt.store
    failures = read_deaths(store, note)
    if attempt.number > 1 and Attempt(store, attempt.number - 1).end_time() is None:
        failures.append(_silent_death(committed, now))
        write_deaths(store, failures)
    return failures


def record_failed_start(attempt: Attempt, error: Exception, *, committed: int, note: Callable[[str], None]) -> None:
    """Count a start that ended by `error`, an obstacle that may pass, as a failure of the run.

    Raises RunError if the failure policy ends the run: restarts have not cured it. A store that fails now is passed
    over, since the error that ended the start tells more.
    """
    with suppress(StoreError):
        line = f"{type(error).__name__}: {getattr(error, 'problem', error)}"
        failures = read_deaths(attempt.store, note)
        deaths = FailureHistory([*failures, _silent_death(committed, time.time(), line)][-MAX_STORED_FAILURES:])
        decision = deaths.decide(node_count=1)
        write_deaths(attempt.store, deaths.failures)
        if isinstance(decision, StopDecision):
            raise RunError(decision.reason, remedy=decision.remedy) from error


def _silent_death(committed: int, now: float, error: str | None = None) -> Failure:
    return Failure(
        time=now,
        step=committed,
        committed=committed,
        worked=False,
        node=None,
        error=error,
        kind="silent",
    )


class OperatorLog:
    """A writer of records to a run's store on a separate thread (`BackgroundWriter`). `note` shows a line to the
    operator."""

    def __init__(self, store: Store, note: Callable[[str], None]) -> None:
        self._store = store
        self._recorder = BackgroundWriter(note)

    def event(self, kind: str, **fields: object) -> None:
        """Record an event with the present time."""
        self._recorder.submit(partial(record_operator_event, self._store, kind, time.time(), **fields))

    def record_hang(self, stuck_text: str, group: GroupRecord) -> None:
        """Record that the ranks of a group are stuck, with the tracebacks of those that answered. `stuck_text`:
        which ranks are stuck and why."""
        for rank, text in group.stacks.items():
            self._write_text(group.attempt, f"rank-{rank:05d}", text)
        silent = sorted(group.beats.keys() - group.stacks.keys())
        self.event("hang", attempt=group.attempt or OPERATOR_ATTEMPT, what=stuck_text, without_stacks=silent)

    def record_death(self, failure: Failure, failed_ranks: Sequence[int], group: GroupRecord) -> None:
        """Record that a group has died, ended by the ranks in `failed_ranks`."""
        about = {"of": group.attempt, "step": failure.step, "ranks": sorted(failed_ranks)}
        self.event("death", **about, node=failure.node, reason=failure.error)
        cause = group.rank_that_raised(failed_ranks)
        if cause is not None:
            self._write_text(group.attempt, f"error-{cause:05d}", group.errors[cause].trace)

    def _write_text(self, attempt: int | None, name: str, text: str) -> None:
        key = f"events/stacks/a{attempt or OPERATOR_ATTEMPT:06d}/{name}.txt"
        self._recorder.submit(partial(self._store.put, key, text.encode()))

    def write_failures(self, failures: Sequence[Failure]) -> None:
        """Replace the record of the run's failures."""
        self._recorder.submit(partial(write_deaths, self._store, tuple(failures)))

    def close(self, patience_s: float) -> bool:
        """Wait until everything is written, at most `patience_s` seconds. Return whether it is."""
        return self._recorder.close(patience_s)
