"""Streams of pair rows over real shards: each row alone as with others, every way of cutting in turn, counted ahead."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.rng import stream_key
from data_service.samples.make import cut_block, make_rows
from data_service.samples.masking import MaskingTables, MlmMasking
from data_service.samples.packing import RowCuts
from data_service.samples.samples import join_rows, slice_rows
from data_service.samples.spec import SourceSpec
from data_service.store.open import open_store
from data_service.stream.counts import count_rows
from data_service.stream.sources import Corpora
from data_service.stream.stream import Stream
from tests.support.data.corpora import (
    SPECIAL,
    VOCABULARY,
    assert_same,
    random_block,
    source_of,
    spec_of,
    text_of,
    write_corpus,
)

PACKINGS = ["segment_pair", "sentence_pair", "ordered_pair", "two_segments"]
BLOCKS = [random_block(seed, 900 + 100 * seed) for seed in range(6)]
OTHER = [random_block(seed, 700) for seed in range(100, 103)]
NOWHERE = SourceSpec(name="text", uri="nowhere", manifest_fingerprint="f" * 64)
WORD_STARTS = np.arange(VOCABULARY) % 3 != 0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"), BLOCKS)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("other"), OTHER)


@settings(deadline=None)
@given(st.integers(0, 1000), st.sampled_from(PACKINGS), st.booleans(), st.data())
def test_rows_alone_are_the_rows_among_others(
    seed: int, packing: str, whole_words: bool, data: st.DataObject
) -> None:
    masking = MlmMasking(rate=0.3, unit="whole_word" if whole_words else "token")
    spec = spec_of(NOWHERE, length=24, input={"packing": packing}, masking=masking)
    words = WORD_STARTS if whole_words else None
    block = random_block(seed, 300, sentence=7)
    rows = cut_block(block, spec, stream_key("structure", seed))
    whole = make_rows(block, rows, 0, len(rows), spec, stream_key("test"), MaskingTables(words))
    start = data.draw(st.integers(0, len(rows) - 1))
    stop = data.draw(st.integers(start + 1, len(rows)))
    assert_same(
        make_rows(block, rows, start, stop, spec, stream_key("test"), MaskingTables(words)),
        slice_rows(whole, start, stop),
    )


@settings(deadline=None)
@given(st.integers(0, 1000), st.sampled_from(PACKINGS))
def test_rows_are_laid_out_with_their_segments(seed: int, packing: str) -> None:
    """[CLS] A [SEP] B [SEP], or [CLS] A [SEP]; B begins after the first separator."""
    spec = spec_of(NOWHERE, length=24, input={"packing": packing})
    block = random_block(seed, 300, sentence=7)
    rows = cut_block(block, spec, stream_key("structure", seed))
    assert isinstance(rows, RowCuts)
    made = make_rows(block, rows, 0, len(rows), spec, stream_key("test"))
    tokens = made.tokens.copy()
    tokens[made.target_positions] = made.target_ids
    assert made.segment_starts is not None
    assert made.segment_starts.dtype == np.int32
    assert (made.pair_label is None) == (packing == "two_segments")
    for row, (first, last) in enumerate(itertools.pairwise(made.offsets.tolist())):
        expected = [SPECIAL.cls]
        starts = []
        for stretch in rows.stretches(row):
            starts.append(len(expected))
            expected += [*block.tokens[stretch].tolist(), SPECIAL.sep]
        assert tokens[first:last].tolist() == expected
        assert made.segment_starts[row] == (starts[1] if len(starts) == 2 else len(expected))


@settings(deadline=None)
@given(st.integers(0, 1000), st.sampled_from(PACKINGS))
def test_words_end_with_their_segment_and_sentence(seed: int, packing: str) -> None:
    spec = spec_of(
        NOWHERE, length=40, input={"packing": packing}, masking=MlmMasking(rate=0.3, unit="whole_word")
    )
    block = random_block(seed, 300, sentence=7)
    rows = cut_block(block, spec, stream_key("structure", seed))
    assert isinstance(rows, RowCuts)
    made = make_rows(block, rows, 0, len(rows), spec, stream_key("test"), MaskingTables(WORD_STARTS))
    sentences = set(block.sentences.tolist())
    targets = set(made.target_positions.tolist())
    for row in range(len(rows)):
        place = int(made.offsets[row]) + 1
        for stretch in rows.stretches(row):
            words: list[list[int]] = []
            for token in stretch:
                if not words or token in sentences or WORD_STARTS[block.tokens[token]]:
                    words.append([])
                words[-1].append(place)
                place += 1
            assert all(len(targets.intersection(word)) in (0, len(word)) for word in words)
            place += 1


@pytest.mark.long
@pytest.mark.parametrize("packing", PACKINGS)
def test_any_cut_and_any_order_of_reading_gives_the_same_bytes(corpus: str, packing: str) -> None:
    spec = spec_of(source_of(corpus), input={"packing": packing, "copies": 2})
    stream = Stream(spec)
    count = stream.samples_per_epoch
    whole = stream.read(1, 0, count)
    rng = np.random.default_rng(0)
    cuts = np.unique(np.concatenate([[0, count], rng.integers(0, count, 25)])).tolist()
    ranges = list(itertools.pairwise(cuts))
    fresh = Stream(spec, windows=1)
    parts = {index: fresh.read(1, *ranges[index]) for index in rng.permutation(len(ranges)).tolist()}
    assert_same(join_rows([parts[index] for index in range(len(ranges))]), whole)


@pytest.mark.long
@pytest.mark.parametrize("packing", ["ordered_pair", "two_segments"])
def test_every_token_once_a_reading(corpus: str, other: str, packing: str) -> None:
    spec = spec_of(source_of(corpus), source_of(other, "other"), input={"packing": packing, "copies": 3})
    stream = Stream(spec)
    samples = stream.read(2, 0, stream.samples_per_epoch)
    expected = 3 * np.bincount(np.concatenate([block.tokens for block in BLOCKS + OTHER]))
    np.testing.assert_array_equal(np.bincount(text_of(samples)), expected)


def rows_seen(stream: Stream, epoch: int) -> dict[tuple[int, int, int], bytes]:
    """(reading, block, row) -> where its text lies."""
    found = {}
    for sample in range(stream.samples_per_epoch):
        source = stream.source(epoch, sample)
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
    stream = Stream(
        spec_of(source_of(corpus), input={"packing": "segment_pair", "copies": 2}, masking=masking)
    )
    rows = [
        {stream.read(epoch, n, n + 1).tokens.tobytes() for n in range(stream.samples_per_epoch)}
        for epoch in (0, 1)
    ]
    if copies == 2:
        assert rows[0] == rows[1]
    else:
        assert len(rows[0] & rows[1]) < 0.1 * len(rows[0])


@pytest.mark.long
@pytest.mark.heavy
def test_a_mixture_reads_each_source_in_all_its_ways(corpus: str, other: str) -> None:
    stream = Stream(
        spec_of(
            source_of(corpus, weight=1.0),
            source_of(other, "other", weight=2.0),
            input={"packing": "ordered_pair", "copies": 2},
        )
    )
    quotas = stream.plan.epoch_layout.quotas
    assert abs(quotas[1] / sum(quotas) - 2 / 3) < 0.01
    seen = Counter(
        (source.name, source.epoch, source.block, source.row)
        for source in (stream.source(0, n) for n in range(stream.samples_per_epoch))
    )
    assert set(seen.values()) == {1}
    assert {epoch % 2 for name, epoch, _, _ in seen if name == "other"} == {0, 1}


@pytest.mark.long
def test_every_sample_has_its_place_on_the_token_axis(corpus: str) -> None:
    """Every sample's place on the token axis, against the lengths of the samples themselves."""
    stream = Stream(spec_of(source_of(corpus), input={"packing": "sentence_pair", "copies": 3}))
    axis, count = stream.token_axis(), stream.samples_per_epoch
    before = 0
    for epoch in range(2):
        lengths = np.diff(stream.read(epoch, 0, count).offsets)
        places = before + np.append(0, np.cumsum(lengths))
        assert [axis.unit(epoch, sample) for sample in range(count + 1)] == places.tolist()
        for sample in range(0, count, 29):
            assert axis.locate(int(places[sample])) == (epoch, sample)
            assert axis.locate(int(places[sample]) - 1 + (sample == 0)) == (epoch, sample)
        before = int(places[-1])


def test_counts_depend_on_the_seed_and_are_kept_under_it(corpus: str, tmp_path: Path) -> None:
    cache = open_store(tmp_path / "cache")
    settings = {"input": {"packing": "segment_pair", "copies": 4}}
    counts = [
        count_rows(Corpora(spec_of(source_of(corpus), seed=seed, **settings)), cache)[0] for seed in (7, 8)
    ]
    assert counts[0].shape == (4 * len(BLOCKS),)
    assert not np.array_equal(counts[0], counts[1])
    assert len(list(cache.list())) == 2


def test_a_window_takes_the_memory_it_was_planned_to_take(corpus: str) -> None:
    for packing in PACKINGS:
        stream = Stream(spec_of(source_of(corpus), input={"packing": packing, "copies": 1}))
        grid = stream.plan.epoch_layout
        samples = stream.read(0, grid.start(1), grid.start(2))
        arrays = (samples.tokens, samples.target_positions, samples.target_ids)
        assert sum(array.nbytes for array in arrays) < 1.1 * grid.window_bytes
