"""Cuts a text that is longer than the model into overlapping windows. Each piece counts in the window where it has most
context."""

import numpy as np
from numpy.typing import NDArray

Ranges = list[tuple[int, int]]


def window_ranges(pieces: int, room: int, stride: int) -> Ranges:
    """Ranges of `room` consecutive pieces that cover all, each sharing `stride` with the one before.

    One range if all fit, also if there is nothing. `stride` is lowered to half of `room` where it is more.
    """
    step = room - min(stride, room // 2)
    ranges = [(0, min(room, pieces))]
    while ranges[-1][1] < pieces:
        start = ranges[-1][0] + step
        ranges.append((start, min(start + room, pieces)))
    return ranges


def best_window(pieces: int, ranges: Ranges) -> NDArray[np.int64]:
    """[pieces] the window in which each has most context on its poorer side (Devlin et al. 2019, `run_squad.py`).

    Of two equal ones the longer, then the first.
    """
    index = np.arange(pieces)
    begin, end = (np.array(side)[:, None] for side in zip(*ranges, strict=True))
    context = np.minimum(index - begin, end - 1 - index) + 0.01 * np.minimum(end - begin, 10_000) / 10_000
    inside = (begin <= index) & (index < end)
    best: NDArray[np.int64] = np.where(inside, context, -1.0).argmax(0)
    return best
