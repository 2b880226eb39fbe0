"""Units: what masking takes whole: a token, or a word."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_service.samples.ragged import Tokens


@dataclass(frozen=True)
class Units:
    """U maskable units in N rows, in order.

    Attributes:
        edges: [N + 1] int64, row i has units edges[i] to edges[i + 1].
        starts: [U] int64 text offset of each unit's first token; None when unit u is the token at u.
        sizes: [U] int64 tokens in each unit; None when all have one.
    """

    edges: NDArray[np.int64]
    starts: NDArray[np.int64] | None = None
    sizes: NDArray[np.int64] | None = None

    def text(self, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sorted text offsets of the tokens of sorted units `chosen`."""
        starts = chosen if self.starts is None else self.starts[chosen]
        return starts if self.sizes is None else _ranges(starts, self.sizes[chosen])

    def of_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the units of `rows`, row after row."""
        return _ranges(self.edges[rows], self.edges[rows + 1] - self.edges[rows])


def _ranges(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The integers of ranges that begin at `starts`, so many of each, end to end."""
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))


def fixed_positions(text: Tokens, never: tuple[int, ...]) -> NDArray[np.int64]:
    """Sorted offsets of the tokens whose id is in `never`; usually none, and quick to find out."""
    found = np.zeros(len(text), dtype=np.bool_)
    for token in never:
        found |= text == token
    return np.flatnonzero(found)


def token_units(edges: NDArray[np.int64], fixed: NDArray[np.int64]) -> Units:
    """Every token but those at `fixed`; row i is text edges[i] to edges[i + 1]."""
    if not len(fixed):
        return Units(edges)
    starts = np.delete(np.arange(edges[-1]), fixed)
    return Units(edges - np.searchsorted(fixed, edges), starts)


def word_units(
    text: Tokens,
    edges: NDArray[np.int64],
    fixed: NDArray[np.int64],
    breaks: NDArray[np.int64],
    starts_word: NDArray[np.bool_],
) -> Units:
    """Whole words: from each piece that starts one to the next. Rows, `breaks` and `fixed` tokens end words.

    Args:
        text: [T] tokens of the rows.
        edges: [N + 1] int64, row i is text edges[i] to edges[i + 1].
        fixed: offsets of tokens in no unit.
        breaks: offsets at which a word starts whatever the piece (sentence starts).
        starts_word: [vocabulary] bool, the tokenizer's word-start table.
    """
    begins = np.append(starts_word[text], True)
    for places in (edges, breaks, fixed, fixed + 1):
        begins[places] = True
    starts = np.flatnonzero(begins)
    sizes = np.diff(starts)
    starts = starts[:-1]
    if len(fixed):
        kept = np.ones(len(starts), dtype=np.bool_)
        kept[np.searchsorted(starts, fixed)] = False
        starts, sizes = starts[kept], sizes[kept]
    return Units(np.searchsorted(starts, edges), starts, sizes)
