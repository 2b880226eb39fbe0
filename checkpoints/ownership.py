"""The ownership of a run: whether it is being trained now, how to ask it to stop, and how to claim it once it has
ended.

    attempts/stop.json    a request to stop: the attempt that is to end, who asks, and when

A request to stop applies to the attempt that it names and to earlier attempts of the same command. A later command
has a higher attempt number, so an old request does not stop it.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from checkpoints.attempt import LEASE_S, Attempt, Owner, UncertainAttempt, newest_attempt_number, try_claim
from data_service.formats import StrictRecord
from data_service.printable import shell_word
from data_service.store.base import Store
from data_service.store.errors import KeyMissing

_log = logging.getLogger(__name__)
_STOP_KEY = "attempts/stop.json"
_POLL_S = 2.0  # seconds between two attempts to claim the run


@dataclass(frozen=True)
class AttemptStatus:
    """The state of a run's newest attempt. Times are in seconds since 1970.

    Attributes:
        attempt: number of the attempt.
        owner: process that claimed it.
        heard: time of its latest heartbeat, by our clock.
        ended: time at which it ended normally, by its machine's clock; None if it has not.
        state: `running`; `ended` (normally); or `dead`: its process is gone, or its latest heartbeat is older than
            the lease, by the store's clock.
    """

    attempt: int
    owner: Owner
    heard: float
    ended: float | None
    state: Literal["running", "ended", "dead"]


def read_attempt_status(store: Store, now: float) -> AttemptStatus | None:
    """Return the state of the newest attempt; None if the run was never started.

    `now`: our time in seconds since 1970, which only converts ages of heartbeats into times.
    """
    number = newest_attempt_number(store)
    if not number:
        return None
    attempt = Attempt(store, number)
    owner, ended, silence = attempt.owner(), attempt.end_time(), attempt.silence_s()
    heard = now - silence
    if ended is not None:
        return AttemptStatus(number, owner, heard, ended, "ended")
    alive = owner.is_running() if owner.is_on_this_machine() else silence < LEASE_S
    return AttemptStatus(number, owner, heard, None, "running" if alive else "dead")


class StopRequest(StrictRecord):
    """A request to stop a run.

    Attributes:
        format: version of this format.
        attempt: number of the newest attempt at the time of the request.
        by: who asks, for people to read.
        time: time of the request (seconds since 1970).
    """

    format: Literal[1] = 1
    attempt: int
    by: str
    time: float


def request_stop(store: Store, request: StopRequest) -> None:
    """Store the request. It replaces an earlier one."""
    store.put(_STOP_KEY, request.model_dump_json().encode())


def find_stop_request(store: Store, first_attempt: int) -> StopRequest | None:
    """Return the request that applies to a command whose first attempt is `first_attempt`; None if there is none.

    A request that cannot be read is ignored with a warning, because it is not known which attempt it names.
    """
    try:
        request = StopRequest.model_validate_json(store.get(_STOP_KEY))
    except KeyMissing:
        return None
    except ValidationError:
        _log.warning("the stop request in %s/%s cannot be read: run `maskfleet runs stop` again", store.uri, _STOP_KEY)
        return None
    return request if request.attempt >= first_attempt else None


def await_claim(
    store: Store,
    owner: Owner,
    stopped: threading.Event,
    notify: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Attempt | None:
    """Claim the next attempt of the run in `store` for `owner`, as soon as the last attempt is known to be over.

    The last attempt is over if it has ended, or if it ran on this machine and its process is gone. If it ran on another
    machine and may still be alive, this waits until it has sent no heartbeat for `LEASE_S` seconds, by the store's
    clock, or until we have watched it for as many seconds by our own clock.

    Args:
        stopped: event that ends the waiting; then None is returned.
        notify: function that is called once if we have to wait, with a sentence for the operator that says how long.
        clock: seconds from any origin, increasing. It is never compared with another machine's clock.

    The caller starts the attempt's `Heartbeat` at once.

    Raises:
        RunIsActive: the last attempt is alive: its process runs here, or its heartbeat changed while we waited. Or
            another process has claimed the run meanwhile.
        StoreError: the store does not answer.
    """
    seen: UncertainAttempt | None = None
    since = clock()
    while not stopped.is_set():
        looked_long = seen is not None and clock() - since >= LEASE_S
        found = try_claim(store, owner, presumed_dead=seen if looked_long else None)
        if isinstance(found, Attempt):
            return found
        if seen is None:
            seen = found
            notify(_waiting_text(found))
        if found.liveness_mark != seen.liveness_mark:
            raise found.active_error(
                f"it is alive: stop it first (maskfleet runs stop {shell_word(store.uri)}) or let it finish"
            )
        stopped.wait(_POLL_S)
    return None


def _waiting_text(found: UncertainAttempt) -> str:
    left, who = max(LEASE_S - found.silence_s, 0), f"attempt {found.attempt.number} on {found.owner.host}"
    return (
        f"{who} has not ended, and its latest heartbeat is {found.silence_s:.0f} s old: "
        f"waiting {left:.0f} s at most, to see whether it is alive"
    )
