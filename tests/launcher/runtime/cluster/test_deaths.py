"""What a run died of, over all its starts: on record, damaged, and when a driver dies without a word."""

from pathlib import Path

import pytest

from checkpoints.attempt import claim, newest_attempt_number
from data_service.store.local import LocalStore
from launcher.runtime.cluster.operator_log import (
    DEATHS_KEY,
    MAX_STORED_FAILURES,
    FailureHistory,
    past_failures,
    read_deaths,
    write_deaths,
)
from launcher.runtime.policies.failures import UNSAVED_FAILURE_LIMIT, Failure, StopDecision


def failure(step: int, *, committed: int = 0, error: str | None = "ValueError: bad row") -> Failure:
    return Failure(
        time=1e9,
        step=step,
        committed=committed,
        worked=True,
        node="a",
        error=error,
        kind="raised" if error else "silent",
    )


def silence(text: str) -> None:
    raise AssertionError(text)


def test_the_newest_come_back_as_they_were(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert read_deaths(store, silence) == []
    failures = [failure(step, error="é" * 3 if step % 2 else None) for step in range(MAX_STORED_FAILURES + 5)]
    write_deaths(store, failures)
    assert read_deaths(store, silence) == failures[5:]
    write_deaths(store, [failure(1, error="x" * 100_000)])
    assert (store.size(DEATHS_KEY) or 0) in range(1, 2000)
    claim(store)
    assert newest_attempt_number(store) == 1, "it is no attempt"


@pytest.mark.parametrize("text", [b"", b"{", b"[[]]", b'{"a": 1}', b'[{"time": "soon"}]', b"\xff", b"[" * 100_000])
def test_a_damaged_record_counts_as_none_and_is_told(tmp_path: Path, text: bytes) -> None:
    notes: list[str] = []
    store = LocalStore(tmp_path)
    store.put(DEATHS_KEY, text)
    assert read_deaths(store, notes.append) == []
    assert "damaged" in notes[0]


def test_a_driver_that_died_without_a_word_is_counted(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    first = claim(store)
    assert past_failures(first, committed=0, now=1e9, note=silence) == []
    second = claim(store)  # the first has left no word
    (death,) = past_failures(second, committed=40, now=1e9, note=silence)
    assert (death.kind, death.step, death.committed, death.node) == ("silent", 40, 40, None)
    second.record_end(1e9)
    third = claim(store)
    assert past_failures(third, committed=40, now=1e9, note=silence) == [death]
    assert read_deaths(store, silence) == [death]


def test_drivers_that_die_for_ever_without_a_commit_end_the_run(tmp_path: Path) -> None:
    """75, or 137, cannot go round for ever."""
    store = LocalStore(tmp_path)
    for start in range(UNSAVED_FAILURE_LIMIT + 1):
        failures = past_failures(claim(store), committed=40, now=1e9 + start, note=silence)
    assert isinstance(FailureHistory(failures).decide(node_count=2), StopDecision)
