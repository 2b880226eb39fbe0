"""Rows of `Samples`: cut, joined, reordered."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from data_service.samples.ragged import Samples

_T = TypeVar("_T", bound=np.generic)


def slice_rows(samples: Samples, start: int, stop: int) -> Samples:
    """Rows `start` to `stop`. Tokens are a view; positions count from the first row and are copied."""
    first, last = samples.offsets[start], samples.offsets[stop]
    low, high = np.searchsorted(samples.target_positions, (first, last))
    return Samples(
        tokens=samples.tokens[first:last],
        offsets=samples.offsets[start : stop + 1] - first,
        target_positions=samples.target_positions[low:high] - first,
        target_ids=samples.target_ids[low:high],
        segment_starts=None if samples.segment_starts is None else samples.segment_starts[start:stop],
        pair_label=None if samples.pair_label is None else samples.pair_label[start:stop],
        order=None if samples.order is None else samples.order[first:last],
        reversed_rows=None if samples.reversed_rows is None else samples.reversed_rows[start:stop],
    )


def join_rows(parts: Sequence[Samples]) -> Samples:
    """All rows of `parts` (at least one), in order."""
    if len(parts) == 1:
        return parts[0]
    shifts = np.cumsum([0, *(part.offsets[-1] for part in parts)])
    shifted = list(zip(parts, shifts[:-1], strict=True))
    return Samples(
        tokens=np.concatenate([part.tokens for part in parts]),
        offsets=np.concatenate([[0], *(part.offsets[1:] + shift for part, shift in shifted)]),
        target_positions=np.concatenate([part.target_positions + shift for part, shift in shifted]),
        target_ids=np.concatenate([part.target_ids for part in parts]),
        segment_starts=_join([part.segment_starts for part in parts]),
        pair_label=_join([part.pair_label for part in parts]),
        order=_join([part.order for part in parts]),
        reversed_rows=_join([part.reversed_rows for part in parts]),
    )


def deal_rows(samples: Samples, parts: Iterable[NDArray[np.int64]]) -> list[Samples]:
    """Rows `part` [N], in that order, for each of `parts`."""
    target_edges = np.searchsorted(samples.target_positions, samples.offsets)
    return [_take_rows(samples, target_edges, part) for part in parts]


def _take_rows(samples: Samples, target_edges: NDArray[np.int64], rows: NDArray[np.int64]) -> Samples:
    where, offsets = _ragged_take(samples.offsets, rows)
    targets, target_offsets = _ragged_take(target_edges, rows)
    moved = np.repeat(offsets[:-1] - samples.offsets[rows], np.diff(target_offsets))
    return Samples(
        tokens=samples.tokens[where],
        offsets=offsets,
        target_positions=samples.target_positions[targets] + moved,
        target_ids=samples.target_ids[targets],
        segment_starts=None if samples.segment_starts is None else samples.segment_starts[rows],
        pair_label=None if samples.pair_label is None else samples.pair_label[rows],
        order=None if samples.order is None else samples.order[where],
        reversed_rows=None if samples.reversed_rows is None else samples.reversed_rows[rows],
    )


def _ragged_take(
    edges: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64] | NDArray[np.int32], NDArray[np.int64]]:
    """Indices of the elements of `rows` of a ragged array with these row `edges`, and the new row edges."""
    lengths = edges[rows + 1] - edges[rows]
    offsets = np.append(0, np.cumsum(lengths))
    # Half-width indices are twice as fast to make and to follow.
    dtype = np.int32 if max(edges[-1], offsets[-1]) < np.iinfo(np.int32).max else np.int64
    where = np.repeat((edges[rows] - offsets[:-1]).astype(dtype), lengths)
    where += np.arange(len(where), dtype=dtype)
    return where, offsets


def _join(columns: Sequence[NDArray[_T] | None]) -> NDArray[_T] | None:
    present = [column for column in columns if column is not None]
    return np.concatenate(present) if present else None
