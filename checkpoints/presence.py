"""Whether a run is being trained right now, from what its newest start has left in the store."""

from dataclasses import dataclass
from typing import Literal

from checkpoints.attempt import LEASE_S, Attempt, Owner, newest_attempt
from data_service.store.base import Store


@dataclass(frozen=True)
class Presence:
    """The newest start of a run. Times in seconds since 1970.

    Attributes:
        attempt, owner: its number, and the process that looks after it.
        heard: when it last showed that it lives, by our clock.
        ended: when it ended in good order, by the clock of its machine; None if it has not.
        state: `running`; `ended`; or `dead`, without having said so: its process is gone, or was not heard of for
            longer than the lease, by the store's clock.
    """

    attempt: int
    owner: Owner
    heard: float
    ended: float | None
    state: Literal["running", "ended", "dead"]


def presence(store: Store, now: float, lease_s: float = LEASE_S) -> Presence | None:
    """None if the run was never started. `now`, in seconds since 1970, only turns ages into times."""
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
