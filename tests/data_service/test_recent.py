"""Results that are remembered: the last ones, for any number of threads."""

import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.recent import RecentResults
from tests.support.faults.process import switching_often


@given(st.integers(1, 5), st.lists(st.integers(0, 7), max_size=60))
def test_the_last_that_were_made_are_remembered(most: int, asked: list[int]) -> None:
    recent: RecentResults[int, str] = RecentResults(most)
    order: list[int] = []
    for key in asked:
        made: list[int] = []
        assert recent.get(key, lambda key=key, made=made: made.append(key) or str(key)) == str(key)
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
            assert recent.get(key, lambda key=key: key * key) == key * key

    with switching_often(), ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(8)))
