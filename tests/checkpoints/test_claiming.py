"""Waiting for a run that may still live elsewhere: until it has been silent for long enough, or is seen to live."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints.attempt import Attempt, Owner, claim
from checkpoints.errors import RunIsActive
from checkpoints.ownership import await_claim, read_attempt_status
from tests.support.stores.faulty import ClockedStore

NOW = 1_000_000.0
ELSEWHERE = Owner(host="node-9", processes="another boot", pid=77, started=NOW, claimed=NOW)


@pytest.fixture
def store(tmp_path: Path) -> ClockedStore:
    return ClockedStore(tmp_path / "run")


class Waiting:
    """A claimant whose pauses pass at once: each calls `meanwhile` and lets `seconds` pass on both clocks."""

    def __init__(self, store: ClockedStore, meanwhile: Callable[[int], None], seconds: float = 10.0) -> None:
        self.store, self.notes, self.pauses, self._now = store, list[str](), 0, 0.0
        self._meanwhile, self._seconds = meanwhile, seconds
        self.stops_clock = False

    def is_set(self) -> bool:
        return False

    def wait(self, timeout: float) -> None:
        self.pauses += 1
        self._now += self._seconds
        if not self.stops_clock:
            self.store.pass_(self._seconds)
        self._meanwhile(self.pauses)

    def claim(self) -> Attempt | None:
        me = Owner.for_this_process(NOW)
        return await_claim(self.store, me, self, self.notes.append, clock=lambda: self._now)  # type: ignore[arg-type]


def nothing(pause: int) -> None: ...


def test_a_silent_run_is_waited_for_and_taken(store: ClockedStore) -> None:
    claim(store, owner=ELSEWHERE).write_heartbeat(NOW)
    store.pass_(15)
    waiting = Waiting(store, nothing)
    taken = waiting.claim()
    assert taken is not None
    assert (taken.number, waiting.pauses) == (2, 5)
    assert len(waiting.notes) == 1
    assert "node-9" in waiting.notes[0]
    assert " 45 s " in waiting.notes[0]


def test_a_store_without_a_clock_of_use_keeps_nobody_out(store: ClockedStore) -> None:
    """We have looked for as long as the lease is, by our own clock."""
    claim(store, owner=ELSEWHERE).write_heartbeat(NOW)
    waiting = Waiting(store, nothing)
    waiting.stops_clock = True
    taken = waiting.claim()
    assert taken is not None
    assert waiting.pauses == 6


def test_a_run_that_shows_life_meanwhile_is_left_alone(store: ClockedStore) -> None:
    """Whatever it says the time is."""
    first = claim(store, owner=ELSEWHERE)
    first.write_heartbeat(NOW, 0)
    waiting = Waiting(store, lambda pause: first.write_heartbeat(NOW, 1) if pause == 3 else None)
    with pytest.raises(RunIsActive, match="node-9") as caught:
        waiting.claim()
    assert " stop" in caught.value.remedy
    assert waiting.pauses == 3


def test_somebody_else_is_faster(store: ClockedStore) -> None:
    claim(store, owner=ELSEWHERE)
    other = ELSEWHERE.model_copy(update={"pid": 78})

    def meanwhile(pause: int) -> None:
        if pause == 2:
            Attempt(store, 1).record_end(NOW)
            claim(store, owner=other)

    with pytest.raises(RunIsActive, match="process 78"):
        Waiting(store, meanwhile).claim()


def test_a_run_that_ends_meanwhile_is_taken_at_once(store: ClockedStore) -> None:
    first = claim(store, owner=ELSEWHERE)
    waiting = Waiting(store, lambda pause: first.record_end(NOW) if pause == 1 else None)
    taken = waiting.claim()
    assert taken is not None
    assert (taken.number, waiting.pauses) == (2, 1)


def test_a_stop_ends_the_waiting(store: ClockedStore) -> None:
    claim(store, owner=ELSEWHERE)
    stopped = threading.Event()
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        stopped.set()

    assert await_claim(store, Owner.for_this_process(NOW), stopped, note) is None
    assert len(notes) == 1


@pytest.mark.parametrize("wrong", [-3600.0, 0.0, 61.0, 3600.0])
def test_whether_a_run_lives_is_not_a_matter_of_our_clock(store: ClockedStore, wrong: float) -> None:
    claim(store, owner=ELSEWHERE).write_heartbeat(NOW)
    store.pass_(59)
    found = read_attempt_status(store, NOW + 59 + wrong)
    assert found is not None
    assert (found.state, found.heard) == ("running", NOW + wrong)
    store.pass_(1)
    found = read_attempt_status(store, NOW + 60 + wrong)
    assert found is not None
    assert found.state == "dead"


@pytest.mark.parametrize("what", ["", ".heartbeat", ".ended"])
@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"time": NaN}', b"\xff"])
def test_damaged_records_do_not_hide_a_run(store: ClockedStore, what: str, text: bytes) -> None:
    claim(store, owner=ELSEWHERE).write_heartbeat(NOW)
    store.put(f"attempts/000001{what}.json", text)
    found = read_attempt_status(store, NOW)
    assert found is not None
    assert found.state == ("ended" if what == ".ended" else "running")
    store.pass_(61)
    taken = claim(store)
    assert taken.number == 2
