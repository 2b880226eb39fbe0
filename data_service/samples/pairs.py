"""Rows of two segments A and B: for BERT's next-sentence task, ALBERT's sentence-order task, ELECTRA (no label), and
XLM's translations.

Next sentence: the second segment follows the first or comes from another document. The rule is google-research/bert,
create_pretraining_data.py, within one block. A row that is too long is truncated, so long sentences lose text.
In one epoch every sentence is read in context once; random second segments are read in addition.

Sentence order: two consecutive segments, swapped or not; every token once per epoch. The rule is
google-research/albert, create_pretraining_data.py, except where that loses text: here a chunk takes another sentence
only while the row has room for it, and a sentence longer than a row is cut into full rows. With `lone_sentence: random`
tokens are still lost, because a lone sentence must make room for random text.

ELECTRA: consecutive text in one or two segments; every token once per epoch. The rule is google-research/electra,
build_pretraining_dataset.py, with two differences. The official code drops text that does not fit; here a row takes
another sentence only while there is room, and a sentence longer than a row is cut into full rows. And here everything
after the beginning of the second segment belongs to it; in the official code a short sentence may still be added to the
first.

Translations (Conneau and Lample 2019, section 3.3): a row is a sentence and its translation, `<s> one </s><s> other
</s>`, each with positions from 0. If a pair is too long for the row, the end of the longer sentence is dropped, then of
both. There are no random draws: an example is a row.
"""

from abc import ABC, abstractmethod
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from data_service.rng import Key
from data_service.samples.packing import SPECIAL_TOKENS_PER_ROW, Packing, RowCuts, RowInput, Segments
from data_service.samples.sentence_chunks import (
    PAIR_SPECIAL_TOKENS,
    SentenceNumbers,
    Sentences,
    TokenRanges,
    chunk_starts,
    draw_bernoulli,
    draw_integers_below,
    draw_random_second_segments,
    draw_target_lengths,
    truncate_pairs,
)
from data_service.samples.texts import first_texts
from data_service.types import Block, Share

_SHORT_ROW_TOKENS = 5  # smallest target length of ELECTRA's short rows, special tokens included
TRANSLATION_TEXTS = 2  # a translation is the first two texts of an example: query and positive


class RandomlyCutRows(RowInput, ABC):
    """Rows with random boundaries.

    Attributes:
        copies: number of different ways of cutting the corpus (BERT's duplication factor). Successive epochs use
            them in rotation. The rows of all ways are counted before training.
    """

    copies: PositiveInt = 10

    @property
    def cut_count(self) -> int:
        return self.copies

    def with_single_cut(self) -> Self:
        return self.model_copy(update={"copies": 1})

    @abstractmethod
    def draw_segments(self, block: Block, length: int, key: Key) -> Segments:
        """Draw the segments of all rows of a block. `key`: random key of the block and the copy."""

    def cut(self, block: Block, length: int, key: Key) -> RowCuts:
        """Return where a block is cut into rows. `key`: random key of the block and the copy."""
        return RowCuts.from_segments(self.draw_segments(block, length, key))


class _RandomPairs(RandomlyCutRows):
    """Rows of two segments; the second follows the first or comes from a random document.

    Attributes:
        random: share of rows with a random second segment, among rows that could also have the following text.
    """

    random: Share = 0.5

    @property
    def mean_token_uses(self) -> float:
        # Random second segments, about half a row each, are read in addition to the corpus.
        return 1 / (1 - self.random / 2)


class SegmentPairs(_RandomPairs):
    """Rows of two segments of several sentences each, which fill the row (Devlin et al. 2019, appendix A.2).

    Attributes:
        short: share of documents whose rows are filled to a random shorter length.
    """

    packing: Literal["segment_pair"]
    short: Share = 0.1

    def draw_segments(self, block: Block, length: int, key: Key) -> Segments:
        """Make a row of each chunk of sentences, which is filled up to a target length.

        A ends at a random sentence. B is the rest of the chunk (label 0), or random text of the missing length (label
        1); then the next chunk begins with the rest. A chunk of one sentence always has a random B.
        """
        room = length - PAIR_SPECIAL_TOKENS
        sentences = Sentences.from_block(block)
        every = np.arange(len(sentences))
        targets = draw_target_lengths(sentences, room, self.short, key)
        end = sentences.chunk_ends_at_least(every, targets)
        split = every + 1 + draw_integers_below(key, "split", every, np.maximum(end - every - 1, 1))
        random = (split == end) | draw_bernoulli(key, "random", every, self.random)
        first = chunk_starts(np.where(random, split, end))
        split, end, random = split[first], end[first], random[first]
        a = sentences.token_range(first, split)
        b = sentences.token_range(split, end)
        wanted = targets[first] - (a[1] - a[0])
        return _pair_segments(sentences, (a, b), first=first, random=random, wanted_tokens=wanted, room=room, key=key)


class SentencePairs(_RandomPairs):
    """Rows of two single sentences (Liu et al. 2019, section 4.2)."""

    packing: Literal["sentence_pair"]

    def draw_segments(self, block: Block, length: int, key: Key) -> Segments:
        """Make rows of a sentence and the next one of its document (label 0) or a random one (label 1).

        With a random B, the next row begins with the next sentence. A document's last sentence always has a random B.
        """
        sentences = Sentences.from_block(block)
        every = np.arange(len(sentences))
        last = every + 1 == sentences.document_end(every)
        random = last | draw_bernoulli(key, "random", every, self.random)
        first = chunk_starts(every + np.where(random, 1, 2))
        random = random[first]
        a = sentences.token_range(first, first + 1)
        b = sentences.token_range(first + 1, np.where(random, first + 1, first + 2))
        return _pair_segments(
            sentences,
            (a, b),
            first=first,
            random=random,
            wanted_tokens=np.ones_like(first),
            room=length - PAIR_SPECIAL_TOKENS,
            key=key,
        )


def _pair_segments(
    sentences: Sentences,
    following: tuple[TokenRanges, TokenRanges],
    first: SentenceNumbers,
    random: NDArray[np.bool_],
    wanted_tokens: SentenceNumbers,
    room: int,
    key: Key,
) -> Segments:
    """Return the segments (A, B) in `following`, shortened to `room` tokens together. Where `random` is true, about
    `wanted_tokens` tokens of random text replace B."""
    a, b = following
    other = draw_random_second_segments(sentences, first, wanted_tokens, key)
    b = (np.where(random, other[0], b[0]), np.where(random, other[1], b[1]))
    return Segments.from_ends(*truncate_pairs(a, b, room, key), random.astype(np.int8))


class OrderedPairs(RandomlyCutRows):
    """Rows of two consecutive segments, swapped or not (Lan et al. 2019, section 3.1).

    Attributes:
        short: share of documents whose rows are filled to a random shorter length.
        swapped: share of rows in which the segments are swapped.
        lone_sentence: how a row of one sentence gets two segments. "cut": the sentence is cut in two (the paper's
            definition of the task). "random": random text is the second segment (google-research/albert).
    """

    packing: Literal["ordered_pair"]
    short: Share = 0.1
    swapped: Share = 0.5
    lone_sentence: Literal["cut", "random"] = "cut"

    def draw_segments(self, block: Block, length: int, key: Key) -> Segments:
        """Make a row of each chunk of sentences: filled up to a target length, then cut in two at a random sentence.

        Label 1: B precedes A in the text. With `lone_sentence: cut` a chunk of one sentence is cut at a random token; a
        chunk of one token is a row of one segment, with label 0. With `random` a chunk of one sentence gets a random
        second segment and label 1.
        """
        room = length - PAIR_SPECIAL_TOKENS
        sentences = Sentences.from_block(block, max_tokens=room)
        every = np.arange(len(sentences))
        targets = draw_target_lengths(sentences, room, self.short, key)
        end = np.minimum(sentences.chunk_ends_at_least(every, targets), sentences.chunk_ends_at_most(every, room))
        first = chunk_starts(end)
        end = end[first]
        start, stop = sentences.token_range(first, end)
        middle = _random_middles(sentences, first, end, key)
        random = (end == first + 1) & (self.lone_sentence == "random")
        middle = np.where(random, stop, middle)
        swapped = (middle < stop) & draw_bernoulli(key, "swapped", first, self.swapped)
        a, b = _ranges_around_middle(start, middle, stop, swapped)
        if random.any():
            other = draw_random_second_segments(sentences, first, targets[first] - (stop - start), key)
            b = (np.where(random, other[0], b[0]), np.where(random, other[1], b[1]))
            a, b = truncate_pairs(a, b, room, key)
        return Segments.from_ends(a, b, (swapped | random).astype(np.int8))


def _random_middles(sentences: Sentences, first: SentenceNumbers, end: SentenceNumbers, key: Key) -> SentenceNumbers:
    """Return [N], random token offsets at which chunks are cut in two.

    A chunk is cut between sentences, or between tokens if it is a single sentence of at least two tokens.
    """
    start, stop = sentences.token_range(first, end)
    lone = end == first + 1
    units = np.where(lone, stop - start, end - first)
    cut = 1 + draw_integers_below(key, "split", first, np.maximum(units - 1, 1))
    return np.where(lone, start + cut, sentences.edges[np.minimum(first + cut, end)])


def _ranges_around_middle(
    start: SentenceNumbers, middle: SentenceNumbers, stop: SentenceNumbers, swapped: NDArray[np.bool_]
) -> tuple[TokenRanges, TokenRanges]:
    """Return the token ranges before and after `middle`, exchanged where `swapped` is true."""
    return (
        (np.where(swapped, middle, start), np.where(swapped, stop, middle)),
        (np.where(swapped, start, middle), np.where(swapped, middle, stop)),
    )


class TwoSegments(RandomlyCutRows):
    """Rows of consecutive text, usually as two segments, without a label (google-research/electra,
    build_pretraining_dataset.py).

    Attributes:
        single: share of rows of one segment.
        short: share of rows filled to a random shorter length.
    """

    packing: Literal["two_segments"]
    single: Share = 0.1
    short: Share = 0.05

    def draw_segments(self, block: Block, length: int, key: Key) -> Segments:
        """Make a row of each chunk of sentences, which is filled up to a target length.

        A takes the first sentence, and further ones while it stays shorter than half the target. In half of the rows
        A also takes the next sentence. B is the rest of the chunk.
        """
        sentences = Sentences.from_block(block, max_tokens=length - PAIR_SPECIAL_TOKENS)
        every = np.arange(len(sentences))
        single = draw_bernoulli(key, "single", every, self.single)
        short = draw_bernoulli(key, "short", every, self.short)
        drawn = _SHORT_ROW_TOKENS + draw_integers_below(key, "short target", every, length - _SHORT_ROW_TOKENS + 1)
        targets = np.where(short, drawn, length)
        room = np.where(single, length - SPECIAL_TOKENS_PER_ROW, length - PAIR_SPECIAL_TOKENS)
        end = np.minimum(sentences.chunk_ends_at_least(every, targets), sentences.chunk_ends_at_most(every, room))
        first = chunk_starts(end)
        end, single = end[first], single[first]
        half = (targets[first] - PAIR_SPECIAL_TOKENS) // 2
        split = np.clip(np.searchsorted(sentences.edges, sentences.edges[first] + half) - 1, first + 1, end)
        a_tokens = sentences.edges[split] - sentences.edges[first]
        over = (split < end) & (a_tokens < half) & draw_bernoulli(key, "over half", first, 0.5)
        split = np.where(single, end, split + over)
        return Segments.from_ends(sentences.token_range(first, split), sentences.token_range(split, end))


Pairs = SegmentPairs | SentencePairs | OrderedPairs | TwoSegments
"""Settings of all inputs whose rows are two segments of running text."""


class Translations(RowInput):
    """Rows of a sentence and its translation, one for each example of a corpus of pairs (Conneau and Lample 2019,
    section 3.3: TLM).

    Each sentence has its own special tokens and positions. Plain-text corpora in the stream have rows of one segment.

    Attributes:
        text: packing of the rows of plain-text corpora; the paper's is `contiguous`.
    """

    packing: Literal["translations"]
    text: Packing = "contiguous"

    def cut(self, block: Block, length: int, key: Key) -> RowCuts:
        """Return a row for each document of a corpus of pairs. Raises CorpusError: a document has only one text."""
        starts, sizes = first_texts(block, TRANSLATION_TEXTS)
        sizes = _fit_pair_sizes(sizes, length - TRANSLATION_TEXTS * SPECIAL_TOKENS_PER_ROW)
        return RowCuts.from_separate_segments(Segments(starts, sizes))


def _fit_pair_sizes(sizes: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """Return [N, 2], the sizes of pairs of texts shortened to at most `room` tokens in sum.

    The longer text is shortened, at most down to half of the room; then the other one, too.
    """
    one, other = sizes[:, 0], sizes[:, 1]
    other = np.minimum(other, np.maximum(room - one, room // 2))
    return np.stack([np.minimum(one, room - other), other], axis=1)
