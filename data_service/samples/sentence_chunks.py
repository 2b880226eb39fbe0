"""Chunks: runs of sentences of one document, from which rows of two segments are made.

The draws of a chunk are numbered by the sentence that it begins with. So a chunk is a function of its first sentence.
Everything is computed for all sentences of a block at once, as if a chunk began at each; this also gives the sentence
at which the next chunk would begin. The chunks that exist are found by following these from the first sentence on.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from data_service.rng import Key, draws32, draws64, scale, stream_key
from data_service.samples.packing import no_longer_than
from data_service.types import Block

PAIR_EDGES = 3  # special tokens of a row of two segments
_DRAWS = 1 << 32
_BITS = 64

Numbers = NDArray[np.int64]
Ends = tuple[Numbers, Numbers]
"""Token offsets at which segments start and stop, each [N]."""


@dataclass(frozen=True)
class Sentences:
    """The S sentences of a block, in D documents.

    Attributes:
        edges: [S + 1] int64, token offsets.
        documents: [D + 1] int64, sentence numbers.
        document: [S] int64, which one each belongs to.
    """

    edges: Numbers
    documents: Numbers
    document: Numbers

    @classmethod
    def of(cls, block: Block, longest: int | None = None) -> Self:
        """Return a block's; those of more than `longest` tokens are cut after each so many."""
        edges, documents = block.sentences, block.documents
        if longest is not None:
            edges = no_longer_than(block.sentences, longest)
            documents = np.searchsorted(edges, block.sentences[documents])
        return cls(edges, documents, np.repeat(np.arange(len(documents) - 1), np.diff(documents)))

    def __len__(self) -> int:
        return len(self.document)

    def document_end(self, first: Numbers) -> Numbers:
        """Return the sentence after the last of the document of each of `first`."""
        return self.documents[self.document[first] + 1]

    def fill(self, first: Numbers, tokens: Numbers) -> Numbers:
        """Return where chunks end that begin at sentences `first` and go on until they have `tokens`, or the document
        ends."""
        reached = np.searchsorted(self.edges, self.edges[first] + tokens)
        return np.clip(reached, first + 1, self.document_end(first))

    def fit(self, first: Numbers, tokens: Numbers | int) -> Numbers:
        """Return the same for chunks that never have more than `tokens`, unless by their first sentence."""
        reached = np.searchsorted(self.edges, self.edges[first] + tokens, side="right") - 1
        return np.clip(reached, first + 1, self.document_end(first))

    def span(self, first: Numbers, stop: Numbers) -> Ends:
        """Return the tokens of sentences `first` to `stop`."""
        return self.edges[first], self.edges[stop]


def follow(following: Numbers) -> Numbers:
    """Return [N] the sentences at which chunks begin, the first at 0; after sentence s comes following[s]."""
    table, found, at = following.tolist(), [], 0
    while at < len(table):
        found.append(at)
        at = table[at]
    return np.array(found, dtype=np.int64)


def below(key: Key, purpose: str, which: Numbers, bounds: Numbers | int) -> Numbers:
    """Return draws number `which` [N], uniform over 0 to `bounds` - 1."""
    draws = draws32(stream_key(key.hex(), purpose), 0, int(which.max(initial=-1)) + 1)
    return scale(draws[which], bounds)


def happens(key: Key, purpose: str, which: Numbers, share: float) -> NDArray[np.bool_]:
    """Return [N] bool, true in a share of the draws."""
    return below(key, purpose, which, _DRAWS) < round(share * _DRAWS)


def document_targets(sentences: Sentences, room: int, short: float, key: Key) -> Numbers:
    """Return [S] tokens that chunks are filled to: `room`, or in a share `short` of the documents uniform in 2 to
    `room`."""
    documents = np.arange(len(sentences.documents) - 1)
    is_short = happens(key, "short document", documents, short)
    targets = np.where(is_short, 2 + below(key, "short target", documents, room - 1), room)
    return targets[sentences.document]


def elsewhere(sentences: Sentences, first: Numbers, tokens: Numbers, key: Key) -> Ends:
    """Return text for the second segments of chunks that begin at `first`: from a random other document, from a random
    sentence on, until there are `tokens` (one sentence at least) or the document ends.

    If the block has only one document, the text is taken from that one, as in google-research/bert.
    """
    own, others = sentences.document[first], len(sentences.documents) - 2
    document = below(key, "other document", first, max(others, 1))
    if others:
        document += document >= own
    begin = sentences.documents[document]
    begin += below(key, "other sentence", first, sentences.documents[document + 1] - begin)
    return sentences.span(begin, sentences.fill(begin, tokens))


def truncated(first: Ends, second: Ends, room: int, key: Key) -> tuple[Ends, Ends]:
    """Cut pairs to at most `room` tokens. One token after another is removed from the segment that is longer at that
    moment (from the second if they are equal), at a random end of it.
    """
    sizes = np.stack([first[1] - first[0], second[1] - second[0]], axis=1)
    excess = np.maximum(sizes.sum(axis=1) - room, 0)
    difference = sizes[:, 0] - sizes[:, 1]
    at_once = np.minimum(excess, np.abs(difference))  # from the longer, before they take turns
    turns = excess - at_once
    lost = np.stack([turns // 2, turns - turns // 2], axis=1)
    lost[np.arange(len(lost)), (difference <= 0).astype(np.int64)] += at_once
    fronts = _heads(key, lost.ravel()).reshape(lost.shape)
    backs = lost - fronts
    return (
        (first[0] + fronts[:, 0], first[1] - backs[:, 0]),
        (second[0] + fronts[:, 1], second[1] - backs[:, 1]),
    )


def _heads(key: Key, tosses: Numbers) -> Numbers:
    """Return [N] heads among so many tosses of a coin: bits that are set."""
    words = -(-tosses // _BITS)
    ends = np.cumsum(words)
    bits = draws64(stream_key(key.hex(), "truncation"), 0, int(ends[-1]) if len(ends) else 0)
    partial = tosses % _BITS
    kept = np.uint64(_BITS) - partial[partial > 0].astype(np.uint64)
    bits[ends[partial > 0] - 1] >>= kept
    up_to = np.append(0, np.cumsum(np.bitwise_count(bits), dtype=np.int64))
    heads: Numbers = up_to[ends] - up_to[ends - words]
    return heads
