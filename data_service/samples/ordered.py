"""Rows of two consecutive segments, swapped or not (ALBERT's SOP). Every token once a reading.

The rule is google-research/albert, create_pretraining_data.py, except where that loses text: a chunk takes another
sentence only while the row has room for it, and a sentence longer than a row is cut into full ones. Only its way
with lone sentences (`lone_sentence: random`), which must make room for random text, loses tokens still.
"""

import numpy as np

from data_service.rng import Key
from data_service.samples.chunks import (
    PAIR_EDGES,
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
    lone = end == first + 1
    start, stop = sentences.span(first, end)
    units = np.where(lone, stop - start, end - first)  # to cut between: tokens, or sentences
    cut = 1 + below(key, "split", first, np.maximum(units - 1, 1))
    middle = np.where(lone, start + cut, sentences.edges[np.minimum(first + cut, end)])
    swapped = (middle < stop) & happens(key, "swapped", first, config.swapped)
    if config.lone_sentence == "cut":
        a = (np.where(swapped, middle, start), np.where(swapped, stop, middle))
        b = (np.where(swapped, start, middle), np.where(swapped, middle, stop))
        return Segments.of(a, b, swapped.astype(np.int8))
    swapped &= ~lone
    other = elsewhere(sentences, first, targets[first] - (stop - start), key)
    a = (np.where(swapped, middle, start), np.where(swapped | lone, stop, middle))
    b = (
        np.where(lone, other[0], np.where(swapped, start, middle)),
        np.where(lone, other[1], np.where(swapped, middle, stop)),
    )
    return Segments.of(*truncated(a, b, room, key), (swapped | lone).astype(np.int8))
