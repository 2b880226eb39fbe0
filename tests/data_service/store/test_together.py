"""Requests on their way together: in order, at the same time, and never all answers at once."""

import threading
from itertools import count

import pytest

from data_service.store.base import parallel_map


def test_answers_come_in_order_and_requests_go_together() -> None:
    barrier = threading.Barrier(8)

    def request(number: int) -> int:
        barrier.wait(timeout=60)  # passes only with eight on their way
        return number * number

    assert list(parallel_map(request, range(16))) == [number * number for number in range(16)]


def test_requests_are_made_as_answers_are_taken() -> None:
    begun: list[int] = []
    answers = parallel_map(begun.append, count())
    for _ in range(5):
        next(answers)
    answers.close()  # type: ignore[attr-defined]
    assert 5 <= len(begun) <= 100


def test_a_failure_is_raised_in_its_place() -> None:
    answers = parallel_map(lambda number: 1 // number, [1, 1, 0, 1])
    assert [next(answers), next(answers)] == [1, 1]
    with pytest.raises(ZeroDivisionError):
        next(answers)


def test_an_iterator_that_is_given_up_waits_for_nobody() -> None:
    """Garbage collection gives one up in any thread, with any lock held: waiting there would be for ever."""
    answered, released = threading.Event(), threading.Event()

    def request(number: int) -> int:
        if number:
            answered.set()
            released.wait(60)
        return number

    answers = parallel_map(request, range(8))
    assert next(answers) == 0
    answered.wait(60)
    answers.close()  # type: ignore[attr-defined]
    assert not released.is_set()
    released.set()
