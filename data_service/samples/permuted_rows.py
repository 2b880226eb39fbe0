"""Rows for permuted language modelling: lanes of text, their targets and their factorisation order."""

import numpy as np
from numpy.typing import NDArray

from data_service.rng import Key, draws64, stream_key
from data_service.samples.context_ngrams import choose_targets
from data_service.samples.lanes import LaneRows
from data_service.samples.permuted import PermutedPrediction, factorisation_order
from data_service.samples.ragged import Samples
from data_service.samples.reading import LaneText, Reading
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
    parts = []
    for first in range(start, stop, size):
        text = reading.lay_out(rows, first, min(first + size, stop), special, key)
        targets, order = _predicted(text, rows.reuse, first, config, key)
        parts.append(_samples(text, targets, order))
    return join_rows(parts)


def _samples(text: LaneText, targets: NDArray[np.bool_], order: NDArray[np.int32]) -> Samples:
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
    )


def _predicted(
    text: LaneText, reuse: int, first_row: int, config: PermutedPrediction, key: Key
) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
    """[N, length], the targets, and the order of all tokens, of `text`'s rows, numbered from `first_row` in their
    block.
    """
    count, length = text.tokens.shape
    of_ngrams = _draws(key, "ngrams", first_row, count, config.predict)
    # One draw a token: its upper half selects single targets, its lower half is its place in the order.
    of_tokens = _draws(key, "tokens", first_row, count, length)
    selects, places = (of_tokens >> np.uint64(32)).astype(np.uint32), of_tokens.astype(np.uint32)
    first_goal, second_goal = config.goals
    targets = np.concatenate(
        [
            choose_targets(text.begins[:, part], text.fixed[:, part], goal, config, draws, selects[:, part])
            for part, goal, draws in (
                (slice(0, reuse), first_goal, of_ngrams[:, :first_goal]),
                (slice(reuse, length), second_goal, of_ngrams[:, first_goal:]),
            )
        ],
        axis=1,
    )
    return targets, factorisation_order(targets | text.functional, places, reuse, config.permutation)


def _draws(key: Key, purpose: str, first_row: int, count: int, per_row: int) -> NDArray[np.uint64]:
    """[count, per_row]: a fixed stretch of draws for each row of the block."""
    draws = draws64(stream_key(key.hex(), purpose), per_row * first_row, per_row * (first_row + count))
    return draws.reshape(count, per_row)
