"""Claims with any number of processes whose requests to the store interleave at random, while they die, hang, lose
their requests or the answers: nobody begins a cell that somebody computes, and none stays blocked."""

import json
from contextlib import suppress
from dataclasses import dataclass
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, multiple, rule

from checkpoints.attempt import Attempt, Owner
from data_service.store.errors import StoreUnavailable
from launcher.after.evaluate.computing import LEASE_S, holder, take
from tests.support.stores.turns import Memory, Process, Turn, TurnStore

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
