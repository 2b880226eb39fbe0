"""A rank stops dead, its process still there: it is noticed, put on record, and started again; nothing changes. Nor do
the ranks of a group that is over need to be able to end by themselves."""

import time
from pathlib import Path

import psutil
import pytest

from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs
from tests.support.runs.observer import title
from tests.support.runs.train_command import committed, freeze, output, titled, training, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]

SETTINGS = (
    "phases=[{steps: 120, length: 32, batch: {sequences: 12}}]",
    "checkpoint={every: {steps: 20}, keep_last: 3}",
    "evaluation={every: {steps: 120}, samples: 20}",
    "zero=1",
)


def test_a_frozen_rank_is_started_again(tmp_path: Path) -> None:
    small_runs.prepare_corpus(tmp_path)
    undisturbed = small_runs.new_run(tmp_path, "undisturbed", *SETTINGS)
    finish(undisturbed, 2)

    uri = small_runs.new_run(tmp_path, "frozen", *SETTINGS, "watchdog={silence: 5, step: 60, other: 120}")
    with training(uri) as process:
        wait_for(process, lambda: committed(uri) >= 20)
        freeze(process, "ray::RankProcess as rank")
        assert process.wait(300) == 0, output(process)
        shown = output(process)
    assert "stuck" in shown
    assert " silent " in shown
    history = small_runs.history(uri)
    (hang,) = (event for event in history.events if event["kind"] == "hang")
    assert len(hang["without_stacks"]) == 1, "the frozen rank cannot answer"
    (stacks,) = (tmp_path / "frozen" / "events" / "stacks").rglob("rank-*.txt")
    assert "thread MainThread" in stacks.read_text()
    small_runs.ensure_same(uri, undisturbed, 120)


def test_the_only_rank_hangs_before_it_has_begun(tmp_path: Path) -> None:
    """In its imports, from a disk that no longer answers: no other rank waits for it."""
    small_runs.prepare_corpus(tmp_path)
    undisturbed = small_runs.new_run(tmp_path, "undisturbed", *SETTINGS, "trainers=1")
    finish(undisturbed, 1)
    uri = small_runs.new_run(tmp_path, "hangs", *SETTINGS, "trainers=1", "watchdog={silence: 60, step: 60, other: 30}")
    with training(uri) as process:
        wait_for(process, lambda: bool(titled(process, "ray::RankProcess.join")))
        freeze(process, "ray::RankProcess.join")
        assert process.wait(300) == 0, output(process)
    kinds = [event["kind"] for event in small_runs.history(uri).events]
    assert (kinds.count("hang"), kinds.count("death")) == (1, 1)
    small_runs.ensure_same(uri, undisturbed, 120)


ENDS_S = 15.0  # the driver's wait for the others to leave is 5 s; Ray's part is seconds on a busy machine


def test_a_dead_rank_and_one_that_cannot_run_are_replaced(tmp_path: Path) -> None:
    """One is killed in training while another is stopped: that one can answer nothing, as if it hung in a GPU's kernel.
    The third waits for both in a sum, and stays. Neither the watchdog's limits nor torch's are reached."""
    small_runs.prepare_corpus(tmp_path)
    uri = small_runs.new_run(tmp_path, "dead", *SETTINGS, "trainers=3")
    with training(uri) as process:
        wait_for(process, lambda: committed(uri) >= 20)
        killed, stopped, _ = titled(process, "ray::RankProcess as rank")
        stopped.suspend()
        began = time.monotonic()
        killed.kill()
        wait_for(process, lambda: not any(lives(rank) for rank in (killed, stopped)))
        assert time.monotonic() - began < ENDS_S
        assert process.wait(300) == 0, output(process)
    assert [event["kind"] for event in small_runs.history(uri).events].count("hang") == 0


def lives(rank: psutil.Process) -> bool:
    return rank.is_running() and title(rank).startswith("ray::RankProcess as rank")
