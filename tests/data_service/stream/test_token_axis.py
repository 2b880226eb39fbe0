"""Batches in tokens: the axis against counting the tokens of every sample."""

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.corpus.manifest import make_block_table
from data_service.samples.spec import SourceSpec
from data_service.stream.plan import StreamPlan
from data_service.stream.stream import Stream
from data_service.stream.token_axis import TokenAxis
from tests.support.data.corpora import random_block, source_of, spec_of, write_corpus
from tests.support.faults.process import switching_often

WEIGHTS = [(None, None), (1.0, 2.5)]


@pytest.fixture(scope="module")
def uris(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpora")
    return [
        write_corpus(folder / "a", [random_block(seed, 800, document=2.0) for seed in range(4)]),
        write_corpus(folder / "b", [random_block(seed, 500, document=2.0) for seed in (10, 11)]),
    ]


def stream_of(uris: list[str], weights: tuple[float | None, float | None]) -> Stream:
    first, second = (source_of(uri, name, w) for uri, name, w in zip(uris, "ab", weights, strict=True))
    return Stream(spec_of(first, second, input={"packing": "doc_sentences"}, window={"least_tokens": 600}))


@pytest.mark.long
@pytest.mark.parametrize("weights", WEIGHTS)
def test_units_are_the_tokens_before_a_sample(uris: list[str], weights: tuple[float | None, float | None]) -> None:
    stream = stream_of(uris, weights)
    axis, count = stream.token_axis(), stream.samples_per_epoch
    lengths = [int(n) for epoch in range(4) for n in np.diff(stream.read(epoch, 0, count).offsets)]
    before = [0, *accumulate(lengths)]
    assert [axis.unit_of_sample(*divmod(sample, count)) for sample in range(4 * count)] == before[:-1]
    assert axis.unit_of_sample(3, count) == before[-1] == axis.unit_of_sample(4, 0)
    for unit in range(0, before[-1], 23):
        expected = next(sample for sample, start in enumerate(before) if start >= unit)
        assert axis.sample_at_unit(unit) == divmod(expected, count)


@pytest.mark.long
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    st.integers(0, 2**32),
    st.sampled_from([32, 70_000]),
)
def test_blocks_of_no_row_and_rows_of_any_length(rows: list[int], seed: int, length: int) -> None:
    """There is no text behind it: the tokens before every sample of an epoch, by the plan's own order."""
    lengths = np.random.default_rng(seed).integers(1, length + 1, sum(rows)).astype(np.uint32)
    table = make_block_table([(0, 0, 0, 10 * n, n, 1) for n in rows], ["0" * 32] * len(rows), ["shard"])
    source = SourceSpec(name="s", uri="u", manifest_fingerprint="f")
    spec = spec_of(source, length=length, window={"samples": 7, "least_tokens": 1})
    counts = (np.array(rows),)
    plan = StreamPlan(spec, (table,), counts)
    axis, first = TokenAxis(plan, counts, (lengths,)), np.cumsum([0, *rows])
    before = 0
    for sample in range(sum(rows)):
        assert axis.unit_of_sample(1, sample) - axis.unit_of_sample(1, 0) == before
        origin = plan.origin_of_sample(1, sample)
        before += int(lengths[first[origin.block] + origin.row])
    assert axis.unit_of_sample(2, 0) - axis.unit_of_sample(1, 0) == before == int(lengths.sum())


@pytest.mark.long
def test_threads_share_a_stream_and_its_axis(uris: list[str]) -> None:
    """A rank reads steps ahead on several threads, which share what is remembered: a run of hours died of that."""
    stream = stream_of(uris, (None, None))
    axis, alone = stream.token_axis(), stream_of(uris, (None, None))
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
