"""Rows of two consecutive segments, swapped or not (ALBERT's SOP). Every token once a reading.

The rule is google-research/albert, create_pretraining_data.py, except where that loses text: a chunk takes another
sentence only while the row has room for it, and a sentence longer than a row is cut into full ones. Only its way
with lone sentences (`lone_sentence: random`), which must make room for random text, loses tokens still.
"""

import numpy as np
from numpy.typing import NDArray

from data_service.rng import Key
from data_service.samples.chunks import (
    PAIR_EDGES,
    Ends,
    Numbers,
    Sentences,
    below,
    document_targets,
    elsewhere,
    follow,
    happens,
    truncated,
)
from data_service.samples.inputs import OrderedPairs
from data_service.samples.segments import Segments
from data_service.shards.block import Block


def ordered_pairs(block: Block, config: OrderedPairs, length: int, key: Key) -> Segments:
    """Chunks of sentences up to the row's target, cut in two at a random sentence. Label 1: B comes first in the text.

    A chunk of one sentence is cut at a random token; of one token, it is a row of one segment, label 0. Or it gets
    a random second segment (label 1), whatever is drawn for it.
    """
    room = length - PAIR_EDGES
    sentences = Sentences.of(block, longest=room)
    every = np.arange(len(sentences))
    targets = document_targets(sentences, room, config.short, key)
    end = np.minimum(sentences.fill(every, targets), sentences.fit(every, room))
    first = follow(end)
    end = end[first]
    start, stop = sentences.span(first, end)
    middle = _middles(sentences, first, end, key)
    random = (end == first + 1) & (config.lone_sentence == "random")
    middle = np.where(random, stop, middle)
    swapped = (middle < stop) & happens(key, "swapped", first, config.swapped)
    a, b = _halves(start, middle, stop, swapped)
    if random.any():
        other = elsewhere(sentences, first, targets[first] - (stop - start), key)
        b = (np.where(random, other[0], b[0]), np.where(random, other[1], b[1]))
        a, b = truncated(a, b, room, key)
    return Segments.of(a, b, (swapped | random).astype(np.int8))


def _middles(sentences: Sentences, first: Numbers, end: Numbers, key: Key) -> Numbers:
    """[N] token offsets at which chunks are cut: between sentences; in a lone one, between tokens, if it has two."""
    start, stop = sentences.span(first, end)
    lone = end == first + 1
    units = np.where(lone, stop - start, end - first)
    cut = 1 + below(key, "split", first, np.maximum(units - 1, 1))
    return np.where(lone, start + cut, sentences.edges[np.minimum(first + cut, end)])


def _halves(start: Numbers, middle: Numbers, stop: Numbers, swapped: NDArray[np.bool_]) -> tuple[Ends, Ends]:
    """What lies before and after `middle`, or the other way round."""
    return (
        (np.where(swapped, middle, start), np.where(swapped, stop, middle)),
        (np.where(swapped, start, middle), np.where(swapped, middle, stop)),
    )
