"""The driver's loop when things fail: stores, ranks, peers, other commands; ranks do what a test says."""

import threading
import time
from pathlib import Path

import pytest

from data_service.store.local import LocalStore
from launcher.runtime.cluster import control_loop
from launcher.runtime.cluster.operator_log import read_deaths
from launcher.runtime.cluster.orders import RunTakenOver, UnfitNodes
from launcher.runtime.policies.elastic import GroupStart
from launcher.runtime.policies.failures import NODE_FAILURE_LIMIT, SAME_ERROR_LIMIT, UNSAVED_FAILURE_LIMIT, Failure
from launcher.runtime.policies.watchdog import RankLocation
from launcher.runtime.run.history import read_history
from tests.support.clusters.control import ELASTIC, FIXED, WATCHDOG, Cluster, Driver, Ranks, driver, raised, started
from tests.support.stores.faulty import FaultyStore, set_fault


def test_a_store_that_hangs_keeps_nobody_from_showing_life(cluster: Cluster, tmp_path: Path) -> None:
    """A6: a death is put on record, a further attempt is claimed; meanwhile the driver talks with the ranks."""
    store = FaultyStore(tmp_path / "run")
    loop = started(store, "a", "a", "b")
    set_fault(store, "hangs")
    loop.end(2)
    assert loop.next_group() is not None, "the death is on its way to the record"
    ranks, entered = Ranks(2), list[bool]()
    entering = threading.Thread(target=lambda: entered.append(loop.loop.claim_attempt(ranks)), daemon=True)  # type: ignore[arg-type]
    entering.start()
    deadline = time.monotonic() + 30
    while ranks.talks < 3 and time.monotonic() < deadline:
        entering.join(0.05)
    assert ranks.talks >= 3
    assert entering.is_alive(), "the claim waits for the store"
    set_fault(store, None)
    entering.join(10)
    assert (entered, loop.loop.group.attempt) == ([True], 2)
    assert loop.close()
    assert [e["of"] for e in read_history(store).events if e["kind"] == "death"] == [1]


def test_a_claim_waits_for_the_store_and_nobody_is_blamed(cluster: Cluster, tmp_path: Path) -> None:
    store = FaultyStore(tmp_path / "run")
    loop = started(store, "a", "a", "b")
    loop.end(2)
    loop.next_group()
    set_fault(store, "down")
    threading.Timer(3.0, set_fault, (store, None)).start()
    assert loop.begin("a", "a", "b") == 2
    assert len([note for note in loop.display.notes if "wait for the store" in note]) == 1
    assert loop.close()


def test_a_stop_does_not_wait_for_a_claim(cluster: Cluster, tmp_path: Path) -> None:
    """Nothing is lost by it: nothing is in memory alone."""
    store = FaultyStore(tmp_path / "run")
    loop = started(store, "a", "a", "b")
    loop.end(2)
    loop.next_group()
    set_fault(store, "hangs")
    loop.stopping.asked.set()
    assert not loop.loop.claim_attempt(Ranks(3))  # type: ignore[arg-type]
    loop.end()
    assert loop.next_group() is None
    set_fault(store, None)


def test_stores_that_do_not_answer_end_no_run(cluster: Cluster, tmp_path: Path) -> None:
    loop = driver(tmp_path, ELASTIC)
    for _ in range(2 * UNSAVED_FAILURE_LIMIT):
        assert loop.next_group() == GroupStart(3, frozenset())
        loop.take_rank_news(0, "a", step=0, doing="starting")
        closed = raised("RuntimeError: connection closed by peer", "silent")
        loop.end(0, rank0=raised("StoreUnavailable: no answer", "transient"), rank1=closed)
    assert loop.next_group() == GroupStart(3, frozenset())
    assert loop.close()


def test_a_rank_that_only_lost_its_peer_has_raised_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """Ray may notice those that raise before the one that was killed: that is no error of the program."""
    loop = driver(tmp_path, ELASTIC)
    for _ in range(SAME_ERROR_LIMIT + 1):
        assert loop.next_group() is not None
        loop.begin("a", "b", "a")
        closed = raised("RuntimeError: connection closed by peer", "silent")
        loop.end(rank0=closed, rank2=closed)
    assert loop.next_group() is not None
    assert loop.loop.end.fatal is None
    assert loop.close()
    assert {death.node for death in read_deaths(LocalStore(tmp_path), print)} == {"b"}


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[list[RankLocation]]:
    """The processes that were killed, each time."""
    found: list[list[RankLocation]] = []
    monkeypatch.setattr(control_loop, "kill_ranks", found.append)
    monkeypatch.setattr(control_loop, "_STACKS_TIMEOUT_S", 0.01)
    monkeypatch.setattr(control_loop, "_POLL_S", 0.001)
    return found


def freeze(loop: Driver, *nodes: str, frozen: int | None) -> None:
    """Time passes, in which the rank `frozen` says nothing, or no rank makes progress if it is None."""
    now = loop.loop._observer._clock()
    for _ in range(8 if frozen is not None else 110):
        now += 1
        loop.loop._observer._clock = lambda now=now: now  # type: ignore[misc]
        for rank, node in enumerate(nodes):
            if rank != frozen:
                loop.take_rank_news(rank, node, stack="thread MainThread" if rank == 0 else None)
        loop.orders()


def test_who_hung_is_blamed(cluster: Cluster, tmp_path: Path, killed: list[list[RankLocation]]) -> None:
    """A9: all are killed, once a group, and still it is known for whom they waited."""
    loop = driver(tmp_path, ELASTIC)
    for _ in range(NODE_FAILURE_LIMIT):
        assert loop.next_group() == GroupStart(3, frozenset())
        loop.begin("a", "b", "a")
        freeze(loop, "a", "b", "a", frozen=1)
        assert loop.ranks.orders.stacks
        loop.end(0, 1, 2)
    assert [[place.node for place in places] for places in killed] == [["a", "b", "a"]] * NODE_FAILURE_LIMIT
    assert loop.next_group() == GroupStart(2, frozenset("b"))
    assert loop.close()
    hangs = [e for e in read_history(LocalStore(tmp_path)).events if e["kind"] == "hang"]
    assert [hang["without_stacks"] for hang in hangs] == [[1, 2]] * NODE_FAILURE_LIMIT
    assert all(hang["what"].startswith("rank 1 has been silent for") for hang in hangs)
    assert LocalStore(tmp_path).get("events/stacks/a000001/rank-00000.txt") == b"thread MainThread"


@pytest.mark.parametrize("absent", [{0}, {1}, {0, 1}])
def test_ranks_that_never_begin_end_their_group(
    absent: set[int], cluster: Cluster, tmp_path: Path, killed: list[list[RankLocation]]
) -> None:
    """Nobody else notices where no other rank waits for them. The group ends as a whole, and is a failure."""
    loop = driver(tmp_path, FIXED)
    assert loop.next_group() is not None
    loop.ranks = Ranks(2)
    now, ended, turns = loop.loop._observer._clock(), False, 0
    while not ended and turns < 2 * WATCHDOG.other:
        now, turns = now + 1, turns + 1
        loop.loop._observer._clock = lambda now=now: now  # type: ignore[misc]
        for rank in {0, 1} - absent:
            loop.take_rank_news(rank, "a", step=0, doing="loading" if turns % 2 else "starting")
        ended = loop.loop.supervise_group(loop.ranks)
    assert WATCHDOG.other < turns < WATCHDOG.other + 5
    loop.end()
    assert loop.next_group() is not None, "the next group may begin"
    assert loop.close()
    (death,) = read_deaths(LocalStore(tmp_path), print)
    assert (death.kind, death.step, death.node) == ("silent", 0, None)


def test_nobody_is_blamed_for_a_hang_of_all(cluster: Cluster, tmp_path: Path, killed: list[list[RankLocation]]) -> None:
    loop = driver(tmp_path, ELASTIC)
    for _ in range(NODE_FAILURE_LIMIT + 1):
        assert loop.next_group() == GroupStart(3, frozenset())
        loop.begin("a", "b", "a")
        freeze(loop, "a", "b", "a", frozen=None)
        loop.end(0, 1, 2)
    assert len(killed) == NODE_FAILURE_LIMIT + 1
    assert loop.close()


def test_a_rank_that_freezes_before_its_group_has_an_attempt_is_found(
    cluster: Cluster, tmp_path: Path, killed: list[list[RankLocation]]
) -> None:
    loop = driver(tmp_path, FIXED)
    loop.next_group()
    loop.take_rank_news(0, "a")
    loop.take_rank_news(1, "b")
    freeze(loop, "a", "b", frozen=1)
    assert len(killed) == 1


def test_a_driver_that_was_stopped_kills_nobody(
    cluster: Cluster, tmp_path: Path, killed: list[list[RankLocation]]
) -> None:
    loop = started(tmp_path, "a", "b", sizing=FIXED)
    for hour in range(20):
        loop.loop._observer._clock = lambda hour=hour: 3600.0 * hour  # type: ignore[misc]
        loop.take_rank_news(0, "a", step=hour)
        loop.take_rank_news(1, "b", step=hour)
        loop.orders()
    assert killed == []


def test_deaths_are_counted_over_all_commands(cluster: Cluster, tmp_path: Path) -> None:
    """75 cannot go round for ever: each command dies once, in the same way."""
    failures, store = list[Failure](), FaultyStore(tmp_path / "run")
    for command in range(SAME_ERROR_LIMIT):
        loop = Driver(store, ELASTIC, None, failures)
        assert loop.next_group() is not None, command
        loop.begin("a", "a", "b")
        loop.end(0, rank0=raised("ValueError: bad row"))
        verdict = loop.next_group()
        assert loop.close()
        failures = read_deaths(store, print)
    assert verdict is None
    assert failures == [], "who starts it again has mended something"


def test_what_earlier_commands_knew_of_a_node_holds(cluster: Cluster, tmp_path: Path) -> None:
    bad = Failure(time=time.time(), step=7, committed=0, worked=True, node="b", error=None, kind="silent")
    loop = driver(tmp_path, ELASTIC, failures=[bad] * NODE_FAILURE_LIMIT)
    assert loop.next_group() == GroupStart(2, frozenset("b"))


def test_a_death_while_stopping_is_nobodys_failure(cluster: Cluster, tmp_path: Path) -> None:
    store = FaultyStore(tmp_path / "run")
    loop = started(store, "a", "a", "b")
    loop.stopping.asked.set()
    loop.end(0, 1, 2)
    assert loop.next_group() is None
    assert loop.close()
    assert read_deaths(store, print) == []


def test_the_run_was_taken_over(cluster: Cluster, tmp_path: Path, killed: list[list[RankLocation]]) -> None:
    """A15: its ranks do not train on until their next commit."""
    loop = started(tmp_path / "told", "a", "a", "b")
    loop.end(0, rank0=RunTakenOver("attempt 1 was superseded by attempt 2"))
    assert (loop.loop.end.taken_over, loop.loop.end.fatal, loop.next_group()) == (True, None, None)
    seen = started(tmp_path / "seen", "a", "a", "b")
    assert not seen.loop.supervise_group(seen.ranks)
    seen.claim._taken.set()
    assert seen.loop.supervise_group(seen.ranks)
    assert len(killed) == 1


def test_nodes_that_are_unfit_are_left_out_as_far_as_they_can_be_spared(cluster: Cluster, tmp_path: Path) -> None:
    for sizing, least in ((ELASTIC, True), (FIXED, False)):
        loop = driver(tmp_path / str(least), sizing)
        loop.next_group()
        unfit = UnfitNodes([{"node": "a"}], "a full disk", "make room")
        loop.end(0, 1, rank0=unfit, rank1=unfit)
        assert (loop.loop.end.fatal is None) == least
        assert loop.next_group() == (GroupStart(1, frozenset("a")) if least else None)
        assert loop.close()
        assert [e["kind"] for e in read_history(loop.store).events].count("unfit") == 1


def test_the_operator_hears_of_a_start_and_of_a_death(cluster: Cluster, tmp_path: Path) -> None:
    """A14: what is done, what died, what follows, what is repeated; a line each."""
    loop = driver(tmp_path, ELASTIC)
    loop.next_group()
    loop.ranks = Ranks(3)
    assert loop.loop.claim_attempt(loop.ranks)
    for rank, node in enumerate("aab"):
        loop.take_rank_news(rank, node, step=40, doing="loading", resumed=40)
        loop.take_rank_news(rank, node, step=47, resumed=40)
    loop.worked()
    loop.take_rank_news(0, "a", step=47)
    loop.end(2, rank0=raised("RuntimeError: connection closed", "silent"))
    loop.next_group()
    assert loop.loop.claim_attempt(loop.ranks)
    loop.take_rank_news(0, "a", step=40, doing="loading", resumed=40)
    loop.end(0, rank0=raised("ValueError: bad row", trace="Traceback: a long one"))
    loop.next_group()
    assert loop.display.notes == [
        "starting 3 ranks",
        "loading the state of step 40",
        "rank 2 on host-b died at step 47 without an error (killed, or machine lost); starting again",
        "starting 3 ranks",
        "loading the state of step 40, 7 steps are repeated",
        "rank 0 on host-a raised at step 40: ValueError: bad row; starting again",
        "starting 3 ranks",
    ]
    assert loop.close()
    assert LocalStore(tmp_path).get("events/stacks/a000002/error-00000.txt") == b"Traceback: a long one"
