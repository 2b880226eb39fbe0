"""The coordinator through starts and failures, with nodes of our own in place of Ray's; it runs as a plain object."""

import re
from dataclasses import replace
from pathlib import Path

from data_service.store.local import LocalStore
from launcher.runtime.cluster.orders import Orders
from launcher.runtime.policies.elastic import GroupStart
from launcher.runtime.policies.failures import BARREN, CROWDED, NODE_FAILURES, SAME_ERROR
from launcher.runtime.policies.watchdog import RankLocation
from launcher.runtime.run.history import read_history
from tests.support.clusters.coordinators import ELASTIC, FIXED, Cluster, begin, events, state

HAND_OVER = Orders(pause=True, hand_over=True)
SAVE = Orders(pause=True)


def test_a_machine_goes_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    ranks = state(tmp_path, ELASTIC)
    assert ranks.next_group([]) == GroupStart(3, frozenset())
    assert begin(ranks, "a", "a", "b") == 1
    del cluster.cores["b"]
    assert ranks.next_group([2]) == GroupStart(2, frozenset())
    assert begin(ranks, "a", "a") == 2, "every group is an attempt of its own"
    ranks.look_around()
    assert not ranks.beat(0, 8, "training", RankLocation("a", 100)).pause
    cluster.cores["c"] = 1
    ranks.look_around()
    assert ranks.beat(0, 8, "training", RankLocation("a", 100)) == HAND_OVER
    ranks.finish(9, saved=False)
    assert ranks.status().paused
    assert ranks.next_group([]) == GroupStart(3, frozenset())
    early = ranks.beat(0, 0, "starting", RankLocation("a", 200))
    assert not early.pause, "that was for the ranks before"
    assert not early.hand_over
    assert begin(ranks, "a", "a", "c") == 3
    assert events(tmp_path, ranks) == [("world", 3, 2), ("pause", None, None), ("world", 2, 3)]


def test_the_others_leave_when_a_rank_is_gone_and_those_after_them_do_not(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The driver's call may arrive late."""
    ranks, place = state(tmp_path, ELASTIC), RankLocation("a", 100)
    first = ranks.next_group([])
    assert first is not None
    ranks.rank_gone(first.number)
    assert ranks.beat(0, 0, "starting", place).abort, "before they have an attempt, too"
    begin(ranks, "a", "a", "b")
    assert ranks.beat(1, 8, "training", place).abort
    second = ranks.next_group([2])
    assert second is not None
    assert second.number == first.number + 1
    ranks.rank_gone(first.number)
    assert not ranks.beat(0, 0, "starting", place).abort
    begin(ranks, "a", "a", "b")
    assert not ranks.beat(0, 9, "training", place, attempt=2).abort
    ranks.rank_gone(second.number)
    assert ranks.beat(0, 9, "training", place, attempt=2).abort
    assert ranks.beat(0, 9, "training", place, attempt=1) == Orders(), "that one is over"


def test_a_node_that_is_to_go_is_left_in_time(cluster: Cluster, tmp_path: Path) -> None:
    ranks = state(tmp_path, ELASTIC)
    ranks.next_group([])
    begin(ranks, "a", "a", "b")
    cluster.cores["c"] = 1
    cluster.draining = {"c": 0}
    ranks.look_around()
    assert not ranks.beat(0, 8, "training", RankLocation("a", 100)).pause, "no rank is on that one"
    cluster.draining = {"b": 1_800_000_000_000}
    ranks.look_around()
    assert ranks.beat(0, 8, "training", RankLocation("a", 100)) == HAND_OVER
    ranks.finish(9, saved=False)
    assert ranks.next_group([]) == GroupStart(3, frozenset()), "with c in place of b"
    assert events(tmp_path, ranks) == [("pause", None, None)]


def test_a_state_is_saved_if_nobody_goes_on_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """Meanwhile all who have it in memory may go."""
    ranks = state(tmp_path, replace(ELASTIC, wait=60))
    ranks.next_group([])
    begin(ranks, "a", "a", "b")
    cluster.draining = {"b": 1_800_000_000_000}
    ranks.look_around()
    assert ranks.beat(0, 8, "training", RankLocation("a", 100)) == SAVE
    ranks.finish(9)
    assert ranks.next_group([]) is None
    assert not ranks.status().idle


def test_a_state_that_only_the_memory_has_is_saved_before_the_command_ends(
    cluster: Cluster, tmp_path: Path
) -> None:
    for room in (True, False):
        ranks = state(tmp_path / str(room), ELASTIC)
        ranks.next_group([])
        begin(ranks, "a", "a", "b")
        ranks.finish(9, saved=False)
        ranks.stop()
        if room:
            assert ranks.next_group([]) == GroupStart(3, frozenset()), "these save it"
            begin(ranks, "a", "a", "b")
            assert ranks.beat(0, 9, "loading", RankLocation("a", 100)).stop
            ranks.finish(9)
        else:
            cluster.cores.clear()
        assert ranks.next_group([]) is None
        assert ranks.status().idle
        assert ranks.status().finished == (9 if room else None)


def test_who_died_first_is_what_ray_says(cluster: Cluster, tmp_path: Path) -> None:
    """Rank 1 dies without a word, rank 0 raises because of it, rank 2 has noticed nothing yet."""
    ranks = state(tmp_path, ELASTIC)
    for _ in range(NODE_FAILURES):
        assert ranks.next_group([0, 1]) == GroupStart(3, frozenset())
        begin(ranks, "a", "b", "a")
        ranks.record({"kind": "step"})
        ranks.failed(0, "RuntimeError: connection closed by peer")
    assert ranks.next_group([0, 1]) == GroupStart(2, frozenset("b"))


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


def test_what_one_rank_alone_knows_is_on_record(cluster: Cluster, tmp_path: Path) -> None:
    ranks = state(tmp_path, ELASTIC)
    ranks.next_group([])
    old = begin(ranks, "a", "a", "b")
    ranks.status()  # hands the notes so far over
    ranks.event("memory_failed", {"step": 3, "reason": "no memory", "rank": 2, "host": "beta"}, old)
    assert len(ranks.status().notes) == 1
    ranks.next_group([2])
    ranks.event("memory_failed", {"step": 4, "reason": "late", "rank": 1, "host": "alpha"}, old)
    assert ranks.close(10)
    (told,) = (e for e in read_history(LocalStore(tmp_path)).events if e["kind"] == "memory_failed")
    assert {name: told[name] for name in ("of", "step", "rank", "host")} == {
        "of": old,
        "step": 3,
        "rank": 2,
        "host": "beta",
    }


def test_a_node_that_cannot_be_spared_stays(cluster: Cluster, tmp_path: Path) -> None:
    ranks = state(tmp_path, FIXED)
    for turn in range(max(NODE_FAILURES, CROWDED) + 1):
        assert ranks.next_group([0]) == GroupStart(2, frozenset(), frugal=turn >= CROWDED)
        begin(ranks, "a", "b")
        ranks.record({"kind": "step"})
    assert ranks.close(10)
    told = [e for e in read_history(LocalStore(tmp_path)).events if e["kind"] == "memory_failed"]
    assert [(e["step"], "rank" in e) for e in told] == [(7, False)]


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
    assert "checkpoint" in fatal.problem
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
    ranks.beat(1, 3, "training", RankLocation("b", 101), old)
    ranks.finish(3, old)
    status = ranks.status()
    assert (status.fatal, status.finished, status.beats[1].place) == (None, None, RankLocation("a", 101))
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
    (note,) = ranks.status().notes
    assert re.search(r"\b1 ranks, 2 ", note)
    assert not ranks.status().idle
    ranks.stop()
    assert ranks.next_group([]) is None
    assert ranks.status().idle


def test_other_ranks_than_wrote_the_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    ranks = state(tmp_path, ELASTIC, last=2)
    assert ranks.next_group([]) == GroupStart(3, frozenset())
    begin(ranks, "a", "a", "b")
    assert events(tmp_path, ranks) == [("world", 2, 3)]
