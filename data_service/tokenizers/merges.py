"""Learns the merges of byte-pair encoding (BPE) from counted words, the same merges as the library `tokenizers` learns
from text. The library's trainer accepts no counts, and its 32-bit sums can overflow.

The symbols of all words form one array, linked to their neighbours, so a merge is a few vector operations on the
positions of its pair. In a large array only pairs that occur at least `floor` times are tracked. Once these are merged,
the floor is lowered and all pairs are counted again. So the many rare pairs take no memory.
"""

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

WORD_END_SYMBOL = -1
"""Symbol after the last symbol of each word."""
_MERGED_SYMBOL = -2  # array entry whose symbol was merged into the previous one
# With more symbols than this, rare pairs are not tracked at first (`floor`).
_MAX_SYMBOLS_WITH_ALL_PAIRS = 1 << 22
_MIN_COUNT_DIVISOR = 8  # the floor is lowered by this factor
_LOW_32_BITS = (1 << 32) - 1

_SymbolIndices = NDArray[np.int64]
_NO_PLACES: _SymbolIndices = np.zeros(0, np.int64)  # replaces the positions of a merged pair, to free them


def learn_merges(
    symbols: NDArray[np.int32],
    counts: NDArray[np.int64],
    pieces: Sequence[str],
    *,
    vocab_size: int,
    min_frequency: int,
    prefix: str = "",
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return all pieces by id, `pieces` first, and the learnt merges as pairs of pieces, in order.

    Learning stops at `vocab_size` pieces, or when no pair occurs `min_frequency` times.

    Args:
        symbols: [n] symbol ids of all distinct words, with WORD_END_SYMBOL after each word.
        counts: [words] number of occurrences of each word. Occurrences of a symbol are below 2^63.
        pieces: pieces by symbol id; no two are equal.
        prefix: mark of pieces inside a word, such as "##"; a merged piece keeps only a leading one.
    """
    learner = _MergeLearner(symbols, counts, pieces, prefix)
    floor = 1
    if len(symbols) > _MAX_SYMBOLS_WITH_ALL_PAIRS:
        floor = max((count for _, count, _ in learner.frequent_pairs(1)), default=1) // _MIN_COUNT_DIVISOR
    while not learner.learn_frequent_merges(vocab_size, max(floor, 1), min_frequency):
        floor //= _MIN_COUNT_DIVISOR
    return learner.pieces, [(learner.pieces[a], learner.pieces[b]) for a, b in learner.merges]


class _MergeLearner:
    """The array of symbols, the counts of symbol pairs, and the merges learnt so far."""

    def __init__(
        self, symbols: NDArray[np.int32], counts: NDArray[np.int64], pieces: Sequence[str], prefix: str
    ) -> None:
        self._symbols = symbols.copy()
        self._weights = np.repeat(counts, np.diff(np.flatnonzero(symbols == WORD_END_SYMBOL), prepend=-1))
        self._next = np.arange(1, len(symbols) + 1, dtype=np.int32)
        # The first symbol of a word is linked to the `WORD_END_SYMBOL` before it.
        self._previous = np.arange(-1, len(symbols) - 1, dtype=np.int32)
        self._prefix = prefix
        self.pieces = list(pieces)
        self._ids = {piece: index for index, piece in enumerate(pieces)}
        self.merges: dict[tuple[int, int], None] = {}
        self._counts: dict[int, int] = {}  # occurrences of each tracked pair
        self._places: list[_SymbolIndices] = []  # positions of each queued pair's first symbol
        self._queue: list[tuple[int, int, int]] = []  # -count, pair, index in _places

    def frequent_pairs(self, floor: int) -> Iterator[tuple[int, int, _SymbolIndices]]:
        """Yield (pair, occurrences, positions of its first symbol) of every pair that occurs at least `floor` times."""
        places = np.flatnonzero(self._symbols >= 0)
        right = self._symbols[self._next[places]]
        places, right = places[right >= 0], right[right >= 0]
        return _group_places(_pair_keys(self._symbols[places], right), places, self._weights[places], floor)

    def learn_frequent_merges(self, vocab_size: int, min_count: int, min_frequency: int) -> bool:
        """Merge pairs that occur `min_count` times or more, most frequent first. Return whether learning is done."""
        self._counts = {(a << 32) | b: self._counts.get((a << 32) | b, 0) for a, b in self.merges}
        self._places, self._queue = [], []
        for pair, count, places in self.frequent_pairs(min_count):
            self._counts[pair] = count
            self._queue_pair(pair, places)
        lowest = max(min_count, min_frequency)
        while self._queue and len(self.pieces) < vocab_size:
            negative, pair, entry = heapq.heappop(self._queue)
            if -negative != self._counts[pair]:
                heapq.heappush(self._queue, (-self._counts[pair], pair, entry))
            elif -negative < lowest:
                break
            else:
                self._merge_pair(pair, self._places[entry], min_count)
                self._places[entry] = _NO_PLACES
        return len(self.pieces) >= vocab_size or min_count <= max(min_frequency, 1)

    def _queue_pair(self, pair: int, places: _SymbolIndices) -> None:
        heapq.heappush(self._queue, (-self._counts[pair], pair, len(self._places)))
        self._places.append(places)

    def _merge_pair(self, pair: int, places: _SymbolIndices, floor: int) -> None:
        a, b = pair >> 32, pair & _LOW_32_BITS
        merged = self._merged_piece_id(a, b)
        first = self._current_places(places, a, b)
        second = self._next[first]
        after = self._next[second]
        right = self._symbols[after]  # read before `_symbols` changes, since merges go from left to right
        self._symbols[first], self._symbols[second] = merged, _MERGED_SYMBOL
        self._next[first], self._previous[after] = after, first
        before = self._previous[first]
        left = self._symbols[before]
        weights = self._weights[first]
        begins, ends = left >= 0, right >= 0
        added = _group_places(
            np.concatenate([_pair_keys(left[begins], merged), _pair_keys(merged, right[ends])]),
            np.concatenate([before[begins], first[ends]]),
            both := np.concatenate([weights[begins], weights[ends]]),
        )
        removed = np.concatenate([_pair_keys(left[begins], a), _pair_keys(b, right[ends])])
        self._update_pair_counts(list(added), _group_places(removed, removed, both), floor)

    def _update_pair_counts(
        self,
        added: list[tuple[int, int, _SymbolIndices]],
        removed: Iterator[tuple[int, int, _SymbolIndices]],
        floor: int,
    ) -> None:
        """Change pair counts after a merge. Pairs with `floor` occurrences are queued, rarer new ones dropped."""
        new = [pair for pair, _, _ in added if pair not in self._counts]
        for pair, count, _ in added:
            self._counts[pair] = self._counts.get(pair, 0) + count
        for pair, count, _ in removed:
            if pair in self._counts:
                self._counts[pair] -= count
        for pair, _, places in added:
            if self._counts[pair] >= floor:
                self._queue_pair(pair, places)
        for pair in new:
            if self._counts[pair] < floor:
                del self._counts[pair]

    def _merged_piece_id(self, a: int, b: int) -> int:
        """Record the merge of two pieces; return the merged piece's id. Other pairs may have given the same piece."""
        self.merges.pop((a, b), None)
        self.merges[a, b] = None
        piece = self.pieces[a] + self.pieces[b].removeprefix(self._prefix)
        if piece not in self._ids:
            self._ids[piece] = len(self.pieces)
            self.pieces.append(piece)
        return self._ids[piece]

    def _current_places(self, places: _SymbolIndices, a: int, b: int) -> _SymbolIndices:
        """Return the positions at which the pair still occurs; every other one where it overlaps itself ("aaaa")."""
        following = self._next[places]
        places = places[(self._symbols[places] == a) & (self._symbols[following] == b)]
        if a != b or not len(places):
            return places
        index = np.arange(len(places))
        begins = np.concatenate([[True], self._next[places[:-1]] != places[1:]])
        kept: _SymbolIndices = places[(index - np.maximum.accumulate(np.where(begins, index, 0))) % 2 == 0]
        return kept


def _pair_keys(left: NDArray[np.int32] | int, right: NDArray[np.int32] | int) -> NDArray[np.int64]:
    """Return each pair of symbols as one integer, with the left symbol in the upper 32 bits."""
    return np.asarray(left, np.int64) << 32 | np.asarray(right, np.int64)


def _group_places(
    keys: NDArray[np.int64], places: _SymbolIndices, weights: NDArray[np.int64], floor: int = 1
) -> Iterator[tuple[int, int, _SymbolIndices]]:
    """Yield (key, sum of weights, positions in order) for each distinct key whose sum is at least `floor`."""
    if not len(keys):
        return
    order = np.argsort(keys, kind="stable")
    keys, places = keys[order], places[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    sums = np.add.reduceat(weights[order], starts)
    stops = np.append(starts[1:], len(keys))
    kept = sums >= floor
    for start, stop, total in zip(starts[kept].tolist(), stops[kept].tolist(), sums[kept].tolist(), strict=True):
        yield int(keys[start]), total, places[start:stop]
