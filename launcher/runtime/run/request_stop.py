"""`maskfleet runs stop`: asks a run to end cleanly. The request goes through the run's store, so the run may be
anywhere."""

import getpass
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from checkpoints.ownership import Presence, StopRequest, read_presence, request_stop
from data_service.store.base import Store
from launcher.runtime.run.log import operator_event

_POLL_S = 1.0


@dataclass(frozen=True)
class StopAnswer:
    """The result of `stop`.

    Attributes:
        found: the newest start of the run; None if it was never started.
        asked: whether that start was running, and so was asked to stop.
    """

    found: Presence | None
    asked: bool


def stop(store: Store, now: float) -> StopAnswer:
    """Ask the running start of the run in `store` to commit and end, and record that as an event.

    If no start is running, nothing is written, so the next start is not affected. `now`: seconds since 1970.
    """
    found = read_presence(store, now)
    if found is None or found.state != "running":
        return StopAnswer(found, asked=False)
    by = whoami()
    request_stop(store, StopRequest(attempt=found.attempt, by=by, time=now))
    operator_event(store, "stop_requested", now, by=by, of=found.attempt)
    return StopAnswer(found, asked=True)


def wait(store: Store, seen: Presence, clock: Callable[[], float], poll_s: float = _POLL_S) -> Presence:
    """Wait until the command that made the start `seen` has ended. Return its last start, or a newer start by another
    command. `clock` returns seconds since 1970."""
    tick = threading.Event()
    while True:
        found = read_presence(store, clock())
        assert found is not None, "a start's record is never deleted"
        if found.state != "running" or not found.owner.same_process(seen.owner):
            return found
        tick.wait(poll_s)


def whoami() -> str:
    """Return the user and host that ask, as text."""
    return f"{getpass.getuser()}@{socket.gethostname()}"
