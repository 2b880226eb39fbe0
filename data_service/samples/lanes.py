"""XLNet's rows: windows of a block's text, each `reuse` tokens after the previous one, read forward or backward.

The text is the block's documents with an end-of-document token after each (the separator, if the tokenizer has none).
Window k begins at token `reuse * k` of the text and holds `length - 3` tokens. A row is
`[reuse][A <sep> B <sep> <cls>]`: the window's first `reuse` tokens, the text that follows as A, and as B either the
text that follows A or text from another place of the block (`data_service.samples.lane_rows`).

Let W = `length - 3` be the tokens of a window. The reused parts of the forward rows together hold every token of the
block once, except its last W - reuse to W - 1 tokens. The reused parts of the backward rows lack W - reuse tokens at
the block's beginning and fewer than `reuse` at its end. A block of fewer than W tokens has no rows.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from data_service.errors import PlanError
from data_service.rng import Key
from data_service.samples.packing import RowInput
from data_service.samples.permutation_lm import PermutedPrediction
from data_service.types import Block, Share

SPECIAL_TOKENS_PER_ROW = 3  # <sep> after A, <sep> and <cls> after B
MAX_ROW_TOKENS = 1 << 16  # largest number of tokens in a row


class Lanes(RowInput):
    """Rows that continue from step to step: row i (lane i) of a batch continues row i of the previous batch (XLNet).

    A row is `[reuse][A <sep> B <sep> <cls>]`. The next row of the lane begins `reuse` tokens later in the text.

    Attributes:
        reuse: number of tokens at the start of a row whose hidden states the next row of the lane can attend to.
        random: share of rows whose segment B begins at a random sentence of the block.
        both_directions: whether every second lane reads its text backwards (bi_data).
    """

    packing: Literal["lanes"]
    reuse: PositiveInt = 256
    random: Share = 0.5
    both_directions: bool = True

    @property
    def directions(self) -> int:
        """Number of directions in which each window is read, 1 or 2."""
        return 2 if self.both_directions else 1

    def cut(self, block: Block, length: int, key: Key) -> "LaneRows":
        """Return the rows of a block, each of exactly `length` tokens. `key` is not used."""
        return lane_rows(block, self, length)


@dataclass(frozen=True)
class LaneRows:
    """The rows of a block. With both directions, row 2k is window k, and row 2k + 1 is the same window read backward.

    Attributes:
        windows: number of windows in the block's text.
        directions: number of directions in which a window is read, 1 or 2.
        length: number of tokens of each row, special ones included.
        reuse: number of tokens from the start of a window to that of the next.
        random: share of rows whose segment B begins at a random sentence of the block.
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
    def row_lengths(self) -> NDArray[np.int64]:
        """[N] int64, number of tokens of each row, special ones included."""
        return np.full(len(self), self.length)


def lane_rows(block: Block, lanes: Lanes, length: int) -> LaneRows:
    """Return the rows of a block, each of exactly `length` tokens."""
    ends = block.sentences[block.documents[1:]]
    rows = count_lane_rows(np.array([len(block.tokens)]), np.array([len(ends)]), lanes, length)
    return LaneRows(
        windows=int(rows[0]) // lanes.directions,
        directions=lanes.directions,
        length=length,
        reuse=lanes.reuse,
        random=lanes.random,
        ends=ends,
    )


def count_lane_rows(
    tokens: NDArray[np.int64], documents: NDArray[np.int64], lanes: Lanes, length: int
) -> NDArray[np.int64]:
    """Return [B] int64, the number of rows of each of B blocks, given its numbers of tokens and documents."""
    text = tokens + documents
    fitting = (text - (length - SPECIAL_TOKENS_PER_ROW)) // lanes.reuse + 1
    rows: NDArray[np.int64] = np.maximum(fitting, 0) * lanes.directions
    return rows


def check_lane_settings(lanes: Lanes, permuted: PermutedPrediction, length: int, lane_count: int | None) -> None:
    """Raise PlanError if rows of `length` tokens have no room for the reused text, two segments and the targets, or if
    `lane_count` lanes cannot be read in both directions."""
    room = length - SPECIAL_TOKENS_PER_ROW - lanes.reuse
    first, second = permuted.target_counts_by_part
    if room < 2 or length > MAX_ROW_TOKENS:
        raise PlanError(
            f"a row of {length} tokens cannot reuse {lanes.reuse} tokens and hold two segments",
            remedy=f"set length to {lanes.reuse + SPECIAL_TOKENS_PER_ROW + 2} to {MAX_ROW_TOKENS}, or change "
            "input.reuse",
        )
    if first > lanes.reuse or second > room:
        raise PlanError(
            f"{permuted.predict} targets do not fit into a row with {lanes.reuse} reused and {room} new tokens",
            remedy=f"set predict to about {min(2 * lanes.reuse, 2 * room) // 6}, one token in six",
        )
    if lane_count is not None and lane_count % lanes.directions:
        raise PlanError(
            f"{lane_count} lanes are an odd number, so half of them cannot be read backward",
            remedy="make the batch an even number of sequences, or set input.both_directions: false",
        )
