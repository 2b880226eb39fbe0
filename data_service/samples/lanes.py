"""XLNet's rows: windows of a block's text that move on by `reuse` tokens, read forward or backward.

The text is the block's documents with an end-of-document token after each (the separator, where the tokenizer has
none). Window k begins at its token `reuse * k` and holds `length - 3` tokens; what is left at a block's end when no
further window fits (less than `reuse` tokens that no row reuses, besides the last window's own) joins no memory this
time. A row is `[reuse][A <sep> B <sep> <cls>]`: the window's first `reuse` tokens, the text that follows as A, and as B
either what follows A or another place of the block (zihangdai/xlnet, data_utils.py, `_split_a_and_b`).

Where the official code differs: it leaves no choice but a random B when no sentence ends inside the window, where we
cut A from B anywhere; and it shortens A to make room for the whole sentence in which B ends, where B ends with the
window. So every row with its own B is the window's whole text, in order.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_service.errors import PlanError
from data_service.rng import Key, draws32, scale, stream_key
from data_service.samples.inputs import Lanes
from data_service.samples.permuted import PermutedPrediction
from data_service.samples.ragged import Tokens
from data_service.samples.units import fixed_positions
from data_service.shards.block import Block
from data_service.tokenizers.specials import SpecialIds

EDGE_TOKENS = 3  # <sep> after A, <sep> and <cls> after B
MOST_TOKENS = 1 << 16  # in a row

_DRAWS_PER_ROW = 3  # whether B is random, where A ends, where B begins
_BEGINS, _FIXED = np.uint8(1), np.uint8(2)


@dataclass(frozen=True)
class LaneRows:
    """The rows of a block. With both directions, window k is row 2k, and row 2k + 1 the same read backward.

    Attributes:
        windows: how many windows the block's text holds.
        directions: 1 or 2.
        length: tokens of each row, special ones included.
        reuse: tokens by which the window moves on.
        random: share of rows whose B is drawn from elsewhere.
        ends: [D] int64, offset in the block at which each document ends.
    """

    windows: int
    directions: int
    length: int
    reuse: int
    random: float
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return self.windows * self.directions

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[N] int64 tokens of each row as the model sees it, special ones included."""
        return np.full(len(self), self.length)

    def text(self, block: Block, start: int, stop: int) -> Tokens:
        """The text of the windows of rows `start` to `stop`, forward and without special tokens."""
        found = [np.arange(s.start, s.stop) for row in range(start, stop) for s in self.stretches(row)]
        return block.tokens[np.concatenate(found)]

    def stretches(self, row: int) -> tuple[range, ...]:
        """Where the window of a row lies in the block; a random B is not told of."""
        first = row // self.directions * self.reuse
        with_ends = self.ends + np.arange(len(self.ends))  # where the end-of-document tokens stand
        start, stop = (
            place - int(np.searchsorted(with_ends, place))
            for place in (first, first + self.length - EDGE_TOKENS)
        )
        return (range(start, stop),)


def lane_rows(block: Block, lanes: Lanes, length: int) -> LaneRows:
    """The rows of a block, each of exactly `length` tokens."""
    ends = block.sentences[block.documents[1:]]
    directions = _directions(lanes)
    rows = count_lane_rows(np.array([len(block.tokens)]), np.array([len(ends)]), lanes, length)
    return LaneRows(int(rows[0]) // directions, directions, length, lanes.reuse, lanes.random, ends)


def count_lane_rows(
    tokens: NDArray[np.int64], documents: NDArray[np.int64], lanes: Lanes, length: int
) -> NDArray[np.int64]:
    """[B] int64 rows of blocks of so many tokens and documents."""
    text = tokens + documents
    fitting = (text - (length - EDGE_TOKENS)) // lanes.reuse + 1
    rows: NDArray[np.int64] = np.maximum(fitting, 0) * _directions(lanes)
    return rows


def check_lanes(lanes: Lanes, permuted: PermutedPrediction, length: int, count: int | None) -> None:
    """Raises PlanError: rows of `length` tokens have no room for the reused text, two segments and the targets, or
    `count` lanes cannot be read in both directions.
    """
    room = length - EDGE_TOKENS - lanes.reuse
    first, second = permuted.goals
    if room < 2 or length > MOST_TOKENS:
        raise PlanError(
            f"a row of {length} tokens cannot reuse {lanes.reuse} and hold two segments",
            remedy=f"set length from {lanes.reuse + EDGE_TOKENS + 2} to {MOST_TOKENS}, or another input.reuse",
        )
    if first > lanes.reuse or second > room:
        raise PlanError(
            f"{permuted.predict} targets do not fit a row of {lanes.reuse} and {room} tokens of text",
            remedy=f"set predict to {min(2 * lanes.reuse, 2 * room) // 6} or so: one token in six",
        )
    if count is not None and count % _directions(lanes):
        raise PlanError(
            f"{count} lanes cannot be read half forward and half backward",
            remedy="make the batch an even number of sequences, or set input.both_directions: false",
        )


def _directions(lanes: Lanes) -> int:
    return 2 if lanes.both_directions else 1


@dataclass(frozen=True)
class LaneText:
    """N rows laid out, as rectangles.

    Attributes:
        tokens: [N, length].
        begins: [N, length] bool, a word begins here, in the direction in which the row is read.
        fixed: [N, length] bool, special tokens, which are never predicted.
        segment_starts: [N] int32, where B begins.
        backward: [N] bool; None where no row is read backward.
    """

    tokens: Tokens
    begins: NDArray[np.bool_]
    fixed: NDArray[np.bool_]
    segment_starts: NDArray[np.int32]
    backward: NDArray[np.bool_] | None


@dataclass(frozen=True)
class Reading:
    """A block's text, forward and, where rows are read backward, once more from its last token to its first.

    Attributes:
        size: tokens of the text, ends of documents included.
        tokens: [size] or [2 * size].
        bounds: [B] int64, where sentences begin in it, ascending, and where it ends.
        flags: as long as `tokens`, uint8: bit 0, a word begins here; bit 1, a special token.
    """

    size: int
    tokens: Tokens
    bounds: NDArray[np.int64]
    flags: NDArray[np.uint8]

    @classmethod
    def of(
        cls,
        block: Block,
        special: SpecialIds,
        never: tuple[int, ...],
        starts_word: NDArray[np.bool_] | None,
        *,
        backward: bool,
    ) -> "Reading":
        """`never` are the special ids; without a word-start table every token is a word."""
        end = special.sep if special.eod is None else special.eod
        text = _with_ends(block.tokens, block.sentences[block.documents[1:]], end)
        document = np.repeat(np.arange(len(block.documents) - 1), np.diff(block.documents))
        bounds = np.append(block.sentences[:-1] + document, len(text))
        fixed = fixed_positions(text, (*never, end))
        begins = np.ones(len(text) + 1, dtype=np.bool_)
        if starts_word is not None:
            begins[:-1] = starts_word[text]
            for places in (bounds, fixed, fixed + 1):
                begins[places] = True
        flags = begins[:-1] * _BEGINS
        flags[fixed] |= _FIXED
        if not backward:
            return cls(len(text), text, bounds, flags)
        mirrored = (begins[1:] * _BEGINS) | (
            flags & _FIXED
        )  # read backward, a word begins with its last piece
        return cls(
            len(text),
            np.concatenate([text, text[::-1]]),
            np.concatenate([bounds, 2 * len(text) - bounds[-2::-1]]),
            np.concatenate([flags, mirrored[::-1]]),
        )

    def lay_out(self, rows: LaneRows, start: int, stop: int, special: SpecialIds, key: Key) -> LaneText:
        """Rows `start` to `stop`; `key` names the block and the epoch."""
        numbers = np.arange(start, stop)
        backward = numbers % rows.directions == 1
        firsts = numbers // rows.directions * rows.reuse
        window = rows.length - EDGE_TOKENS
        firsts = np.where(backward, 2 * self.size - firsts - window, firsts)
        sizes, seconds = self._split(
            firsts + rows.reuse, window - rows.reuse, backward, rows.random, start, key
        )
        places = _places(firsts, sizes, seconds, rows)
        between = rows.reuse + sizes
        tokens, flags = self.tokens[places], self.flags[places]
        tokens[:, -1] = special.cls
        for columns in (between, rows.length - 2):
            tokens[np.arange(len(tokens)), columns] = special.sep
        flags[:, [0, rows.reuse]] |= _BEGINS
        flags[np.arange(len(flags)), between + 1] |= _BEGINS
        flags[:, -2:] = _BEGINS | _FIXED
        flags[np.arange(len(flags)), between] = _BEGINS | _FIXED
        return LaneText(
            tokens,
            (flags & _BEGINS).view(np.bool_),
            (flags & _FIXED) > 0,
            (between + 1).astype(np.int32),
            backward if rows.directions == 2 else None,
        )

    def _split(
        self,
        places: NDArray[np.int64],
        room: int,
        backward: NDArray[np.bool_],
        random: float,
        first_row: int,
        key: Key,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of A, [N], and where B begins, [N], for second parts of `room` tokens that begin at `places`."""
        stop = first_row + len(places)
        draws = draws32(stream_key(key.hex(), "segments"), _DRAWS_PER_ROW * first_row, _DRAWS_PER_ROW * stop)
        drawn, cut, place = draws.reshape(-1, _DRAWS_PER_ROW).T
        low = np.searchsorted(self.bounds, places, side="right")
        choices = np.searchsorted(self.bounds, places + room) - low
        at_sentence = self.bounds[low + scale(cut, np.maximum(choices, 1))] - places
        sizes = np.where(choices > 0, at_sentence, 1 + scale(cut, room - 1))
        # A random B begins with a sentence, and early enough to fit.
        anywhere = backward * self.size + scale(place, self.size - (room - sizes) + 1)
        elsewhere = self.bounds[np.searchsorted(self.bounds, anywhere, side="right") - 1]
        return sizes, np.where(drawn < round(random * (1 << 32)), elsewhere, places + sizes)


def _with_ends(tokens: Tokens, ends: NDArray[np.int64], end: int) -> Tokens:
    """`tokens` with an `end` before each offset in `ends`."""
    is_end = np.zeros(len(tokens) + len(ends), dtype=np.bool_)
    is_end[ends + np.arange(len(ends))] = True
    text = np.full(len(is_end), end, dtype=tokens.dtype)
    text[~is_end] = tokens
    return text


def _places(
    firsts: NDArray[np.int64], sizes: NDArray[np.int64], seconds: NDArray[np.int64], rows: LaneRows
) -> NDArray[np.int64]:
    """[N, length], where in the reading each row's tokens stand; anywhere for `<sep>` and `<cls>`."""
    columns = np.arange(rows.length)
    between = rows.reuse + sizes
    shift = seconds - between - 1
    places = np.where(columns <= between[:, None], firsts[:, None], shift[:, None]) + columns
    places[:, -2:] = 0
    return places
