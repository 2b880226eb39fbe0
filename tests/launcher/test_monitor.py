"""The monitor through starts and failures, with nodes of our own in place of Ray's; it runs as a plain object."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from faulty_store import FaultyStore, set_fault

from checkpoints.attempt import Owner, claim
from data_service.store.local import LocalStore
from launcher import nodes
from launcher.deaths import read_deaths
from launcher.elastic import Sizing, Start
from launcher.history import read_history
from launcher.monitor import MonitorState
from launcher.policy import BARREN, NODE_FAILURES, SAME_ERROR, Failure
from launcher.watchdog import Place

ELASTIC = Sizing(least=1, most=3, expected=3, wait=0, grow=0, each={"CPU": 1})
FIXED = Sizing(least=2, most=2, expected=2, wait=0, grow=float("inf"), each={"CPU": 1})


class Cluster:
    """Nodes by name, and their cores."""

    def __init__(self, **cores: int) -> None:
        self.cores = cores
        self.draining: dict[str, int] = {}

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": name, "Alive": True, "Resources": {"CPU": cores}} for name, cores in self.cores.items()
        ]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster(a=2, b=1)
    monkeypatch.setattr(ray, "nodes", cluster.nodes)
    monkeypatch.setattr(nodes.state, "get_draining_nodes", lambda: cluster.draining)
    return cluster


def faulty(folder: Path, failures: Sequence[Failure] = ()) -> tuple[MonitorState, FaultyStore]:
    """With a store that can hang or be away."""
    owner, store = Owner.here(time.time()), FaultyStore(folder / "run")
    return MonitorState(claim(store, owner=owner), owner, ELASTIC, None, failures), store


def state(
    folder: Path, sizing: Sizing, last: int | None = None, failures: Sequence[Failure] = ()
) -> MonitorState:
    owner, store = Owner.here(time.time()), LocalStore(folder)
    return MonitorState(claim(store, owner=owner), owner, sizing, last, failures)


def begin(state: MonitorState, *nodes: str) -> int:
    """A group comes together on these nodes and shows life."""
    number = state.enter(nodes)
    assert isinstance(number, int)
    for rank, node in enumerate(nodes):
        state.beat(rank, 7, "training", Place(node, 100 + rank))
    return number


def events(folder: Path, state: MonitorState) -> list[tuple[Any, ...]]:
    assert state.close(10)
    found = read_history(LocalStore(folder)).events
    return [(e["kind"], e.get("from"), e.get("to")) for e in found if e["kind"] in ("world", "pause")]


def test_a_machine_goes_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    ranks = state(tmp_path, ELASTIC)
    assert ranks.next_group([]) == Start(3, frozenset())
    assert begin(ranks, "a", "a", "b") == 1
    del cluster.cores["b"]
    assert ranks.next_group([2]) == Start(2, frozenset())
    assert begin(ranks, "a", "a") == 2, "every group is an attempt of its own"
    ranks.look_around()
    assert not ranks.beat(0, 8, "training", Place("a", 100)).pause
    cluster.cores["c"] = 1
    ranks.look_around()
    assert ranks.beat(0, 8, "training", Place("a", 100)).pause
    assert not ranks.beat(0, 8, "training", Place("a", 100)).stop
    ranks.finish(9)
    assert ranks.status().paused
    assert ranks.next_group([]) == Start(3, frozenset())
    early = ranks.beat(0, 0, "starting", Place("a", 200))
    assert not early.pause, "that was for the ranks before"
    assert begin(ranks, "a", "a", "c") == 3
    assert events(tmp_path, ranks) == [("world", 3, 2), ("pause", None, None), ("world", 2, 3)]


def test_a_node_that_is_to_go_is_left_in_time(cluster: Cluster, tmp_path: Path) -> None:
    ranks = state(tmp_path, ELASTIC)
    ranks.next_group([])
    begin(ranks, "a", "a", "b")
    cluster.cores["c"] = 1
    cluster.draining = {"c": 0}
    ranks.look_around()
    assert not ranks.beat(0, 8, "training", Place("a", 100)).pause, "no rank is on that one"
    cluster.draining = {"b": 1_800_000_000_000}
    ranks.look_around()
    assert ranks.beat(0, 8, "training", Place("a", 100)).pause
    ranks.finish(9)
    assert ranks.next_group([]) == Start(3, frozenset()), "with c in place of b"
    assert events(tmp_path, ranks) == [("pause", None, None)]


def test_who_died_first_is_what_ray_says(cluster: Cluster, tmp_path: Path) -> None:
    """Rank 1 dies without a word, rank 0 raises because of it, rank 2 has noticed nothing yet."""
    ranks = state(tmp_path, ELASTIC)
    for _ in range(NODE_FAILURES):
        assert ranks.next_group([0, 1]) == Start(3, frozenset())
        begin(ranks, "a", "b", "a")
        ranks.record({"kind": "step"})
        ranks.failed(0, "RuntimeError: connection closed by peer")
    assert ranks.next_group([0, 1]) == Start(2, frozenset("b"))


def test_a_death_is_on_record(cluster: Cluster, tmp_path: Path) -> None:
    ranks = state(tmp_path, ELASTIC)
    ranks.next_group([])
    begin(ranks, "a", "a", "b")
    ranks.failed(0, "RuntimeError: connection closed by peer")
    ranks.next_group([2])
    assert ranks.close(10)
    (death,) = (e for e in read_history(LocalStore(tmp_path)).events if e["kind"] == "death")
    told = {name: death[name] for name in ("of", "step", "ranks", "node", "reason")}
    assert told == {"of": 1, "step": 7, "ranks": [2], "node": "b", "reason": None}


def test_a_node_that_cannot_be_spared_stays(cluster: Cluster, tmp_path: Path) -> None:
    ranks = state(tmp_path, FIXED)
    for _ in range(NODE_FAILURES + 1):
        assert ranks.next_group([0]) == Start(2, frozenset())
        begin(ranks, "a", "b")
        ranks.record({"kind": "step"})


def test_an_error_that_comes_back_ends_the_run(cluster: Cluster, tmp_path: Path) -> None:
    ranks = state(tmp_path, ELASTIC)
    for _ in range(SAME_ERROR):
        assert ranks.next_group([0]) is not None
        begin(ranks, "a", "a", "b")
        ranks.record({"kind": "step"})
        ranks.failed(0, "ValueError: bad row")
    assert ranks.next_group([0]) is None
    fatal = ranks.status().fatal
    assert fatal is not None
    assert "bad row" in fatal.problem


def test_deaths_before_ranks_come_together_end_the_run_at_last(cluster: Cluster, tmp_path: Path) -> None:
    """They may be the machines': so not soon."""
    ranks = state(tmp_path, FIXED)
    assert ranks.next_group([]) is not None
    for _ in range(BARREN - 1):
        assert ranks.next_group([0, 1]) is not None
    assert ranks.next_group([0, 1]) is None
    fatal = ranks.status().fatal
    assert fatal is not None
    assert "without a checkpoint newer" in fatal.problem
    assert fatal.repeated


def test_a_death_is_counted_once_however_long_machines_are_waited_for(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Ray tells of the same dead ranks each time it asks whether others may start."""
    ranks = state(tmp_path, FIXED)
    assert ranks.next_group([]) is not None
    begin(ranks, "a", "b")
    cluster.cores = {"a": 1}
    for _ in range(2 * BARREN):
        assert ranks.next_group([1]) is None
    assert ranks.status().fatal is None
    cluster.cores = {"a": 2}
    assert ranks.next_group([1]) is not None


def test_ranks_that_were_cut_off_are_not_listened_to(cluster: Cluster, tmp_path: Path) -> None:
    """They live on, find a newer attempt in the store, and take it for somebody else's."""
    ranks = state(tmp_path, FIXED)
    ranks.next_group([])
    old = begin(ranks, "a", "b")
    ranks.next_group([1])
    new = begin(ranks, "a", "a")
    ranks.fail("attempt 1 was superseded by attempt 2", "let this process end", old)
    ranks.failed(1, "RuntimeError: connection closed", None, old)
    ranks.beat(1, 3, "training", Place("b", 101), old)
    ranks.finish(3, old)
    status = ranks.status()
    assert (status.fatal, status.finished, status.beats[1].place) == (None, None, Place("a", 101))
    ranks.finish(9, new)
    assert ranks.status().finished == 9


def test_who_ends_to_go_back_has_not_died(cluster: Cluster, tmp_path: Path) -> None:
    ranks = state(tmp_path, FIXED)
    assert ranks.next_group([]) is not None
    for _ in range(2 * BARREN):
        begin(ranks, "a", "a")
        ranks.went_back()
        assert ranks.next_group([0, 1]) is not None


def test_a_stop_while_machines_are_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    ranks = state(tmp_path, FIXED)
    cluster.cores = {"a": 1}
    assert ranks.next_group([]) is None
    assert ranks.status().notes == ["waiting for machines: places for 1 ranks, 2 at least wanted"]
    assert not ranks.status().idle
    ranks.stop()
    assert ranks.next_group([]) is None
    assert ranks.status().idle


def test_other_ranks_than_wrote_the_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    ranks = state(tmp_path, ELASTIC, last=2)
    assert ranks.next_group([]) == Start(3, frozenset())
    begin(ranks, "a", "a", "b")
    assert events(tmp_path, ranks) == [("world", 2, 3)]


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
        ranks.beat(0, step, "starting", Place("a", 200))
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
        assert ranks.next_group([0]) == Start(3, frozenset())
        ranks.beat(0, 0, "starting", Place("a", 1))
        ranks.failed(0, "StoreUnavailable: no answer", kind="transient")
        ranks.failed(1, "RuntimeError: connection closed by peer", kind="silent")
    assert ranks.next_group([0]) == Start(3, frozenset())
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
        assert ranks.next_group([0, 1, 2]) == Start(3, frozenset())
        begin(ranks, "a", "b", "a")
        ranks.stacks()
        assert ranks.beat(0, 8, "training", Place("a", 100)).stacks
        ranks.stack(0, "thread MainThread")
        ranks.hung("rank 1 has been silent for 120 s", [1], ranks.status().group)
    assert ranks.next_group([0, 1, 2]) == Start(2, frozenset("b"))
    assert ranks.close(10)
    hangs = [e for e in read_history(LocalStore(tmp_path)).events if e["kind"] == "hang"]
    assert [hang["without_stacks"] for hang in hangs] == [[1, 2]] * NODE_FAILURES
    assert LocalStore(tmp_path).get("events/stacks/a000001/rank-00000.txt") == b"thread MainThread"


def test_nobody_is_blamed_for_a_hang_of_all(cluster: Cluster, tmp_path: Path) -> None:
    ranks = state(tmp_path, ELASTIC)
    for _ in range(NODE_FAILURES + 1):
        assert ranks.next_group([0, 1, 2]) == Start(3, frozenset())
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
    assert ranks.next_group([]) == Start(2, frozenset("b"))


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
        ranks.beat(rank, 40, "loading", Place(node, 100, f"host-{node}"))
        ranks.beat(rank, 47, "training", Place(node, 100, f"host-{node}"))
    ranks.record({"kind": "step"})
    ranks.failed(0, "RuntimeError: connection closed", kind="silent")
    ranks.next_group([2])
    ranks.enter(("a", "a", "b"))
    ranks.beat(0, 40, "loading", Place("a", 300, "host-a"))
    ranks.failed(0, "ValueError: bad row", trace="Traceback: a long one")
    ranks.next_group([0])
    assert number == 1
    assert ranks.status().notes == [
        "starting 3 ranks",
        "loading the checkpoint of step 40",
        "first step done",
        "rank 2 on host-b died at step 47 without a word (killed, or its machine lost); "
        "starting again from the last checkpoint",
        "starting 3 ranks",
        "loading the checkpoint of step 40, 7 steps are repeated",
        "rank 0 on host-a raised at step 40: ValueError: bad row; starting again from the last checkpoint",
        "starting 3 ranks",
    ]
    assert ranks.close(10)
    assert LocalStore(tmp_path).get("events/stacks/a000002/error-00000.txt") == b"Traceback: a long one"
