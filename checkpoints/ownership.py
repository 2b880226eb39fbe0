"""Who trains a run: whether it is being trained now, asking it to stop, and claiming it when that is known to be over.

    attempts/stop.json    which attempt is to end, who asks, and when

A request to stop is for the attempt that it names and for the earlier attempts of the same command. A later command
has a higher attempt number, so the old request does not stop it.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from checkpoints.attempt import LEASE_S, Attempt, Owner, UncertainAttempt, newest_attempt, try_claim
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from data_service.visible import shell_word

_log = logging.getLogger(__name__)
_KEY = "attempts/stop.json"
_POLL_S = 2.0


@dataclass(frozen=True)
class Presence:
    """The newest attempt of a run. Times in seconds since 1970.

    Attributes:
        attempt, owner: its number, and the process that looks after it.
        heard: when it last showed that it lives, by our clock.
        ended: when it ended in good order, by its machine's clock; None if it has not.
        state: `running`; `ended`, in good order; or `dead`: its process is gone, or it has shown no sign of life for
            longer than the lease, by the store's clock.
    """

    attempt: int
    owner: Owner
    heard: float
    ended: float | None
    state: Literal["running", "ended", "dead"]


def presence(store: Store, now: float, lease_s: float = LEASE_S) -> Presence | None:
    """The newest attempt; None if the run was never started. `now`, in seconds since 1970, only turns ages
    into times.
    """
    number = newest_attempt(store)
    if not number:
        return None
    attempt = Attempt(store, number)
    owner, ended, silence = attempt.owner(), attempt.ended(), attempt.silence()
    heard = now - silence
    if ended is not None:
        return Presence(number, owner, heard, ended, "ended")
    alive = owner.is_running() if owner.is_here() else silence < lease_s
    return Presence(number, owner, heard, None, "running" if alive else "dead")


class StopRequest(BaseModel):
    """A request to stop. `attempt`: the newest one at that time. `by`: who asks, for people to read. `time`: seconds
    since 1970.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    attempt: int
    by: str
    time: float


def request_stop(store: Store, request: StopRequest) -> None:
    """Stores the request, in place of an earlier one."""
    store.put(_KEY, request.model_dump_json().encode())


def stop_requested(store: Store, first: int) -> StopRequest | None:
    """The request that a command has to obey whose first attempt is `first`; None if there is none. A request that
    cannot be
    read is ignored, with a warning: it is not known which attempt it was for."""
    try:
        request = StopRequest.model_validate_json(store.get(_KEY))
    except KeyMissing:
        return None
    except ValidationError:
        _log.warning("%s/%s cannot be read: ask again for the run to stop", store.uri, _KEY)
        return None
    return request if request.attempt >= first else None


def await_claim(
    store: Store,
    owner: Owner,
    stopped: threading.Event,
    note: Callable[[str], None],
    *,
    lease_s: float = LEASE_S,
    poll_s: float = _POLL_S,
    clock: Callable[[], float] = time.monotonic,
) -> Attempt | None:
    """Takes the next attempt of the run in `store` for `owner`, as soon as it is free.

    It is free at once if the last attempt has ended, or ran on this machine and is gone. If the last attempt ran on
    another machine and may still live, this waits until that attempt has been silent for `lease_s` seconds, by the
    store's clock, or for that long by our own clock since we began to look. `clock` counts seconds from anywhere; it is
    never compared with another machine's.

    Args:
        stopped: ends the waiting; looked at every `poll_s` seconds at least.
        note: is called once, with what the operator should know: that we wait, and for how long.

    Returns: the attempt, or None if `stopped` was set before. Start its heart at once (`Heartbeat`).

    Raises:
        RunIsActive: the last attempt is alive: its process runs here, or its heartbeat changed while we waited. Or
            another process has claimed the run meanwhile.
        StoreError: the store does not answer.
    """
    seen: UncertainAttempt | None = None
    since = clock()
    while not stopped.is_set():
        looked_long = seen is not None and clock() - since >= lease_s
        found = try_claim(store, owner, lease_s=lease_s, dead=seen if looked_long else None)
        if isinstance(found, Attempt):
            return found
        if seen is None:
            seen = found
            note(_waiting(found, lease_s))
        if found.sign != seen.sign:
            raise found.refusal(
                f"it is alive: stop it first (maskfleet runs stop {shell_word(store.uri)}) or let it finish"
            )
        stopped.wait(poll_s)
    return None


def _waiting(found: UncertainAttempt, lease_s: float) -> str:
    left, who = max(lease_s - found.silence, 0), f"attempt {found.attempt.number} on {found.owner.host}"
    return (
        f"{who} has not ended, and showed life {found.silence:.0f} s ago: "
        f"waiting {left:.0f} s at most, to see whether it lives"
    )
