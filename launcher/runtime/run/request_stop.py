"""`maskfleet runs stop`: asks a run to save and end. The request is written to the run's store, so the run may train on
another machine."""

import getpass
import socket
import threading
from collections.abc import Callable

from checkpoints.ownership import AttemptStatus, StopRequest, read_attempt_status, request_stop
from data_service.store.base import Store
from launcher.runtime.run.log import record_operator_event

_POLL_S = 1.0  # interval of checks whether the run has ended


def ask_to_stop(store: Store, now: float) -> AttemptStatus | None:
    """Ask the running start of a run to save and end, and record that as an event. Return the newest start; None if the
    run was never started.

    If no start is running, nothing is written, and the next start is not affected. `now`: seconds since 1970.
    """
    found = read_attempt_status(store, now)
    if found is not None and found.state == "running":
        by = user_at_host()
        request_stop(store, StopRequest(attempt=found.attempt, by=by, time=now))
        record_operator_event(store, "stop_requested", now, by=by, of=found.attempt)
    return found


def wait_for_end(store: Store, presence: AttemptStatus, clock: Callable[[], float]) -> AttemptStatus:
    """Wait until the command that owns the start `presence` has ended. Return its last start, or a newer start of
    another command. `clock` returns seconds since 1970."""
    tick = threading.Event()
    while True:
        found = read_attempt_status(store, clock())
        assert found is not None, "a start's record is never deleted"
        if found.state != "running" or not found.owner.same_process(presence.owner):
            return found
        tick.wait(_POLL_S)


def user_at_host() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"
