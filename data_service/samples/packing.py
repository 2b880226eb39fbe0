"""Packing cuts a block into rows. Row boundaries are a pure function of the block, so any row can be made again.

Packed rows never share or lose a token: they are the text between consecutive `edges`. A row is laid out as
`<s> text </s>`, with one more `</s>` before every document that begins inside it. The packings:

full_sentences: whole sentences while they fit; rows cross documents.
doc_sentences: the same, but a row ends with its document.
contiguous: full rows, cut anywhere. The number of rows can be computed from the manifest.

Rows of several segments consist of token ranges of a block. The segments of all rows, one after another, form the rows'
text, which is laid out and masked like a block's text. It may contain a token of the block several times, or not at
all.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self, TypeVar, assert_never

import numpy as np
from numpy.typing import NDArray

from data_service.formats import StrictRecord
from data_service.rng import Key
from data_service.samples.samples import Indices, Samples, expand_ranges
from data_service.tokenizers.specials import SpecialIds
from data_service.types import Block, Tokens

V = TypeVar("V", bound=np.generic)


class RowInput(StrictRecord):
    """The settings under a recipe's `input`: how documents become rows.

    Each subclass has a method `cut`, which cuts a block into rows.
    """

    @property
    def cut_count(self) -> int:
        """Number of different ways of cutting the corpus into rows. Successive epochs use them in rotation."""
        return 1

    @property
    def mean_token_uses(self) -> float:
        """Approximate mean number of times that a token of the corpus is used in one epoch."""
        return 1.0

    @property
    def texts_per_row(self) -> int:
        """Number of texts in a row. Each is truncated to the phase's length and has its own special tokens."""
        return 1

    def with_single_cut(self) -> Self:
        """Return the same settings with `cut_count` 1."""
        return self


Packing = Literal["full_sentences", "doc_sentences", "contiguous"]


class PackedInput(RowInput):
    """Rows of one segment; every token occurs in exactly one row.

    RoBERTa's FULL-SENTENCES and DOC-SENTENCES (Liu et al. 2019, section 4.2), or cuts regardless of sentences.
    """

    packing: Packing

    def cut(self, block: Block, length: int, key: Key) -> "RowCuts":
        """Return where a block is cut into rows. `key` is not used."""
        return pack_block(block, self.packing, length)


@dataclass(frozen=True)
class Segments:
    """The segments A and B of N rows, or the G texts of N examples.

    Attributes:
        starts: [N, G] int64, offset in the block of the first token of each segment; G is 2 for A and B.
        sizes: [N, G] int64, number of tokens of each segment. Only B may be empty, in a row of one segment.
        labels: [N] int8, sentence-pair labels; None if rows have none.
    """

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    labels: NDArray[np.int8] | None = None

    @classmethod
    def from_ends(
        cls,
        first: tuple[NDArray[np.int64], NDArray[np.int64]],
        second: tuple[NDArray[np.int64], NDArray[np.int64]],
        labels: NDArray[np.int8] | None = None,
    ) -> Self:
        """Return the segments with these offsets in the block: `first` is (starts, stops) of A, `second` of B."""
        starts, stops = (np.stack(ends, axis=1) for ends in zip(first, second, strict=True))
        return cls(starts, stops - starts, labels)

    def slice_rows(self, start: int, stop: int) -> "Segments":
        """Return the segments of rows `start` to `stop - 1`."""
        labels = None if self.labels is None else self.labels[start:stop]
        return Segments(self.starts[start:stop], self.sizes[start:stop], labels)

    def select_tokens(self, values: NDArray[V]) -> NDArray[V]:
        """Return the values of the segments' tokens, in order. `values`: [T], one value for each token of the block."""
        return values[expand_ranges(self.starts.ravel(), self.sizes.ravel())]

    def sentence_starts(self, block: Block) -> NDArray[np.int64]:
        """Return the offsets in the rows' text at which a sentence or a segment B begins.

        The offsets are not sorted, and some occur twice.
        """
        starts, sizes = self.starts.ravel(), self.sizes.ravel()
        before = np.cumsum(sizes) - sizes
        low = np.searchsorted(block.sentences, starts)
        counts = np.searchsorted(block.sentences, starts + sizes) - low
        inside = block.sentences[expand_ranges(low, counts)] + np.repeat(before - starts, counts)
        paired = self.sizes[:, 1] > 0
        return np.concatenate([inside, before[1::2][paired]])


SPECIAL_TOKENS_PER_ROW = 2  # <s> and </s>


@dataclass(frozen=True)
class RowCuts:
    """The boundaries of N rows of a block. The rows' text is the block's text, or consists of segments of it.

    Attributes:
        edges: [N + 1] int64, offsets in the rows' text. Row i lies from edges[i] to edges[i + 1] and is never empty.
        separators: [K] int64, sorted offsets in the rows' text before which a separator is inserted: where a document
            or a further segment begins inside a row. An offset that occurs twice stands for the end of one text
            (`</s>`) and the beginning of the next (`<s>`).
        segments: segments of which the rows' text consists; None if it is the block's text.
        restarts: whether position numbers restart at 0 with each further segment.
    """

    edges: NDArray[np.int64]
    separators: NDArray[np.int64]
    segments: Segments | None = None
    restarts: bool = False

    @classmethod
    def from_segments(cls, segments: Segments) -> "RowCuts":
        """Return rows of segments, with a separator before each segment of a row but the first."""
        edges = np.append(0, np.cumsum(segments.sizes.sum(axis=1)))
        further = edges[:-1, None] + np.cumsum(segments.sizes, axis=1)[:, :-1]
        return cls(edges, further[segments.sizes[:, 1:] > 0], segments)

    @classmethod
    def from_separate_segments(cls, segments: Segments) -> "RowCuts":
        """Return rows in which each segment has its own `<s>` and `</s>`, and positions from 0."""
        joined = cls.from_segments(segments)
        return replace(joined, separators=np.repeat(joined.separators, 2), restarts=True)

    def __len__(self) -> int:
        return len(self.edges) - 1

    def text(self, block: Block, start: int, stop: int) -> Tokens:
        """Return the text of rows `start` to `stop - 1`, without special tokens."""
        return self.select_tokens(block.tokens, start, stop)  # type: ignore[return-value]

    def select_tokens(self, values: NDArray[V], start: int, stop: int) -> NDArray[V]:
        """Return the values of the tokens in rows `start` to `stop - 1`, in order.

        `values`: [T], one value for each token of the block.
        """
        if self.segments is not None:
            return self.segments.slice_rows(start, stop).select_tokens(values)
        return values[self.edges[start] : self.edges[stop]]

    def sentence_starts(self, block: Block, start: int, stop: int) -> NDArray[np.int64]:
        """Return the offsets in the text of rows `start` to `stop - 1` at which a sentence or a second segment begins.

        The offsets are not sorted, and some may occur twice.
        """
        if self.segments is not None:
            return self.segments.slice_rows(start, stop).sentence_starts(block)
        first, last = self.edges[start], self.edges[stop]
        low, high = np.searchsorted(block.sentences, (first, last))
        starts: NDArray[np.int64] = block.sentences[low:high] - first
        return starts

    def add_segment_labels(self, samples: Samples, start: int, stop: int) -> Samples:
        """Return `samples`, which are rows `start` to `stop - 1`, with segment starts and pair labels added."""
        if self.segments is None:
            return samples
        segments = self.segments.slice_rows(start, stop)
        # The second segment begins after <s>, A and </s>.
        begins = (1 + segments.sizes[:, 0] + 1).astype(np.int32)
        restarts = np.ones(samples.rows, dtype=np.bool_) if self.restarts else None
        return replace(samples, segment_starts=begins, pair_label=segments.labels, restarts=restarts)

    def text_ranges(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return which text of the block the rows hold, as three arrays [S] int64, row after row, segments in order:
        row, first token in the block, and the one after the last."""
        if self.segments is None:
            return np.arange(len(self)), self.edges[:-1], self.edges[1:]
        rows, number = np.nonzero(self.segments.sizes)
        starts = self.segments.starts[rows, number]
        return rows, starts, starts + self.segments.sizes[rows, number]

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        """[N] int64, number of tokens of each row, special ones included."""
        return np.diff(self.edges + np.searchsorted(self.separators, self.edges)) + SPECIAL_TOKENS_PER_ROW


def pack_block(block: Block, packing: Packing, length: int) -> RowCuts:
    """Return where a block is cut into rows of at most `length` tokens, special ones included.

    Rows are filled greedily with whole sentences. A sentence longer than a row is first cut into full rows; the rest of
    it is packed with the next sentences.
    """
    room, sentences = length - SPECIAL_TOKENS_PER_ROW, block.sentences
    starts = sentences[block.documents]  # token offsets of the documents, and of the block's end
    match packing:
        case "contiguous":
            edges = _contiguous_edges(starts, room)
        case "full_sentences":
            edges = _greedy_edges(cut_long_sentences(sentences, room), starts, room, cross_documents=True)
        case "doc_sentences":
            edges = _greedy_edges(cut_long_sentences(sentences, room), starts, room, cross_documents=False)
        case _:
            assert_never(packing)
    return RowCuts(edges, np.setdiff1d(starts, edges, assume_unique=True))


def count_contiguous_rows(tokens: NDArray[np.int64], documents: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Return [B] int64, the number of rows into which `contiguous` packing cuts each of B blocks.

    `tokens`, `documents`: [B], numbers of tokens and documents in each block.
    """
    return -(-(tokens + documents - 1) // (length - SPECIAL_TOKENS_PER_ROW))


def _contiguous_edges(starts: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """Return the edges of rows of `room` tokens, separators included. A separator between two rows is dropped."""
    places = starts + np.arange(len(starts))  # offsets of the documents' first tokens when separators are inserted
    end = int(places[-1]) - 1
    cuts = np.append(np.arange(0, end, room), end)
    edges: NDArray[np.int64] = cuts - np.searchsorted(places[1:-1], cuts, side="right")
    return edges


def cut_long_sentences(sentences: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """Return the sentence boundaries with a cut after every `room` tokens of sentences longer than `room`."""
    lengths = np.diff(sentences)
    if lengths.max() <= room:
        return sentences
    pieces = -(-lengths // room)
    first = np.cumsum(pieces) - pieces
    within = np.arange(pieces.sum()) - np.repeat(first, pieces)
    return np.append(np.repeat(sentences[:-1], pieces) + within * room, sentences[-1])


def _greedy_edges(
    sentences: NDArray[np.int64], starts: NDArray[np.int64], room: int, *, cross_documents: bool
) -> NDArray[np.int64]:
    """Return the edges of rows that are filled greedily with sentences. `starts`: token offsets of documents.

    For every sentence, the end of a row that would begin with it is computed; then the rows are followed from the
    first.
    """
    begins_document = np.zeros(len(sentences) - 1, dtype=np.int64)
    begins_document[np.searchsorted(sentences, starts[1:-1])] = 1
    document = np.cumsum(begins_document)
    if cross_documents:  # separators take room: add those before each sentence to its offsets
        begin, end = sentences[:-1] + document, sentences[1:] + document
        following = np.searchsorted(end, begin + room, side="right")
    else:
        reach = np.minimum(sentences[:-1] + room, starts[document + 1])
        following = np.searchsorted(sentences[1:], reach, side="right")
    jumps, taken, at = following.tolist(), [0], 0
    while at < len(jumps):
        at = jumps[at]
        taken.append(at)
    return sentences[taken]


@dataclass(frozen=True)
class LaidOutRows:
    """N rows with special tokens, before masking; T tokens in all.

    Attributes:
        tokens: [T], writable; each row is `<s> text </s>` with a further `</s>` between documents or segments.
        offsets: [N + 1] int64, offsets in `tokens`; row i is tokens[offsets[i]:offsets[i + 1]].
        edges: [N + 1] int64, offsets in the rows' text, which begins with the first row; row i holds text tokens
            edges[i] to edges[i + 1].
        separators: [K] int64, offsets in the rows' text before which a separator stands.
    """

    tokens: Tokens
    offsets: NDArray[np.int64]
    edges: NDArray[np.int64]
    separators: NDArray[np.int64]

    def token_indices(self, text: Indices, counts_per_row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices in `tokens` of sorted text offsets. `counts_per_row`: [N], their number by row."""
        shift = np.repeat(1 + SPECIAL_TOKENS_PER_ROW * np.arange(len(counts_per_row)), counts_per_row)
        if len(self.separators):
            passed = np.searchsorted(text, self.separators)
            shift += np.repeat(np.arange(len(passed) + 1), np.diff(passed, prepend=0, append=len(text)))
        shift += text
        return shift

    def marked_token_indices(self, marked: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the sorted indices in `tokens` of the text tokens for which `marked` is true."""
        text = np.flatnonzero(marked)
        return self.token_indices(text, np.diff(np.searchsorted(text, self.edges)))

    def hole_indices(self, removed: NDArray[np.bool_], shift: int = 0) -> NDArray[np.int64]:
        """Return `Samples.holes`: all tokens of rows whose whole text is removed, and the removed tokens of other rows.

        `removed`: [T] bool, whether a token replaces one of a removed document. `shift`: added to their indices.
        """
        lost = np.logical_and.reduceat(removed, self.edges[:-1])
        found = np.repeat(lost, np.diff(self.offsets))
        found[self.marked_token_indices(removed) + shift] = True
        return np.flatnonzero(found)


def lay_out(text: Tokens, rows: RowCuts, start: int, stop: int, special: SpecialIds) -> LaidOutRows:
    """Return rows `start` to `stop - 1`, whose text is `text`, with special tokens."""
    first, last = rows.edges[start], rows.edges[stop]
    edges = rows.edges[start : stop + 1] - first
    low, high = np.searchsorted(rows.separators, (first, last))
    separators = rows.separators[low:high] - first
    before = np.searchsorted(separators, edges)
    offsets = edges + before + SPECIAL_TOKENS_PER_ROW * np.arange(len(edges))
    row_of = np.searchsorted(edges, separators, side="right")
    between = separators + np.arange(len(separators)) + SPECIAL_TOKENS_PER_ROW * row_of - 1

    tokens = np.empty(offsets[-1], dtype=text.dtype)
    is_text = np.ones(len(tokens), dtype=np.bool_)
    for places, token in (
        (offsets[:-1], special.cls),
        (offsets[1:] - 1, special.sep),
        (between, special.sep),
    ):
        tokens[places] = token
        is_text[places] = False
    # The second of two separators at one offset begins a text: it is <s>.
    tokens[between[1:][separators[1:] == separators[:-1]]] = special.cls
    tokens[is_text] = text
    return LaidOutRows(tokens, offsets, edges, separators)
