"""Streams of pair rows over real shards: rows laid out with their segments, every way of cutting in turn."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.rng import stream_key
from data_service.samples.make import cut_block, make_rows, token_ranges_of_row
from data_service.samples.masking import MaskingTables, MlmMasking
from data_service.store.open import open_store
from data_service.stream.counts import RowCounter
from data_service.stream.sources import Corpora
from data_service.stream.stream import Stream
from tests.support.data.corpora import SPECIAL, originals, random_block, source_of, spec_of, write_corpus
from tests.support.data.row_settings import KEY, NOWHERE, SEGMENTS, WORD_STARTS

BLOCKS = [random_block(seed, 900 + 100 * seed) for seed in range(6)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"), BLOCKS)


@settings(deadline=None)
@given(st.integers(0, 1000), st.sampled_from(SEGMENTS))
def test_rows_are_laid_out_with_their_segments(seed: int, packing: str) -> None:
    """[CLS] A [SEP] B [SEP], or [CLS] A [SEP]; B begins after the first separator."""
    spec = spec_of(NOWHERE, length=24, input={"packing": packing})
    block = random_block(seed, 300, sentence=7)
    rows = cut_block(block, spec, stream_key("structure", seed))
    made = make_rows(block, rows, 0, len(rows), spec, KEY)
    tokens = originals(made)
    assert made.segment_starts is not None
    assert made.segment_starts.dtype == np.int32
    assert (made.pair_label is None) == (packing == "two_segments")
    for row, (first, last) in enumerate(itertools.pairwise(made.offsets.tolist())):
        expected = [SPECIAL.cls]
        starts = []
        for stretch in token_ranges_of_row(block, rows, row, spec, KEY):
            starts.append(len(expected))
            expected += [*block.tokens[stretch].tolist(), SPECIAL.sep]
        assert tokens[first:last].tolist() == expected
        assert made.segment_starts[row] == (starts[1] if len(starts) == 2 else len(expected))


@settings(deadline=None)
@given(st.integers(0, 1000), st.sampled_from(SEGMENTS))
def test_words_end_with_their_segment_and_sentence(seed: int, packing: str) -> None:
    spec = spec_of(NOWHERE, length=40, input={"packing": packing}, masking=MlmMasking(rate=0.3, unit="whole_word"))
    block = random_block(seed, 300, sentence=7)
    rows = cut_block(block, spec, stream_key("structure", seed))
    made = make_rows(block, rows, 0, len(rows), spec, KEY, MaskingTables(WORD_STARTS))
    sentences = set(block.sentences.tolist())
    targets = set(made.target_positions.tolist())
    for row in range(len(rows)):
        place = int(made.offsets[row]) + 1
        for stretch in token_ranges_of_row(block, rows, row, spec, KEY):
            words: list[list[int]] = []
            for token in stretch:
                if not words or token in sentences or WORD_STARTS[block.tokens[token]]:
                    words.append([])
                words[-1].append(place)
                place += 1
            assert all(len(targets.intersection(word)) in (0, len(word)) for word in words)
            place += 1


def rows_seen(stream: Stream, epoch: int) -> dict[tuple[int, int, int], bytes]:
    """(reading, block, row) -> where its text lies."""
    found = {}
    for sample in range(stream.samples_per_epoch):
        source = stream.sample_text(epoch, sample)
        assert (source.epoch, source.block, source.row) not in found
        found[source.epoch, source.block, source.row] = repr(source.stretches).encode()
    return found


@pytest.mark.long
@pytest.mark.heavy
def test_each_reading_is_cut_in_its_own_way_and_then_the_first_comes_again(corpus: str) -> None:
    stream = Stream(spec_of(source_of(corpus), input={"packing": "segment_pair", "copies": 2}))
    first, second = rows_seen(stream, 0), rows_seen(stream, 1)
    assert {reading for reading, _, _ in first} == {0, 1}
    assert {reading for reading, _, _ in second} == {2, 3}
    assert {(reading + 2, block, row): text for (reading, block, row), text in first.items()} == second
    ways = [sorted(text for (reading, _, _), text in first.items() if reading == way) for way in (0, 1)]
    common = Counter(ways[0]) & Counter(ways[1])
    assert sum(common.values()) < 0.2 * len(ways[0])


@pytest.mark.long
@pytest.mark.parametrize("copies", ["dynamic", 2])
def test_masks_are_drawn_for_each_reading(corpus: str, copies: str | int) -> None:
    """With as many masks as ways of cutting, rows come back masked alike: BERT's static data."""
    masking = MlmMasking.model_validate({"copies": copies})
    stream = Stream(spec_of(source_of(corpus), input={"packing": "segment_pair", "copies": 2}, masking=masking))
    rows = [
        {stream.read(epoch, n, n + 1).tokens.tobytes() for n in range(stream.samples_per_epoch)} for epoch in (0, 1)
    ]
    if copies == 2:
        assert rows[0] == rows[1]
    else:
        assert len(rows[0] & rows[1]) < 0.1 * len(rows[0])


def test_counts_depend_on_the_seed_and_are_kept_under_it(corpus: str, tmp_path: Path) -> None:
    cache = open_store(tmp_path / "cache")
    settings = {"input": {"packing": "segment_pair", "copies": 4}}
    counts = [
        RowCounter(cache).count_rows(Corpora(spec_of(source_of(corpus), seed=seed, **settings)))[0] for seed in (7, 8)
    ]
    assert counts[0].shape == (4 * len(BLOCKS),)
    assert not np.array_equal(counts[0], counts[1])
    assert len(list(cache.list())) == 2
