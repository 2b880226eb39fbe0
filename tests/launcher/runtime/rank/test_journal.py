"""Records on their way to a store that hangs, fails, or is gone for a while: training goes on, nothing is lost."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from data_service.store.errors import AccessDenied, OutOfSpace, StoreUnavailable
from data_service.store.local import LocalStore
from encoder_core.train.engine import Update
from encoder_core.train.exchange import StepSignals
from encoder_core.train.metrics import StepReport
from encoder_core.train.state import TrainState
from launcher.runtime.rank.journal import RankJournal
from launcher.runtime.rank.startup import StartupClock
from launcher.runtime.run import log
from launcher.runtime.run.history import read_history
from launcher.runtime.run.log import RunLog
from tests.support.ranks.checkpointers import Silent

WAIT_S = 30.0  # never as long
QUICK_S = 1.0  # what a step may wait, on a busy machine


@dataclass(frozen=True)
class Troubled(LocalStore):
    """A store whose writes wait until `open` is set, and then do what `plan` says, one after the other: raise before or
    after they have taken effect, or neither."""

    open: threading.Event = field(default_factory=threading.Event)
    plan: list[tuple[str, Exception]] = field(default_factory=list)
    waiting: threading.Event = field(default_factory=threading.Event)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.waiting.set()
        self.open.wait()
        when, error = self.plan.pop(0) if self.plan else ("never", AssertionError("never raised"))
        if when == "before":
            raise error
        super().put(key, data)
        if when == "after":
            raise error


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Troubled:
    monkeypatch.setattr(log, "_RETRY_S", 0.001)
    return Troubled(tmp_path)


def step(number: int) -> dict[str, object]:
    return {"kind": "step", "step": number, "seconds": 1.0}


def lasts(work: Callable[[], object]) -> float:
    begun = time.monotonic()
    work()
    return time.monotonic() - begun


def test_a_store_that_hangs_holds_up_no_step_and_a_commit_a_moment_only(store: Troubled) -> None:
    journal = RunLog(store, 1, flush_seconds=0.0)

    def train(start: int, stop: int) -> None:
        for number in range(start, stop):
            journal.add_metrics(step(number))
            journal.flush_if_due(float(number))
            journal.event("skipped_step", float(number), step=number)

    assert lasts(lambda: train(0, 200)) < QUICK_S
    assert store.waiting.wait(WAIT_S)
    assert not journal.flush(0.05)
    assert lasts(lambda: journal.flush(0.05)) < QUICK_S
    assert lasts(lambda: train(200, 400)) < QUICK_S
    assert len(read_history(store).steps) == 0
    store.open.set()
    assert journal.close(WAIT_S)
    history = read_history(store)
    assert history.steps.numbers.tolist() == list(range(400))
    assert [event["step"] for event in history.events] == list(range(400))


def test_the_end_of_training_waits_for_a_bounded_time_too(store: Troubled) -> None:
    journal = RunLog(store, 1, flush_seconds=1000.0)
    journal.add_metrics(step(0))
    assert lasts(lambda: journal.close(0.05)) < QUICK_S
    store.open.set()


ERRORS: list[type[StoreUnavailable] | type[AccessDenied] | type[OutOfSpace]] = [
    StoreUnavailable,
    AccessDenied,
    OutOfSpace,
]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_fails_in_whatever_order_every_record_is_there_once_in_the_end(store: Troubled, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        when = draw.choice(["before", "after", "after", "never"])
        store.plan.append((when, draw.choice(ERRORS).for_uri("s3://bucket/key", "a fault")))
    notes: list[str] = []
    journal = RunLog(store, 1, flush_seconds=0.0, note=notes.append)
    store.open.set()
    done = 0
    for _ in range(100):
        for _ in range(draw.randint(0, 3)):
            journal.add_metrics(step(done))
            done += 1
        match draw.choice(["due", "event", "flush", "outage", "back"]):
            case "due":
                journal.flush_if_due(float(done))
            case "event":
                journal.event("skipped_step", float(done))
            case "flush":
                journal.flush(0.002)
            case "outage":
                store.open.clear()
            case "back":
                store.open.set()
    store.open.set()
    assert journal.close(WAIT_S)
    history = read_history(store)
    assert history.steps.numbers.tolist() == list(range(done))
    assert (history.repeated, history.damage) == (0, []), "nothing is there twice"
    assert [event["kind"] for event in history.events if event["kind"] == "records_lost"] == []


def test_what_does_not_fit_in_memory_is_told_and_put_on_record(
    store: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_MAX_WAITING_BYTES", 1000)
    notes: list[str] = []
    journal = RunLog(store, 7, flush_seconds=1000.0, note=notes.append)
    journal.event("start", 0.0)
    assert store.waiting.wait(WAIT_S)
    for number in range(100):
        journal.add_metrics(step(number))
    (note,) = notes
    assert "1,000 bytes " in note
    store.open.set()
    assert journal.close(WAIT_S)
    history = read_history(store)
    kept = history.steps.numbers.tolist()
    assert kept == list(range(100 - len(kept), 100)), "the newest"
    assert 10 < len(kept) < 30
    (lost,) = (event for event in history.events if event["kind"] == "records_lost")
    assert (lost["what"], lost["records"], lost["attempt"]) == ("metrics", 100 - len(kept), 7)


def test_an_outage_is_told_once(store: Troubled) -> None:
    store.plan.extend([("before", StoreUnavailable.for_uri("s3://bucket/key", "no answer"))] * 5)
    notes: list[str] = []
    journal = RunLog(store, 1, flush_seconds=1000.0, note=notes.append)
    store.open.set()
    journal.event("start", 0.0)
    assert journal.close(WAIT_S)
    (note,) = notes
    assert "no answer" in note


def test_records_of_an_attempt_that_died_before_it_could_write_leave_a_gap(store: Troubled) -> None:
    store.open.set()
    first = RunLog(store, 1, flush_seconds=1000.0)
    first.add_metrics(step(0))
    assert first.close(WAIT_S)  # steps 1 and 2 were made, committed, and never recorded
    second = RunLog(store, 2, flush_seconds=1000.0)
    second.add_metrics(step(3))
    assert second.close(WAIT_S)
    history = read_history(store)
    assert (history.steps.numbers.tolist(), history.repeated) == ([0, 3], 0)


def test_a_rank_goes_on_at_speed_though_the_store_hangs(store: Troubled) -> None:
    """Steps, a skipped one, an evaluation and what a commit asks for."""
    line, startup = Silent(), StartupClock()
    startup.end_part("data")
    journal = RankJournal(line, startup, RunLog(store, 1, flush_seconds=0.0))

    def train() -> None:
        for step in range(100):
            update = Update(applied=step != 7, grad_norm=1.0)
            signals = StepSignals(False, False, False, True, False, 0.0, 1000, 0, {"mlm": 100.0})
            sums = {"mlm_loss": 100.0, "mlm_weighted": 100.0, "mlm_targets": 100.0}
            journal.report_step(StepReport(TrainState(step=step), (), signals, sums, 1e-3, {"all": update}, 0.1, ()))
        journal.report_evaluation(100, {"loss": 2.0, "mlm_loss": 2.0})
        journal.report_activity(100, "evaluating", 3)
        journal.flush()

    assert lasts(train) < 2.0 + QUICK_S
    assert line.beats[-2:] == [(100, "training", 0), (100, "evaluating", 3)]
    store.open.set()
    journal.close()
    history = read_history(store)
    assert history.steps.numbers.tolist() == list(range(100))
    assert [evaluation["step"] for evaluation in history.evaluations] == [100]
    assert sorted(event["kind"] for event in history.events) == ["skipped_step", "underway"]
    assert all(" step " in note for note in line.notes)
