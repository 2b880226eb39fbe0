"""The driver's loop through starts and deaths, with nodes of our own in place of Ray's, and ranks that do what a test
says."""

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from data_service.store.local import LocalStore
from launcher.exit_codes import REPEAT, STOPPED
from launcher.runtime.cluster.orders import EndedUnsaved, FatalError, RankOrders, RestartFromEarlierState
from launcher.runtime.policies.elastic import GroupStart
from launcher.runtime.policies.failures import NODE_FAILURE_LIMIT, SILENT_DEATH_LIMIT, UNSAVED_FAILURE_LIMIT
from launcher.runtime.run.history import read_history
from tests.support.clusters.control import ELASTIC, FIXED, STEPS, Cluster, driver, raised, started

HAND_OVER = RankOrders(pause=True, hand_over=True)
SAVE = RankOrders(pause=True)


def test_a_machine_goes_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    loop = driver(tmp_path, ELASTIC)
    assert loop.next_group() == GroupStart(3, frozenset())
    assert loop.begin("a", "a", "b") == 1
    del cluster.cores["b"]
    loop.end(2)
    assert loop.next_group() == GroupStart(2, frozenset())
    assert loop.begin("a", "a") == 2, "every group is an attempt of its own"
    loop.loop.pause_if_nodes_changed()
    assert not loop.orders().pause
    cluster.cores["c"] = 1
    loop.loop.pause_if_nodes_changed()
    assert loop.orders() == HAND_OVER
    loop.finish(9, saved=False)
    assert loop.next_group() == GroupStart(3, frozenset())
    assert loop.begin("a", "a", "c") == 3
    assert loop.orders() == RankOrders(), "that was for the ranks before"
    assert loop.events() == [("world", 3, 2), ("pause", None, None), ("world", 2, 3)]


def test_a_node_that_is_to_go_is_left_in_time(cluster: Cluster, tmp_path: Path) -> None:
    loop = started(tmp_path, "a", "a", "b")
    cluster.cores["c"] = 1
    cluster.draining = {"c": 0}
    loop.loop.pause_if_nodes_changed()
    assert not loop.orders().pause, "no rank is on that one"
    cluster.draining = {"b": 1_800_000_000_000}
    loop.loop.pause_if_nodes_changed()
    assert loop.orders() == HAND_OVER
    assert re.search(r": b \(host-b\):", loop.display.notes[-1])
    loop.finish(9, saved=False)
    assert loop.next_group() == GroupStart(3, frozenset()), "with c in place of b"
    assert loop.events() == [("pause", None, None)]


def test_a_state_is_saved_if_nobody_goes_on_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """Meanwhile all who have it in memory may go."""
    loop = started(tmp_path, "a", "a", "b", sizing=replace(ELASTIC, wait=60))
    cluster.draining = {"b": 1_800_000_000_000}
    loop.loop.pause_if_nodes_changed()
    assert loop.orders() == SAVE
    loop.finish(9)
    assert loop.next_group() is None
    assert loop.loop.end.finished == 9


def test_a_state_that_only_the_memory_has_is_saved_before_the_command_ends(cluster: Cluster, tmp_path: Path) -> None:
    for room in (True, False):
        loop = started(tmp_path / str(room), "a", "a", "b")
        cluster.draining = {"b": 1_800_000_000_000}
        loop.loop.pause_if_nodes_changed()
        loop.finish(9, saved=False)
        cluster.draining = {}
        loop.stopping.asked.set()
        if room:
            assert loop.next_group() == GroupStart(3, frozenset()), "these save it"
            loop.begin("a", "a", "b")
            assert not loop.loop.supervise_group(loop.ranks)
            assert loop.ranks.orders.stop
            loop.finish(9)
        else:
            cluster.cores.clear()
        assert loop.next_group() is None
        assert loop.loop.end.finished == (9 if room else None)


def test_who_died_first_is_what_ray_says(cluster: Cluster, tmp_path: Path) -> None:
    """Rank 1 dies without a word, rank 0 raises because of it, rank 2 has noticed nothing yet."""
    loop = driver(tmp_path, ELASTIC)
    for _ in range(NODE_FAILURE_LIMIT):
        assert loop.next_group() == GroupStart(3, frozenset())
        loop.begin("a", "b", "a")
        loop.worked()
        loop.end(0, 1, rank0=raised("RuntimeError: connection closed by peer"))
    assert loop.next_group() == GroupStart(2, frozenset("b"))
    (told,) = (note for note in loop.display.notes if "excluded" in note)
    assert re.match(r"node b \(host-b\) ", told)


def test_what_one_rank_alone_knows_is_on_record(cluster: Cluster, tmp_path: Path) -> None:
    loop = driver(tmp_path, ELASTIC)
    loop.next_group()
    attempt = loop.begin("a", "a", "b")
    told = {"step": 3, "reason": "no memory", "rank": 2, "host": "beta"}
    loop.take_rank_news(2, "b", events=[("memory_failed", told)])
    assert loop.display.notes[-1] == "rank 2 on beta: no memory"
    assert loop.close()
    (event,) = (e for e in read_history(LocalStore(tmp_path)).events if e["kind"] == "memory_failed")
    assert {name: event[name] for name in ("of", "step", "rank", "host")} == {
        "of": attempt,
        "step": 3,
        "rank": 2,
        "host": "beta",
    }


def test_a_node_that_cannot_be_spared_stays(cluster: Cluster, tmp_path: Path) -> None:
    loop = driver(tmp_path, FIXED)
    for turn in range(max(NODE_FAILURE_LIMIT, SILENT_DEATH_LIMIT) + 1):
        assert loop.next_group() == GroupStart(2, frozenset(), frugal=turn >= SILENT_DEATH_LIMIT)
        loop.begin("a", "b")
        loop.worked()
        loop.end(0)
    assert loop.close()
    told = [e for e in read_history(LocalStore(tmp_path)).events if e["kind"] == "memory_failed"]
    assert [(e["step"], "rank" in e) for e in told] == [(7, False)]


def test_deaths_before_ranks_come_together_end_the_run_at_last(cluster: Cluster, tmp_path: Path) -> None:
    """They may be the machines': so not soon. Ranks that only lost each other count as well."""
    loop = driver(tmp_path, FIXED)
    for turn in range(UNSAVED_FAILURE_LIMIT):
        assert loop.next_group() is not None
        loop.end(0, 1) if turn % 2 else loop.end(rank0=raised("RuntimeError: gone", "silent"))
    assert loop.next_group() is None
    assert loop.loop.end.fatal is not None
    assert "checkpoint" in loop.loop.end.fatal.problem


def test_places_that_ray_does_not_find_are_nobodys_failure(cluster: Cluster, tmp_path: Path) -> None:
    loop = driver(tmp_path, FIXED)
    for _ in range(2 * UNSAVED_FAILURE_LIMIT):
        assert loop.next_group() is not None
        loop.end()
    assert loop.loop.end.fatal is None


def test_who_ends_to_go_back_has_not_died(cluster: Cluster, tmp_path: Path) -> None:
    loop = driver(tmp_path, FIXED)
    for _ in range(2 * UNSAVED_FAILURE_LIMIT):
        assert loop.next_group() is not None
        loop.begin("a", "a")
        loop.end(
            0,
            1,
            rank0=RestartFromEarlierState(),
            rank1=raised("RuntimeError: connection closed by peer", "silent"),
        )
    assert loop.next_group() is not None


def test_a_mistake_ends_the_run(cluster: Cluster, tmp_path: Path) -> None:
    loop = started(tmp_path, "a", "a", sizing=FIXED)
    loop.end(
        0,
        1,
        rank1=FatalError("what", "do"),
        rank0=raised("RuntimeError: connection closed by peer", "silent"),
    )
    assert loop.loop.end.fatal == FatalError("what", "do")
    assert loop.next_group() is None


def test_a_last_save_that_failed_is_told(cluster: Cluster, tmp_path: Path) -> None:
    loop = started(tmp_path, "a", "a", "b")
    loop.stopping.asked.set()
    loop.end(rank0=EndedUnsaved("the final checkpoint failed"))
    assert loop.next_group() is None
    end = loop.loop.end
    assert (end.unsaved, end.finished, end.fatal) == ("the final checkpoint failed", None, None)


def test_a_stop_while_machines_are_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    loop = driver(tmp_path, FIXED)
    cluster.cores = {"a": 1}
    assert loop.next_group() is None
    (note,) = loop.display.notes
    assert re.search(r"\b1 ranks, 2 ", note)
    loop.stopping.asked.set()
    cluster.cores = {"a": 2}
    assert loop.next_group() is None, "though they have come"


@pytest.mark.parametrize("claimed", [False, True])
def test_a_signal_before_the_first_step_ends_the_ranks_at_once(
    cluster: Cluster, tmp_path: Path, *, claimed: bool
) -> None:
    """While they join, and while they load and compile: Slurm would kill the job, and not start it again. Nobody has
    died."""
    loop = driver(tmp_path, ELASTIC)
    loop.next_group()
    if claimed:
        loop.begin("a", "a", "b")
    assert not loop.loop.supervise_group(loop.ranks)
    loop.stopping.asked.set()
    assert loop.loop.supervise_group(loop.ranks)
    loop.end()
    assert loop.next_group() is None
    end = loop.loop.end
    assert (end.finished, end.unsaved, end.fatal) == (None, None, None)
    assert loop.close()
    assert "death" not in [event["kind"] for event in read_history(LocalStore(tmp_path)).events]


def test_ranks_that_have_something_to_save_do_so(cluster: Cluster, tmp_path: Path) -> None:
    """After a step, or where nobody needs the machine: a state may be in memory that is newer than any checkpoint."""
    for worked, code in ((True, REPEAT), (False, STOPPED)):
        loop = started(tmp_path / str(code), "a", "a", "b")
        if worked:
            loop.worked()
        loop.stopping.code = code
        loop.stopping.asked.set()
        assert not loop.loop.supervise_group(loop.ranks)
        assert loop.ranks.orders.stop


def test_ranks_that_save_the_last_step_without_doing_one_are_left_to_it(cluster: Cluster, tmp_path: Path) -> None:
    """A rank died in the last save: the group that takes over has no step to do."""
    loop = started(tmp_path, "a", "a", "b")
    loop.stopping.asked.set()
    loop.take_rank_news(0, "a", step=STEPS, doing="saving", resumed=STEPS)
    assert not loop.loop.supervise_group(loop.ranks)


@pytest.mark.parametrize("deaths", [1, 2])
def test_what_memory_holds_gets_a_minute_to_be_saved(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    """After a death, also after that of a group which had not come to a step; then the machine is needed."""
    loop = started(tmp_path, "a", "a", "b")
    loop.worked()
    for _ in range(deaths):
        loop.end(2)
        assert loop.next_group() is not None
        loop.begin("a", "a", "b")
    loop.stopping.asked.set()
    assert not loop.loop.supervise_group(loop.ranks)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 59)
    assert not loop.loop.supervise_group(loop.ranks)
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert loop.loop.supervise_group(loop.ranks)


def test_a_death_that_a_signal_follows_is_on_record(cluster: Cluster, tmp_path: Path) -> None:
    loop = started(tmp_path, "a", "a", "b")
    loop.ranks.failed = [2]
    loop.stopping.asked.set()
    assert not loop.loop.supervise_group(loop.ranks)
    loop.end(2, rank1=raised("RuntimeError: connection closed by peer", "silent"))
    assert loop.close()
    assert [event["kind"] for event in read_history(LocalStore(tmp_path)).events] == ["death"]


def test_figures_go_to_every_sink_each_once(cluster: Cluster, tmp_path: Path) -> None:
    loop = started(tmp_path, "a", "a", "b")
    records = [{"kind": "step", "step": 6}, {"kind": "evaluation", "step": 7}]
    loop.take_rank_news(0, "a", records=records)
    loop.take_rank_news(0, "a")
    assert loop.display.records == records


def test_a_death_is_on_record(cluster: Cluster, tmp_path: Path) -> None:
    loop = started(tmp_path, "a", "a", "b")
    loop.end(2, rank0=raised("RuntimeError: connection closed by peer", "silent"))
    assert loop.close()
    (death,) = (e for e in read_history(LocalStore(tmp_path)).events if e["kind"] == "death")
    told = {name: death[name] for name in ("of", "step", "ranks", "node", "host", "reason")}
    assert told == {"of": 1, "step": 7, "ranks": [2], "node": "b", "host": "host-b", "reason": None}
