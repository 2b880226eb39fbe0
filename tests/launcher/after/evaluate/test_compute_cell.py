"""Claims: a cell is one process's as long as it computes it, and anybody's afterwards."""

import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from checkpoints.attempt import Attempt, Owner
from data_service.store.base import Store
from data_service.store.errors import StoreUnavailable
from data_service.store.open import open_store
from launcher.after.evaluate.compute_cell import LEASE_S, claimed, holder, take
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.faulty import silent_for
from tests.support.stores.s3 import S3Server

KEYS = [f"{number:032x}" for number in range(20)]
THERE = Owner(host="node-9", processes="another boot", pid=77, started=0.0, claimed=0.0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "results")


@pytest.mark.long
def test_a_cell_is_held_until_its_computing_is_over(any_store: Store) -> None:
    with claimed(any_store, KEYS[0]) as other:
        assert other is None
        with claimed(any_store, KEYS[0]) as ours, claimed(any_store, KEYS[1]) as free:
            assert ours is not None
            assert ours.is_here()
            assert free is None
        assert holder(any_store, KEYS[0]) is not None
    assert holder(any_store, KEYS[0]) is None
    with claimed(any_store, KEYS[0]) as other:
        assert other is None


def test_what_fails_lets_go_of_its_cell(store: Store) -> None:
    with pytest.raises(KeyboardInterrupt), claimed(store, KEYS[0]):
        raise KeyboardInterrupt
    assert holder(store, KEYS[0]) is None


@pytest.mark.long
def test_of_many_that_ask_at_once_one_gets_it(any_store: Store) -> None:
    got: list[str] = []
    with ExitStack() as stack:

        def ask() -> None:
            got.extend(key for key in KEYS[:3] if stack.enter_context(claimed(any_store, key)) is None)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(got) == KEYS[:3]


STAYING = """
import signal, sys
from data_service.store.open import open_store
from launcher.after.evaluate.compute_cell import claimed
with claimed(open_store(sys.argv[1]), sys.argv[2]) as other:
    print(other, flush=True)
    signal.pause()
"""


@pytest.mark.long
def test_what_a_killed_process_of_this_machine_computed_is_free_at_once(store: Store, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STAYING, str(tmp_path / "results"), KEYS[0]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "None\n"
        found = holder(store, KEYS[0])
        assert found is not None
        assert found.pid == process.pid
        process.kill()
        process.wait()
        assert holder(store, KEYS[0]) is None


@pytest.mark.parametrize("owner", [THERE, Owner.here(0.0)], ids=["another machine", "hangs here"])
def test_whose_heart_is_silent_for_longer_than_the_lease_holds_nothing(
    store: Store, tmp_path: Path, owner: Owner
) -> None:
    claim = take(store, KEYS[0], owner)
    assert isinstance(claim, Attempt)
    claim.beat(time.time())
    assert holder(store, KEYS[0]) == owner
    silent_for(str(tmp_path / "results/claims" / KEYS[0]), LEASE_S - 20)
    assert holder(store, KEYS[0]) == owner
    silent_for(str(tmp_path / "results/claims" / KEYS[0]), LEASE_S + 1)
    with claimed(store, KEYS[0]) as other:
        assert other is None


def test_a_damaged_claim_holds_for_the_lease(store: Store, tmp_path: Path) -> None:
    """Whose it is cannot be told."""
    store.put(f"claims/{KEYS[0]}/attempts/000004.json", b"{")
    assert holder(store, KEYS[0]) is not None
    silent_for(str(tmp_path / "results/claims" / KEYS[0]), LEASE_S + 1)
    with claimed(store, KEYS[0]) as other:
        assert other is None


@pytest.mark.long
def test_a_store_that_fails_is_an_error_and_no_free_cell(s3: S3Server, faults: FaultProxy) -> None:
    bucket = s3.new_bucket()
    store, hasty = open_store(f"s3://{bucket}"), open_store(f"s3://{bucket}", patience_s=0.1)
    assert isinstance(take(store, KEYS[0], THERE), Attempt)
    faults.always = "error 500"
    with pytest.raises(StoreUnavailable), claimed(hasty, KEYS[0]):
        pass
    faults.always = None
    for _ in range(3):
        faults.plan.extend(["garble", "truncate", "reset after"])
        assert holder(store, KEYS[0]) is not None
