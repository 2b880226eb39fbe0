"""Copies of the state in memory that are not made, or not shared, are on record whichever rank knows it."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from checkpoints.attempt import claim
from checkpoints.gather import SingleRank
from checkpoints.listing import list_committed
from checkpoints.memory_slots import Slot
from encoder_core.train.state import TrainState
from encoder_core.train.xlnet_memory import StoredMemory
from launcher.runtime.policies.recovery import COPY_TIME_SHARE
from launcher.runtime.rank.checkpointing import MemoryCopies
from launcher.runtime.rank.journal import RankJournal
from launcher.runtime.rank.startup import StartupClock
from launcher.runtime.run.log import RunLog
from launcher.runtime.run.record import open_run
from tests.support.ranks.checkpointers import Engine, Nothing, Silent
from tests.support.ranks.run_group import run_group
from tests.support.runs.small_runs import new_run


class Node:
    """A keeper that has the slots of the only rank."""

    shares, ranks = True, 1

    def __init__(self) -> None:
        self.slots: Sequence[Slot] = ()

    def note_completed_set(self, rank: int, count: int, slots: Sequence[Slot]) -> None:
        self.slots = slots

    def drop_all_sets(self) -> None: ...


@pytest.fixture
def made(inputs: Path, tmp_path: Path) -> tuple[MemoryCopies, Node, Silent]:
    run, node, line = open_run(new_run(inputs, str(tmp_path / "run"))), Node(), Silent()
    journal = RankJournal(line, StartupClock(), None)
    attempt, second = (
        claim(run.store),
        SingleRank(rank=1, world=2),
    )  # one that is not the first keeps no journal
    copies = MemoryCopies(run, attempt, second, keeper=node, extra=Nothing(), journal=journal, resumed=None)
    return copies, node, line


def copy(copies: MemoryCopies, step: int) -> int | None:
    engine: Any = Engine()
    return copies.copy_state(engine, TrainState(step=step), StoredMemory((), {}), time.monotonic())


def test_a_machine_without_memory_is_on_record_once(
    made: tuple[MemoryCopies, Node, Silent], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, node, line = made
    monkeypatch.setattr("checkpoints.memory_slots.FREE_MEMORY_SHARE", 1.0)
    assert copies.is_due(3)
    assert copy(copies, 3) is None
    assert [(kind, fields["step"]) for kind, fields in line.events] == [("memory_failed", 3)]
    assert not copies.is_due(4)
    assert node.slots == ()


@pytest.mark.parametrize("full", [0, 1])
def test_a_state_that_not_all_ranks_can_hand_over_is_saved(inputs: Path, full: int) -> None:
    """Otherwise the steps since the last checkpoint would be gone without a death."""
    run = new_run(inputs, f"full-{full}", "checkpoint={every: {steps: 5}, keep_last: 3}", "recovery.memory_every=2")
    ended = run_group(run, 2, stop_at=7, full=full)
    assert ended.codes == [0, 0], ended.output
    assert "memory_failed" in ended.output
    assert list_committed(open_run(run).store)[0].step == 7


def test_a_partner_without_memory_is_on_record_once_and_copies_go_on(
    made: tuple[MemoryCopies, Node, Silent],
) -> None:
    copies, node, line = made
    for step in range(1, 8):
        assert copies.is_due(step)
        assert copy(copies, step)
        assert not copies.is_due(step + 1), "the other node has not answered"
        newest = max(node.slots, key=lambda slot: slot.seal)
        if step == 2:
            newest.mark_copy_awaited(False)  # it has a copy
        else:
            newest.mark_copy_refused()
    assert [(kind, fields["step"]) for kind, fields in line.events] == [("memory_unshared", 1)]


def test_copies_take_as_small_a_share_of_the_time_as_auto_says(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copies, whose pages are new, count as nothing."""
    run, node, now, took = open_run(new_run(inputs, str(tmp_path / "run"))), Node(), 1000.0, 0.3
    attempt = claim(run.store)
    journal = RankJournal(Silent(), StartupClock(), RunLog(run.store, attempt.number, 1000.0))
    monkeypatch.setattr(time, "monotonic", lambda: now)
    copies = MemoryCopies(run, attempt, SingleRank(), keeper=node, extra=Nothing(), journal=journal, resumed=None)
    engine: Any = Engine()
    for step in (1, 2, 3):
        assert copies.is_due(step)
        assert copies.copy_state(engine, TrainState(step=step), StoredMemory((), {}), now - took)
        for slot in node.slots:
            slot.mark_copy_awaited(False)
    now += 0.99 * took / COPY_TIME_SHARE
    assert not copies.is_due(4)
    now += 0.02 * took / COPY_TIME_SHARE
    assert copies.is_due(5)
