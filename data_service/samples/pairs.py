"""Rows of two segments, of which the second follows the first or comes from another document (BERT's NSP).

The rule is google-research/bert, create_pretraining_data.py, within one block. A row longer than it may be loses
tokens, so a long sentence is not seen whole; every sentence is seen in its place once a reading, and random second
segments come besides.
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
from data_service.samples.inputs import SegmentPairs, SentencePairs
from data_service.samples.segments import Segments
from data_service.shards.block import Block


def segment_pairs(block: Block, config: SegmentPairs, length: int, key: Key) -> Segments:
    """Chunks of sentences up to the row's target. A ends at a random sentence; B is the rest of the chunk (label
    0), or text of as many tokens from elsewhere (label 1), and the rest goes to the next chunk. A chunk of one
    sentence has no rest.
    """
    room = length - PAIR_EDGES
    sentences = Sentences.of(block)
    every = np.arange(len(sentences))
    targets = document_targets(sentences, room, config.short, key)
    end = sentences.fill(every, targets)
    split = every + 1 + below(key, "split", every, np.maximum(end - every - 1, 1))
    random = (split == end) | happens(key, "random", every, config.random)
    first = follow(np.where(random, split, end))
    split, end, random = split[first], end[first], random[first]
    a = sentences.span(first, split)
    b = sentences.span(split, end)
    wanted = targets[first] - (a[1] - a[0])
    return _paired(sentences, (a, b), first, random, wanted, room, key)


def sentence_pairs(block: Block, config: SentencePairs, length: int, key: Key) -> Segments:
    """A sentence and the next one of its document (label 0), or one from elsewhere (label 1), and the next one
    begins the next row. The last sentence of a document has none that follows.
    """
    sentences = Sentences.of(block)
    every = np.arange(len(sentences))
    last = every + 1 == sentences.document_end(every)
    random = last | happens(key, "random", every, config.random)
    first = follow(every + np.where(random, 1, 2))
    random = random[first]
    a = sentences.span(first, first + 1)
    b = sentences.span(first + 1, np.where(random, first + 1, first + 2))
    return _paired(sentences, (a, b), first, random, np.ones_like(first), length - PAIR_EDGES, key)


def _paired(
    sentences: Sentences,
    following: tuple[Ends, Ends],
    first: Numbers,
    random: NDArray[np.bool_],
    wanted: Numbers,
    room: int,
    key: Key,
) -> Segments:
    """Segments A and B, with `wanted` tokens from elsewhere for B where `random`, cut to `room`."""
    a, b = following
    other = elsewhere(sentences, first, wanted, key)
    b = (np.where(random, other[0], b[0]), np.where(random, other[1], b[1]))
    return Segments.of(*truncated(a, b, room, key), random.astype(np.int8))
