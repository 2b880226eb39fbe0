"""Attempts: every start of a run takes the next number, and only the newest may write.

    attempts/000003.json            who claimed it and when; created by conditional put, so one winner
    attempts/000003.heartbeat.json  the time it last showed that it lives
    attempts/000003.ended.json      it ended by itself
    attempts/stop.json              somebody asks the present start to end (checkpoints/stop.py)

A start is refused while the newest attempt lives. On the same machine the process table answers that at
once; from another one, an attempt counts as dead when its heartbeat is older than the lease, by clocks that
agree to within it. That is a courtesy to users, not what correctness rests on: an attempt checks before every
commit and every deletion that none has been claimed after it.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

from checkpoints.errors import RunIsActive, Superseded
from data_service.store.base import Store
from data_service.store.errors import KeyMissing, StoreError

_log = logging.getLogger(__name__)

_ROOT = "attempts/"
LEASE_S = 60.0
_SAME_START_S = 5.0  # the kernel's start time of a process, seen through a clock that is being adjusted


class Owner(BaseModel):
    """The process that claimed an attempt.

    Attributes:
        host: its machine's name.
        processes: identifies the process table `pid` belongs to: machine, boot and container.
        pid, started: the process, and when it was created (seconds since 1970).
        claimed: when it claimed the attempt (seconds since 1970).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    processes: str
    pid: int
    started: float
    claimed: float

    @classmethod
    def here(cls, now: float) -> "Owner":
        started = psutil.Process().create_time()
        return cls(
            host=socket.gethostname(),
            processes=_process_table(),
            pid=os.getpid(),
            started=started,
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
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            started: float = process.create_time()
        except psutil.NoSuchProcess:
            return False
        return abs(started - self.started) < _SAME_START_S


@dataclass(frozen=True)
class Attempt:
    """One start of the run in `store`. Plain data: give it to every rank."""

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

    def claimed(self) -> bool:
        """Whether it is there."""
        return self.store.size(_key(self.number)) is not None

    def owner(self) -> Owner:
        """Whose it is. Raises KeyMissing if nobody has claimed it."""
        return Owner.model_validate_json(self.store.get(_key(self.number)))

    def heard(self) -> float:
        """When it last showed that it lives: seconds since 1970."""
        try:
            return float(json.loads(self.store.get(_key(self.number, ".heartbeat")))["time"])
        except KeyMissing:
            return self.owner().claimed

    def ended(self) -> float | None:
        """When it ended by itself: seconds since 1970; None if it has not."""
        try:
            return float(json.loads(self.store.get(_key(self.number, ".ended")))["time"])
        except KeyMissing:
            return None

    def beat(self, now: float) -> None:
        """Shows that the attempt is alive."""
        self.store.put(_key(self.number, ".heartbeat"), json.dumps({"time": now}).encode())

    def end(self, now: float) -> None:
        """Marks that the attempt is over, so that the next start need not wait for its lease."""
        self.store.put(_key(self.number, ".ended"), json.dumps({"time": now}).encode())


def claim(
    store: Store,
    *,
    owner: Owner | None = None,
    lease_s: float = LEASE_S,
    clock: Callable[[], float] = time.time,
) -> Attempt:
    """Takes the next attempt number of the run in `store` for `owner` (default: this process).

    An owner may succeed itself: a supervisor claims anew for every group of ranks it starts, in its own
    name, so that ranks of an earlier group that still linger somewhere cannot write.

    Raises:
        RunIsActive: the newest attempt is alive, or was claimed in the same moment by somebody else.
    """
    owner = owner or Owner.here(clock())
    while True:
        newest = newest_attempt(store)
        if newest:
            _ensure_over(Attempt(store, newest), owner, lease_s, clock)
        attempt = Attempt(store, newest + 1)
        record = owner.model_copy(update={"claimed": clock()})
        if store.put_if_absent(_key(attempt.number), record.model_dump_json().encode()):
            return attempt


def end_all(store: Store, owner: Owner, now: float) -> None:
    """Marks the newest attempt as over if it is `owner`'s: the next start need not wait for a lease."""
    newest = newest_attempt(store)
    if newest and Attempt(store, newest).owner().same_process(owner):
        Attempt(store, newest).end(now)


class Heartbeat:
    """Beats for an attempt in a background thread, a quarter of the lease apart, between `with` and its end.

    A store that fails for a while costs beats, not the run: the worst that can follow is that another machine
    takes this attempt for dead, and then `ensure_current` tells.
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
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._attempt.beat(self._clock())
            except StoreError as error:
                _log.warning("no heartbeat of attempt %d: %s", self._attempt.number, error.problem)
            self._stop.wait(self._interval)


def _ensure_over(attempt: Attempt, claimant: Owner, lease_s: float, clock: Callable[[], float]) -> None:
    store, number = attempt.store, attempt.number
    owner = attempt.owner()
    if store.size(_key(number, ".ended")) is not None or owner.same_process(claimant):
        return
    since = _date(owner.claimed)
    who = f"attempt {number} of {store.uri} is running: host {owner.host}, process {owner.pid}, since {since}"
    if owner.is_here():
        if owner.is_running():
            raise RunIsActive(who, remedy=f"stop it first (kill {owner.pid}) or let it finish")
        return
    silence = clock() - attempt.heard()
    if silence < lease_s:
        remedy = f"stop it there; if it is dead already, try again in {lease_s - silence:.0f} s"
        raise RunIsActive(f"{who}; it last showed life {max(silence, 0):.0f} s ago", remedy=remedy)


def newest_attempt(store: Store) -> int:
    """The number of the newest start of the run; 0 if it was never started."""
    keys = [entry.key.removeprefix(_ROOT).removesuffix(".json") for entry in store.list(_ROOT)]
    return max((int(key) for key in keys if key.isdecimal()), default=0)


def _key(number: int, what: str = "") -> str:
    return f"{_ROOT}{number:06d}{what}.json"


def _process_table() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    container = Path("/proc/self/ns/pid")
    parts = [socket.gethostname()]
    if boot.exists():
        parts += [boot.read_text().strip(), os.readlink(container)]
    return " ".join(parts)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
