"""Rows of two segments, each a stretch of a block: which text they hold, and where its sentences begin.

Laid end to end, the segments of all rows are a text of their own, which lay-out and masking work on as they do on
a block's. It may hold a token of the block more than once, or not at all.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from data_service.samples.ragged import Tokens
from data_service.shards.block import Block


@dataclass(frozen=True)
class Segments:
    """The segments A and B of N rows.

    Attributes:
        starts: [N, 2] int64, offset in the block of the first token of each.
        sizes: [N, 2] int64, tokens of each. A is never empty; B is, in a row of one segment.
        labels: [N] int8, the sentence-pair label; None where there is none.
    """

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    labels: NDArray[np.int8] | None

    @classmethod
    def of(
        cls,
        first: tuple[NDArray[np.int64], NDArray[np.int64]],
        second: tuple[NDArray[np.int64], NDArray[np.int64]],
        labels: NDArray[np.int8] | None = None,
    ) -> Self:
        """From where in the block A and B start and stop, each [N] int64."""
        starts, stops = (np.stack(ends, axis=1) for ends in zip(first, second, strict=True))
        return cls(starts, stops - starts, labels)

    def rows(self, start: int, stop: int) -> "Segments":
        """Those of rows `start` to `stop`."""
        labels = None if self.labels is None else self.labels[start:stop]
        return Segments(self.starts[start:stop], self.sizes[start:stop], labels)

    def text(self, block: Block) -> Tokens:
        """The segments' tokens, end to end."""
        return end_to_end(block, self.starts, self.sizes)

    def sentence_starts(self, block: Block) -> NDArray[np.int64]:
        """Offsets in `text` at which a sentence, or segment B of a row, begins, in no order; some come twice."""
        starts, sizes = self.starts.ravel(), self.sizes.ravel()
        before = np.cumsum(sizes) - sizes
        low = np.searchsorted(block.sentences, starts)
        counts = np.searchsorted(block.sentences, starts + sizes) - low
        skipped = np.cumsum(counts) - counts
        found = np.repeat(low - skipped, counts) + np.arange(int(counts.sum()))
        inside = block.sentences[found] + np.repeat(before - starts, counts)
        paired = self.sizes[:, 1] > 0
        return np.concatenate([inside, before[1::2][paired]])


def end_to_end(block: Block, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> Tokens:
    """The tokens of stretches of a block, one after another; `starts` and `sizes` have one shape, read row by row."""
    flat = sizes.ravel()
    before = np.cumsum(flat) - flat
    # Half-width indices are twice as fast to make and to follow.
    dtype = np.int32 if len(block.tokens) + flat.sum() < np.iinfo(np.int32).max else np.int64
    where = np.repeat((starts.ravel() - before).astype(dtype), flat)
    where += np.arange(len(where), dtype=dtype)
    return block.tokens[where]
