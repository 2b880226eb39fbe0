"""Attempts: every start of a run is an attempt with the next number, and only the newest attempt may write.

    attempts/000003.json            the process that claimed it, and when; by conditional put, so one claim wins
    attempts/000003.heartbeat.json  the attempt's latest heartbeat, with its time
    attempts/000003.ended.json      the time at which the attempt ended normally
    attempts/stop.json              a request to stop the current attempt (checkpoints/ownership.py)

A new attempt is refused while the newest one is alive. On the same machine the process table shows whether it is. An
attempt on another machine counts as dead when it has written nothing for longer than the lease, by the store's clock
alone: clocks of two machines are never compared. For an attempt in another container of the same machine, the seconds
since boot decide, because both containers read the same count. So setting a wall clock, by minutes or hours, makes no
live attempt look dead. This check protects users from a mistake; correctness does not depend on it, because an attempt
checks before every commit and every deletion that no newer attempt has been claimed.

If an attempt's record is damaged, its owner is unknown, and the lease decides whether the attempt is alive.
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

from pydantic import BaseModel, FiniteFloat, ValidationError

from checkpoints.errors import RunIsActive, Superseded
from data_service import processes
from data_service.formats import StrictRecord
from data_service.store.base import Store
from data_service.store.errors import KeyMissing, StoreError

_log = logging.getLogger(__name__)

_FOLDER = "attempts/"
LEASE_S = 60.0  # seconds without a heartbeat after which an attempt on another machine counts as dead
_FINAL_HEARTBEAT_WAIT_S = 1.0  # seconds that `__exit__` waits for a heartbeat that is being written
_UNKNOWN_HOST = "an unknown host"


class Owner(StrictRecord):
    """The process that claimed an attempt.

    Attributes:
        host: name of its machine.
        processes: name of the process table that `pid` belongs to (machine, boot and container).
        pid: process number.
        started: time at which the process began (clock ticks since boot).
        claimed: time at which it claimed the attempt (seconds since 1970).
    """

    host: str
    processes: str
    pid: int
    started: FiniteFloat
    claimed: FiniteFloat

    @classmethod
    def for_this_process(cls, now: float) -> "Owner":
        """Return this process as an attempt's owner. `now`: the time of the claim (seconds since 1970)."""
        return cls.for_process(os.getpid(), now)

    @classmethod
    def for_process(cls, pid: int, now: float) -> "Owner":
        """Return process `pid` of this machine as an attempt's owner. The caller claims the attempt for it."""
        return cls(
            host=socket.gethostname(),
            processes=processes.process_namespace_name(),
            pid=pid,
            started=processes.process_start_ticks(pid),
            claimed=now,
        )

    def same_process(self, other: "Owner") -> bool:
        """Return whether both owners are the same process, even if their claims were made at different times."""
        return (self.processes, self.pid, self.started) == (other.processes, other.pid, other.started)

    def is_on_this_machine(self) -> bool:
        """Return whether the owner belongs to the process table of this machine and container."""
        return self.processes == processes.process_namespace_name()

    def is_running(self) -> bool:
        """Return whether the process exists on this machine: same pid and same start, because pids are reused."""
        return self.started > 0 and processes.process_start_ticks(self.pid) == self.started


class _TimeRecord(BaseModel):
    time: FiniteFloat  # seconds since 1970


class _HeartbeatRecord(_TimeRecord):
    """A stored heartbeat. `beat`: its number; `since_boot`: seconds since its machine's boot."""

    beat: int
    since_boot: FiniteFloat


@dataclass(frozen=True)
class Attempt:
    """One attempt of the run in `store`. It is plain data, so it can be sent to every rank."""

    store: Store
    number: int

    def ensure_current(self) -> None:
        """Raise Superseded if a newer attempt has been claimed."""
        successor = _attempt_key(self.number + 1)
        if self.store.size(successor) is None:
            return
        owner = Attempt(self.store, self.number + 1).owner()
        raise Superseded(
            f"attempt {self.number} of {self.store.uri} was superseded by attempt {self.number + 1} "
            f"(host {owner.host}, process {owner.pid}, since {_date_text(owner.claimed)})",
            remedy="let this process end; the newer attempt continues the run",
        )

    def superseding_owner(self, owner: Owner) -> Owner | None:
        """Return the newest attempt's owner if another process than `owner` has taken over the run; else None.

        The same `owner` claims a new attempt for every group of ranks that it starts. While there is no newer attempt,
        this costs one request.
        """
        if self.store.size(_attempt_key(self.number + 1)) is None:
            return None
        newest = Attempt(self.store, newest_attempt_number(self.store)).owner()
        return None if newest.same_process(owner) else newest

    def claim_for(self, owner: Owner) -> bool:
        """Claim the attempt for `owner`. Return False and change nothing if it has been claimed already."""
        return self.store.put_if_absent(_attempt_key(self.number), owner.model_dump_json().encode())

    def is_claimed(self) -> bool:
        return self.store.size(_attempt_key(self.number)) is not None

    def owner(self) -> Owner:
        """Return the owner that claimed the attempt; for a damaged record, a placeholder that matches no machine.

        Raises KeyMissing: nobody has claimed the attempt.
        """
        try:
            return Owner.model_validate_json(self.store.get(_attempt_key(self.number)))
        except ValidationError:
            claimed = time.time() - (self.store.age(_attempt_key(self.number)) or 0.0)
            return Owner(host=_UNKNOWN_HOST, processes="", pid=0, started=claimed, claimed=claimed)

    def silence_s(self) -> float:
        """Return the seconds since the attempt's latest heartbeat, or since its claim if it has sent none.

        They are measured by the store's clock; for an attempt in another container of this machine, by the kernel's
        seconds since boot, which both containers read.
        """
        with suppress(ValidationError):  # no heartbeat yet, or a partly written one
            since_boot = _HeartbeatRecord.model_validate_json(self.heartbeat()).since_boot
            owner = self.owner()
            if processes.boot_id() in owner.processes.split() and not owner.is_on_this_machine():
                return max(0.0, processes.seconds_since_boot() - since_boot)
        ages = (self.store.age(_attempt_key(self.number, what)) for what in (".heartbeat", ""))
        return next((age for age in ages if age is not None), math.inf)

    def heartbeat(self) -> bytes:
        """Return the latest heartbeat as stored; empty before the first. No two heartbeats have the same bytes."""
        try:
            return self.store.get(_attempt_key(self.number, ".heartbeat"))
        except KeyMissing:
            return b""

    def end_time(self) -> float | None:
        """Return when the attempt ended normally (seconds since 1970, by its machine's clock); else None."""
        key = _attempt_key(self.number, ".ended")
        try:
            return _TimeRecord.model_validate_json(self.store.get(key)).time
        except KeyMissing:
            return None
        except ValidationError:  # a damaged record: take the time at which the store received it
            return time.time() - (self.store.age(key) or 0.0)

    @property
    def key(self) -> str:
        """Key of the stored object that claims the attempt."""
        return _attempt_key(self.number)

    def write_heartbeat(self, now: float, count: int = 0) -> None:
        """Write a heartbeat. `count` makes each heartbeat differ from the previous one, even if the clock stands
        still."""
        beat = _HeartbeatRecord(time=now, beat=count, since_boot=processes.seconds_since_boot())
        self.store.put(_attempt_key(self.number, ".heartbeat"), beat.model_dump_json().encode())

    def record_end(self, now: float) -> None:
        """Record that the attempt has ended, so that the next start does not wait for its lease to expire."""
        self.store.put(_attempt_key(self.number, ".ended"), json.dumps({"time": now}).encode())


@dataclass(frozen=True)
class UncertainAttempt:
    """An attempt on another machine that may still be alive, because it has written something within the lease.

    Attributes:
        silence_s: seconds since its latest heartbeat, by the store's clock.
        heartbeat: its latest heartbeat, as stored. If it changes while we watch, the attempt is alive.
    """

    attempt: Attempt
    owner: Owner
    silence_s: float
    heartbeat: bytes

    @property
    def liveness_mark(self) -> tuple[int, bytes]:
        """The attempt's number and latest heartbeat. One of them changes while somebody trains the run."""
        return self.attempt.number, self.heartbeat

    def active_error(self, remedy: str) -> RunIsActive:
        heard = f"its latest heartbeat is {self.silence_s:.0f} s old"
        return RunIsActive(f"{_owner_text(self.attempt, self.owner)}; {heard}", remedy=remedy)


def claim(
    store: Store,
    *,
    owner: Owner | None = None,
    clock: Callable[[], float] = time.time,
) -> Attempt:
    """Claim the next attempt of the run in `store` for `owner` (default: this process), without waiting.

    The same owner may claim again: a supervisor claims a new attempt for every group of ranks that it starts. So ranks
    of an earlier group that still run somewhere cannot write.

    Raises:
        RunIsActive: the newest attempt is alive or may be alive, or another process claimed one at the same moment.
    """
    found = try_claim(store, owner or Owner.for_this_process(clock()), clock=clock)
    if isinstance(found, Attempt):
        return found
    left = max(LEASE_S - found.silence_s, 0)
    raise found.active_error(f"stop that process on its host; if it is dead already, try again in {left:.0f} s")


def try_claim(
    store: Store,
    owner: Owner,
    *,
    clock: Callable[[], float] = time.time,
    presumed_dead: UncertainAttempt | None = None,
) -> Attempt | UncertainAttempt:
    """Claim the next attempt as `claim` does, but return `UncertainAttempt` if it is not known whether the newest
    attempt is alive.

    `presumed_dead`: an attempt that the caller considers dead. It counts as dead unless it has sent another
    heartbeat since.
    """
    while True:
        newest = newest_attempt_number(store)
        unsure = _uncertain_attempt(Attempt(store, newest), owner) if newest else None
        if unsure is not None and (presumed_dead is None or presumed_dead.liveness_mark != unsure.liveness_mark):
            return unsure
        attempt = Attempt(store, newest + 1)
        if attempt.claim_for(owner.model_copy(update={"claimed": clock()})):
            return attempt


def end_newest_attempt(store: Store, owner: Owner, now: float) -> None:
    """Record that the newest attempt has ended if `owner` claimed it, so that the next start waits for no lease."""
    newest = newest_attempt_number(store)
    if newest and Attempt(store, newest).owner().same_process(owner):
        Attempt(store, newest).record_end(now)


class Heartbeat:
    """A background thread that writes an attempt's heartbeats while its `with` block runs, four per lease.

    If the store fails for a while, only heartbeats are lost, not the run. In the worst case another machine considers
    this attempt dead and claims the run; then `ensure_current` raises Superseded.
    """

    def __init__(self, attempt: Attempt, *, lease_s: float = LEASE_S, clock: Callable[[], float] = time.time) -> None:
        self._attempt = attempt
        self._interval = lease_s / 4
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write_until_stopped, name="attempt heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End the thread. Wait at most a second for a heartbeat that is being written."""
        self._stop.set()
        self._thread.join(_FINAL_HEARTBEAT_WAIT_S)

    def _write_until_stopped(self) -> None:
        for count in itertools.count():
            try:
                self._attempt.write_heartbeat(self._clock(), count)
            except StoreError as error:
                _log.warning("no heartbeat of attempt %d: %s", self._attempt.number, error.problem)
            if self._stop.wait(self._interval):
                return


def _uncertain_attempt(attempt: Attempt, claimant: Owner) -> UncertainAttempt | None:
    """Return None if the attempt has certainly ended, `UncertainAttempt` if it may be alive.

    Raises RunIsActive: the attempt is certainly alive.
    """
    owner = attempt.owner()
    if attempt.end_time() is not None or owner.same_process(claimant):
        return None
    if owner.is_on_this_machine():
        if owner.is_running():
            raise RunIsActive(_owner_text(attempt, owner), remedy=f"stop it first (kill {owner.pid}) or let it finish")
        return None
    heartbeat, silence = attempt.heartbeat(), attempt.silence_s()
    return UncertainAttempt(attempt, owner, silence, heartbeat) if silence < LEASE_S else None


def _owner_text(attempt: Attempt, owner: Owner) -> str:
    where = f"host {owner.host}, process {owner.pid}, since {_date_text(owner.claimed)}"
    return f"attempt {attempt.number} of {attempt.store.uri} is running: {where}"


def newest_attempt_number(store: Store) -> int:
    """Return the number of the newest attempt of the run; 0 if the run was never started."""
    keys = [entry.key.removeprefix(_FOLDER).removesuffix(".json") for entry in store.list(_FOLDER)]
    return max((int(key) for key in keys if key.isdecimal()), default=0)


def _attempt_key(number: int, suffix: str = "") -> str:
    return f"{_FOLDER}{number:06d}{suffix}.json"


def _date_text(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
