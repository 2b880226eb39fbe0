"""Results that are remembered: the last ones, for any number of threads."""

import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.result_cache import RecentResults
from tests.support.faults.process import switching_often


@given(st.integers(1, 5), st.lists(st.integers(0, 7), max_size=60))
def test_the_last_that_were_made_are_remembered(most: int, asked: list[int]) -> None:
    recent: RecentResults[int, str] = RecentResults(most)
    order: list[int] = []

    def make(key: int, made: list[int]) -> str:
        made.append(key)
        return str(key)

    for key in asked:
        made: list[int] = []
        assert recent.get(key, partial(make, key, made)) == str(key)
        assert (made == []) == (key in order[-most:])
        order += made
    assert pickle.loads(pickle.dumps(recent)).get(-1, lambda: "new") == "new"  # noqa: S301


def test_what_is_not_made_is_not_remembered() -> None:
    recent: RecentResults[int, int] = RecentResults(2)
    with pytest.raises(ZeroDivisionError):
        recent.get(1, lambda: 1 // 0)
    assert recent.get(1, lambda: 5) == 5


@pytest.mark.parametrize("seed", range(3))
def test_threads_share_it(seed: int) -> None:
    recent: RecentResults[int, int] = RecentResults(3)

    def ask(number: int) -> None:
        draw = random.Random(100 * seed + number)
        for _ in range(2000):
            key = draw.randrange(9)
            assert recent.get(key, partial(pow, key, 2)) == key * key

    with switching_often(), ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(8)))
