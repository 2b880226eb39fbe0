"""The coordinator when things fail: stores, ranks, peers, other commands; it runs as a plain object."""

import threading
import time
from pathlib import Path

from data_service.store.local import LocalStore
from launcher.runtime.cluster.deaths import read_deaths
from launcher.runtime.policies.elastic import GroupStart
from launcher.runtime.policies.failures import BARREN, NODE_FAILURES, SAME_ERROR, Failure
from launcher.runtime.policies.watchdog import RankLocation
from launcher.runtime.run.history import read_history
from tests.support.clusters.coordinators import ELASTIC, Cluster, begin, faulty, state
from tests.support.stores.faulty import set_fault


def test_a_store_that_hangs_keeps_nobody_from_showing_life(cluster: Cluster, tmp_path: Path) -> None:
    """A6: a death is put on record, a further attempt is claimed; meanwhile ranks beat, and the driver asks."""
    ranks, store = faulty(tmp_path)
    ranks.next_group([])
    begin(ranks, "a", "a", "b")
    set_fault(store, "hangs")
    assert ranks.next_group([2]) is not None, "the death is on its way to the record"
    entering = threading.Thread(target=ranks.enter, args=(("a", "a"),), daemon=True)
    entering.start()
    began = time.monotonic()
    for step in range(100):
        ranks.beat(0, step, "starting", RankLocation("a", 200))
        assert ranks.status().beats[0].step == step
    assert time.monotonic() - began < 5
    assert entering.is_alive(), "the claim waits for the store"
    set_fault(store, None)
    entering.join(10)
    assert ranks.status().attempt == 2
    assert ranks.close(10)
    assert [e["of"] for e in read_history(store).events if e["kind"] == "death"] == [1]


def test_a_claim_waits_for_the_store_and_nobody_is_blamed(cluster: Cluster, tmp_path: Path) -> None:
    ranks, store = faulty(tmp_path)
    ranks.next_group([])
    begin(ranks, "a", "a", "b")
    ranks.next_group([2])
    before = ranks.status().starts
    set_fault(store, "down")
    for _ in range(3):
        assert "no answer" in str(ranks.enter(("a", "a", "b")))
    told = [note for note in ranks.status().notes if "wait for the store" in note]
    assert len(told) == 1
    set_fault(store, None)
    assert ranks.enter(("a", "a", "b")) == 2
    assert ranks.status().starts == before + 1
    assert ranks.close(10)


def test_stores_that_do_not_answer_end_no_run(cluster: Cluster, tmp_path: Path) -> None:
    ranks = state(tmp_path, ELASTIC)
    for _ in range(2 * BARREN):
        assert ranks.next_group([0]) == GroupStart(3, frozenset())
        ranks.beat(0, 0, "starting", RankLocation("a", 1))
        ranks.failed(0, "StoreUnavailable: no answer", kind="transient")
        ranks.failed(1, "RuntimeError: connection closed by peer", kind="silent")
    assert ranks.next_group([0]) == GroupStart(3, frozenset())
    assert ranks.close(10)


def test_a_rank_that_only_lost_its_peer_has_raised_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """Ray may notice those that raise before the one that was killed: that is no error of the program."""
    ranks = state(tmp_path, ELASTIC)
    for _ in range(SAME_ERROR + 1):
        assert ranks.next_group([0]) is not None
        begin(ranks, "a", "b", "a")
        ranks.failed(0, "RuntimeError: connection closed by peer", kind="silent")
        ranks.failed(2, "RuntimeError: connection closed by peer", kind="silent")
    assert ranks.next_group([0]) is not None
    assert ranks.status().fatal is None
    assert ranks.close(10)
    assert {death.node for death in read_deaths(LocalStore(tmp_path), print)} == {"b"}


def test_who_hung_is_blamed(cluster: Cluster, tmp_path: Path) -> None:
    """A9: all are killed, and still it is known for whom they waited."""
    ranks = state(tmp_path, ELASTIC)
    for _ in range(NODE_FAILURES):
        assert ranks.next_group([0, 1, 2]) == GroupStart(3, frozenset())
        begin(ranks, "a", "b", "a")
        ranks.stacks()
        assert ranks.beat(0, 8, "training", RankLocation("a", 100)).stacks
        ranks.stack(0, "thread MainThread")
        ranks.hung("rank 1 has been silent for 120 s", [1], ranks.status().group)
    assert ranks.next_group([0, 1, 2]) == GroupStart(2, frozenset("b"))
    assert ranks.close(10)
    hangs = [e for e in read_history(LocalStore(tmp_path)).events if e["kind"] == "hang"]
    assert [hang["without_stacks"] for hang in hangs] == [[1, 2]] * NODE_FAILURES
    assert LocalStore(tmp_path).get("events/stacks/a000001/rank-00000.txt") == b"thread MainThread"


def test_nobody_is_blamed_for_a_hang_of_all(cluster: Cluster, tmp_path: Path) -> None:
    ranks = state(tmp_path, ELASTIC)
    for _ in range(NODE_FAILURES + 1):
        assert ranks.next_group([0, 1, 2]) == GroupStart(3, frozenset())
        begin(ranks, "a", "b", "a")
        ranks.hung("all stand still", [], ranks.status().group)
    assert ranks.close(10)


def test_deaths_are_counted_over_all_commands(cluster: Cluster, tmp_path: Path) -> None:
    """75 cannot go round for ever: each command dies once, in the same way."""
    failures: list[Failure] = []
    for command in range(SAME_ERROR):
        ranks, store = faulty(tmp_path, failures)
        assert ranks.next_group([]) is not None, command
        begin(ranks, "a", "a", "b")
        ranks.failed(0, "ValueError: bad row")
        verdict = ranks.next_group([0])
        assert ranks.close(10)
        failures = read_deaths(store, print)
    assert verdict is None
    assert failures == [], "who starts it again has mended something"


def test_what_earlier_commands_knew_of_a_node_holds(cluster: Cluster, tmp_path: Path) -> None:
    bad = Failure(time=time.time(), step=7, committed=0, worked=True, node="b", error=None, kind="silent")
    ranks = state(tmp_path, ELASTIC, failures=[bad] * NODE_FAILURES)
    assert ranks.next_group([]) == GroupStart(2, frozenset("b"))


def test_a_death_while_stopping_is_nobodys_failure(cluster: Cluster, tmp_path: Path) -> None:
    ranks, store = faulty(tmp_path)
    ranks.next_group([])
    begin(ranks, "a", "a", "b")
    ranks.stop()
    assert ranks.next_group([0, 1, 2]) is None
    assert ranks.status().idle
    assert ranks.close(10)
    assert read_deaths(store, print) == []


def test_the_run_was_taken_over(cluster: Cluster, tmp_path: Path) -> None:
    ranks = state(tmp_path, ELASTIC)
    ranks.next_group([])
    number = begin(ranks, "a", "a", "b")
    ranks.superseded("attempt 1 was superseded by attempt 2", number)
    assert ranks.status().superseded
    assert ranks.next_group([0]) is None
    status = ranks.status()
    assert (status.idle, status.fatal) == (True, None)


def test_a_last_save_that_failed_is_told(cluster: Cluster, tmp_path: Path) -> None:
    ranks = state(tmp_path, ELASTIC)
    ranks.next_group([])
    number = begin(ranks, "a", "a", "b")
    ranks.stop()
    ranks.unsaved("the final checkpoint failed", number)
    status = ranks.status()
    assert (status.unsaved, status.finished, status.fatal) == ("the final checkpoint failed", None, None)


def test_the_operator_hears_of_a_start_and_of_a_death(cluster: Cluster, tmp_path: Path) -> None:
    """A14: what is done, what died, what follows, what is repeated; a line each."""
    ranks = state(tmp_path, ELASTIC)
    ranks.next_group([])
    number = ranks.enter(("a", "a", "b"))
    for rank, node in enumerate("aab"):
        ranks.beat(rank, 40, "loading", RankLocation(node, 100, f"host-{node}"))
        ranks.beat(rank, 47, "training", RankLocation(node, 100, f"host-{node}"))
    ranks.record({"kind": "step"})
    ranks.failed(0, "RuntimeError: connection closed", kind="silent")
    ranks.next_group([2])
    ranks.enter(("a", "a", "b"))
    ranks.beat(0, 40, "loading", RankLocation("a", 300, "host-a"))
    ranks.failed(0, "ValueError: bad row", trace="Traceback: a long one")
    ranks.next_group([0])
    assert number == 1
    assert ranks.status().notes == [
        "starting 3 ranks",
        "loading the state of step 40",
        "rank 2 on host-b died at step 47 without a word (killed, or its machine lost); starting again",
        "starting 3 ranks",
        "loading the state of step 40, 7 steps are repeated",
        "rank 0 on host-a raised at step 40: ValueError: bad row; starting again",
        "starting 3 ranks",
    ]
    assert ranks.close(10)
    assert LocalStore(tmp_path).get("events/stacks/a000002/error-00000.txt") == b"Traceback: a long one"
