"""Who computes which cell: the process that does so claims it first, and nobody else begins it meanwhile.

    claims/<key>/attempts/...    as a run's attempts (checkpoints.attempt): who it is, its heart, its end

A claim lasts as long as the computing, and whoever holds one waits for nobody. So it blocks nobody for ever, whatever
dies: a process says when it is done; that one of this machine is gone, the process table says; anything else, be it on
another machine, a process that hangs or an end that could not be written, is over when its heart has been silent for
longer than the lease, by the store's clock.

Claims save work. That a result is written once rests on its conditional put.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from checkpoints.attempt import Attempt, Heartbeat, Owner, newest_attempt
from data_service.store.base import Store
from data_service.store.errors import KeyMissing, StoreError, StoreUnavailable

LEASE_S = 180.0
"""Longer than a failing store is tried again (120 s) and a beat takes: its outage makes nobody look dead."""

_LOOKS = 4  # at a listing that names what is not there


@contextmanager
def claimed(store: Store, key: str) -> Iterator[Owner | None]:
    """The cell is ours while the context lasts, and that shows. Yields None; or, if it is somebody's who lives, whose.

    Raises StoreError kinds.
    """
    found = take(store, key, Owner.here(time.time()))
    if isinstance(found, Owner):
        yield found
        return
    with Heartbeat(found, lease_s=LEASE_S):
        try:
            yield None
        finally:
            with suppress(StoreError):  # then the lease tells
                found.end(time.time())


def take(store: Store, key: str, owner: Owner, lease_s: float = LEASE_S) -> Attempt | Owner:
    """Claim the cell for `owner`, whose heart must beat from now on; else who has it and lives.

    Raises StoreError kinds.
    """
    while True:
        newest, living = _newest(store, key, lease_s)
        if living is not None:
            return living
        attempt = Attempt(newest.store, newest.number + 1)
        if attempt.take(owner):
            return attempt


def holder(store: Store, key: str, lease_s: float = LEASE_S) -> Owner | None:
    """Who computes the cell and lives, as far as can be told. Raises StoreError kinds."""
    return _newest(store, key, lease_s)[1]


def _newest(store: Store, key: str, lease_s: float) -> tuple[Attempt, Owner | None]:
    """The newest claim, 0 for none, and whose it is if it holds."""
    place = store.at(f"claims/{key}")
    for _ in range(_LOOKS):
        newest = Attempt(place, newest_attempt(place))
        if not newest.number:
            return newest, None
        with suppress(KeyMissing):  # a listing that was damaged on its way: no claim is ever deleted
            return newest, _living(newest, lease_s)
    raise StoreUnavailable.at(place.uri, "it lists claims that are not there")


def _living(claim: Attempt, lease_s: float) -> Owner | None:
    owner = claim.owner()
    if claim.ended() is not None or (owner.is_here() and not owner.is_running()):
        return None
    return owner if claim.silence() < lease_s else None
