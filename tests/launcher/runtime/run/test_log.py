"""Metrics as segments per attempt, and the history of the committed lineage read back from them; and the writer in the
background: in order, again until it succeeds, bounded, and never in anybody's way."""

import math
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from data_service.store.base import Store
from data_service.store.errors import StoreUnavailable
from data_service.store.open import open_store
from launcher.runtime.run import log
from launcher.runtime.run.history import read_history
from launcher.runtime.run.log import BackgroundWriter, RunLog, encode_line, evaluation_record, record_operator_event

WAIT_S = 30.0  # for a thread that has something to do; never as long


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path)


def step(number: int, loss: float = 1.0) -> dict[str, object]:
    return {"kind": "step", "step": number, "loss": loss, "seconds": 2.0}


def keys(store: Store) -> list[str]:
    return [entry.key for entry in store.list()]


def test_records_wait_in_memory_until_they_are_due(store: Store) -> None:
    journal = RunLog(store, attempt=3, flush_seconds=10)
    journal.flush_if_due(100.0)
    journal.add_metrics(step(0))
    journal.flush_if_due(109.0)
    journal.event("straggler", 5.0)  # an event is written at once, and the metrics before it
    assert journal.flush(WAIT_S)
    journal.add_metrics(step(1))
    journal.flush_if_due(109.9)
    assert journal.flush(WAIT_S)
    assert journal.flush(WAIT_S)
    names = ["events/a000003/00000000", "metrics/a000003/00000000", "metrics/a000003/00000001"]
    assert keys(store) == [f"{name}.jsonl" for name in names]


def test_what_is_due_is_written_without_being_waited_for(store: Store) -> None:
    journal = RunLog(store, attempt=1, flush_seconds=10)
    journal.flush_if_due(100.0)
    journal.add_metrics(step(0))
    journal.flush_if_due(110.0)
    journal._metrics.wait_until_written(WAIT_S)
    assert len(read_history(store).steps) == 1


def test_a_later_attempt_supersedes_the_steps_it_repeats(store: Store) -> None:
    first = RunLog(store, 1, 1000)
    for number in range(6):
        first.add_metrics(step(number, loss=1.0))
        if number in (2, 4):
            first.add_metrics(evaluation_record(number + 1, {"mlm_loss": 1.0}))
    assert first.flush(WAIT_S)
    second = RunLog(store, 2, 1000)  # resumes from a commit after 3 steps
    second.add_metrics(step(3, loss=2.0))
    assert second.flush(WAIT_S)
    history = read_history(store)
    assert history.steps.numbers.tolist() == [0, 1, 2, 3]
    assert history.steps.column("loss").tolist() == [1, 1, 1, 2]
    assert [record["step"] for record in history.evaluations] == [3], "made after 3 steps, none of them repeated"
    assert (history.repeated, history.repeated_seconds) == (3, 6.0)


def test_an_attempt_that_did_no_step_supersedes_nothing(store: Store) -> None:
    first = RunLog(store, 1, 1000)
    first.add_metrics(step(0))
    assert first.flush(WAIT_S)
    second = RunLog(store, 2, 1000)
    second.event("resume", 9.0, step=0)
    assert second.flush(WAIT_S)
    assert len(read_history(store).steps) == 1


def test_events_between_attempts_have_a_place_of_their_own(store: Store) -> None:
    record_operator_event(store, "recipe_changed", 2.0, changes=["- zero: 1 -> 2"])
    record_operator_event(store, "recipe_changed", 3.0, changes=[])
    journal = RunLog(store, 1, 1000)
    journal.event("start", 1.0, step=0)
    assert journal.flush(WAIT_S)
    assert [event["kind"] for event in read_history(store).events] == [
        "start",
        "recipe_changed",
        "recipe_changed",
    ]


def test_an_event_between_attempts_whose_answer_was_lost_is_there_once(store: Store) -> None:
    for time in (2.0, 3.0, 3.0):
        record_operator_event(store, "death", time, rank=0)
    assert [event["time"] for event in read_history(store).events] == [2.0, 3.0]


def test_numbers_that_json_does_not_have_become_null() -> None:
    line = encode_line({"loss": math.nan, "nested": [math.inf, {"x": -math.inf}], "fine": 1.5})
    assert line == '{"loss":null,"nested":[null,{"x":null}],"fine":1.5}\n'


def test_an_evaluation_states_loss_and_perplexity() -> None:
    record = evaluation_record(7, {"loss": 52.0, "mlm_loss": 2.0, "rtd_loss": 1.0, "mlm_accuracy": 0.5})
    assert (record["step"], record["loss"], record["mlm_accuracy"]) == (7, 52.0, 0.5)
    assert record["perplexity"] == pytest.approx(math.exp(2.0))
    assert evaluation_record(7, {"loss": 3.0, "plm_loss": 3.0})["perplexity"] == pytest.approx(math.exp(3.0))
    assert evaluation_record(1, {"mlm_loss": 1e9})["perplexity"] == math.exp(700)


LINES = [
    b'{"kind": "st',
    b"[]",
    b'{"kind": "step"}',
    b'{"kind": "other", "step": 1}',
    b"\xff\xfe",
    b"[" * 100_000,
]
UNSOUND = {b'{"kind":"step","step":%s}' % number for number in (b"1.5", b"-1", b'"1"', b"9" * 40, b"null")}


@pytest.mark.parametrize("line", [*LINES, *sorted(UNSOUND)])
def test_a_damaged_line_is_named_and_the_rest_is_read(store: Store, line: bytes) -> None:
    lines = (encode_line(step(0)).encode(), line + b"\n", encode_line(step(1)).encode())
    store.put("metrics/a000001/00000000.jsonl", b"".join(lines))
    history = read_history(store)
    assert history.steps.numbers.tolist() == [0, 1]
    (damage,) = history.damage
    assert "a000001/00000000.jsonl, line 2: " in damage


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "null", '"x"', "[1]", "{}", "9" * 400])
def test_what_is_no_number_is_none_and_unknown_fields_hurt_nobody(store: Store, value: str) -> None:
    text = f'{{"kind":"step","step":3,"loss":{value},"seconds":2.0,"of tomorrow":{{"a":[1]}},"../x":1}}\n'
    store.put("metrics/a000001/00000000.jsonl", text.encode())
    steps = read_history(store).steps
    assert steps.fields == {"step", "seconds", "loss"} - ({"loss"} if value[0] in 'n"[{' else set())
    assert not np.isfinite(steps.column("loss")).any()
    assert steps.column("seconds").tolist() == [2.0]


@pytest.mark.parametrize("line", [b'{"kind": "st', b"{}", b'{"kind":"stop","time":"x","attempt":0}', b"7"])
def test_a_damaged_event_is_named_and_the_rest_is_read(store: Store, line: bytes) -> None:
    store.put("events/a000001/00000000.jsonl", line)
    record_operator_event(store, "end", 2.0)
    history = read_history(store)
    assert [event["kind"] for event in history.events] == ["end"]
    assert "events/a000001/00000000.jsonl, line 1" in history.damage[0]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_RETRY_S", 0.001)
    monkeypatch.setattr(log, "_MAX_WAITING_WRITES", 2)


def test_writes_are_done_in_order_and_repeated_until_they_succeed(hasty: None) -> None:
    done: list[int] = []
    failures = iter([True, True, False])

    def flaky() -> None:
        if next(failures):
            raise StoreUnavailable.for_uri("s3://bucket/key", "no answer")
        done.append(1)

    recorder = BackgroundWriter(note=lambda text: None)
    recorder.submit(flaky)
    recorder.submit(lambda: done.append(2))
    assert recorder.close(patience_s=10)
    assert done == [1, 2]


def test_a_store_that_hangs_holds_up_nobody_and_the_oldest_are_given_up(hasty: None) -> None:
    release, done, notes = threading.Event(), list[int](), list[str]()
    recorder = BackgroundWriter(note=notes.append)
    recorder.submit(release.wait)
    while recorder.drain(0.0) or recorder._waiting:  # until the thread is in the write that hangs
        pass
    for number in range(5):
        recorder.submit(partial(done.append, number))
    release.set()
    assert recorder.close(patience_s=10)
    assert done == [3, 4]
    assert len(notes) == 1


def test_a_mistake_in_a_record_is_told_and_the_others_go_on(hasty: None) -> None:
    notes: list[str] = []
    done: list[int] = []
    recorder = BackgroundWriter(note=notes.append)
    recorder.submit(lambda: 1 / 0)
    recorder.submit(lambda: done.append(1))
    assert recorder.close(patience_s=10)
    assert done == [1]
    assert "ZeroDivisionError" in notes[0]


def test_what_cannot_be_written_is_given_up_at_the_end(hasty: None) -> None:
    def fails() -> None:
        raise StoreUnavailable.for_uri("s3://bucket/key", "no answer")

    recorder = BackgroundWriter(note=lambda text: None)
    recorder.submit(fails)
    assert not recorder.close(patience_s=0.05)
