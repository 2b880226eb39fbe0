"""The records that the driver writes of a run: events, texts, failures. Callers never wait for the store."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from data_service.store.base import Store
from launcher.runtime.cluster.deaths import write_deaths
from launcher.runtime.cluster.group_record import GroupRecord
from launcher.runtime.policies.failures import Failure
from launcher.runtime.run.log import OPERATOR, Recorder, operator_event


class OperatorLog:
    """A writer of records, which writes to a run's store on a separate thread (`Recorder`). `note` shows a line to the
    operator."""

    def __init__(self, store: Store, note: Callable[[str], None]) -> None:
        self._store = store
        self._recorder = Recorder(note)

    def event(self, kind: str, **fields: object) -> None:
        """Record an event with the present time."""
        self._recorder.submit(partial(operator_event, self._store, kind, time.time(), **fields))

    def hang(self, what: str, group: GroupRecord) -> None:
        """Record that the ranks of a group are stuck, with the tracebacks of those that answered. `what`: which ranks
        are stuck and why."""
        for rank, text in group.stacks.items():
            self._text(group.attempt, f"rank-{rank:05d}", text)
        silent = sorted(group.beats.keys() - group.stacks.keys())
        self.event("hang", attempt=group.attempt or OPERATOR, what=what, without_stacks=silent)

    def death(self, failure: Failure, failed: Sequence[int], group: GroupRecord) -> None:
        """Record that a group has died, ended by the ranks in `failed`."""
        about = {"of": group.attempt, "step": failure.step, "ranks": sorted(failed)}
        self.event("death", **about, node=failure.node, reason=failure.error)
        cause = group.cause(failed)
        if cause is not None:
            self._text(group.attempt, f"error-{cause:05d}", group.errors[cause].trace)

    def _text(self, attempt: int | None, name: str, text: str) -> None:
        key = f"events/stacks/a{attempt or OPERATOR:06d}/{name}.txt"
        self._recorder.submit(partial(self._store.put, key, text.encode()))

    def deaths(self, failures: Sequence[Failure]) -> None:
        """Replace the record of the run's failures."""
        self._recorder.submit(partial(write_deaths, self._store, tuple(failures)))

    def close(self, patience_s: float) -> bool:
        """Wait until everything is written, at most `patience_s` seconds. Return whether it is."""
        return self._recorder.close(patience_s)
