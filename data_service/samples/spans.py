"""Selects runs of words that are masked together, n-grams (ALBERT) or spans (SpanBERT), for all rows at once. Both are
called stretches here.

A stretch is drawn as its first word and its number of words; n-grams and spans differ in the distribution of this
number. Each row draws stretches until its budget of tokens is used up. The effect of a draw depends on earlier draws,
so all rows advance together, one draw per round. As in `selection`, each row has a fixed range of random numbers, so
its result does not depend on other rows.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_service.rng import UINT32_RANGE, Key, draw_uint64, scale_draws, stream_key
from data_service.samples.selection import DrawSlots, Units, select_remaining


@dataclass(frozen=True)
class LengthDistribution:
    """A distribution of lengths from 1 to L words.

    Attributes:
        edges: [L - 1] uint32, ascending. A uniform 32-bit draw below edges[0] means 1 word, else below edges[1] 2, ...
    """

    edges: NDArray[np.uint32]

    @classmethod
    def from_weights(cls, weights: NDArray[np.float64]) -> "LengthDistribution":
        """Return the distribution in which n words have a probability proportional to weights[n - 1] > 0."""
        # Sums and one division are rounded alike on all machines, so the same draws give the same lengths.
        upper = np.cumsum(weights)
        return cls(np.rint(upper[:-1] / upper[-1] * UINT32_RANGE).clip(0, UINT32_RANGE - 1).astype(np.uint32))

    @property
    def max_length(self) -> int:
        return len(self.edges) + 1

    def lengths_from_draws(self, draws: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return [N] int64, random numbers of words for [N] uniform 32-bit draws."""
        return np.searchsorted(self.edges, draws, side="right") + 1


def ngram_lengths(max_words: int) -> LengthDistribution:
    """Return the distribution with p(n) proportional to 1 / n for n up to `max_words` (Lan et al. 2019, section
    3.1)."""
    return LengthDistribution.from_weights(1 / np.arange(1, max_words + 1))


def span_lengths(p: float, max_words: int) -> LengthDistribution:
    """Return the distribution Geometric(p), truncated after `max_words` and renormalised (Joshi et al. 2020, sec.
    3.1)."""
    return LengthDistribution.from_weights(np.cumprod(np.append(p, np.full(max_words - 1, 1 - p))))


@dataclass(frozen=True)
class SpanRule:
    """How stretches are drawn.

    Attributes:
        lengths: distribution of the number of words in a stretch.
        overlap: whether a stretch that overlaps an earlier one is merged with it (spans); otherwise it is dropped
            (n-grams). A stretch that begins inside an earlier one is always dropped.
    """

    lengths: LengthDistribution
    overlap: bool


def select_spans(
    units: Units,
    separators: NDArray[np.int64],
    budgets: NDArray[np.int64],
    slots: DrawSlots,
    rule: SpanRule,
    key: Key,
) -> NDArray[np.bool_]:
    """Return [U] bool, whether each word is selected.

    The first word of a stretch is uniform over the row's words. A stretch ends early at the end of its row, before a
    separator or a token that is never masked, and before a word that would exceed the row's budget. So a row never
    exceeds its budget, and stays below it only if no other word fits. If a row's random numbers are used up first,
    single words in random order fill the rest.

    `separators`: sorted text offsets before which a separator stands inside a row. `budgets`: [N] int64, largest
    number of tokens to select in each row.
    """
    rounds = _SpanSelection(units, separators, budgets, rule)
    words = draw_uint64(key, int(slots.edges[0]), int(slots.edges[-1]))
    slot, end = slots.edges[:-1] - slots.edges[0], slots.edges[1:] - slots.edges[0]
    active = np.flatnonzero((budgets > 0) & (np.diff(units.edges) > 0))
    while len(active):
        rounds.select_drawn_spans(active, words[slot[active]])
        slot[active] += 1
        active = active[(rounds.left[active] > 0) & (slot[active] < end[active])]
    chosen = rounds.chosen[: int(units.edges[-1])]
    select_remaining(chosen, units, rounds.left, slots.first_row, stream_key(key.hex(), "rest"))
    return chosen


class _SpanSelection:
    """The words chosen so far (`chosen`), and the number of tokens that each row may still select (`left`).

    Arrays of words are padded at the end by the largest stretch, so that stretches from all first words can be indexed
    as one matrix.
    """

    def __init__(
        self, units: Units, separators: NDArray[np.int64], budgets: NDArray[np.int64], stretches: SpanRule
    ) -> None:
        assert units.starts is not None  # set, because units are words
        assert units.sizes is not None
        self._first, self._available = units.edges[:-1], np.diff(units.edges)
        width = min(stretches.lengths.max_length, int(self._available.max(initial=1)))
        self._steps = np.arange(width)
        self._sizes = np.append(units.sizes, np.zeros(width, dtype=np.int64))
        self._ends = _forced_span_ends(units.starts, units.sizes, units.edges, separators)
        self._stretches = stretches
        self.chosen = np.zeros(len(self._sizes), dtype=np.bool_)
        self.left = budgets.copy()

    def select_drawn_spans(self, rows: NDArray[np.int64], draws: NDArray[np.uint64]) -> None:
        """Select in each of `rows` the stretch that its draw stands for, as far as the rule and the budget allow."""
        start = self._first[rows] + scale_draws((draws >> np.uint64(32)).astype(np.uint32), self._available[rows])
        stop = start + self._stretches.lengths.lengths_from_draws(draws.astype(np.uint32))
        stop = np.minimum(stop, self._ends[np.searchsorted(self._ends, start, side="right")])
        members = start[:, None] + self._steps
        inside = members < stop[:, None]
        before = self.chosen[members]
        sizes = self._sizes[members] * (inside & ~before if self._stretches.overlap else inside)
        taken = inside & (np.cumsum(sizes, axis=1) <= self.left[rows, None])
        spoilt = before[:, 0] if self._stretches.overlap else (before & taken).any(1)
        taken &= ~spoilt[:, None]
        self.chosen[members[taken]] = True
        self.left[rows] -= (sizes * taken).sum(1)


def _forced_span_ends(
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    edges: NDArray[np.int64],
    separators: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the sorted indices of words before which a stretch must end, at row ends, gaps and separators."""
    gaps = np.flatnonzero(starts[1:] != starts[:-1] + sizes[:-1]) + 1
    return np.unique(np.concatenate([edges, gaps, np.searchsorted(starts, separators)]))
