"""Batches in tokens: the axis against counting the tokens of every sample."""

from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from corpus import random_block, source_of, spec_of, write_corpus

from data_service.positions import Phase, Positions
from data_service.stream import Stream

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


@pytest.mark.parametrize("weights", WEIGHTS)
def test_units_are_the_tokens_before_a_sample(
    uris: list[str], weights: tuple[float | None, float | None]
) -> None:
    stream = stream_of(uris, weights)
    axis, count = stream.token_axis(), stream.samples_per_epoch
    lengths = [int(n) for epoch in range(4) for n in np.diff(stream.read(epoch, 0, count).offsets)]
    before = [0, *accumulate(lengths)]
    assert [axis.unit(*divmod(sample, count)) for sample in range(4 * count)] == before[:-1]
    assert axis.unit(3, count) == before[-1] == axis.unit(4, 0)
    for unit in range(0, before[-1], 23):
        expected = next(sample for sample, start in enumerate(before) if start >= unit)
        assert axis.locate(unit) == divmod(expected, count)


def test_steps_of_so_many_tokens(uris: list[str], tmp_path: Path) -> None:
    stream = stream_of(uris, (None, None))
    positions = Positions([Phase(40, 700, stream.samples_per_epoch, stream.token_axis())])
    sizes = []
    for step in range(40):
        read = [stream.read(r.epoch, r.start, r.stop) for r in positions.ranges(step)]
        sizes.append(sum(len(samples.tokens) for samples in read))
    assert max(abs(size - 700) for size in sizes) < 32
    assert abs(sum(sizes) - 40 * 700) < 32
