"""A command's hold on its run: its own attempts, and somebody else's."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints.attempt import Attempt, Owner, claim
from checkpoints.errors import RunIsActive
from data_service.store.errors import StoreUnavailable
from launcher.runtime.cluster import run_claim
from launcher.runtime.cluster.run_claim import RunClaim
from tests.support.stores.faulty import FaultyStore, set_fault


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_claim, "SUCCESSOR_CHECK_INTERVAL_S", 0.01)


OTHER = Owner(host="elsewhere", processes="another machine", pid=1, started=0.0, claimed=0.0)


def seize(store: FaultyStore, number: int) -> None:
    """Another machine takes the next attempt, because it takes us for dead."""
    assert store.put_if_absent(f"attempts/{number:06d}.json", OTHER.model_dump_json().encode())


def soon(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.005)
    return holds()


def test_attempts_of_its_own_follow_each_other(tmp_path: Path) -> None:
    store, owner = FaultyStore(tmp_path / "run"), Owner.for_this_process(time.time())
    tenure = RunClaim(claim(store, owner=owner), owner)
    assert [tenure.claim_next().number for _ in range(3)] == [1, 2, 3]
    assert soon(lambda: store.size("attempts/000003.heartbeat.json") is not None)
    assert not tenure.is_superseded
    tenure.close(10)


def test_a_successor_is_noticed_even_after_an_outage(tmp_path: Path) -> None:
    """A15: not only at the next commit."""
    store, owner = FaultyStore(tmp_path / "run"), Owner.for_this_process(time.time())
    tenure = RunClaim(claim(store, owner=owner), owner)
    tenure.claim_next()
    seize(store, 2)
    set_fault(store, "down")
    time.sleep(0.05)  # some looks, none of which says anything
    set_fault(store, None)
    assert soon(lambda: tenure.is_superseded)
    Attempt(store, 2).write_heartbeat(time.time())
    with pytest.raises(RunIsActive):
        tenure.claim_next()
    tenure.close(10)


def test_a_claim_in_an_outage_can_be_asked_again(tmp_path: Path) -> None:
    store, owner = FaultyStore(tmp_path / "run"), Owner.for_this_process(time.time())
    tenure = RunClaim(claim(store, owner=owner), owner)
    assert tenure.claim_next().number == 1, "the driver has claimed it: no store is needed"
    set_fault(store, "down")
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            tenure.claim_next()
    set_fault(store, None)
    assert tenure.claim_next().number == 2
    tenure.close(10)


def test_a_store_that_hangs_holds_up_no_end(tmp_path: Path) -> None:
    store, owner = FaultyStore(tmp_path / "run"), Owner.for_this_process(time.time())
    attempt = claim(store, owner=owner)
    set_fault(store, "hangs")
    tenure = RunClaim(attempt, owner)
    began = time.monotonic()
    tenure.close(0.1)
    assert time.monotonic() - began < 5
    set_fault(store, None)
