"""`Samples` holds rows of different lengths one after another, without padding; an attention kernel adds it if needed.

Functions here select, join and reorder rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from data_service.types import Tokens


@dataclass(frozen=True)
class Samples:
    """N rows of training data with T tokens and M targets in all.

    Attributes:
        tokens: [T] uint16 or uint32, the rows' input ids after masking, row after row, special ones included.
        offsets: [N + 1] int64, offsets in `tokens`; row i is tokens[offsets[i]:offsets[i + 1]].
        target_positions: [M] int64, sorted indices in `tokens` of the tokens that the model must predict.
        target_ids: [M], original ids of these tokens, in the dtype of `tokens`.
        segment_starts: [N] int32, place in the row at which its second segment begins; the row's length if it has none.
            None if the input has single segments.
        restarts: [N] bool, whether positions begin again with the second segment (translations); None if they never do.
        languages: [N, 2] uint16, numbers of the languages of both segments, twice the same in a row of one segment. In
            an example of several texts: languages of the first and of the others. None if the model has no languages.
        pair_label: [N] int8, sentence-pair label (NSP, SOP); None without pairs.
        order: [T] int32, factorisation order within the row (permuted LM); None otherwise. A token's content may use
            tokens of the same or a lower number, its prediction only those of a lower number.
        reversed_rows: [N] bool, whether the row's text runs from its last token to its first; None if none can.
        text_starts: [N, G] int32, place in the row at which each of the G texts of an example begins, the first at 0.
            Each text has its own special tokens. None if rows are not examples of several texts.
        cls_last: [N] bool, whether the row's texts end with their classification token (XLNet); None if texts begin
            with it, or if rows are not examples.
        causal: [N] bool, whether each token of the row sees only itself and the tokens before it; None if every token
            sees its whole row.
        holes: [H] int64, sorted indices in `tokens` at which nothing is learned: padding ids in place of removed
            documents, and all tokens of a row without other text. None if the blocks have no removed documents.
        rates: [N] float32, probability with which each token of the row's text was hidden (masked diffusion); None
            otherwise.
        maskable: [N] int32, number of tokens of each row that could be hidden; None without `rates`.
        corrupted: [C], corrupted forms of the rows, row after row, in the dtype of `tokens`: an encoder reads them, and
            a decoder predicts `tokens` (denoising). A row's form may be shorter than the row. None otherwise.
        corrupted_offsets: [N + 1] int64, offsets in `corrupted`; None without it.
    """

    tokens: Tokens
    offsets: NDArray[np.int64]
    target_positions: NDArray[np.int64]
    target_ids: Tokens
    segment_starts: NDArray[np.int32] | None = None
    restarts: NDArray[np.bool_] | None = None
    languages: NDArray[np.uint16] | None = None
    pair_label: NDArray[np.int8] | None = None
    order: NDArray[np.int32] | None = None
    reversed_rows: NDArray[np.bool_] | None = None
    text_starts: NDArray[np.int32] | None = None
    cls_last: NDArray[np.bool_] | None = None
    causal: NDArray[np.bool_] | None = None
    holes: NDArray[np.int64] | None = None
    rates: NDArray[np.float32] | None = None
    maskable: NDArray[np.int32] | None = None
    corrupted: Tokens | None = None
    corrupted_offsets: NDArray[np.int64] | None = None

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        arrays = (getattr(self, field.name) for field in fields(self))
        return sum(array.nbytes for array in arrays if array is not None)


_T = TypeVar("_T", bound=np.generic)


class _ByRow(TypedDict):
    """The arrays of `Samples` that have one entry for each row."""

    segment_starts: NDArray[np.int32] | None
    restarts: NDArray[np.bool_] | None
    languages: NDArray[np.uint16] | None
    pair_label: NDArray[np.int8] | None
    reversed_rows: NDArray[np.bool_] | None
    text_starts: NDArray[np.int32] | None
    cls_last: NDArray[np.bool_] | None
    rates: NDArray[np.float32] | None
    maskable: NDArray[np.int32] | None
    causal: NDArray[np.bool_] | None


def slice_rows(samples: Samples, start: int, stop: int) -> Samples:
    """Return rows `start` to `stop`. Their tokens are a view; target positions count from the first row and are
    copied."""
    first, last = samples.offsets[start], samples.offsets[stop]
    low, high = np.searchsorted(samples.target_positions, (first, last))
    return Samples(
        tokens=samples.tokens[first:last],
        offsets=samples.offsets[start : stop + 1] - first,
        target_positions=samples.target_positions[low:high] - first,
        target_ids=samples.target_ids[low:high],
        order=None if samples.order is None else samples.order[first:last],
        holes=None if samples.holes is None else _inside(samples.holes, first, last) - first,
        **_corrupted(samples, slice(start, stop)),
        **_by_row(samples, slice(start, stop)),
    )


def holes_of(
    places: NDArray[np.int64], offsets: NDArray[np.int64], lost: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return `Samples.holes` of rows at `offsets`: `places`, and all tokens of the rows that are `lost` [N]."""
    found = np.repeat(lost, np.diff(offsets))
    found[places] = True
    return np.flatnonzero(found)


def _inside(places: NDArray[np.int64], first: int, last: int) -> NDArray[np.int64]:
    """Return those of the sorted places from `first` on and before `last`."""
    low, high = np.searchsorted(places, (first, last))
    return places[low:high]


def join_rows(parts: Sequence[Samples]) -> Samples:
    """Return all rows of `parts` (at least one), in order."""
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
        restarts=_join([part.restarts for part in parts]),
        languages=_join([part.languages for part in parts]),
        pair_label=_join([part.pair_label for part in parts]),
        order=_join([part.order for part in parts]),
        holes=_join([None if part.holes is None else part.holes + shift for part, shift in shifted]),
        **_joined_corrupted(parts),
        reversed_rows=_join([part.reversed_rows for part in parts]),
        text_starts=_join([part.text_starts for part in parts]),
        cls_last=_join([part.cls_last for part in parts]),
        rates=_join([part.rates for part in parts]),
        maskable=_join([part.maskable for part in parts]),
        causal=_join([part.causal for part in parts]),
    )


def deal_rows(samples: Samples, parts: Iterable[NDArray[np.int64]]) -> list[Samples]:
    """Return for each of `parts`, [N] row numbers, the samples of these rows, in this order."""
    target_edges = np.searchsorted(samples.target_positions, samples.offsets)
    holes = samples.holes
    hole_edges = None if holes is None else np.searchsorted(holes, samples.offsets)
    return [_take_rows(samples, target_edges, hole_edges, part) for part in parts]


def _take_rows(
    samples: Samples,
    target_edges: NDArray[np.int64],
    hole_edges: NDArray[np.int64] | None,
    rows: NDArray[np.int64],
) -> Samples:
    where, offsets = _ragged_take(samples.offsets, rows)
    targets, target_offsets = _ragged_take(target_edges, rows)
    moved = offsets[:-1] - samples.offsets[rows]
    holes = None
    if samples.holes is not None and hole_edges is not None:
        taken, hole_offsets = _ragged_take(hole_edges, rows)
        holes = samples.holes[taken] + np.repeat(moved, np.diff(hole_offsets))
    return Samples(
        tokens=samples.tokens[where],
        offsets=offsets,
        target_positions=samples.target_positions[targets] + np.repeat(moved, np.diff(target_offsets)),
        target_ids=samples.target_ids[targets],
        order=None if samples.order is None else samples.order[where],
        holes=holes,
        **_corrupted(samples, rows),
        **_by_row(samples, rows),
    )


class _Corrupted(TypedDict):
    """The corrupted forms in `Samples`, which have lengths of their own."""

    corrupted: Tokens | None
    corrupted_offsets: NDArray[np.int64] | None


def _corrupted(samples: Samples, rows: NDArray[np.int64] | slice) -> _Corrupted:
    """Return the corrupted forms of some rows; of a range of rows, a view."""
    tokens, offsets = samples.corrupted, samples.corrupted_offsets
    if tokens is None or offsets is None:
        return _Corrupted(corrupted=None, corrupted_offsets=None)
    if isinstance(rows, slice):
        edges = offsets[rows.start : rows.stop + 1]
        return _Corrupted(corrupted=tokens[edges[0] : edges[-1]], corrupted_offsets=edges - edges[0])
    where, moved = _ragged_take(offsets, rows)
    return _Corrupted(corrupted=tokens[where], corrupted_offsets=moved)


def _joined_corrupted(parts: Sequence[Samples]) -> _Corrupted:
    offsets = [part.corrupted_offsets for part in parts if part.corrupted_offsets is not None]
    forms = [part.corrupted for part in parts if part.corrupted is not None]
    if not offsets:
        return _Corrupted(corrupted=None, corrupted_offsets=None)
    lengths = np.concatenate([np.diff(each) for each in offsets])
    joined: Tokens = np.concatenate(forms)  # type: ignore[assignment]
    return _Corrupted(corrupted=joined, corrupted_offsets=np.append(0, np.cumsum(lengths)))


def _ragged_take(
    edges: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64] | NDArray[np.int32], NDArray[np.int64]]:
    """Return the indices of all elements of `rows` in a ragged array, and the edges of these rows after the selection.

    `edges`: offsets of the array's rows.
    """
    lengths = edges[rows + 1] - edges[rows]
    offsets = np.append(0, np.cumsum(lengths))
    # Half-width indices are twice as fast to make and to follow.
    dtype = np.int32 if max(edges[-1], offsets[-1]) < np.iinfo(np.int32).max else np.int64
    where = np.repeat((edges[rows] - offsets[:-1]).astype(dtype), lengths)
    where += np.arange(len(where), dtype=dtype)
    return where, offsets


def _by_row(samples: Samples, rows: NDArray[np.int64] | slice) -> _ByRow:
    def of(column: NDArray[_T] | None) -> NDArray[_T] | None:
        return None if column is None else column[rows]

    return _ByRow(
        segment_starts=of(samples.segment_starts),
        restarts=of(samples.restarts),
        languages=of(samples.languages),
        pair_label=of(samples.pair_label),
        reversed_rows=of(samples.reversed_rows),
        text_starts=of(samples.text_starts),
        cls_last=of(samples.cls_last),
        rates=of(samples.rates),
        maskable=of(samples.maskable),
        causal=of(samples.causal),
    )


def _join(columns: Sequence[NDArray[_T] | None]) -> NDArray[_T] | None:
    present = [column for column in columns if column is not None]
    return np.concatenate(present) if present else None
