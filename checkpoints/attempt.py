"""Attempts: every start of a run is an attempt with the next number, and only the newest attempt may write.

    attempts/000003.json            who claimed it and when; created by conditional put, so one winner
    attempts/000003.heartbeat.json  the time it last showed that it lives
    attempts/000003.ended.json      it ended by itself
    attempts/stop.json              a request that the present attempt end (checkpoints/ownership.py)

A new attempt is refused while the newest one lives. On the same machine the process table shows whether it does. On
another machine an attempt counts as dead when it has written nothing for longer than the lease, by the clock of the
store alone: clocks of two machines are never compared. In another container of the same machine the seconds since boot
decide, which both see. So a wall clock that is set, by minutes or hours, makes no live attempt look dead. This check
spares users a mistake; correctness does not depend on it. An attempt checks before every commit and every deletion that
no newer attempt has been claimed.

If the record of an attempt is damaged, its owner is not known, and the lease decides.
"""

import itertools
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from checkpoints.errors import RunIsActive, Superseded
from data_service import processes
from data_service.store.base import Store
from data_service.store.errors import KeyMissing, StoreError

_log = logging.getLogger(__name__)

_ROOT = "attempts/"
LEASE_S = 60.0
_LAST_BEAT_S = 1.0  # for a beat under way
_UNREADABLE = "an unknown host"


class Owner(BaseModel):
    """The process that claimed an attempt.

    Attributes:
        host: its machine's name.
        processes: the process table that `pid` belongs to (machine, boot and container), and the clock of `started`.
        pid, started: the process, and when it began (clock ticks since boot).
        claimed: when it claimed the attempt (seconds since 1970).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    processes: str
    pid: int
    started: FiniteFloat
    claimed: FiniteFloat

    @classmethod
    def here(cls, now: float) -> "Owner":
        """This process. `now`: seconds since 1970."""
        return cls.of(os.getpid(), now)

    @classmethod
    def of(cls, pid: int, now: float) -> "Owner":
        """A process of this machine, in whose name this one acts."""
        return cls(
            host=socket.gethostname(),
            processes=_process_table(),
            pid=pid,
            started=processes.started(pid),
            claimed=now,
        )

    def same_process(self, other: "Owner") -> bool:
        """Whether both are the same process, whenever they claimed."""
        return (self.processes, self.pid, self.started) == (other.processes, other.pid, other.started)

    def is_here(self) -> bool:
        """Whether its process would be one of this machine and container."""
        return self.processes == _process_table()

    def is_running(self) -> bool:
        """Whether the process exists on this machine: same pid and same start, for pids are reused."""
        return self.started > 0 and processes.started(self.pid) == self.started


class _Time(BaseModel):
    time: FiniteFloat


class _Beat(_Time):
    """A heartbeat. `since_boot`: seconds since its machine's boot; 0.1.0 wrote none."""

    beat: int
    since_boot: FiniteFloat | None = None


@dataclass(frozen=True)
class Attempt:
    """One attempt of the run in `store`. Plain data: every rank can be given it."""

    store: Store
    number: int

    def ensure_current(self) -> None:
        """Raises Superseded if a newer attempt has been claimed."""
        successor = _key(self.number + 1)
        if self.store.size(successor) is None:
            return
        owner = Attempt(self.store, self.number + 1).owner()
        raise Superseded(
            f"attempt {self.number} of {self.store.uri} was superseded by attempt {self.number + 1} "
            f"(host {owner.host}, process {owner.pid}, since {_date(owner.claimed)})",
            remedy="let this process end; the newer one continues the run",
        )

    def superseded(self, owner: Owner) -> Owner | None:
        """Who has taken the run over: the owner of a newer attempt that is not `owner`'s. None if nobody has. (`owner`
        claims an attempt for every group of its ranks.) Costs one request while there is no newer attempt."""
        if self.store.size(_key(self.number + 1)) is None:
            return None
        newest = Attempt(self.store, newest_attempt(self.store)).owner()
        return None if newest.same_process(owner) else newest

    def take(self, owner: Owner) -> bool:
        """Claim it for `owner`. False, and no change, if it has been claimed already."""
        return self.store.put_if_absent(_key(self.number), owner.model_dump_json().encode())

    def claimed(self) -> bool:
        """Whether it has been claimed."""
        return self.store.size(_key(self.number)) is not None

    def owner(self) -> Owner:
        """Who claimed it; an owner of no machine if the record is damaged. Raises KeyMissing if nobody has
        claimed it.
        """
        try:
            return Owner.model_validate_json(self.store.get(_key(self.number)))
        except ValidationError:
            claimed = time.time() - (self.store.age(_key(self.number)) or 0.0)
            return Owner(host=_UNREADABLE, processes="", pid=0, started=claimed, claimed=claimed)

    def silence(self) -> float:
        """Seconds since it last showed that it lives: by the store's clock, but for another container of this machine
        by the kernel's count since boot, which both read."""
        with suppress(ValidationError):  # no beat yet, or a torn one
            since_boot = _Beat.model_validate_json(self.heartbeat()).since_boot
            owner = self.owner()
            if since_boot is not None and processes.boot() in owner.processes.split() and not owner.is_here():
                return max(0.0, processes.since_boot() - since_boot)
        ages = (self.store.age(_key(self.number, what)) for what in (".heartbeat", ""))
        return next((age for age in ages if age is not None), math.inf)

    def heartbeat(self) -> bytes:
        """Its newest heartbeat as stored, which differs at every beat. Empty before the first."""
        try:
            return self.store.get(_key(self.number, ".heartbeat"))
        except KeyMissing:
            return b""

    def ended(self) -> float | None:
        """When it ended by itself: seconds since 1970, by the clock of its machine; None if it has not."""
        key = _key(self.number, ".ended")
        try:
            return _Time.model_validate_json(self.store.get(key)).time
        except KeyMissing:
            return None
        except ValidationError:  # that it is there is what counts
            return time.time() - (self.store.age(key) or 0.0)

    def beat(self, now: float, count: int = 0) -> None:
        """Shows that the attempt is alive. `count` sets one beat apart from the next, whatever the clock does."""
        beat = _Beat(time=now, beat=count, since_boot=processes.since_boot())
        self.store.put(_key(self.number, ".heartbeat"), beat.model_dump_json().encode())

    def end(self, now: float) -> None:
        """Marks that the attempt is over, so that the next start need not wait for its lease."""
        self.store.put(_key(self.number, ".ended"), json.dumps({"time": now}).encode())


@dataclass(frozen=True)
class UncertainAttempt:
    """An attempt on another machine that may still live: it has written something within the lease.

    Attributes:
        attempt, owner: which one, and its owner.
        silence: seconds since it last showed that it lives, by the store's clock.
        heartbeat: its newest, as stored. If it changes while we look, the attempt lives.
    """

    attempt: Attempt
    owner: Owner
    silence: float
    heartbeat: bytes

    @property
    def sign(self) -> tuple[int, bytes]:
        """What changes while somebody works on the run."""
        return self.attempt.number, self.heartbeat

    def refusal(self, remedy: str) -> RunIsActive:
        heard = f"it last showed life {self.silence:.0f} s ago"
        return RunIsActive(f"{_who(self.attempt, self.owner)}; {heard}", remedy=remedy)


def claim(
    store: Store,
    *,
    owner: Owner | None = None,
    lease_s: float = LEASE_S,
    clock: Callable[[], float] = time.time,
) -> Attempt:
    """Takes the next attempt number of the run in `store` for `owner` (default: this process), at once or not at all.

    An owner may succeed itself: a supervisor claims anew for every group of ranks it starts, in its own
    name, so that ranks of an earlier group that still linger somewhere cannot write.

    Raises:
        RunIsActive: the newest attempt is alive or may be, or was claimed in the same moment by somebody else.
    """
    found = try_claim(store, owner or Owner.here(clock()), lease_s=lease_s, clock=clock)
    if isinstance(found, Attempt):
        return found
    left = max(lease_s - found.silence, 0)
    raise found.refusal(f"stop it there; if it is dead already, try again in {left:.0f} s")


def try_claim(
    store: Store,
    owner: Owner,
    *,
    lease_s: float = LEASE_S,
    clock: Callable[[], float] = time.time,
    dead: UncertainAttempt | None = None,
) -> Attempt | UncertainAttempt:
    """As `claim`, but returns an `UncertainAttempt` if the newest attempt may or may not live. `dead`: an attempt that
    the caller takes for dead, unless it has shown another sign of life since.
    """
    while True:
        newest = newest_attempt(store)
        unsure = _unsure(Attempt(store, newest), owner, lease_s) if newest else None
        if unsure is not None and (dead is None or dead.sign != unsure.sign):
            return unsure
        attempt = Attempt(store, newest + 1)
        if attempt.take(owner.model_copy(update={"claimed": clock()})):
            return attempt


def end_all(store: Store, owner: Owner, now: float) -> None:
    """Marks the newest attempt as over if it is `owner`'s: the next start need not wait for a lease."""
    newest = newest_attempt(store)
    if newest and Attempt(store, newest).owner().same_process(owner):
        Attempt(store, newest).end(now)


class Heartbeat:
    """Beats for an attempt in a background thread, a quarter of the lease apart, between `with` and its end.

    If the store fails for a while, only beats are lost, not the run. At worst another machine takes this attempt for
    dead and claims the run; `ensure_current` then raises Superseded.
    """

    def __init__(
        self, attempt: Attempt, *, lease_s: float = LEASE_S, clock: Callable[[], float] = time.time
    ) -> None:
        self._attempt = attempt
        self._interval = lease_s / 4
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attempt heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the thread. It does not wait for a beat that hangs in the store."""
        self._stop.set()
        self._thread.join(_LAST_BEAT_S)

    def _run(self) -> None:
        for count in itertools.count():
            try:
                self._attempt.beat(self._clock(), count)
            except StoreError as error:
                _log.warning("no heartbeat of attempt %d: %s", self._attempt.number, error.problem)
            if self._stop.wait(self._interval):
                return


def _unsure(attempt: Attempt, claimant: Owner, lease_s: float) -> UncertainAttempt | None:
    """None if the attempt is over for sure. Raises RunIsActive if it lives for sure."""
    owner = attempt.owner()
    if attempt.ended() is not None or owner.same_process(claimant):
        return None
    if owner.is_here():
        if owner.is_running():
            raise RunIsActive(
                _who(attempt, owner), remedy=f"stop it first (kill {owner.pid}) or let it finish"
            )
        return None
    heartbeat, silence = attempt.heartbeat(), attempt.silence()
    return UncertainAttempt(attempt, owner, silence, heartbeat) if silence < lease_s else None


def _who(attempt: Attempt, owner: Owner) -> str:
    where = f"host {owner.host}, process {owner.pid}, since {_date(owner.claimed)}"
    return f"attempt {attempt.number} of {attempt.store.uri} is running: {where}"


def newest_attempt(store: Store) -> int:
    """The number of the newest start of the run; 0 if it was never started."""
    keys = [entry.key.removeprefix(_ROOT).removesuffix(".json") for entry in store.list(_ROOT)]
    return max((int(key) for key in keys if key.isdecimal()), default=0)


def _key(number: int, what: str = "") -> str:
    return f"{_ROOT}{number:06d}{what}.json"


def _process_table() -> str:
    """Says too in what starts are counted: 0.1.0 compared them by the wall clock, and knows no process by this name."""
    return f"{processes.table()} since boot"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
