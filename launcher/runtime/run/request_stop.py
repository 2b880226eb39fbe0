"""`maskfleet runs stop`: asks a run to end cleanly. The request goes through the run's store, so the run may be
anywhere."""

import getpass
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from checkpoints.ownership import AttemptStatus, StopRequest, read_attempt_status, request_stop
from data_service.store.base import Store
from launcher.runtime.run.log import record_operator_event

_POLL_S = 1.0


@dataclass(frozen=True)
class StopAnswer:
    """The result of `ask_to_stop`.

    Attributes:
        found: the newest start of the run; None if it was never started.
        asked: whether that start was running, and so was asked to stop.
    """

    found: AttemptStatus | None
    asked: bool


def ask_to_stop(store: Store, now: float) -> StopAnswer:
    """Ask the running start of the run in `store` to commit and end, and record that as an event.

    If no start is running, nothing is written, so the next start is not affected. `now`: seconds since 1970.
    """
    found = read_attempt_status(store, now)
    if found is None or found.state != "running":
        return StopAnswer(found, asked=False)
    by = user_at_host()
    request_stop(store, StopRequest(attempt=found.attempt, by=by, time=now))
    record_operator_event(store, "stop_requested", now, by=by, of=found.attempt)
    return StopAnswer(found, asked=True)


def wait_for_end(
    store: Store, presence: AttemptStatus, clock: Callable[[], float], poll_s: float = _POLL_S
) -> AttemptStatus:
    """Wait until the command that made the start `presence` has ended. Return its last start, or a newer start by
    another command. `clock` returns seconds since 1970."""
    tick = threading.Event()
    while True:
        found = read_attempt_status(store, clock())
        assert found is not None, "a start's record is never deleted"
        if found.state != "running" or not found.owner.same_process(presence.owner):
            return found
        tick.wait(poll_s)


def user_at_host() -> str:
    """Return the user and host that ask, as text."""
    return f"{getpass.getuser()}@{socket.gethostname()}"
