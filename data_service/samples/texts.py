"""Rows of several texts, each with its own special tokens: the examples of contrastive training.

A row is an example: a query, its positive and its negatives one after another, or a sentence twice. The end of a text
is cut off if the text with its special tokens is longer than the phase's length.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt

from data_service.errors import CorpusError
from data_service.rng import Key
from data_service.samples.packing import SPECIAL_TOKENS_PER_ROW, RowCuts, RowInput, Segments, lay_out
from data_service.samples.samples import Samples
from data_service.tokenizers.specials import SpecialIds
from data_service.types import Block

ClassTokenPlace = Literal["cls_first", "cls_last"]
"""`<cls> text <sep>`, or XLNet's `text <sep> <cls>`."""


class TextPairs(RowInput):
    """Rows of a query, its positive and negatives, one for each example of a corpus of pairs (contrastive training).

    Attributes:
        negatives: number of negatives to use, the first ones of an example.
    """

    packing: Literal["pairs"]
    negatives: NonNegativeInt = 0

    @property
    def texts_per_row(self) -> int:
        return 2 + self.negatives

    def cut(self, block: Block, length: int, key: Key) -> RowCuts:
        """Return a row for each document of a corpus of pairs. Raises CorpusError: a document has too few texts."""
        starts, sizes = first_texts(block, self.texts_per_row)
        return RowCuts.from_separate_segments(Segments(starts, np.minimum(sizes, length - SPECIAL_TOKENS_PER_ROW)))


class RepeatedSentences(RowInput):
    """Rows of a sentence of a plain corpus, twice. Dropout makes the two embeddings differ (Gao et al. 2021, "SimCSE",
    section 3).

    Attributes:
        shortest: smallest number of tokens, without special tokens; shorter sentences are left out.
    """

    packing: Literal["sentences"]
    shortest: PositiveInt = 8

    @property
    def mean_token_uses(self) -> float:
        return 2.0

    @property
    def texts_per_row(self) -> int:
        return 2

    def cut(self, block: Block, length: int, key: Key) -> RowCuts:
        """Return a row for each sentence of at least `shortest` tokens."""
        sizes = np.diff(block.sentences)
        chosen = np.flatnonzero(sizes >= self.shortest)
        starts, sizes = block.sentences[chosen], np.minimum(sizes[chosen], length - SPECIAL_TOKENS_PER_ROW)
        return RowCuts.from_separate_segments(
            Segments(np.repeat(starts[:, None], 2, axis=1), np.repeat(sizes[:, None], 2, axis=1))
        )


Texts = TextPairs | RepeatedSentences
"""Settings of all inputs whose rows are several texts; nothing is masked."""


def first_texts(block: Block, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (offsets in the block, sizes) of the first `count` texts of each document of a corpus of pairs, both
    [N, count] int64. Raises CorpusError: a document has fewer texts."""
    if np.diff(block.documents).min() < count:
        raise CorpusError(
            f"a document of a corpus of pairs has fewer than {count} texts",
            remedy="build the corpus again with `maskfleet corpus build --texts pairs`",
        )
    first = block.documents[:-1, None] + np.arange(count)
    starts = block.sentences[first]
    return starts, block.sentences[first + 1] - starts


def text_rows(
    block: Block, rows: RowCuts, start: int, stop: int, special: SpecialIds, layout: ClassTokenPlace
) -> Samples:
    """Return rows `start` to `stop - 1` with special tokens and without targets."""
    assert rows.segments is not None
    laid_out = lay_out(rows.text(block, start, stop), rows, start, stop, special)
    sizes = rows.segments.sizes[start:stop] + SPECIAL_TOKENS_PER_ROW
    # The roll by one token makes each text's first token, <cls>, its last.
    shift = -1 if layout == "cls_last" else 0
    tokens, holes = np.roll(laid_out.tokens, shift), None
    if block.removed is not None:
        holes = laid_out.hole_indices(rows.select_tokens(block.removed, start, stop), shift)
    return Samples(
        tokens=tokens,
        offsets=laid_out.offsets,
        target_positions=np.zeros(0, dtype=np.int64),
        target_ids=tokens[:0],
        text_starts=(np.cumsum(sizes, axis=1) - sizes).astype(np.int32),
        cls_last=np.ones(len(sizes), dtype=np.bool_) if shift else None,
        holes=holes,
    )
