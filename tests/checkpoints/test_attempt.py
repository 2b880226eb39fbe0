"""Attempts: one start of a run at a time, found dead at once on its own machine, and by its lease elsewhere."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from checkpoints.attempt import Attempt, Heartbeat, Owner, claim, end_newest_attempt
from checkpoints.errors import RunIsActive, Superseded
from data_service.store.base import Store
from data_service.store.local import LocalStore
from tests.support.stores.faulty import ClockedStore, FaultyStore, set_fault

NOW = 1_000_000.0


@pytest.fixture
def store(tmp_path: Path) -> ClockedStore:
    return ClockedStore(tmp_path / "run")


def elsewhere(now: float, pid: int = 77) -> Owner:
    return Owner(host="node-9", processes="node-9 another boot", pid=pid, started=now - 5, claimed=now)


def claim_in_child(store: LocalStore, *, then_die: bool) -> int:
    """Claims in another process of this machine; returns its pid. It is killed, or waits to be."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        claim(store)
        os.write(write, b"claimed")
        signal.pause()
    assert os.read(read, 7) == b"claimed"
    if then_die:
        os.kill(child, signal.SIGKILL)
    return child


def reap(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_numbers_count_up(any_store: Store) -> None:
    for number in (1, 2, 3):
        attempt = claim(any_store)
        assert attempt.number == number
        attempt.ensure_current()
        attempt.record_end(NOW)


def test_a_run_that_lives_here_is_refused_and_named(store: LocalStore) -> None:
    child = claim_in_child(store, then_die=False)
    try:
        with pytest.raises(RunIsActive, match=f"process {child}") as caught:
            claim(store)
    finally:
        reap(child)
    assert f"kill {child}" in caught.value.remedy
    assert claim(store).number == 2


def test_a_killed_run_starts_again_at_once_even_before_it_is_reaped(store: LocalStore) -> None:
    child = claim_in_child(store, then_die=True)
    assert os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT) is not None  # dead, still in the table
    try:
        assert claim(store).number == 2
    finally:
        os.waitpid(child, 0)


def test_a_reused_pid_is_not_the_old_process(store: LocalStore) -> None:
    here = Owner.for_this_process(NOW)
    store.put(
        "attempts/000001.json",
        here.model_copy(update={"started": here.started - 100}).model_dump_json().encode(),
    )
    assert claim(store).number == 2


@pytest.mark.parametrize("wrong", [-3600.0, 0.0, 61.0, 3600.0])
def test_elsewhere_the_lease_decides_by_the_stores_clock_alone(store: ClockedStore, wrong: float) -> None:
    """`wrong`: seconds by which the claimant's clock is ahead."""
    first = claim(store, owner=elsewhere(NOW), clock=lambda: NOW)
    store.pass_(59)
    with pytest.raises(RunIsActive, match="node-9") as caught:
        claim(store, clock=lambda: NOW + 59 + wrong)
    assert " 1 s" in caught.value.remedy
    store.pass_(41)
    first.write_heartbeat(NOW + 100)
    store.pass_(59)
    with pytest.raises(RunIsActive):
        claim(store, clock=lambda: NOW + 159 + wrong)
    store.pass_(1)
    assert claim(store, clock=lambda: NOW + 160 + wrong).number == 2


def test_an_owner_succeeds_itself_and_ends_its_last(store: ClockedStore) -> None:
    owner = elsewhere(NOW)
    first = claim(store, owner=owner)
    store.pass_(1000)
    second = claim(store, owner=owner)
    with pytest.raises(Superseded):
        first.ensure_current()
    second.ensure_current()
    with pytest.raises(RunIsActive):  # the second claim counts as a sign of life, before any heartbeat
        claim(store)
    end_newest_attempt(store, elsewhere(NOW, pid=78), NOW)  # not its own: nothing happens
    with pytest.raises(RunIsActive):
        claim(store)
    end_newest_attempt(store, owner, NOW + 1001)
    assert claim(store).number == 3


def test_who_has_taken_over(store: LocalStore) -> None:
    """Not the owner itself, who claims an attempt for every group of its ranks."""
    owner = elsewhere(NOW)
    first = claim(store, owner=owner)
    assert first.superseding_owner(owner) is None
    claim(store, owner=owner).record_end(NOW)
    assert first.superseding_owner(owner) is None
    claim(store)
    found = first.superseding_owner(owner)
    assert found is not None
    assert found.pid == os.getpid()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"pid": "x"}', b"\xff\x00"])
def test_a_damaged_record_of_another_start_counts_as_long_as_the_lease(store: ClockedStore, text: bytes) -> None:
    claim(store)
    store.put("attempts/000001.json", text)
    with pytest.raises(RunIsActive, match="unknown"):
        claim(store)
    store.pass_(60)
    first, second = Attempt(store, 1), claim(store)
    assert second.number == 2
    store.put("attempts/000002.json", text)
    with pytest.raises(Superseded, match="unknown"):
        first.ensure_current()
    store.put("attempts/000002.ended.json", text)
    assert second.end_time() is not None
    assert claim(store).number == 3


def test_of_many_starts_at_once_one_works(any_store: Store) -> None:
    claim(any_store, owner=elsewhere(NOW), clock=lambda: NOW).record_end(NOW)
    start = threading.Barrier(12)

    def try_one(number: int) -> bool:
        start.wait()
        try:
            claim(any_store, owner=elsewhere(NOW, pid=number), clock=lambda: NOW)
        except RunIsActive:
            return False
        return True

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(try_one, range(12))).count(True) == 1


def test_the_heart_beats_and_survives_a_failing_store(store: LocalStore, caplog: pytest.LogCaptureFixture) -> None:
    """Beats differ even while the clock stands."""
    attempt = Attempt(FaultyStore(store.root), claim(store).number)
    set_fault(store, "down")
    with Heartbeat(attempt, lease_s=0.004, clock=lambda: NOW):
        while "no heartbeat of attempt 1" not in caplog.text:
            time.sleep(0.001)
        seen = {Attempt(store, 1).heartbeat()}
        set_fault(store, None)
        while len(seen) < 4:
            seen.add(Attempt(store, 1).heartbeat())
    assert b"" in seen
    assert json.loads(store.get("attempts/000001.heartbeat.json"))["time"] == NOW
