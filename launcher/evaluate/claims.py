"""Who computes which cell, so that two commands on the same results share the work instead of doing it twice.

    drivers/<name>/attempts/...     a command's heart beats there (checkpoints.attempt)
    claims/<key>/000001.json        names the command that computes the cell; the newest number counts

A claim holds as long as its command lives: on this machine the process table says so at once, from another one the
silence of its heart for longer than the lease. That saves work; correctness rests on the conditional put of results.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from checkpoints.attempt import LEASE_S, Heartbeat, Owner, claim
from checkpoints.presence import Presence, presence
from data_service.store.base import Store
from data_service.store.errors import StoreError
from launcher.evaluate.sealed import read, seal

_DRIVERS, _CLAIMS = "drivers", "claims"


class Claim(BaseModel):
    """`driver`: the name of the command that computes the cell."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    driver: str


class Claims:
    """The claims of one command, while the context `claiming` lasts. Methods raise StoreError kinds."""

    def __init__(self, store: Store, driver: str, lease_s: float) -> None:
        self._store = store
        self._driver = driver
        self._lease_s = lease_s

    def claim(self, key: str) -> Presence | None:
        """Take the cell: None if it is ours now, else the command that computes it, which lives."""
        while True:
            number, driver = self._newest(f"{_CLAIMS}/{key}/")
            if driver == self._driver:
                return None
            holder = None if driver is None else self._living(driver)
            if holder is not None:
                return holder
            ours = f"{_CLAIMS}/{key}/{number + 1:06d}.json"
            if self._store.put_if_absent(ours, seal(Claim(driver=self._driver))):
                return None

    def _newest(self, prefix: str) -> tuple[int, str | None]:
        """Number and command of the newest claim: 0 and None if there is none. A damaged one is nobody's."""
        names = [entry.key.removeprefix(prefix).removesuffix(".json") for entry in self._store.list(prefix)]
        number = max((int(name) for name in names if name.isdecimal()), default=0)
        newest = read(self._store, f"{prefix}{number:06d}.json", Claim) if number else None
        return number, None if newest is None else newest.driver

    def _living(self, driver: str) -> Presence | None:
        found = presence(self._store.at(f"{_DRIVERS}/{driver}"), time.time(), self._lease_s)
        return found if found is not None and found.state == "running" else None


@contextmanager
def claiming(store: Store, *, lease_s: float = LEASE_S) -> Iterator[Claims]:
    """Claims in the name of this process, while the context lasts. Raises StoreError kinds."""
    name = uuid4().hex
    own = claim(store.at(f"{_DRIVERS}/{name}"), owner=Owner.here(time.time()), lease_s=lease_s)
    with Heartbeat(own, lease_s=lease_s):
        try:
            yield Claims(store, name, lease_s)
        finally:
            with suppress(StoreError):  # then the lease tells, or the process table
                own.end(time.time())
