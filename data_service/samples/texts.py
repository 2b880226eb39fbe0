"""Rows of several texts, each with its own special tokens: the examples of contrastive training.

A row is an example. Its texts follow one another: query, positive and negatives, or one sentence twice. Each text is
truncated at its end, so that with its special tokens it has at most the phase's length.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt

from data_service.errors import CorpusError
from data_service.samples.packing import SPECIAL_TOKENS_PER_ROW, RowInput, concatenate_ranges
from data_service.samples.samples import Samples, removed_token_indices
from data_service.tokenizers.specials import SpecialIds
from data_service.types import Block, Tokens

ClassTokenPlace = Literal["cls_first", "cls_last"]
"""`<cls> text <sep>`, or XLNet's `text <sep> <cls>`."""


class TextPairs(RowInput):
    """Rows of a query, its positive and negatives, one for each example of a corpus of pairs (contrastive training).

    Attributes:
        negatives: number of an example's negatives that are used, the first ones.
    """

    packing: Literal["pairs"]
    negatives: NonNegativeInt = 0

    @property
    def texts_per_row(self) -> int:
        return 2 + self.negatives


class RepeatedSentences(RowInput):
    """Rows of a sentence of a plain corpus, repeated. Dropout makes the two differ (Gao et al. 2021, "SimCSE", section
    3).

    Attributes:
        shortest: smallest number of tokens, without special ones; shorter sentences are left out.
    """

    packing: Literal["sentences"]
    shortest: PositiveInt = 8

    @property
    def mean_token_uses(self) -> float:
        return 2.0

    @property
    def texts_per_row(self) -> int:
        return 2


Texts = TextPairs | RepeatedSentences
"""Rows of several texts, in which nothing is masked."""


@dataclass(frozen=True)
class TextRows:
    """N rows of G texts each.

    Attributes:
        starts: [N, G] int64, offset in the block of the first token of each text.
        sizes: [N, G] int64, number of tokens of each text after truncation; never 0.
    """

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        """[N] int64, number of tokens of each row, special ones included."""
        lengths: NDArray[np.int64] = (self.sizes + SPECIAL_TOKENS_PER_ROW).sum(axis=1)
        return lengths

    def text(self, block: Block, start: int, stop: int) -> Tokens:
        """Return the tokens of rows `start` to `stop`, text after text, without special tokens."""
        return concatenate_ranges(block.tokens, self.starts[start:stop], self.sizes[start:stop])  # type: ignore[return-value]

    def token_ranges(self, row: int) -> tuple[range, ...]:
        """Return the range of the block's tokens that each text of a row holds."""
        ends = zip(self.starts[row].tolist(), self.sizes[row].tolist(), strict=True)
        return tuple(range(start, start + size) for start, size in ends)


def pair_rows(block: Block, texts_per_row: int, length: int) -> TextRows:
    """Return a row for each document of a corpus of pairs, with its first `texts_per_row` texts.

    Raises CorpusError: a document has fewer texts.
    """
    if np.diff(block.documents).min() < texts_per_row:
        raise CorpusError(
            f"a document of a corpus of pairs has fewer than {texts_per_row} texts",
            remedy="build the corpus again with `maskfleet corpus build --texts pairs`",
        )
    first = block.documents[:-1, None] + np.arange(texts_per_row)
    starts = block.sentences[first]
    return TextRows(starts, np.minimum(block.sentences[first + 1] - starts, length - SPECIAL_TOKENS_PER_ROW))


def repeated_sentence_rows(block: Block, min_tokens: int, texts_per_row: int, length: int) -> TextRows:
    """Return a row for each sentence of at least `min_tokens` tokens, with the sentence `texts_per_row` times."""
    sizes = np.diff(block.sentences)
    long_enough = np.flatnonzero(sizes >= min_tokens)
    starts, sizes = (
        block.sentences[long_enough],
        np.minimum(sizes[long_enough], length - SPECIAL_TOKENS_PER_ROW),
    )
    return TextRows(np.repeat(starts[:, None], texts_per_row, axis=1), np.repeat(sizes[:, None], texts_per_row, axis=1))


def text_rows(
    block: Block, rows: TextRows, start: int, stop: int, special: SpecialIds, layout: ClassTokenPlace
) -> Samples:
    """Return rows `start` to `stop` with special tokens and without targets."""
    sizes = rows.sizes[start:stop]
    ends = np.cumsum(sizes.ravel() + SPECIAL_TOKENS_PER_ROW)
    begins = ends - sizes.ravel() - SPECIAL_TOKENS_PER_ROW
    text = rows.text(block, start, stop)
    cls_last = layout == "cls_last"
    cls, sep = (ends - 1, ends - 2) if cls_last else (begins, ends - 1)
    tokens = np.empty(int(ends[-1]), dtype=text.dtype)
    is_text = np.ones(len(tokens), dtype=np.bool_)
    for places, token in ((cls, special.cls), (sep, special.sep)):
        tokens[places] = token
        is_text[places] = False
    tokens[is_text] = text
    begins = begins.reshape(sizes.shape)
    offsets, holes = np.append(begins[:, 0], ends[-1]), None
    if block.removed is not None:
        removed = concatenate_ranges(block.removed, rows.starts[start:stop], sizes)
        lost = np.logical_and.reduceat(removed, np.append(0, np.cumsum(sizes.sum(axis=1))[:-1]))
        holes = removed_token_indices(np.flatnonzero(is_text)[removed], offsets, lost)
    return Samples(
        tokens=tokens,
        offsets=offsets,
        target_positions=np.zeros(0, dtype=np.int64),
        target_ids=tokens[:0],
        text_starts=(begins - begins[:, :1]).astype(np.int32),
        cls_last=np.ones(len(sizes), dtype=np.bool_) if cls_last else None,
        holes=holes,
    )
