"""Rows for permuted language modelling: lanes of text, their targets and their factorisation order."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from data_service.rng import Key, draws64, stream_key
from data_service.samples.context_ngrams import choose_targets
from data_service.samples.lanes import LaneRows, LaneText, Reading
from data_service.samples.permuted import PermutedPrediction, factorisation_order
from data_service.samples.ragged import Samples
from data_service.samples.rows import join_rows
from data_service.shards.block import Block
from data_service.tokenizers.specials import SpecialIds

_TOKENS_AT_ONCE = 1 << 18  # so that the arrays of a piece stay in a cache


def permuted_rows(
    block: Block,
    rows: LaneRows,
    start: int,
    stop: int,
    config: PermutedPrediction,
    special: SpecialIds,
    never: tuple[int, ...],
    key: Key,
    starts_word: NDArray[np.bool_] | None,
) -> Samples:
    """Rows `start` to `stop` of a block. `never` are the ids never predicted; `key` names the block and the epoch."""
    reading = Reading.of(block, special, never, starts_word, backward=rows.directions == 2)
    size = max(1, _TOKENS_AT_ONCE // rows.length)
    return join_rows(
        [
            _samples(reading.lay_out(rows, first, last, special, key), rows.reuse, first, config, key)
            for first, last in _ranges(start, stop, size)
        ]
    )


def _ranges(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, size):
        yield first, min(first + size, stop)


def _samples(text: LaneText, reuse: int, first_row: int, config: PermutedPrediction, key: Key) -> Samples:
    """`text`'s rows, numbered from `first_row` in their block, with targets and order."""
    count, length = text.tokens.shape
    last_row = first_row + count
    of_ngrams = draws64(
        stream_key(key.hex(), "ngrams"), config.predict * first_row, config.predict * last_row
    ).reshape(count, config.predict)
    # One draw a token: its upper half selects single targets, its lower half is its place in the order.
    of_tokens = draws64(stream_key(key.hex(), "tokens"), length * first_row, length * last_row)
    halves = of_tokens.astype("<u8", copy=False).view("<u4").reshape(count, length, 2)
    first_goal, second_goal = config.goals
    parts = (
        (slice(0, reuse), slice(0, first_goal), first_goal),
        (slice(reuse, None), slice(first_goal, None), second_goal),
    )
    chosen = [
        choose_targets(
            text.begins[:, part], text.fixed[:, part], goal, config, of_ngrams[:, draws], halves[:, part, 1]
        )
        for part, draws, goal in parts
    ]
    targets = np.concatenate(chosen, axis=1)
    ordered = targets.copy()
    ordered[:, length - 2 :] = True
    ordered[np.arange(count), text.segment_starts - 1] = True
    order = factorisation_order(
        (ordered[:, :reuse], ordered[:, reuse:]),
        (halves[:, :reuse, 0], halves[:, reuse:, 0]),
        config.permutation,
    )
    tokens = text.tokens.ravel()
    positions = np.flatnonzero(targets)
    return Samples(
        tokens=tokens,
        offsets=np.arange(count + 1) * length,
        target_positions=positions,
        target_ids=tokens[positions],
        segment_starts=text.segment_starts,
        order=order.ravel(),
        reversed_rows=text.backward,
    )
