"""Claims with any number of processes whose requests to the store interleave at random, while they die, hang, lose
their requests or the answers: nobody begins a cell that somebody computes, and none stays blocked.

Each process is a thread that waits before every request to its store until it is given a turn, so every interleaving
can be had again. The store's clock stands still unless time is made to pass.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, multiple, rule

from checkpoints.attempt import Attempt, Owner
from data_service.store.base import Entry
from data_service.store.errors import KeyMissing, StoreUnavailable
from launcher.after.evaluate.compute_cell import LEASE_S, holder, take

Turn = Literal["carried out", "lost", "answer lost", "dies before", "dies after"]


class Dies(BaseException):
    """What a process that is killed raises: nobody catches it."""


@dataclass
class Memory:
    """Objects and when they were written, by a clock of their own, in seconds."""

    now: float = 0.0
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)


class TurnStore:
    """`Store`, as far as claims need it. `turn` waits for a turn and says what becomes of the request."""

    def __init__(self, memory: Memory, turn: Callable[[], Turn], prefix: str = "") -> None:
        self._memory, self._turn, self._prefix = memory, turn, prefix

    @property
    def uri(self) -> str:
        return f"memory/{self._prefix}"

    def at(self, prefix: str) -> "TurnStore":
        return TurnStore(self._memory, self._turn, f"{self._prefix}{prefix}/")

    def get(self, key: str) -> bytes:
        with self._request():
            found = self._memory.objects.get(self._prefix + key)
        if found is None:
            raise KeyMissing.at(self.uri + key)
        return found[0]

    def put(self, key: str, data: bytes) -> None:
        with self._request():
            self._memory.objects[self._prefix + key] = data, self._memory.now

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._request():
            absent = self._prefix + key not in self._memory.objects
            if absent:
                self._memory.objects[self._prefix + key] = data, self._memory.now
        return absent

    def size(self, key: str) -> int | None:
        with self._request():
            found = self._memory.objects.get(self._prefix + key)
        return None if found is None else len(found[0])

    def age(self, key: str) -> float | None:
        with self._request():
            found = self._memory.objects.get(self._prefix + key)
        return None if found is None else self._memory.now - found[1]

    def list(self, prefix: str = "") -> Iterator[Entry]:
        with self._request():
            keys = sorted(key for key in self._memory.objects if key.startswith(self._prefix + prefix))
        for key in keys:
            yield Entry(key.removeprefix(self._prefix), 1)

    def _request(self) -> "_Request":
        return _Request(self._turn(), self.uri)


class _Request:
    def __init__(self, turn: Turn, uri: str) -> None:
        self._turn, self._uri = turn, uri

    def __enter__(self) -> None:
        if self._turn == "dies before":
            raise Dies
        if self._turn == "lost":
            raise StoreUnavailable.at(self._uri, "no connection")

    def __exit__(self, *error: object) -> None:
        if self._turn == "dies after":
            raise Dies
        if self._turn == "answer lost":
            raise StoreUnavailable.at(self._uri, "no answer")


class Process:
    """Runs `program` with a store of its own until it is `over`; it stands still between turns.

    `failure`: what it raised.
    """

    def __init__(self, memory: Memory, program: Callable[[TurnStore], None]) -> None:
        self._program = program
        self._given: Turn = "carried out"
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self.over = False
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(TurnStore(memory, self._wait),), daemon=True)
        self._thread.start()
        self._stands.acquire()

    def give(self, turn: Turn = "carried out") -> None:
        """One request; back when it stands before the next, or is over."""
        if not self.over:
            self._given = turn
            self._go.release()
            self._stands.acquire()

    def _run(self, store: TurnStore) -> None:
        try:
            self._program(store)
        except Dies:
            pass
        except Exception as error:
            self.failure = error
        finally:
            self.over = True
            self._stands.release()

    def _wait(self) -> Turn:
        self._stands.release()
        self._go.acquire()
        return self._given


KEY = "ab" * 16
HERE = Owner.here(0.0)
DONE: list[Turn] = ["carried out"]
TROUBLE: list[Turn] = ["lost", "answer lost", "dies before", "dies after"]
TURNS = DONE * 6 + TROUBLE
_MANY = 60  # requests: more than any claim takes alone


@dataclass
class Worker:
    """A process that claims the cell, computes it for a turn, and says that it is done.

    `state`: of its computing; what `dies` or `hangs` shows no life from then on.
    """

    owner: Owner
    state: str = "not begun"
    claim: Attempt | None = None
    process: Process | None = None

    @property
    def computes(self) -> bool:
        return self.state == "computing"


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.memory, self.workers = Memory(), list[Worker]()
        self.living = set[int]()
        running = mock.patch.object(Owner, "is_running", lambda owner: owner.pid in self.living)
        running.start()
        self.restore = running.stop

    workers_known = Bundle("workers")

    @rule(target=workers_known, here=st.booleans())
    def start(self, here: bool) -> Worker:
        number = len(self.workers) + 1
        processes = HERE.processes if here else f"boot of host {number}"
        worker = Worker(HERE.model_copy(update={"pid": number, "processes": processes}))
        self.workers.append(worker)
        self.living.add(number)
        worker.process = Process(self.memory, lambda store: self.work(worker, store))
        return worker

    @rule(worker=workers_known, turn=st.sampled_from(TURNS))
    def give(self, worker: Worker, turn: Turn) -> None:
        assert worker.process is not None
        if worker.state == "hung":
            return
        if turn.startswith("dies"):
            self.living.discard(worker.owner.pid)
        worker.process.give(turn)
        if worker.process.failure is not None:
            raise worker.process.failure
        if turn.startswith("dies"):
            worker.state = "dead"

    @rule(worker=consumes(workers_known))
    def hang(self, worker: Worker) -> None:
        worker.state = "hung"

    @rule(target=workers_known, worker=consumes(workers_known))
    def forget_those_that_are_over(self, worker: Worker) -> object:
        assert worker.process is not None
        return multiple() if worker.process.over else worker

    @rule(seconds=st.sampled_from([1.0, LEASE_S / 2, LEASE_S, 3 * LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        """Hearts beat."""
        until = self.memory.now + seconds
        while self.memory.now < until:
            self.memory.now = min(until, self.memory.now + LEASE_S / 4)
            for worker in self.workers:
                if worker.computes and worker.claim is not None:
                    self.at_once(worker.claim).beat(0.0)

    def work(self, worker: Worker, store: TurnStore) -> None:
        with suppress(StoreUnavailable):
            found = take(store, KEY, worker.owner)  # type: ignore[arg-type]
            if isinstance(found, Owner):
                return
            others = [other for other in self.workers if other.computes]
            assert not others, f"{worker.owner.pid} begins while {others[0].owner.pid} computes"
            worker.state, worker.claim = "computing", found
            with suppress(StoreUnavailable):
                store.size("the data")
            worker.state = "computed"
            found.end(0.0)

    def teardown(self) -> None:
        try:
            self.free_at_once_where_that_is_known()
            self.free_after_the_lease()
        finally:
            for worker in self.workers:
                while worker.process is not None and not worker.process.over:
                    worker.process.give("dies before")
            self.restore()

    def free_at_once_where_that_is_known(self) -> None:
        """The newest claim's process is of this machine and gone, or there was none."""
        records = [key for key in self.memory.objects if key.rpartition("/")[2].count(".") == 1]
        newest = json.loads(self.memory.objects[max(records)][0]) if records else None
        gone = newest is None or (newest["processes"] == HERE.processes and newest["pid"] not in self.living)
        if gone:
            assert holder(TurnStore(self.memory, lambda: "carried out"), KEY) is None  # type: ignore[arg-type]

    def free_after_the_lease(self) -> None:
        """Whatever has become of all processes that there were."""
        for worker in self.workers:
            worker.state = "hung"
        self.memory.now += LEASE_S
        self.start(here=False)
        last = self.workers[-1]
        assert last.process is not None
        for _ in range(_MANY):
            last.process.give()
        assert last.state == "computed"

    def at_once(self, claim: Attempt) -> Attempt:
        """Requests of its heart, which are no turns."""
        store = TurnStore(self.memory, lambda: "carried out")
        return Attempt(store.at(f"claims/{KEY}"), claim.number)  # type: ignore[arg-type]


TestAnyOrder = pytest.mark.heavy(AnyOrder.TestCase)
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
