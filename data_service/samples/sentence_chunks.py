"""Chunks: runs of consecutive sentences of one document, from which rows of two segments are made.

A chunk's random draws are numbered by its first sentence, so they do not depend on other chunks. Everything is computed
for all sentences of a block at once, as if a chunk began with each of them. This also gives the sentence with which the
next chunk would begin. The actual chunks are found by following these links from the first sentence on.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from data_service.rng import UINT32_RANGE, Key, draw_uint32, draw_uint64, scale_draws, stream_key
from data_service.samples.packing import cut_long_sentences
from data_service.types import Block

PAIR_SPECIAL_TOKENS = 3  # <s>, and </s> after each of two segments
_BITS_PER_DRAW = 64  # coin tosses per 64-bit draw

SentenceNumbers = NDArray[np.int64]  # numbers of sentences in the block, or one integer for each of them
TokenRanges = tuple[SentenceNumbers, SentenceNumbers]
"""Token offsets in the block at which N segments start and stop, each [N]."""


@dataclass(frozen=True)
class Sentences:
    """The S sentences of a block of D documents.

    Attributes:
        edges: [S + 1] int64, token offsets of the sentences, and the end of the block.
        documents: [D + 1] int64, number of each document's first sentence, and S.
        document: [S] int64, number of the document that each sentence belongs to.
    """

    edges: SentenceNumbers
    documents: SentenceNumbers
    document: SentenceNumbers

    @classmethod
    def from_block(cls, block: Block, max_tokens: int | None = None) -> Self:
        """Return the sentences of a block. Sentences of more than `max_tokens` tokens are cut after every `max_tokens`
        tokens."""
        edges, documents = block.sentences, block.documents
        if max_tokens is not None:
            edges = cut_long_sentences(block.sentences, max_tokens)
            documents = np.searchsorted(edges, block.sentences[documents])
        return cls(edges, documents, np.repeat(np.arange(len(documents) - 1), np.diff(documents)))

    def __len__(self) -> int:
        return len(self.document)

    def document_end(self, first: SentenceNumbers) -> SentenceNumbers:
        """Return for each sentence number in `first` the number of the sentence after its document's last one."""
        return self.documents[self.document[first] + 1]

    def chunk_ends_at_least(self, first: SentenceNumbers, tokens: SentenceNumbers) -> SentenceNumbers:
        """Return the ends of chunks that begin with sentences `first` and continue until they have `tokens` tokens, or
        the document ends.
        """
        reached = np.searchsorted(self.edges, self.edges[first] + tokens)
        return np.clip(reached, first + 1, self.document_end(first))

    def chunk_ends_at_most(self, first: SentenceNumbers, tokens: SentenceNumbers | int) -> SentenceNumbers:
        """Return the ends of the longest chunks that begin with sentences `first` and have at most `tokens` tokens.

        A chunk has at least one sentence, even if this is longer.
        """
        reached = np.searchsorted(self.edges, self.edges[first] + tokens, side="right") - 1
        return np.clip(reached, first + 1, self.document_end(first))

    def token_range(self, first: SentenceNumbers, stop: SentenceNumbers) -> TokenRanges:
        """Return the token offsets at which sentences `first` to `stop - 1` begin and end."""
        return self.edges[first], self.edges[stop]


def chunk_starts(following: SentenceNumbers) -> SentenceNumbers:
    """Return the first sentences of all chunks. `following`: end of the chunk that begins with each sentence."""
    table, found, at = following.tolist(), [], 0
    while at < len(table):
        found.append(at)
        at = table[at]
    return np.array(found, dtype=np.int64)


def draw_integers_below(
    key: Key, purpose: str, draw_numbers: SentenceNumbers, bounds: SentenceNumbers | int
) -> SentenceNumbers:
    """Return [N] integers, uniform over 0 to `bounds` - 1. `draw_numbers`: [N], indices in the random stream."""
    draws = draw_uint32(stream_key(key.hex(), purpose), 0, int(draw_numbers.max(initial=-1)) + 1)
    return scale_draws(draws[draw_numbers], bounds)


def draw_bernoulli(key: Key, purpose: str, draw_numbers: SentenceNumbers, share: float) -> NDArray[np.bool_]:
    """Return [N] bool, each true with probability `share`. Arguments as for `draw_integers_below`."""
    return draw_integers_below(key, purpose, draw_numbers, UINT32_RANGE) < round(share * UINT32_RANGE)


def draw_target_lengths(sentences: Sentences, room: int, short_share: float, key: Key) -> SentenceNumbers:
    """Return [S], the target length in tokens of the chunk that begins with each sentence.

    It is `room`, or in a share `short_share` of the documents uniform over 2 to `room`.
    """
    documents = np.arange(len(sentences.documents) - 1)
    is_short = draw_bernoulli(key, "short document", documents, short_share)
    targets = np.where(is_short, 2 + draw_integers_below(key, "short target", documents, room - 1), room)
    return targets[sentences.document]


def draw_random_second_segments(
    sentences: Sentences, first: SentenceNumbers, tokens: SentenceNumbers, key: Key
) -> TokenRanges:
    """Return the token ranges of random second segments for chunks that begin with sentences `first`.

    A segment begins with a random sentence of a random other document, and continues until it has `tokens` tokens (at
    least one sentence) or the document ends. A block's only document is used itself, as in google-research/bert.
    """
    own, others = sentences.document[first], len(sentences.documents) - 2
    document = draw_integers_below(key, "other document", first, max(others, 1))
    if others:
        document += document >= own
    begin = sentences.documents[document]
    begin += draw_integers_below(key, "other sentence", first, sentences.documents[document + 1] - begin)
    return sentences.token_range(begin, sentences.chunk_ends_at_least(begin, tokens))


def truncate_pairs(first: TokenRanges, second: TokenRanges, room: int, key: Key) -> tuple[TokenRanges, TokenRanges]:
    """Return pairs of segments shortened to at most `room` tokens.

    Tokens are removed one by one, from the segment that is longer at the time (the second if they are equal), at its
    beginning or end at random.
    """
    sizes = np.stack([first[1] - first[0], second[1] - second[0]], axis=1)
    excess = np.maximum(sizes.sum(axis=1) - room, 0)
    difference = sizes[:, 0] - sizes[:, 1]
    # Number of tokens cut from the longer segment before both are cut in turns.
    at_once = np.minimum(excess, np.abs(difference))
    turns = excess - at_once
    lost = np.stack([turns // 2, turns - turns // 2], axis=1)
    lost[np.arange(len(lost)), (difference <= 0).astype(np.int64)] += at_once
    fronts = _draw_coin_tosses(key, lost.ravel()).reshape(lost.shape)
    backs = lost - fronts
    return (
        (first[0] + fronts[:, 0], first[1] - backs[:, 0]),
        (second[0] + fronts[:, 1], second[1] - backs[:, 1]),
    )


def _draw_coin_tosses(key: Key, tosses: SentenceNumbers) -> SentenceNumbers:
    """Return [N], the number of heads in `tosses` [N] tosses of a coin."""
    words = -(-tosses // _BITS_PER_DRAW)
    ends = np.cumsum(words)
    bits = draw_uint64(stream_key(key.hex(), "truncation"), 0, int(ends[-1]) if len(ends) else 0)
    partial = tosses % _BITS_PER_DRAW
    kept = np.uint64(_BITS_PER_DRAW) - partial[partial > 0].astype(np.uint64)
    bits[ends[partial > 0] - 1] >>= kept
    up_to = np.append(0, np.cumsum(np.bitwise_count(bits), dtype=np.int64))
    heads: SentenceNumbers = up_to[ends] - up_to[ends - words]
    return heads
