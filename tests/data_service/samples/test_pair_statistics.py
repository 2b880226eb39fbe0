"""Shares of a million rows of two segments (by default of a tenth of that), within five standard errors of the
published numbers."""

from functools import cache

import numpy as np
import pytest

from data_service.rng import stream_key
from data_service.samples.packing import Segments
from data_service.samples.pairs import (
    OrderedPairs,
    SegmentPairs,
    SentencePairs,
    TwoSegments,
    ordered_pairs,
    segment_pairs,
    sentence_pairs,
    two_segments,
)
from data_service.types import Block

LENGTH = 64
SENTENCE = 6  # tokens
DOCUMENT = 500  # sentences


@cache
def even_block(documents: int) -> Block:
    """Sentences of one length, so that nothing but the draws decides. Ten fit in a row."""
    sentences = documents * DOCUMENT
    return Block(
        np.zeros(sentences * SENTENCE, dtype=np.uint16),
        np.arange(sentences + 1) * SENTENCE,
        np.arange(documents + 1) * DOCUMENT,
    )


@pytest.fixture(params=[100_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def rows(request: pytest.FixtureRequest) -> int:
    """How many rows to look at, at least."""
    count: int = request.param
    return count


def within(found: np.ndarray, share: float) -> None:
    """`found` [N] bool is true with probability `share`."""
    error = np.sqrt(share * (1 - share) / len(found))
    assert abs(found.mean() - share) < 5 * error, f"{found.mean()} is not {share} +- {error}"


def document_of(segments: Segments) -> np.ndarray:
    """[N, 2] the documents that the segments lie in."""
    return segments.starts // (SENTENCE * DOCUMENT)


def labels_of(segments: Segments) -> np.ndarray:
    assert segments.labels is not None
    return segments.labels


def test_next_sentence_is_random_in_half_of_the_rows(rows: int) -> None:
    """Devlin et al. 2019, appendix A.2: 50 % of the time B is the actual next sentence."""
    segments = segment_pairs(
        even_block(rows // 60), SegmentPairs(packing="segment_pair", short=0), LENGTH, stream_key("nsp")
    )
    assert len(segments.starts) > rows
    random, documents = labels_of(segments) == 1, document_of(segments)
    # The last sentence of a document may be left alone in its chunk; its second segment is random whatever is drawn.
    ends_document = (
        segments.starts[:, 0] + segments.sizes[:, 0] == (documents[:, 0] + 1) * SENTENCE * DOCUMENT
    )
    within(random[~ends_document], 0.5)
    assert random[ends_document].all()
    assert (documents[random, 0] != documents[random, 1]).all()
    follows = segments.starts[:, 1] - (segments.starts[:, 0] + segments.sizes[:, 0])
    assert ((follows[~random] >= 0) & (follows[~random] < SENTENCE * 3)).all()  # what was cut lies between
    assert segments.sizes.sum(axis=1).max() <= LENGTH - 3


@pytest.mark.long
def test_a_tenth_of_the_documents_is_filled_to_a_random_length(rows: int) -> None:
    """google-research/bert: short_seq_prob 0.1, drawn once a document, uniform over 2 to the longest."""
    config = SegmentPairs(packing="segment_pair", random=0)
    segments = segment_pairs(even_block(rows // 45), config, LENGTH, stream_key("short"))
    assert len(segments.starts) > rows
    documents, sizes = document_of(segments)[:, 0], segments.sizes.sum(axis=1)
    first = sizes[np.unique(documents, return_index=True)[1]]  # of each document
    within(first != LENGTH - 3, 0.1 * 59 / 60)  # of the targets 2 to 61 only the last fills the row
    for sentences in range(2, 11):
        # Targets of 7 to 12 are reached by two sentences, and so on; those of 2 to 6 by one, which gets another.
        targets = SENTENCE + 5 * (sentences == 2)
        within(first == sentences * SENTENCE, 0.1 * targets / 60)


def test_sentence_pairs_are_random_in_half_of_the_rows(rows: int) -> None:
    count = rows // 300
    segments = sentence_pairs(
        even_block(count), SentencePairs(packing="sentence_pair"), LENGTH, stream_key("sentences")
    )
    assert len(segments.starts) > rows
    random, documents = labels_of(segments) == 1, document_of(segments)
    last = segments.starts[:, 0] + SENTENCE == (documents[:, 0] + 1) * SENTENCE * DOCUMENT
    within(random[~last], 0.5)
    assert random[last].all()
    assert (documents[random, 0] != documents[random, 1]).all()
    assert (segments.starts[~random, 1] == segments.starts[~random, 0] + SENTENCE).all()
    # The other document is any other alike, the sentence any of its own.
    away = (documents[random, 1] - documents[random, 0]) % count
    assert abs(away.mean() / (count / 2) - 1) < 5 / np.sqrt(3 * random.sum())
    sentence = segments.starts[random, 1] // SENTENCE % DOCUMENT
    counts = np.bincount(sentence, minlength=DOCUMENT)
    chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert abs(chi_square - (DOCUMENT - 1)) < 5 * np.sqrt(2 * (DOCUMENT - 1))


@pytest.mark.long
def test_sentence_order_is_swapped_in_half_of_the_rows(rows: int) -> None:
    """Lan et al. 2019, section 3.1."""
    segments = ordered_pairs(
        even_block(rows // 50), OrderedPairs(packing="ordered_pair"), LENGTH, stream_key("sop")
    )
    assert len(segments.starts) > rows
    swapped = labels_of(segments) == 1
    within(swapped, 0.5)
    np.testing.assert_array_equal(segments.starts[:, 0] > segments.starts[:, 1], swapped)
    assert (document_of(segments)[:, 0] == document_of(segments)[:, 1]).all()
    assert segments.sizes.min() > 0


def test_a_tenth_of_the_rows_has_one_segment_and_a_twentieth_is_short(rows: int) -> None:
    """google-research/electra, build_pretraining_dataset.py: 0.1 and 0.05."""
    config = TwoSegments(packing="two_segments")
    segments = two_segments(even_block(rows // 50), config, LENGTH, stream_key("electra"))
    assert len(segments.starts) > rows
    stops = segments.starts[:, 0] + segments.sizes.sum(axis=1)
    inside = stops % (SENTENCE * DOCUMENT) != 0  # the last row of a document is as short as what is left
    sizes = segments.sizes[inside]
    long = sizes.sum(axis=1) == 60  # ten sentences
    # Targets of 5 to 54 tokens are reached before ten sentences, of the 60 from 5 to 64.
    within(~long, 0.05 * 50 / 60)
    within(sizes[long, 1] == 0, 0.1)
    # A grows to 24 tokens, below half of 61, and takes the sentence with which it reaches 30 in half of the rows.
    paired = sizes[long & (sizes[:, 1] > 0)]
    assert set(paired[:, 0].tolist()) == {24, 30}
    within(paired[:, 0] == 30, 0.5)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_shares_of_none_and_all(share: float) -> None:
    key, block = stream_key("edge"), even_block(20)
    pairs = sentence_pairs(block, SentencePairs(packing="sentence_pair", random=share), LENGTH, key)
    assert abs(labels_of(pairs).mean() - share) < 0.01
    ordered = ordered_pairs(block, OrderedPairs(packing="ordered_pair", swapped=share), LENGTH, key)
    assert (labels_of(ordered) == share).all()
    two = two_segments(block, TwoSegments(packing="two_segments", single=share, short=0), LENGTH, key)
    assert (two.sizes[:, 1] == 0).mean() == pytest.approx(share, abs=0.01)
