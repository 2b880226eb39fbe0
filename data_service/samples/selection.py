"""Selects an exact number of tokens from each row, uniformly, without replacement, for all rows at once.

A unit is a token or a word and is selected as a whole. Units are drawn with replacement. Only the first draw of a unit
counts, because the distinct units of such a sequence are in uniform random order. Each row has a fixed range of the
block's random numbers (its slots): as many as it is expected to need, and some spare ones. The few rows that need more
finish with a random order of their remaining units. The range depends only on the row's position in its block, so the
result for a row is the same, whichever rows are made with it.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_service.rng import Key, draw_uint32, draw_uint64, scale_draws, stream_key
from data_service.samples.samples import Indices, expand_ranges
from data_service.types import Tokens


@dataclass(frozen=True)
class Units:
    """U maskable units in N rows, in order.

    Attributes:
        edges: [N + 1] int64, row i has units edges[i] to edges[i + 1] - 1.
        starts: [U] int64, text offset of each unit's first token; None if unit u is the token at offset u.
        sizes: [U] int64, number of tokens in each unit; None if each has one.
    """

    edges: NDArray[np.int64]
    starts: NDArray[np.int64] | None = None
    sizes: NDArray[np.int64] | None = None

    def token_offsets(self, chosen: NDArray[np.int64]) -> Indices:
        """Return the sorted text offsets of all tokens of the sorted units `chosen`."""
        starts = chosen if self.starts is None else self.starts[chosen]
        return starts if self.sizes is None else expand_ranges(starts, self.sizes[chosen])


def excluded_token_offsets(text: Tokens, excluded_ids: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the sorted offsets in `text` of the tokens whose id is in `excluded_ids`."""
    found = np.zeros(len(text), dtype=np.bool_)
    for token in excluded_ids:
        found |= text == token
    return np.flatnonzero(found)


def token_units(edges: NDArray[np.int64], fixed: NDArray[np.int64]) -> Units:
    """Return all tokens as units, except those at offsets `fixed`. Row i is text edges[i] to edges[i + 1]."""
    if not len(fixed):
        return Units(edges)
    starts = np.delete(np.arange(edges[-1]), fixed)
    return Units(edges - np.searchsorted(fixed, edges), starts)


def word_units(
    starts: NDArray[np.bool_],
    edges: NDArray[np.int64],
    fixed: NDArray[np.int64],
    separator_offsets: NDArray[np.int64],
) -> Units:
    """Return units of whole words. A word extends from a token that begins a word up to the next such token.

    Words also end with their row, before `separator_offsets`, and before `fixed` tokens.

    Args:
        starts: [T] bool, whether a word (or another unit) begins with each token of the rows.
        edges: [N + 1] int64, text offsets; row i is text edges[i] to edges[i + 1].
        fixed: offsets of tokens that belong to no unit.
        separator_offsets: offsets at which a word always begins (sentence starts).
    """
    begins = np.append(starts, True)
    for always in (edges, separator_offsets, fixed, fixed + 1):
        begins[always] = True
    places = np.flatnonzero(begins)
    firsts, sizes = places[:-1], np.diff(places)
    if len(fixed):
        kept = np.ones(len(firsts), dtype=np.bool_)
        kept[np.searchsorted(firsts, fixed)] = False
        firsts, sizes = firsts[kept], sizes[kept]
    return Units(np.searchsorted(firsts, edges), firsts, sizes)


_EXPECTED_DRAWS_FACTOR = 1.06  # slots of a row per expected draw
_SPARE_SLOTS_PER_ROW = 10  # slots of each row in addition to that
_FIXED_POINT_BITS = 16  # slots per token are a multiple of 2**-16


@dataclass(frozen=True)
class DrawSlots:
    """The range of random numbers (slots) of each row in the random streams of its block.

    Attributes:
        edges: [N + 1] int64; row i has random numbers edges[i] to edges[i + 1] - 1. With `for_rate`, a row has at least
            rate * tokens + 1 of them.
        first_row: number of the first row in its block.
    """

    edges: NDArray[np.int64]
    first_row: int

    @classmethod
    def for_rate(cls, text_edges: NDArray[np.int64], first_row: int, rate: float) -> "DrawSlots":
        """Return random-number ranges that suffice to select a share `rate` (below 1) of each row's tokens.

        `text_edges`: [N + 1], offsets in the block's text; row i lies from text_edges[i] to text_edges[i + 1].
        """
        # Expected draws per token until a share `rate` of a long row's tokens has been drawn.
        expected = -math.log1p(-rate)
        per_token = math.ceil(expected * _EXPECTED_DRAWS_FACTOR * (1 << _FIXED_POINT_BITS))
        rows = np.arange(first_row, first_row + len(text_edges))
        return cls(((text_edges * per_token) >> _FIXED_POINT_BITS) + _SPARE_SLOTS_PER_ROW * rows, first_row)

    @property
    def draws_per_row(self) -> NDArray[np.int64]:
        return np.diff(self.edges)


def select_units(units: Units, budgets: NDArray[np.int64], slots: DrawSlots, key: Key) -> NDArray[np.bool_]:
    """Return [U] bool, whether each unit is selected. `budgets`: [N], number of tokens to select in each row.

    Single tokens are selected until the budget is reached. Words are taken in random order; words that would exceed
    the budget are skipped (BERT's whole-word rule), so a row may stay below its budget if no other word fits.
    """
    chosen = np.zeros(int(units.edges[-1]), dtype=np.bool_)
    drawn, counts = _draw_units(units, slots, key)
    order = np.arange(len(drawn), dtype=np.int32)
    latest = np.empty(len(chosen), dtype=np.int32)
    latest[drawn[::-1]] = order[::-1]  # in reverse, so that each unit's first draw overwrites later ones
    first = latest[drawn] == order
    if units.sizes is None:
        left = _select_first_drawn(chosen, drawn, counts, first, budgets)
    else:
        left = _select_until_budget(
            chosen, drawn[first], np.repeat(np.arange(len(counts)), counts)[first], units.sizes, budgets
        )
    select_remaining(chosen, units, left, slots.first_row, key)
    return chosen


def select_by_draw_count(units: Units, draws: NDArray[np.int64], slots: DrawSlots, key: Key) -> NDArray[np.bool_]:
    """Return [U] bool: the units drawn when `draws[i]` units of each row i are drawn with replacement."""
    chosen = np.zeros(int(units.edges[-1]), dtype=np.bool_)
    drawn, counts = _draw_units(units, slots, key)
    before = np.cumsum(counts) - counts
    chosen[drawn[np.arange(len(drawn)) - np.repeat(before, counts) < np.repeat(draws, counts)]] = True
    return chosen


def _draw_units(units: Units, slots: DrawSlots, key: Key) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return units drawn with replacement, row after row, and the number drawn in each row (0 if it has no units)."""
    counts, available = slots.draws_per_row, np.diff(units.edges)
    draws = draw_uint32(key, int(slots.edges[0]), int(slots.edges[-1]))
    if not available.all():
        draws = draws[np.repeat(available > 0, counts)]
        counts = np.where(available > 0, counts, 0)
    drawn = scale_draws(draws, np.repeat(available, counts))
    drawn += np.repeat(units.edges[:-1], counts)
    return drawn, counts


def _select_first_drawn(
    chosen: NDArray[np.bool_],
    drawn: NDArray[np.int64],
    counts: NDArray[np.int64],
    is_first_draw: NDArray[np.bool_],
    budgets: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Select in `chosen` the first `budgets` distinct units of each row; return how many units each row still needs."""
    distinct = np.cumsum(is_first_draw)
    ends = np.append(0, distinct)[np.cumsum(np.append(0, counts))]
    within = distinct <= np.repeat(ends[:-1] + budgets, counts)
    within &= is_first_draw
    chosen[drawn[within]] = True
    lacking: NDArray[np.int64] = np.maximum(budgets - np.diff(ends), 0)
    return lacking


def _select_until_budget(
    chosen: NDArray[np.bool_],
    drawn: NDArray[np.int64],
    row: NDArray[np.int64],
    sizes: NDArray[np.int64],
    budgets: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Select each row's units in order, skipping those that do not fit; return how many tokens each row still needs.

    Each pass selects the units before the first that does not fit, and drops all that cannot fit any more.
    """
    left = budgets.copy()
    while len(drawn):
        fits = sizes[drawn] <= left[row]
        drawn, row = drawn[fits], row[fits]
        size = sizes[drawn]
        total = np.cumsum(size)
        counts = np.bincount(row, minlength=len(left))
        before = np.append(0, total)[np.cumsum(counts) - counts]
        taken = total <= np.repeat(before + left, counts)
        chosen[drawn[taken]] = True
        left -= np.bincount(row[taken], weights=size[taken], minlength=len(left)).astype(np.int64)
        drawn, row = drawn[~taken], row[~taken]
    return left


def select_remaining(
    chosen: NDArray[np.bool_], units: Units, remaining_tokens: NDArray[np.int64], first_row: int, key: Key
) -> None:
    """Select further units of each row in random order, as long as they fit into `remaining_tokens` [N].

    This loops over rows, because only few rows have such units. `first_row`: number of the first row in its block.
    """
    rows = np.flatnonzero(remaining_tokens)
    if units.sizes is not None and len(rows):
        counts = np.diff(units.edges)[rows]
        rest = expand_ranges(units.edges[rows], counts)
        number = np.repeat(np.arange(len(rows)), counts)
        fits = ~chosen[rest] & (units.sizes[rest] <= remaining_tokens[rows][number])
        rows = rows[np.bincount(number[fits], minlength=len(rows)) > 0]
    for row in rows.tolist():
        start, stop = units.edges[row : row + 2].tolist()
        left = int(remaining_tokens[row])
        rest = start + np.flatnonzero(~chosen[start:stop])
        if units.sizes is not None:
            rest = rest[units.sizes[rest] <= left]
        order = np.argsort(draw_uint64(stream_key(key.hex(), first_row + row), 0, len(rest)), kind="stable")
        for unit in rest[order]:
            size = 1 if units.sizes is None else int(units.sizes[unit])
            if size <= left:
                chosen[unit] = True
                left -= size
            if not left:
                break
