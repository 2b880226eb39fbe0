"""Claims: a cell is one command's as long as that command lives, and anybody's afterwards."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from clocked import silent_for

from checkpoints.attempt import Owner, claim
from data_service.store.base import Store
from data_service.store.open import open_store
from launcher.evaluate.claims import Claim, claiming
from launcher.evaluate.sealed import seal

KEYS = [f"{number:032x}" for number in range(20)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "results")


def test_two_commands_share_the_cells(store: Store) -> None:
    with claiming(store) as first, claiming(store) as second:
        ours = [first.claim(key) is None for key in KEYS[:12]]
        theirs = [second.claim(key) is None for key in KEYS[6:]]
    assert all(ours)
    assert theirs == [False] * 6 + [True] * 8


def test_of_many_that_ask_at_once_one_gets_it(any_store: Store) -> None:
    got: list[str] = []
    with claiming(any_store) as first, claiming(any_store) as second, claiming(any_store) as third:
        threads = [
            threading.Thread(
                target=lambda c=claims: got.extend(key for key in KEYS[:5] if c.claim(key) is None)
            )
            for claims in (first, second, third)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(got) == KEYS[:5]


def test_a_command_may_claim_again_what_it_has(store: Store) -> None:
    with claiming(store) as claims:
        assert claims.claim(KEYS[0]) is None
        assert claims.claim(KEYS[0]) is None


def test_what_a_command_that_ended_had_claimed_is_free(store: Store) -> None:
    with claiming(store) as claims:
        claims.claim(KEYS[0])
    with claiming(store) as claims:
        assert claims.claim(KEYS[0]) is None


STAYING = """
import signal, sys
from data_service.store.open import open_store
from launcher.evaluate.claims import Claim, claiming
from launcher.evaluate.sealed import seal
with claiming(open_store(sys.argv[1])) as claims:
    print(claims.claim(sys.argv[2]), flush=True)
    signal.pause()
"""


def test_what_a_killed_command_of_this_machine_had_claimed_is_free_at_once(
    store: Store, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", STAYING, str(tmp_path / "results"), KEYS[0]]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        claiming(store) as claims,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "None\n"
        holder = claims.claim(KEYS[0])
        assert holder is not None
        assert holder.owner.pid == process.pid
        process.kill()
        process.wait()
        assert claims.claim(KEYS[0]) is None


def test_a_command_of_another_machine_holds_what_it_claimed_until_its_heart_is_silent(
    store: Store, tmp_path: Path
) -> None:
    there = Owner(host="node-9", processes="another boot", pid=77, started=0.0, claimed=time.time())
    claim(store.at("drivers/theirs"), owner=there)
    store.put(f"claims/{KEYS[0]}/000001.json", seal(Claim(driver="theirs")))
    with claiming(store, lease_s=60) as claims:
        holder = claims.claim(KEYS[0])
        assert holder is not None
        assert holder.owner.host == "node-9"
        silent_for(str(tmp_path / "results/drivers/theirs"), 61)
        assert claims.claim(KEYS[0]) is None


def test_a_damaged_claim_is_nobodys(store: Store) -> None:
    store.put(f"claims/{KEYS[0]}/000004.json", b"{")
    with claiming(store) as claims:
        assert claims.claim(KEYS[0]) is None
    assert store.size(f"claims/{KEYS[0]}/000005.json")
