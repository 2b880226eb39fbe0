"""Makes XLNet's rows (`lanes.py`) for permuted language modelling, with their targets and factorisation order.

For each row this module decides where segment A ends, which text is segment B, and where words begin in the direction
in which the row is read.

The rule is that of zihangdai/xlnet, data_utils.py, `_split_a_and_b`: A ends with a sentence. B is what follows, or, in
a share `random` of the rows, begins with a sentence elsewhere in the block. There are two differences:

- If no sentence ends inside the window, the official code always draws a random B; here A then ends anywhere.
- The official code shortens A so that B can end with a whole sentence. Here B ends with the window, so that a row whose
  B follows A is the window's whole text in order.

As in the official code, a row read backward is the row of the reversed text, with `<sep>` and `<cls>` at its end.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from data_service.rng import Key, draw_uint32, draw_uint64, scale_draws, stream_key
from data_service.samples.lanes import SPECIAL_TOKENS_PER_ROW, LaneRows
from data_service.samples.permutation_lm import PermutedPrediction, choose_targets, factorisation_order
from data_service.samples.samples import Samples, join_rows
from data_service.samples.selection import excluded_token_offsets
from data_service.tokenizers.specials import SpecialIds
from data_service.types import Block, Tokens

_DRAWS_PER_ROW = 3  # draws per row: whether B is random, where A ends, where a random B begins
_WORD_START_BIT, _FIXED_BIT, _REMOVED_BIT = np.uint8(1), np.uint8(2), np.uint8(4)  # `DirectedBlockText.flags`


@dataclass(frozen=True)
class LaneRowTokens:
    """The tokens of N rows of equal length.

    Attributes:
        tokens: [N, length], token ids.
        begins: [N, length] bool, whether a word begins with the token, in the direction in which the row is read.
        fixed: [N, length] bool, whether the token is special, so that it is never predicted.
        segment_starts: [N] int32, index in the row of B's first token.
        backward: [N] bool, whether the row is read backward; None if no row is.
        removed: [N, length] bool, tokens in place of removed documents; None if there are none in the block.
    """

    tokens: Tokens
    begins: NDArray[np.bool_]
    fixed: NDArray[np.bool_]
    segment_starts: NDArray[np.int32]
    backward: NDArray[np.bool_] | None
    removed: NDArray[np.bool_] | None

    @property
    def sep_and_cls_mask(self) -> NDArray[np.bool_]:
        """[N, length] bool, true for each row's two `<sep>` and its `<cls>`, but not for end-of-document tokens in its
        text."""
        found = np.zeros(self.tokens.shape, dtype=np.bool_)
        found[:, -2:] = True
        found[np.arange(len(found)), self.segment_starts - 1] = True
        return found


@dataclass(frozen=True)
class DirectedBlockText:
    """A block's text, followed by the reversed text if some rows are read backward.

    Attributes:
        size: number of tokens of the text, end-of-document tokens included.
        tokens: [size] or [2 * size], token ids.
        bounds: [B] int64, ascending offsets in `tokens` at which sentences begin, and the end of the text.
        flags: uint8, as long as `tokens`. Bit 0: a word begins with the token; bit 1: the token is special; bit 2: the
            token replaces a token of a removed document.
        holes: whether bit 2 is set anywhere.
    """

    size: int
    tokens: Tokens
    bounds: NDArray[np.int64]
    flags: NDArray[np.uint8]
    holes: bool

    @classmethod
    def from_block(
        cls,
        block: Block,
        special: SpecialIds,
        excluded_ids: tuple[int, ...],
        starts_word: NDArray[np.bool_] | None,
        *,
        backward: bool,
    ) -> Self:
        """Return the text of a block; `backward`: also reversed. `excluded_ids` are never predicted.

        `starts_word`: [vocab_size] bool, which pieces begin a word, for blocks that do not store where words begin.
        None: every token is a word.
        """
        end = special.sep if special.eod is None else special.eod
        ends = block.sentences[block.documents[1:]]
        text: Tokens = np.insert(block.tokens, ends, end)  # type: ignore[assignment]
        document = np.repeat(np.arange(len(block.documents) - 1), np.diff(block.documents))
        bounds = np.append(block.sentences[:-1] + document, len(text))
        fixed = excluded_token_offsets(text, (*excluded_ids, end))
        begins = np.ones(len(text) + 1, dtype=np.bool_)
        if starts_word is not None:
            stored = block.unit_starts("word")
            begins[:-1] = starts_word[text] if stored is None else np.insert(stored, ends, True)
            for places in (bounds, fixed, fixed + 1):
                begins[places] = True
        flags = begins[:-1] * _WORD_START_BIT
        flags[fixed] |= _FIXED_BIT
        if block.removed is not None:
            flags |= np.insert(block.removed, ends, False) * _REMOVED_BIT
        holes = block.removed is not None
        if not backward:
            return cls(len(text), text, bounds, flags, holes)
        # In reversed text, a word begins with its last piece.
        mirrored = (begins[1:] * _WORD_START_BIT) | (flags & (_FIXED_BIT | _REMOVED_BIT))
        return cls(
            len(text),
            np.concatenate([text, text[::-1]]),
            np.concatenate([bounds, 2 * len(text) - bounds[-2::-1]]),
            np.concatenate([flags, mirrored[::-1]]),
            holes,
        )

    def lay_out(self, rows: LaneRows, start: int, stop: int, special: SpecialIds, key: Key) -> LaneRowTokens:
        """Return the tokens of rows `start` to `stop - 1`. `key`: random key of this block in this epoch."""
        firsts, sizes, seconds, backward = self.segments_of_rows(rows, start, stop, key)
        places = _token_offsets(firsts, sizes, seconds, rows)
        between = rows.reuse + sizes
        tokens, flags = self.tokens[places], self.flags[places]
        tokens[:, -1] = special.cls
        for columns in (between, rows.length - 2):
            tokens[np.arange(len(tokens)), columns] = special.sep
        flags[:, [0, rows.reuse]] |= _WORD_START_BIT
        flags[np.arange(len(flags)), between + 1] |= _WORD_START_BIT
        flags[:, -2:] = _WORD_START_BIT | _FIXED_BIT
        flags[np.arange(len(flags)), between] = _WORD_START_BIT | _FIXED_BIT
        return LaneRowTokens(
            tokens,
            (flags & _WORD_START_BIT).view(np.bool_),
            (flags & _FIXED_BIT) > 0,
            (between + 1).astype(np.int32),
            backward if rows.directions == 2 else None,
            (flags & _REMOVED_BIT) > 0 if self.holes else None,
        )

    def segments_of_rows(
        self, rows: LaneRows, start: int, stop: int, key: Key
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return four arrays [N] for rows `start` to `stop - 1`: offset in `tokens` of the row's text, size of A,
        offset of B, and whether the row is read backward. A directly follows the reused text."""
        numbers = np.arange(start, stop)
        backward = numbers % rows.directions == 1
        firsts = numbers // rows.directions * rows.reuse
        window = rows.length - SPECIAL_TOKENS_PER_ROW
        firsts = np.where(backward, 2 * self.size - firsts - window, firsts)
        room = window - rows.reuse
        sizes, seconds = self._segment_bounds(firsts + rows.reuse, room, backward, rows.random, start, key)
        return firsts, sizes, seconds, backward

    def _segment_bounds(
        self,
        places: NDArray[np.int64],
        room: int,
        backward: NDArray[np.bool_],
        random: float,
        first_row: int,
        key: Key,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for N rows the size of A, [N], and the offset in `tokens` at which B begins, [N].

        `places`: [N], offsets at which A begins. `room`: number of tokens of A and B together.
        """
        stop = first_row + len(places)
        draws = draw_uint32(stream_key(key.hex(), "segments"), _DRAWS_PER_ROW * first_row, _DRAWS_PER_ROW * stop)
        drawn, cut, place = draws.reshape(-1, _DRAWS_PER_ROW).T
        low = np.searchsorted(self.bounds, places, side="right")
        choices = np.searchsorted(self.bounds, places + room) - low
        at_sentence = self.bounds[low + scale_draws(cut, np.maximum(choices, 1))] - places
        sizes = np.where(choices > 0, at_sentence, 1 + scale_draws(cut, room - 1))
        # A random B begins with the sentence around a random offset, which leaves room for all of B.
        anywhere = backward * self.size + scale_draws(place, self.size - (room - sizes) + 1)
        elsewhere = self.bounds[np.searchsorted(self.bounds, anywhere, side="right") - 1]
        return sizes, np.where(drawn < round(random * (1 << 32)), elsewhere, places + sizes)


def lane_text_ranges(
    block: Block, rows: LaneRows, special: SpecialIds, key: Key
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return which text of a block its rows hold, as three arrays [S] int64: row, first token in the block, and the one
    after the last. A row has one entry, or a second one for a random B.

    `key`: random key of this block in this epoch.
    """
    reading = DirectedBlockText.from_block(block, special, (), None, backward=rows.directions == 2)
    firsts, sizes, seconds, backward = reading.segments_of_rows(rows, 0, len(rows), key)
    ends = firsts + rows.reuse + sizes
    window = rows.length - SPECIAL_TOKENS_PER_ROW
    follows = seconds == ends
    starts = np.concatenate([firsts, seconds[~follows]])
    stops = np.concatenate([np.where(follows, firsts + window, ends), (seconds + firsts + window - ends)[~follows]])
    numbers = np.arange(len(rows))
    of_row = np.concatenate([numbers, numbers[~follows]])
    mirrored = backward[of_row]
    whole = 2 * reading.size
    starts, stops = np.where(mirrored, whole - stops, starts), np.where(mirrored, whole - starts, stops)
    with_ends = rows.ends + np.arange(len(rows.ends))  # offsets in the text of the end-of-document tokens
    in_block = [places - np.searchsorted(with_ends, places) for places in (starts, stops)]
    order = np.argsort(of_row, kind="stable")
    return of_row[order], in_block[0][order], in_block[1][order]


def _token_offsets(
    row_starts: NDArray[np.int64], a_sizes: NDArray[np.int64], b_starts: NDArray[np.int64], rows: LaneRows
) -> NDArray[np.int64]:
    """Return [N, length] int64: for each token of the rows its offset in `DirectedBlockText.tokens`; arbitrary for
    `<sep>` and `<cls>`."""
    columns = np.arange(rows.length)
    between = rows.reuse + a_sizes
    shift = b_starts - between - 1
    places = np.where(columns <= between[:, None], row_starts[:, None], shift[:, None]) + columns
    places[:, -2:] = 0
    return places


_CHUNK_TOKENS = 1 << 18  # tokens of rows made at once, so that the arrays fit into the CPU cache


def permuted_rows(
    block: Block,
    rows: LaneRows,
    start: int,
    stop: int,
    config: PermutedPrediction,
    special: SpecialIds,
    excluded_ids: tuple[int, ...],
    key: Key,
    starts_word: NDArray[np.bool_] | None,
) -> Samples:
    """Return rows `start` to `stop - 1` of a block with their targets and factorisation orders.

    `key`: random key of this block in this epoch. Other arguments as for `DirectedBlockText.from_block`.
    """
    reading = DirectedBlockText.from_block(block, special, excluded_ids, starts_word, backward=rows.directions == 2)
    size = max(1, _CHUNK_TOKENS // rows.length)
    parts = []
    for first in range(start, stop, size):
        text = reading.lay_out(rows, first, min(first + size, stop), special, key)
        targets, order = _choose_targets(text, rows.reuse, first, config, key)
        parts.append(_to_samples(text, targets, order))
    return join_rows(parts)


def _to_samples(text: LaneRowTokens, targets: NDArray[np.bool_], order: NDArray[np.int32]) -> Samples:
    count, length = text.tokens.shape
    tokens, positions = text.tokens.ravel(), np.flatnonzero(targets)
    return Samples(
        tokens=tokens,
        offsets=np.arange(count + 1) * length,
        target_positions=positions,
        target_ids=tokens[positions],
        segment_starts=text.segment_starts,
        order=order.ravel(),
        reversed_rows=text.backward,
        holes=None if text.removed is None else np.flatnonzero(text.removed),
    )


def _choose_targets(
    text: LaneRowTokens, reuse: int, first_row: int, config: PermutedPrediction, key: Key
) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
    """Return which tokens are targets, [N, length] bool, and the factorisation order, [N, length] int32.

    `first_row`: number of the first row in its block.
    """
    count, length = text.tokens.shape
    of_ngrams = _row_draws(key, "ngrams", first_row, count, config.predict)
    # One draw per token: the upper half decides whether it becomes a single target, the lower half orders the targets.
    of_tokens = _row_draws(key, "tokens", first_row, count, length)
    selects, places = (of_tokens >> np.uint64(32)).astype(np.uint32), of_tokens.astype(np.uint32)
    first_goal, second_goal = config.target_counts_by_part
    targets = np.concatenate(
        [
            choose_targets(
                text.begins[:, part],
                text.fixed[:, part],
                target_count=goal,
                config=config,
                draws=draws,
                keys=selects[:, part],
            )
            for part, goal, draws in (
                (slice(0, reuse), first_goal, of_ngrams[:, :first_goal]),
                (slice(reuse, length), second_goal, of_ngrams[:, first_goal:]),
            )
        ],
        axis=1,
    )
    return targets, factorisation_order(targets | text.sep_and_cls_mask, places, reuse, config.permutation)


def _row_draws(key: Key, purpose: str, first_row: int, count: int, per_row: int) -> NDArray[np.uint64]:
    """Return [count, per_row] uint64 draws of `count` rows from `first_row` on. A row always gets the same draws."""
    draws = draw_uint64(stream_key(key.hex(), purpose), per_row * first_row, per_row * (first_row + count))
    return draws.reshape(count, per_row)
