"""Permuted language modelling: the choice of the tokens to predict, and their order (Yang et al. 2019).

Targets are n-grams, each inside a context of tokens that are not predicted. The rule is that of zihangdai/xlnet,
data_utils.py, `_sample_mask`: draw n with probability proportional to 1 / n, skip a random part of the n-gram's
context, take the n words that follow, skip the rest of the context, and begin again. At the end, single tokens are
added until the number of targets is reached. There are two differences: special tokens are never chosen and end an
n-gram; and an n-gram longer than the remaining number of targets is shortened (the official code exceeds the number).
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from data_service.formats import StrictRecord
from data_service.rng import scale_draws


class PermutedPrediction(StrictRecord):
    """Targets and factorisation order of a row (zihangdai/xlnet, data_utils.py).

    Attributes:
        predict: number of targets in a row; half of them (rounded up) are among its reused tokens.
        context, chosen: the code's alpha (6) and beta (1): n * context / chosen tokens around an n-gram are no targets.
        longest: largest n of n-grams; n is drawn with probability proportional to 1 / n.
        unit: unit of n-grams: whole words (the paper), or pieces, the first of which begins a word (the official code).
        permutation: number of adjacent tokens that are permuted as a group; groups stay in order.
        copies: "dynamic" chooses new targets in every epoch; a number k makes k choices and uses them in rotation.
    """

    kind: Literal["plm"] = "plm"
    predict: PositiveInt = 85
    context: PositiveInt = 6
    chosen: PositiveInt = 1
    longest: PositiveInt = 5
    unit: Literal["whole_word", "piece"] = "whole_word"
    permutation: PositiveInt = 256
    copies: Literal["dynamic"] | PositiveInt = "dynamic"

    def epoch_of_draws(self, epoch: int) -> int:
        """Return the epoch whose random draws are used in `epoch`; see `copies`."""
        return epoch if self.copies == "dynamic" else epoch % self.copies

    def expected_target_count(self, length: int, maskable: int) -> float:
        """Return the number of targets in a row."""
        return self.predict

    @property
    def target_counts_by_part(self) -> tuple[int, int]:
        """Numbers of targets in the reused and in the new part of a row."""
        return self.predict - self.predict // 2, self.predict // 2


def factorisation_order(
    ordered: NDArray[np.bool_], keys: NDArray[np.uint32], reuse: int, group_tokens: int
) -> NDArray[np.int32]:
    """Return [N, L] int32, the position of each token in its row's factorisation order.

    Each token sees exactly the tokens that it sees in zihangdai/xlnet, data_utils.py, `_local_perm`. A row has two
    parts; the first `reuse` tokens are the first part. In each part, the tokens that are not `ordered` come first and
    share one position: they see each other and, in the second part, all of the first. Then come the `ordered` tokens in
    random order. So the first part sees nothing of the second.

    Args:
        ordered: [N, L] bool, true for targets, `<sep>` and `<cls>`.
        keys: [N, L] random numbers that sort the `ordered` tokens of a group.
        reuse: number of tokens in the first part.
        group_tokens: number of tokens in a group that is permuted. (The official code uses the same order in all groups
            of a part, here each has its own; at the published sizes a part is one group.)
    """
    first = _order_ranks(ordered[:, :reuse], keys[:, :reuse], group_tokens)
    second = _order_ranks(ordered[:, reuse:], keys[:, reuse:], group_tokens)
    return np.concatenate([first, first.max(axis=1, keepdims=True) + 1 + second], axis=1)


def _order_ranks(ordered: NDArray[np.bool_], keys: NDArray[np.uint32], group_tokens: int) -> NDArray[np.int32]:
    """Return [N, P] int32: rank from 1, by group and key, of each `ordered` token in its row; 0 for other tokens."""
    rows, columns = np.nonzero(ordered)
    counts = ordered.sum(axis=1)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    # Group, key and column in one number, so that sorting by value gives the same order on every machine.
    keyed = ((columns // group_tokens) << 48).view(np.uint64) | (keys[ordered].astype(np.uint64) << np.uint64(16))
    places = np.full((len(ordered), int(counts.max(initial=0))), np.iinfo(np.uint64).max)
    places[rows, within] = keyed | columns.view(np.uint64)
    places.sort(axis=1)
    ranks = np.zeros(ordered.shape, dtype=np.int32)
    ranks[rows, (places[rows, within] & np.uint64(0xFFFF)).view(np.int64)] = within + 1
    return ranks


_MAX_UINT64 = np.uint64(0xFFFFFFFFFFFFFFFF)  # sorts last: the value of tokens that cannot be chosen
_LOW_32_BITS = np.uint64(0xFFFFFFFF)
_KEY_SHIFT_BITS = np.uint64(32)  # a 32-bit random key stands above a 32-bit column number


def choose_targets(
    word_starts: NDArray[np.bool_],
    special_mask: NDArray[np.bool_],
    target_count: int,
    config: PermutedPrediction,
    draws: NDArray[np.uint64],
    keys: NDArray[np.uint32],
) -> NDArray[np.bool_]:
    """Return [N, P] bool, the targets: `target_count` tokens of each row of P tokens, or all that are not special if
    these are fewer.

    Args:
        word_starts: [N, P] bool, whether a word begins with the token; true for special tokens and the tokens after
            them.
        special_mask: [N, P] bool, whether the token is special, so that it is never chosen.
        target_count: number of tokens to choose in each row.
        config: settings of the n-grams.
        draws: [N, D] random numbers, one for each n-gram; D = `target_count` is always enough.
        keys: [N, P] random numbers that choose single tokens.
    """
    chosen = choose_ngrams(word_starts, special_mask, target_count, config, draws)
    free = ~(chosen | special_mask)
    missing = np.minimum(target_count - chosen.sum(axis=1), free.sum(axis=1))
    most = int(missing.max(initial=0))
    if most:
        columns = np.arange(free.shape[1], dtype=np.uint64)
        order = np.where(free, (keys.astype(np.uint64) << _KEY_SHIFT_BITS) | columns, _MAX_UINT64)
        first = np.sort(np.partition(order, most - 1, axis=1)[:, :most], axis=1)
        rows, number = np.nonzero(np.arange(most) < missing[:, None])
        chosen[rows, (first[rows, number] & _LOW_32_BITS).view(np.int64)] = True
    return chosen


def choose_ngrams(
    word_starts: NDArray[np.bool_],
    special_mask: NDArray[np.bool_],
    target_count: int,
    config: PermutedPrediction,
    draws: NDArray[np.uint64],
) -> NDArray[np.bool_]:
    """Return [N, P] bool, targets in n-grams, at most `target_count` in a row. Arguments as for `choose_targets`."""
    rows, width = word_starts.shape
    units = _RowUnits(word_starts, special_mask)
    likely = _ngram_thresholds(config.longest)
    row = np.arange(rows)
    at, left = row * (width + 1), np.full(rows, target_count)
    marks = np.zeros(rows * (width + 1) + 1, dtype=np.int8)
    # Each pass of the loop draws one n-gram in every row.
    for of_turn in draws.T:
        word = of_turn[row]
        n = np.minimum(1 + np.searchsorted(likely, word >> _KEY_SHIFT_BITS, side="right"), left)
        context = n * config.context // config.chosen
        passed = scale_draws(word.astype(np.uint32), context)
        end_of_row = row * (width + 1) + width
        start, stop = units.ngram_bounds(np.minimum(at + passed, end_of_row), n, left, config.unit == "whole_word")
        found = (start < stop) & (stop < end_of_row)
        marks[start[found]] += 1
        marks[stop[found]] -= 1
        at, left = stop + context - passed, left - (stop - start)
        going = found & (left > 0) & (at < end_of_row)
        row, at, left = row[going], at[going], left[going]
        if not len(row):
            break
    inside = np.cumsum(marks[:-1], dtype=np.int8).reshape(rows, width + 1)
    return inside[:, :width] > 0


class _RowUnits:
    """The words and special tokens of rows, with one more special token added after each row.

    Places are indices of tokens, counted through all rows, each with its added token.
    """

    def __init__(self, begins: NDArray[np.bool_], fixed: NDArray[np.bool_]) -> None:
        first = np.pad(begins, ((0, 0), (0, 1)), constant_values=True).ravel()
        is_fixed = np.pad(fixed, ((0, 0), (0, 1)), constant_values=True).ravel()
        self._places = np.flatnonzero(first)  # [U], place of each unit
        self._first_unit = np.cumsum(first, dtype=np.int32) - first  # index of the first unit at or after each place
        number = np.arange(len(self._places))
        barrier = is_fixed[self._places]
        last = len(number) - 1
        # [U], for each unit the index of the first word, and of the first special token, from it on
        self._next_word = _reversed_cumulative_minimum(np.where(barrier, last, number))
        self._next_fixed = _reversed_cumulative_minimum(np.where(barrier, number, last))

    def ngram_bounds(
        self,
        places: NDArray[np.int64],
        n: NDArray[np.int64],
        max_tokens: NDArray[np.int64],
        whole_words: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the places at which the next n-gram at or after each of `places` starts and stops; equal if none fits.

        An n-gram has n tokens from the beginning of a word on; or n words, or fewer that fit into `max_tokens` tokens.
        """
        unit = self._next_word[self._first_unit[places]]
        start, barrier = self._places[unit], self._next_fixed[unit]
        if not whole_words:
            return start, np.minimum(start + n, self._places[barrier])
        last = np.minimum(unit + n, barrier)
        stop = self._places[last]
        while len(over := np.flatnonzero(stop - start > max_tokens)):
            last[over] -= 1
            stop[over] = self._places[last[over]]
        return start, stop


def _reversed_cumulative_minimum(units: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each element the minimum of it and all later elements."""
    smallest: NDArray[np.int64] = np.minimum.accumulate(units[::-1])[::-1]
    return smallest


def _ngram_thresholds(longest: int) -> NDArray[np.uint64]:
    """Return [longest - 1] uint64 thresholds: a uniform 32-bit draw at or above the k-th one means n > k (k from 1)."""
    shares = 1 / np.arange(1, longest + 1)
    return np.round(np.cumsum(shares / shares.sum())[:-1] * (1 << 32)).astype(np.uint64)
