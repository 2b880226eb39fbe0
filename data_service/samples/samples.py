"""`Samples` holds rows of different lengths one after another, without padding; attention kernels pad if they must.

Functions here select, join and reorder rows. How they treat a column depends on its `ColumnAxis`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Annotated, Any, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from data_service.types import Tokens


class ColumnAxis(Enum):
    """What a column has one entry for: each row, token, target, hole, or token of a corrupted form."""

    ROW = auto()
    TOKEN = auto()
    TARGET = auto()
    HOLE = auto()
    FORM = auto()  # tokens of the corrupted forms of rows


_T = TypeVar("_T", bound=np.generic)
ByRow = Annotated[NDArray[_T] | None, ColumnAxis.ROW]  # a column with one entry for each row
Edges = NDArray[np.int64]  # [N + 1], offsets of rows: row i goes from edges[i] to edges[i + 1]
Indices = NDArray[np.int64] | NDArray[np.int32]


@dataclass(frozen=True)
class Samples:
    """N rows of training data with T tokens and M targets in all.

    Attributes:
        tokens: [T] uint16 or uint32, input ids after masking, row after row, special tokens included.
        offsets: [N + 1] int64, offsets in `tokens`; row i is tokens[offsets[i]:offsets[i + 1]].
        target_positions: [M] int64, sorted indices in `tokens` of the tokens that the model must predict.
        target_ids: [M], original ids of the targets, in the dtype of `tokens`.
        segment_starts: [N] int32, index in the row at which its second segment begins; the row's length if it has none.
            None if all rows have one segment.
        restarts: [N] bool, whether positions restart at 0 with the second segment (translations); None: in no row.
        languages: [N, 2] uint16, language numbers of both segments, equal in a row of one segment. In an example of
            several texts: language of the first text and of the others. None if the model has no language embeddings.
        pair_label: [N] int8, sentence-pair label (NSP, SOP); None without pairs.
        order: [T] int32, position of each token in the row's factorisation order (permuted LM); None otherwise. The
            content stream sees tokens of the same or a lower position, the prediction only those of a lower one.
        reversed_rows: [N] bool, whether the row's text is reversed; None: in no row.
        text_starts: [N, G] int32, index in the row at which each of the G texts of an example begins, the first at 0.
            Each text has its own special tokens. None if rows are not examples of several texts.
        cls_last: [N] bool, whether the row's texts end with their classification token (XLNet); None if texts begin
            with it, or if rows are not examples.
        causal: [N] bool, whether each token of the row sees only itself and the tokens before it; None if every token
            sees its whole row.
        holes: [H] int64, sorted indices in `tokens` at which nothing is learned: padding ids in place of removed
            documents, and all tokens of rows whose whole text is removed. None if no document is removed.
        rates: [N] float32, probability with which each token of the row's text was hidden (masked diffusion); None
            otherwise.
        maskable: [N] int32, number of tokens of each row that could be hidden; None without `rates`.
        corrupted: [C], corrupted forms of the rows (denoising), row after row, in the dtype of `tokens`: an encoder
            reads them, and a decoder predicts `tokens`. A form may be shorter than its row. None otherwise.
        corrupted_offsets: [N + 1] int64, offsets in `corrupted`; None without it.
    """

    tokens: Annotated[Tokens, ColumnAxis.TOKEN]
    offsets: Annotated[Edges, ColumnAxis.TOKEN]
    target_positions: Annotated[NDArray[np.int64], ColumnAxis.TARGET]
    target_ids: Annotated[Tokens, ColumnAxis.TARGET]
    segment_starts: ByRow[np.int32] = None
    restarts: ByRow[np.bool_] = None
    languages: ByRow[np.uint16] = None
    pair_label: ByRow[np.int8] = None
    order: Annotated[NDArray[np.int32] | None, ColumnAxis.TOKEN] = None
    reversed_rows: ByRow[np.bool_] = None
    text_starts: ByRow[np.int32] = None
    cls_last: ByRow[np.bool_] = None
    causal: ByRow[np.bool_] = None
    holes: Annotated[NDArray[np.int64] | None, ColumnAxis.HOLE] = None
    rates: ByRow[np.float32] = None
    maskable: ByRow[np.int32] = None
    corrupted: Annotated[Tokens | None, ColumnAxis.FORM] = None
    corrupted_offsets: Annotated[Edges | None, ColumnAxis.FORM] = None

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        """Total size of all arrays in bytes."""
        return sum(column.nbytes for column in _present_columns(self).values())


_COLUMN_AXES: dict[str, ColumnAxis] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Samples, include_extras=True).items()
}
_OFFSET_COLUMNS = ("offsets", "corrupted_offsets")  # columns of [N + 1] offsets of rows
_INDEX_COLUMNS = ("target_positions", "holes")  # columns whose entries are indices in `tokens`


def _present_columns(samples: Samples) -> dict[str, NDArray[Any]]:
    """Return the columns that are not None, by name."""
    found = {field.name: getattr(samples, field.name) for field in fields(samples)}
    return {name: column for name, column in found.items() if column is not None}


def _row_edges_by_axis(samples: Samples, chosen: Sequence[int] | slice) -> dict[ColumnAxis, Edges]:
    """Return [N + 1] offsets of the rows along each axis other than ROW; of them only those that `chosen` selects."""
    columns, offsets = _present_columns(samples), samples.offsets[chosen]
    places = {_COLUMN_AXES[name]: np.searchsorted(columns[name], offsets) for name in _INDEX_COLUMNS if name in columns}
    return {_COLUMN_AXES[name]: columns[name][chosen] for name in _OFFSET_COLUMNS if name in columns} | places


def slice_rows(samples: Samples, start: int, stop: int) -> Samples:
    """Return rows `start` to `stop - 1`. Tokens are a view; indices and offsets are copies that count from the first
    of these rows."""
    edges = _row_edges_by_axis(samples, [start, stop])
    found: dict[str, Any] = {}
    for name, column in _present_columns(samples).items():
        if _COLUMN_AXES[name] is ColumnAxis.ROW:
            found[name] = column[start:stop]
        elif name in _OFFSET_COLUMNS:
            found[name] = column[start : stop + 1] - column[start]
        else:
            first, last = edges[_COLUMN_AXES[name]]
            found[name] = (
                column[first:last] - edges[ColumnAxis.TOKEN][0] if name in _INDEX_COLUMNS else column[first:last]
            )
    return Samples(**found)


def join_rows(parts: Sequence[Samples]) -> Samples:
    """Return all rows of `parts` (at least one), in order."""
    if len(parts) == 1:
        return parts[0]
    shifts = np.cumsum([0, *(part.offsets[-1] for part in parts)])
    columns = [_present_columns(part) for part in parts]
    found: dict[str, Any] = {}
    for name in _COLUMN_AXES:
        present = [(part[name], shift) for part, shift in zip(columns, shifts, strict=False) if name in part]
        if not present:
            continue
        if name in _OFFSET_COLUMNS:
            lengths = np.concatenate([np.diff(column) for column, _ in present])
            found[name] = np.append(0, np.cumsum(lengths))
        else:
            found[name] = np.concatenate(
                [column + shift if name in _INDEX_COLUMNS else column for column, shift in present]
            )
    return Samples(**found)


def distribute_rows(samples: Samples, parts: Iterable[NDArray[np.int64]]) -> list[Samples]:
    """Return one `Samples` for each of `parts`, an array of row numbers, with these rows in this order."""
    edges = _row_edges_by_axis(samples, slice(None))
    return [_take_rows(samples, edges, part) for part in parts]


def _take_rows(samples: Samples, edges: Mapping[ColumnAxis, Edges], rows: NDArray[np.int64]) -> Samples:
    """Return the given rows in order. `edges`: [N + 1] offsets of all rows along each axis other than ROW."""
    taken = {axis: _take_ragged(all_edges, rows) for axis, all_edges in edges.items()}
    moved = taken[ColumnAxis.TOKEN][1][:-1] - samples.offsets[rows]
    found: dict[str, Any] = {}
    for name, column in _present_columns(samples).items():
        if _COLUMN_AXES[name] is ColumnAxis.ROW:
            found[name] = column[rows]
            continue
        where, offsets = taken[_COLUMN_AXES[name]]
        found[name] = offsets if name in _OFFSET_COLUMNS else column[where]
        if name in _INDEX_COLUMNS:
            found[name] += np.repeat(moved, np.diff(offsets))
    return Samples(**found)


def _take_ragged(edges: Edges, rows: NDArray[np.int64]) -> tuple[Indices, Edges]:
    """Return the indices of all elements of `rows` in a ragged array, and the offsets of these rows in the selection.

    `edges`: offsets of all rows in the array.
    """
    lengths = edges[rows + 1] - edges[rows]
    return expand_ranges(edges[rows], lengths), np.append(0, np.cumsum(lengths))


def expand_ranges(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> Indices:
    """Return the integers of all ranges with these `starts` and `sizes`, one range after another."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    # Indices in int32 are computed and read twice as fast as in int64.
    dtype = np.int32 if starts.max(initial=0) + total < np.iinfo(np.int32).max else np.int64
    found = np.repeat((starts - ends + sizes).astype(dtype), sizes)
    found += np.arange(total, dtype=dtype)
    return found
