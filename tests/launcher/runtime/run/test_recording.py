"""The recorder: in order, again until it succeeds, bounded, and never in anybody's way."""

import threading
from functools import partial

import pytest

from data_service.store.errors import StoreUnavailable
from launcher.runtime.run import log
from launcher.runtime.run.log import BackgroundWriter


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_RETRY_S", 0.001)
    monkeypatch.setattr(log, "_MAX_WAITING_WRITES", 2)


def test_writes_are_done_in_order_and_repeated_until_they_succeed() -> None:
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


def test_a_store_that_hangs_holds_up_nobody_and_the_oldest_are_given_up() -> None:
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


def test_a_mistake_in_a_record_is_told_and_the_others_go_on() -> None:
    notes: list[str] = []
    done: list[int] = []
    recorder = BackgroundWriter(note=notes.append)
    recorder.submit(lambda: 1 / 0)
    recorder.submit(lambda: done.append(1))
    assert recorder.close(patience_s=10)
    assert done == [1]
    assert "ZeroDivisionError" in notes[0]


def test_what_cannot_be_written_is_given_up_at_the_end() -> None:
    def fails() -> None:
        raise StoreUnavailable.for_uri("s3://bucket/key", "no answer")

    recorder = BackgroundWriter(note=lambda text: None)
    recorder.submit(fails)
    assert not recorder.close(patience_s=0.05)
