"""Rows of consecutive text in one or two segments, without a label (ELECTRA). Every token once a reading.

The rule is google-research/electra, build_pretraining_dataset.py, with two differences. Where that cuts off what
does not fit, a row here takes another sentence only while there is room, and a sentence longer than a row is cut
into full ones. And once the second segment has begun, all that follows belongs to it; there, a short sentence may
still go to the end of the first.
"""

import numpy as np

from data_service.rng import Key
from data_service.samples.chunks import PAIR_EDGES, Sentences, below, follow, happens
from data_service.samples.inputs import TwoSegments
from data_service.samples.packing import EDGE_TOKENS
from data_service.samples.segments import Segments
from data_service.shards.block import Block

_SHORTEST = 5  # target of a short row, special tokens included


def two_segments(block: Block, config: TwoSegments, length: int, key: Key) -> Segments:
    """Chunks of sentences up to the row's target. The first sentence goes to A, and so do the next while A stays
    shorter than half the target; the sentence that would end this goes to A in half of the rows, the rest to B.
    """
    sentences = Sentences.of(block, longest=length - PAIR_EDGES)
    every = np.arange(len(sentences))
    single = happens(key, "single", every, config.single)
    short = happens(key, "short", every, config.short)
    drawn = _SHORTEST + below(key, "short target", every, length - _SHORTEST + 1)
    targets = np.where(short, drawn, length)
    room = np.where(single, length - EDGE_TOKENS, length - PAIR_EDGES)
    end = np.minimum(sentences.fill(every, targets), sentences.fit(every, room))
    first = follow(end)
    end, single = end[first], single[first]
    half = (targets[first] - PAIR_EDGES) // 2
    split = np.clip(np.searchsorted(sentences.edges, sentences.edges[first] + half) - 1, first + 1, end)
    a_tokens = sentences.edges[split] - sentences.edges[first]
    over = (split < end) & (a_tokens < half) & happens(key, "over half", first, 0.5)
    split = np.where(single, end, split + over)
    return Segments.of(sentences.span(first, split), sentences.span(split, end))
