"""Records that the driver writes to the run's store: events, tracebacks, failures. Callers never wait for the store.

Failures are counted over all starts of a run, in `attempts/deaths.json`: even if a scheduler restarts the command
forever, a failure that restarts do not cure ends the run. Only the newest start writes the file.
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

DEATHS_KEY = "attempts/deaths.json"  # it holds a `_DeathsRecord`
MAX_STORED_FAILURES = 32  # older failures are forgotten; the failure policy uses fewer than this
_ERROR_CHARACTERS = 500  # a stored error is cut to this length


class _DeathsRecord(StrictRecord):
    format: Literal[1] = 1
    failures: tuple[Failure, ...]


class FailureHistory:
    """The failures of a run, as its newest start counts them.

    Attributes:
        failures: the newest failures of all starts, in order of time.
        committed: step of the newest known checkpoint.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = list(failures)
        self.committed = failures[-1].committed if failures else 0
        self._reached = 0  # step that the last failed group had reached

    def add(self, failure: Failure) -> None:
        self.failures = [*self.failures, failure][-MAX_STORED_FAILURES:]
        self._reached = failure.step

    def note_resume(self, step: int) -> int:
        """Record that the ranks have loaded the state of step `step`. Return how many steps they repeat."""
        again, self._reached, self.committed = max(0, self._reached - step), 0, step
        return again

    def decide(self, node_count: int) -> RestartDecision | StopDecision:
        """Return the decision of the failure policy. A decision to end the run also clears the failures, because the
        operator is expected to repair the cause before the next start."""
        if not self.failures:
            return RestartDecision()
        decision = decide_after_failure(self.failures, node_count)
        if isinstance(decision, StopDecision):
            self.failures = []
        return decision


def read_deaths(store: Store, note: Callable[[str], None]) -> list[Failure]:
    """Return the stored failures, the oldest first. If the record is damaged, return none, and warn with `note`.

    Raises StoreError; RunError if a newer version of Maskfleet wrote the record."""
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
    """Store the newest `failures` in place of those stored before. Raises StoreError."""
    newest = (
        replace(one, error=one.error and one.error[:_ERROR_CHARACTERS]) for one in failures[-MAX_STORED_FAILURES:]
    )
    store.put(DEATHS_KEY, _DeathsRecord(failures=tuple(newest)).model_dump_json().encode())


def past_failures(attempt: Attempt, *, committed: int, now: float, note: Callable[[str], None]) -> list[Failure]:
    """Return the stored failures. If the attempt before `attempt` has no recorded end, its driver was killed: this is
    stored as one more failure. Call this after `attempt` is claimed.

    `committed`: step of the newest checkpoint. `now`: seconds since 1970. Raises StoreError.
    """
    store = attempt.store
    failures = read_deaths(store, note)
    if attempt.number > 1 and Attempt(store, attempt.number - 1).end_time() is None:
        failures.append(_silent_death(committed, now))
        write_deaths(store, failures)
    return failures


def record_failed_start(attempt: Attempt, error: Exception, *, committed: int, note: Callable[[str], None]) -> None:
    """Store one more failure: this start ended with `error`, which a restart may cure.

    Raises RunError if the failure policy ends the run, because restarts have not cured it. Errors of the store are
    ignored here, because `error` is more informative.
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
    """Return the failure of a start that ended before its first step. It counts as silent, even with an `error`."""
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
    """Writes the driver's records to a run's store in a background thread. `note` shows a line to the operator."""

    def __init__(self, store: Store, note: Callable[[str], None]) -> None:
        self._store = store
        self._recorder = BackgroundWriter(note)

    def event(self, kind: str, **fields: object) -> None:
        """Record an event of type `kind` with the current time."""
        self._recorder.submit(partial(record_operator_event, self._store, kind, time.time(), **fields))

    def record_hang(self, stuck_text: str, group: GroupRecord) -> None:
        """Record that ranks of `group` are stuck, with the tracebacks that were collected. `stuck_text`: the text of
        `rank_group.stuck_text`."""
        for rank, text in group.stacks.items():
            self._write_text(group.attempt, f"rank-{rank:05d}", text)
        silent = sorted(group.beats.keys() - group.stacks.keys())
        self.event("hang", attempt=group.attempt or OPERATOR_ATTEMPT, what=stuck_text, without_stacks=silent)

    def record_death(self, failure: Failure, failed_ranks: Sequence[int], group: GroupRecord) -> None:
        """Record that `group` has died because the ranks `failed_ranks` failed."""
        about = {"of": group.attempt, "step": failure.step, "ranks": sorted(failed_ranks)}
        host = next((beat.place.host for beat in group.beats.values() if beat.place.node == failure.node), None)
        self.event("death", **about, node=failure.node, host=host, reason=failure.error)
        cause = group.rank_that_raised(failed_ranks)
        if cause is not None:
            self._write_text(group.attempt, f"error-{cause:05d}", group.errors[cause].trace)

    def _write_text(self, attempt: int | None, name: str, text: str) -> None:
        key = f"events/stacks/a{attempt or OPERATOR_ATTEMPT:06d}/{name}.txt"
        self._recorder.submit(partial(self._store.put, key, text.encode()))

    def write_failures(self, failures: Sequence[Failure]) -> None:
        """Store `failures` in the background (`write_deaths`)."""
        self._recorder.submit(partial(write_deaths, self._store, tuple(failures)))

    def close(self, patience_s: float) -> bool:
        """Wait until everything is written, at most `patience_s` seconds. Return whether it is."""
        return self._recorder.close(patience_s)
