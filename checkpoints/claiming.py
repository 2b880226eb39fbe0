"""Claiming a run whose last start may still live on another machine: it is watched until that is known."""

import threading
import time
from collections.abc import Callable

from checkpoints.attempt import LEASE_S, Attempt, Owner, Unsure, try_claim
from data_service.store.base import Store

_POLL_S = 2.0


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

    At once where the last start has ended, or ran on this machine and is gone. A start on another machine that may
    still live is waited for: until it has been silent for `lease_s` seconds, by the store's clock, or for as long as
    we have looked, by our own. `clock` counts seconds from anywhere and is never compared with another machine's.

    Args:
        stopped: ends the waiting; looked at every `poll_s` seconds at least.
        note: tells the operator, once, that and how long it may take.

    Returns: the attempt, or None if `stopped` was set before. Start its heart at once (`Heartbeat`).

    Raises:
        RunIsActive: the last start is alive: its process runs here, or its heart was seen to beat; or somebody else
            has claimed meanwhile.
        StoreError: the store does not answer.
    """
    seen: Unsure | None = None
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
                f"it is alive: stop it first (maskfleet runs stop {store.uri}) or let it finish"
            )
        stopped.wait(poll_s)
    return None


def _waiting(found: Unsure, lease_s: float) -> str:
    left, who = max(lease_s - found.silence, 0), f"attempt {found.attempt.number} on {found.owner.host}"
    return (
        f"{who} has not ended, and showed life {found.silence:.0f} s ago: "
        f"waiting {left:.0f} s at most, to see whether it lives"
    )
