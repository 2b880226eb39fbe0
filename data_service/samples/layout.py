"""Layout: text between special tokens, row after row."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_service.samples.packing import EDGE_TOKENS, Rows
from data_service.samples.ragged import Tokens
from data_service.tokenizers.specials import SpecialIds


@dataclass(frozen=True)
class LaidOut:
    """N rows of text, T tokens in all, before masking.

    Attributes:
        tokens: [T] writable, each row `<s> text </s>` with a further `</s>` between documents or segments.
        offsets: [N + 1] int64, row i is tokens[offsets[i]:offsets[i + 1]].
        edges: [N + 1] int64, row i holds text tokens edges[i] to edges[i + 1], counted from the first row's.
        separators: [K] int64, text offsets before which a separator stands, counted likewise.
    """

    tokens: Tokens
    offsets: NDArray[np.int64]
    edges: NDArray[np.int64]
    separators: NDArray[np.int64]

    def places(self, text: NDArray[np.int64], per_row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices into `tokens` of sorted text offsets, of which `per_row` [N] lie in each row."""
        shift = np.repeat(1 + EDGE_TOKENS * np.arange(len(per_row)), per_row)
        if len(self.separators):
            passed = np.searchsorted(text, self.separators)
            shift += np.repeat(np.arange(len(passed) + 1), np.diff(passed, prepend=0, append=len(text)))
        shift += text
        return shift


def lay_out(text: Tokens, rows: Rows, start: int, stop: int, special: SpecialIds) -> LaidOut:
    """Rows `start` to `stop`, whose text is `text`."""
    first, last = rows.edges[start], rows.edges[stop]
    edges = rows.edges[start : stop + 1] - first
    low, high = np.searchsorted(rows.separators, (first, last))
    separators = rows.separators[low:high] - first
    before = np.searchsorted(separators, edges)
    offsets = edges + before + EDGE_TOKENS * np.arange(len(edges))
    row_of = np.searchsorted(edges, separators, side="right")
    between = separators + np.arange(len(separators)) + EDGE_TOKENS * row_of - 1

    tokens = np.empty(offsets[-1], dtype=text.dtype)
    is_text = np.ones(len(tokens), dtype=np.bool_)
    for places, token in (
        (offsets[:-1], special.cls),
        (offsets[1:] - 1, special.sep),
        (between, special.sep),
    ):
        tokens[places] = token
        is_text[places] = False
    tokens[is_text] = text
    return LaidOut(tokens, offsets, edges, separators)
