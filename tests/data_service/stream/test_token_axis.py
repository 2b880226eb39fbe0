"""Batches in tokens: the axis against counting the tokens of every sample."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.stream.stream import Stream
from data_service.stream.token_axis import TokenAxis
from tests.support.data.corpora import plan_of, random_block, source_of, spec_of, write_corpus
from tests.support.faults.process import switching_often


@pytest.fixture(scope="module")
def uris(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpora")
    return [
        write_corpus(folder / "a", [random_block(seed, 800, document=2.0) for seed in range(4)]),
        write_corpus(folder / "b", [random_block(seed, 500, document=2.0) for seed in (10, 11)]),
    ]


def stream_of(uris: list[str]) -> Stream:
    first, second = map(source_of, uris, "ab")
    return Stream(spec_of(first, second, input={"packing": "doc_sentences"}, window={"least_tokens": 600}))


@pytest.mark.long
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    st.integers(0, 2**32),
    st.sampled_from([32, 70_000]),
)
def test_blocks_of_no_row_and_rows_of_any_length(rows: list[int], seed: int, length: int) -> None:
    """There is no text behind it: the tokens before every sample of an epoch, by the plan's own order."""
    lengths = np.random.default_rng(seed).integers(1, length + 1, sum(rows)).astype(np.uint32)
    plan = plan_of([rows], length=length)
    axis, first = TokenAxis(plan, (np.array(rows),), (lengths,)), np.cumsum([0, *rows])
    before = 0
    for sample in range(sum(rows)):
        assert axis.unit_of_sample(1, sample) - axis.unit_of_sample(1, 0) == before
        origin = plan.origin_of_sample(1, sample)
        before += int(lengths[first[origin.block] + origin.row])
    assert axis.unit_of_sample(2, 0) - axis.unit_of_sample(1, 0) == before == int(lengths.sum())


@pytest.mark.long
def test_threads_share_a_stream_and_its_axis(uris: list[str]) -> None:
    """A rank reads steps ahead on several threads, which share what is remembered: a run of hours died of that."""
    stream, alone = stream_of(uris), stream_of(uris)
    axis = stream.token_axis()
    far, draw = axis.unit_of_sample(900, 0), random.Random(1)
    expected = {unit: alone.token_axis().sample_at_unit(unit) for unit in draw.choices(range(far), k=40)}
    rows = {place: alone.read(*place, place[1] + 1).tokens for place in expected.values()}

    def ask(number: int) -> None:
        for unit in random.Random(number).choices(list(expected), k=60):
            assert axis.sample_at_unit(unit) == expected[unit]
            epoch, sample = expected[unit]
            np.testing.assert_array_equal(stream.read(epoch, sample, sample + 1).tokens, rows[epoch, sample])

    with switching_often(), ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(8)))
