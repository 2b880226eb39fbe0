"""Metrics as segments per attempt, and the history of the committed lineage read back from them."""

import math
from pathlib import Path

import pytest

from data_service.store.base import Store
from data_service.store.open import open_store
from launcher.errors import RunError
from launcher.history import read_history
from launcher.metrics import Journal, encode, evaluation_record, operator_event


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path)


def step(number: int, loss: float = 1.0) -> dict[str, object]:
    return {"kind": "step", "step": number, "loss": loss, "seconds": 2.0}


def keys(store: Store) -> list[str]:
    return [entry.key for entry in store.list()]


def test_records_wait_in_memory_until_they_are_due(store: Store) -> None:
    journal = Journal(store, attempt=3, flush_seconds=10)
    journal.flush_due(100.0)
    journal.metric(step(0))
    journal.flush_due(109.0)
    assert keys(store) == []
    journal.flush_due(110.0)
    journal.metric(step(1))
    journal.flush_due(119.0)
    journal.flush()
    journal.flush()
    assert keys(store) == ["metrics/a000003/00000000.jsonl", "metrics/a000003/00000001.jsonl"]


def test_an_event_is_durable_at_once_and_brings_the_metrics_before_it(store: Store) -> None:
    journal = Journal(store, attempt=1, flush_seconds=1000)
    journal.metric(step(0))
    journal.event("commit", 5.0, step=1)
    history = read_history(store)
    assert [record["step"] for record in history.steps] == [0]
    assert history.events == ({"time": 5.0, "kind": "commit", "attempt": 1, "step": 1},)


def test_a_later_attempt_supersedes_the_steps_it_repeats(store: Store) -> None:
    first = Journal(store, 1, 1000)
    for number in range(6):
        first.metric(step(number, loss=1.0))
        if number in (2, 4):
            first.metric(evaluation_record(number + 1, {"mlm_loss": 1.0}))
    first.flush()
    second = Journal(store, 2, 1000)  # resumes from a commit after 3 steps
    second.metric(step(3, loss=2.0))
    second.flush()
    history = read_history(store)
    assert [(record["step"], record["loss"]) for record in history.steps] == [(0, 1), (1, 1), (2, 1), (3, 2)]
    assert [record["step"] for record in history.evaluations] == [3], (
        "made after 3 steps, none of them repeated"
    )
    assert (history.repeated, history.repeated_seconds) == (3, 6.0)


def test_an_attempt_that_did_no_step_supersedes_nothing(store: Store) -> None:
    first = Journal(store, 1, 1000)
    first.metric(step(0))
    first.flush()
    Journal(store, 2, 1000).event("resume", 9.0, step=0)
    assert len(read_history(store).steps) == 1


def test_events_between_attempts_have_a_place_of_their_own(store: Store) -> None:
    operator_event(store, "recipe_changed", 2.0, changes=["- zero: 1 -> 2"])
    operator_event(store, "recipe_changed", 3.0, changes=[])
    Journal(store, 1, 1000).event("start", 1.0, step=0)
    assert [event["kind"] for event in read_history(store).events] == [
        "start",
        "recipe_changed",
        "recipe_changed",
    ]


def test_numbers_that_json_does_not_have_become_null() -> None:
    line = encode({"loss": math.nan, "nested": [math.inf, {"x": -math.inf}], "fine": 1.5})
    assert line == '{"loss":null,"nested":[null,{"x":null}],"fine":1.5}\n'


def test_an_evaluation_states_loss_and_perplexity() -> None:
    record = evaluation_record(7, {"loss": 52.0, "mlm_loss": 2.0, "rtd_loss": 1.0, "mlm_accuracy": 0.5})
    assert (record["step"], record["loss"], record["mlm_accuracy"]) == (7, 52.0, 0.5)
    assert record["perplexity"] == pytest.approx(math.exp(2.0))
    assert evaluation_record(7, {"loss": 3.0, "plm_loss": 3.0})["perplexity"] == pytest.approx(math.exp(3.0))
    assert evaluation_record(1, {"mlm_loss": 1e9})["perplexity"] == math.exp(700)


def test_a_damaged_segment_is_named_with_its_line(store: Store) -> None:
    store.put("metrics/a000001/00000000.jsonl", encode(step(0)).encode() + b'{"kind": "st')
    with pytest.raises(RunError, match=r"a000001/00000000\.jsonl, line 2"):
        read_history(store)
